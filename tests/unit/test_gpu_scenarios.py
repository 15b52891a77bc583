"""The scenarios of tests/gpu from end to end, with stand-ins for engines, router and nvidia-smi: no GPU, no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run
import scenarios

ROOT = Path(__file__).parents[2]
GPU = ROOT / "tests/gpu"
ADDRESS = "127.0.0.11"
MODEL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "dtype": "float32",
}
NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=name) printf 'NVIDIA H200\\nNVIDIA H200\\n' ;;
  --query-gpu=memory.used) printf '0\\n0\\n' ;;
  --query-gpu=index,uuid,memory.used,memory.total)
    printf '0, GPU-00000000-0000-0000-0000-000000000000, 0, 143771\\n1, GPU-00000000-0000-0000-0000-000000000001, 0, 143771\\n' ;;
esac
"""


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """The packs, for an address that this machine has, models that are only a config.json, and a cache that is ours."""
    folder = tmp_path_factory.mktemp("packs")
    words = [sys.executable, GPU / "pack.py", "-i", ROOT / "inventory/h200", folder]
    subprocess.run(words, check=True)
    models = tmp_path_factory.mktemp("models")
    for name in ("qwen3-8b-shape", "qwen3-30b-a3b-shape"):
        (models / name).mkdir()
        (models / name / "config.json").write_text(json.dumps(MODEL))
        (models / name / "tokenizer_config.json").write_text("{}")
    caches = tmp_path_factory.mktemp("caches")
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text().replace("198.18.40.11", ADDRESS).replace("/srv/models", str(models))
            path.write_text(text.replace("/var/cache/vllm-fleet", str(caches)))
    return folder


@pytest.fixture
def harness(packs, tmp_path, monkeypatch):
    """Performs a scenario: name -> its result."""
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    folders = [ROOT / "tests/support/stand_ins", ROOT / "tests/support", ROOT / "src"]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, folders)))
    monkeypatch.setattr(scenarios, "imex_channel", lambda *, there: None)
    less = {"LOAD_SECONDS": 1, "OUTPUT": 4, "PROMPTS": 2, "IN_TURN": 5, "LENGTHS": (64, 128)}
    for constant, value in less.items():
        monkeypatch.setattr(scenarios, constant, value)

    def perform(name: str):
        done = {"ok": False}
        run.perform(name, packs, tmp_path / "out", done, 2)
        return done

    return perform


def test_pair(harness):
    done = harness("pair")
    assert done["ok"], done


def test_ordinary(harness):
    done = harness("ordinary")
    assert done["ok"], done


def test_experts(harness):
    done = harness("experts")
    assert done["ok"], done


def test_rollouts(harness):
    done = harness("rollouts")
    assert done["ok"], done


def test_gate(harness):
    """Nothing is wrong here, so the gate does not hold."""
    assert not harness("gate")["ok"]


def test_mapping(harness):
    done = harness("per_transfer")
    assert done["ok"], done


def test_four_gpus(harness):
    assert harness("uneven")["skipped"] == "it needs 4 GPUs, and this machine has 2"
