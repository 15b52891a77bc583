"""Every scenario on this machine's GPUs: `make gpu`. README.md says what is needed; without GPUs all are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.machine import gpus
from gpu.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
OUT = ROOT / ".state/gpu/out"
PYTHON = os.environ.get("GPU_PYTHON", sys.executable)


@pytest.fixture(scope="session")
def results():
    """What run.py measured, once for all tests."""
    if not gpus():
        pytest.skip("NVIDIA GPUs are needed, and this machine has none")
    if os.geteuid():
        pytest.fail("root is needed: for an address on loopback and a device node")
    imported = subprocess.run([PYTHON, "-c", "import aiohttp, ansible, nixl, vllm, vllm_router"], check=False)
    if imported.returncode:
        pytest.fail(f"{PYTHON} lacks what engines need (above); GPU_PYTHON names another")
    shutil.rmtree(OUT, ignore_errors=True)
    packs = OUT / "packs"
    words = [sys.executable, ROOT / "tests/gpu/pack.py", "-i", ROOT / "inventory/h200", packs]
    subprocess.run(words, check=True)
    # What it finds is in the results; a scenario that fails is a test that fails.
    subprocess.run([PYTHON, ROOT / "tests/gpu/run.py", packs, OUT], check=False)
    found = OUT / "results.json"
    return json.loads(found.read_text())["scenarios"] if found.exists() else {}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(results, name):
    done = results.get(name, {"ok": False, "why": ["it was not run: see above"]})
    if "skipped" in done:
        pytest.skip(done["skipped"])
    assert done["ok"], "\n".join(done["why"])
