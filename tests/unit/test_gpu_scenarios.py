"""The scenarios of tests/gpu from end to end, with stand-ins for engines, router and nvidia-smi: no GPU, no figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import load
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
used=0
[ ! -e "$HELD" ] || used=117512
case "$1" in
  --query-gpu=name) printf 'NVIDIA H200\\nNVIDIA H200\\n' ;;
  --query-gpu=memory.used) printf "$used\\n0\\n" ;;
  --query-gpu=index,uuid,memory.used,memory.total)
    printf "0, GPU-00000000-0000-0000-0000-000000000000, $used, 143771\\n1, GPU-00000000-0000-0000-0000-000000000001, 0, 143771\\n" ;;
esac
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """What pack.py writes."""
    folder = tmp_path_factory.mktemp("packed")
    words = [sys.executable, GPU / "pack.py", "-i", ROOT / "inventory/h200", folder]
    subprocess.run(words, check=True)
    return folder


@pytest.fixture
def packs(packed, tmp_path_factory):
    """The packs, for an address that this machine has, models that are only a config.json, and a cache that is ours."""
    folder = shutil.copytree(packed, tmp_path_factory.mktemp("packs") / "packs")
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
    less = {"LOAD_SECONDS": 1, "OUTPUT": 4, "PROMPTS": 2, "IN_TURN": 5, "LENGTHS": (64,), "RATES": (2, 4)}
    for constant, value in less.items():
        monkeypatch.setattr(scenarios, constant, value)
    # Of a machine that does something else as well, this would be true.
    monkeypatch.setattr(load, "MOST_LATE_MS", 60_000)

    def perform(name: str, gpus: int = 2, **environment: str):
        for file in packs.rglob("engine.env"):
            lines = [f"{key}={value}" for key, value in environment.items()]
            file.write_text("\n".join([file.read_text(), *lines]))
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        done = {"ok": False}
        run.perform(name, packs, tmp_path / "out", done, gpus)
        return done

    return perform


def test_what_is_measured_is_what_the_recipe_renders(packed):
    golden = ROOT / "tests/unit/golden/recipes/h200"
    files = [path for path in golden.rglob("*") if path.is_file()]
    assert len(files) == 6
    for path in files:
        member = packed / "pair/members" / path.relative_to(golden)
        assert member.read_text() == path.read_text().replace("198.51.100.11", "198.18.40.11")


@pytest.mark.parametrize("name", ["pair", "experts", "rollouts", "per_transfer"])
def test_a_scenario_is_right_where_nothing_is_wrong(harness, name):
    done = harness(name)
    assert done["ok"], done


def test_ordinary_engines_see_their_own_gpus(harness, tmp_path):
    done = harness("ordinary")
    assert done["ok"], done
    for gpu in (0, 1):
        assert f"on GPUs {gpu}\n" in (tmp_path / f"out/logs/ordinary/serve-gpu-01-{gpu}.log").read_text()


def test_the_gate_does_not_hold_where_nothing_is_wrong(harness):
    assert not harness("gate")["ok"]


def test_a_pair_that_moves_no_kv_has_no_figures(harness):
    done = harness("pair", NO_KV="1")
    assert not done["ok"]
    assert all("0 MB of KV moved" in load["invalid"][0] for load in done["loads"])
    assert not done["proof"]["passed"]


def test_a_prefill_that_cannot_come_back_alone_comes_back_with_its_decode(harness, tmp_path):
    done = harness("cached", HELD=str(tmp_path / "held"))
    assert done["ok"], done
    assert (done["left_mib"], done["left_mib_after_decode"]) == (117512, 0)
    assert not done["memory_check"]["free"]
    assert "The decodes: decode-gpu-01-1." in done["memory_check"]["text"]
    assert "Free memory on device" in done["restart_failed"]["log"][-1]
    assert set(done["restart_both"]) == {"prefill-gpu-01-0", "decode-gpu-01-1"}


def test_four_gpus_are_needed(harness):
    assert harness("uneven")["skipped"] == "it needs 4 GPUs, and this machine has 2"


def test_two_prefills_and_a_decode_of_two_gpus(harness):
    done = harness("uneven", gpus=4)
    assert done["ok"], done
    assert set(done["loads"][0]["split"]) == {"prefill-gpu-01-0", "prefill-gpu-01-1", "decode-gpu-01-2"}


def test_a_decode_of_two_ranks_is_proved_rank_by_rank(harness):
    """The stand-in counts KV for the engine and not for its ranks, and the proof says so."""
    done = harness("wide", gpus=4)
    assert not any(load["invalid"] for load in done["loads"])
    assert "rank 1" in done["proof"]["msg"]
