"""The scenarios of tests/gpu from end to end, with stand-ins for engines, router and nvidia-smi: no GPU, no figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from gpu import load, report, run, scenarios

ROOT = Path(__file__).parents[2]
GPU = ROOT / "tests/gpu"
ADDRESS = "127.0.0.11"
MODEL = {
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "float32",
}
UNREAD = "could not read: "
HOST_CHECK = {
    "passed": ["gpu-count"],
    "findings": [
        {"check": "ports", "level": "fail", "seen": f"{UNREAD}`sockets`: the host has no such program"},
        {
            "check": "nftables",
            "level": "info",
            "seen": "there is no nft yet; playbooks/fence.yml installs it",
        },
        {
            "check": "reachable",
            "level": "fail",
            "seen": f"{UNREAD}what was opened there, or what came of dialing",
        },
        {
            "check": "cdi-fresh",
            "level": "fail",
            "seen": f"{UNREAD}no CDI specification of nvidia.com/gpu names the driver's libraries",
        },
    ],
}
"""What it says of a machine with GPUs that has no Ansible, docker and systemd."""
CHANNEL = {"passed": [*HOST_CHECK["passed"], "imex-channel"], "findings": HOST_CHECK["findings"]}
NO_CHANNEL = HOST_CHECK | {
    "findings": [*HOST_CHECK["findings"], {"check": "imex-channel", "level": "fail", "seen": "it is missing"}]
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


def as_it_is(*, there: bool | None):
    """No device node is made."""
    return nullcontext()


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
    monkeypatch.setattr(run, "imex_channel", as_it_is)
    less = {
        "LOAD_SECONDS": 1,
        "OUTPUT": 4,
        "PROMPTS": 2,
        "MOST_PROMPTS": 3,
        "IN_TURN": 6,
        "LENGTHS": (64,),
        "RATES": (2, 4),
    }
    less["COUNTED_SECONDS"] = 0.2
    for constant, value in less.items():
        monkeypatch.setattr(scenarios, constant, value)
    # Of a machine that does something else as well, this would be true.
    monkeypatch.setattr(load, "MOST_LATE_MS", 60_000)

    checked = scenarios.host_check

    def perform(name: str, gpus: int = 2, host_check=CHANNEL, **environment: str):
        # It has to read all of this machine; what it then says is of this one and not of the scenario.
        monkeypatch.setattr(scenarios, "host_check", lambda machine: (checked(machine), host_check)[1])
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


@pytest.mark.parametrize("name", ["pair", "experts", "rollouts", "per_transfer", "shared_rollouts"])
def test_a_scenario_is_right_where_nothing_is_wrong(harness, name):
    done = harness(name)
    assert done["ok"], done


def test_ordinary_engines_see_their_own_gpus(harness, tmp_path):
    done = harness("ordinary")
    assert done["ok"], done
    for gpu in (0, 1):
        assert f"on GPUs {gpu}\n" in (tmp_path / f"out/logs/ordinary/serve-gpu-01-{gpu}.log").read_text()


def test_the_gate_holds_where_kv_is_slow_and_the_channel_was_missed(harness):
    done = harness("gate", host_check=NO_CHANNEL, SLOW_KV="1")
    assert done["ok"], done
    assert done["rate"]["kv_gbps"] == 0.4


@pytest.mark.parametrize(
    ("host_check", "trouble", "why"),
    [
        (NO_CHANNEL, {}, ["the proof passed"]),
        (CHANNEL, {"SLOW_KV": "1"}, ["the host check does not miss the channel"]),
        (
            NO_CHANNEL,
            {"WRONG_TOKENS": "1"},
            ["the proof failed, and not for its rate: ", "the tokens differ"],
        ),
    ],
)
def test_the_gate_does_not_hold(harness, host_check, trouble, why):
    done = harness("gate", host_check=host_check, **trouble)
    assert not done["ok"]
    assert len(done["why"]) == 1, done["why"]
    (said,) = done["why"]
    assert all(words in said for words in why), said


def test_a_pair_that_moves_no_kv_has_no_figures(harness):
    done = harness("pair", NO_KV="1")
    assert not done["ok"]
    runs = [*done["loads"], done["overhead"], done["rate"], done["rate_after"]]
    assert len(runs) == 5
    assert all("0 MB of KV moved" in run["invalid"][0] for run in runs)
    assert not done["proof"]["passed"]
    for where in ("loads 2", "overhead", "rate after", "proof after"):
        assert any(reason.startswith(f"{where}: ") for reason in done["why"]), done["why"]


def test_a_pair_with_wrong_tokens_is_not_right(harness):
    done = harness("pair", WRONG_TOKENS="1")
    assert not done["ok"]
    for where in ("tokens", "tokens after", "proof"):
        assert any(reason.startswith(f"{where}: ") for reason in done["why"]), done["why"]


@pytest.mark.parametrize(
    ("name", "host_check", "why"),
    [
        (
            "pair",
            NO_CHANNEL | {"findings": [{"check": "ecc", "level": "fail", "seen": "GPU 1 has errors"}]},
            "the host check ecc failed: GPU 1 has errors",
        ),
        ("rollouts", HOST_CHECK, "the host check imex-channel does not pass, and the channel is there"),
    ],
)
def test_what_the_host_check_finds_has_to_be_explained(harness, name, host_check, why):
    assert harness(name, host_check=host_check)["why"] == [why]


def test_ranks_have_to_take_the_requests_that_name_them(harness):
    why = harness("experts", NO_RANKS="1")["why"]
    assert "of 3 requests for rank 0 ranks 0 and 1 counted" in why[0]


def test_a_prefill_that_cannot_come_back_alone_comes_back_with_its_decode(harness, tmp_path):
    done = harness("cached", HELD=str(tmp_path / "held"))
    assert done["ok"], done
    assert (done["left_mib"], done["left_mib_after_decode"]) == (117512, 0)
    assert not done["memory_check"]["free"]
    assert "The decodes: decode-gpu-01-1." in done["memory_check"]["text"]
    assert done["restart_failed"]["error"].startswith(
        "prefill-gpu-01-0 ended with 1: ValueError: Free memory on device"
    )
    assert set(done["restart_both"]) == {"prefill-gpu-01-0", "decode-gpu-01-1"}


@pytest.mark.parametrize(("name", "block"), [("shared", 16), ("shared_64", 64)])
def test_engines_that_share_a_gpu_are_compared_before_and_after_their_pool_is_used_up(
    harness, tmp_path, name, block
):
    done = harness(name, gpus=1)
    assert done["ok"], done
    assert done["block_size"] == block
    assert done["fresh"]["rate"]["descriptors_each"] == 36
    assert done["used_up"]["rate"]["descriptors_each"] == 9000
    assert done["prompts"] * max(scenarios.TRANSFERS) > done["kv_tokens"] == 100_000
    for log in (tmp_path / "out/logs" / name).glob("*-gpu-*.log"):
        assert "on GPUs 0\n" in log.read_text()


def test_a_pool_that_was_not_used_up_shows_nothing(harness):
    assert harness("shared", gpus=1, NEVER_USED_UP="1")["why"] == [
        "used up: a transfer is in 36 pieces, as of a pool that was not"
    ]


def test_only_a_gpu_that_is_shared_may_have_no_nvlink(harness):
    seen = {
        "nvlinks": "nvidia-smi shows no NVLink; by default UCX then reads KV over TCP",
        "fabric-state": "GPU 0: State N/A, Status N/A",
        "gpu-count": "2 GPUs, the inventory says 1",
    }
    bad = [{"check": check, "level": "fail", "seen": words} for check, words in seen.items()]
    alone = CHANNEL | {"findings": [*CHANNEL["findings"], *bad]}
    for name in ("shared", "shared_rollouts"):
        assert harness(name, gpus=1, host_check=alone)["ok"]
    assert harness("rollouts", host_check=alone)["why"] == [
        f"the host check {check} failed: {words}" for check, words in seen.items()
    ]


def test_wrong_tokens_after_the_pool_was_used_up_are_not_right(harness):
    why = harness("shared", gpus=1, WRONG_TOKENS="1")["why"]
    for where in ("fresh: tokens: ", "fresh: proof: ", "used up: tokens: ", "used up: proof: "):
        assert any(reason.startswith(where) for reason in why), why


def test_four_gpus_are_needed(harness):
    assert harness("uneven")["skipped"] == "it needs 4 GPUs, and this machine has 2"


def test_two_prefills_and_a_decode_of_two_gpus(harness):
    done = harness("uneven", gpus=4)
    assert done["ok"], done
    assert set(done["loads"][0]["split"]) == {"prefill-gpu-01-0", "prefill-gpu-01-1", "decode-gpu-01-2"}


def test_a_decode_of_two_ranks_is_proved_rank_by_rank(harness):
    done = harness("wide", gpus=4)
    assert done["ok"], done
    assert "(2 rank pairs)" in done["proof"]["table"][-1]


def test_a_scenario_says_when_it_ran_and_with_which_code(harness):
    done = harness("uneven")
    assert set(done) == {"ok", "begun", "commit", "why", "skipped", "seconds"}


def test_results_are_written_after_each_scenario_and_continued(harness, packs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "gpus", lambda: ["NVIDIA H200"] * 2)
    monkeypatch.setattr(run, "versions", lambda: {"vllm": "0.33.0"})
    harness("uneven")  # for stand-ins on the path

    def perform(*names: str):
        monkeypatch.setattr(sys, "argv", ["run.py", str(packs), str(tmp_path / "told"), *names])
        return run.main()

    assert perform("uneven", "experts") == 0
    assert "== uneven: skipped, it needs 4 GPUs, and this machine has 2, in 0.0 s" in capsys.readouterr().out
    assert perform("wide") == 0
    told = json.loads((tmp_path / "told/results.json").read_text())
    assert {name: done["ok"] for name, done in told["scenarios"].items()} == {
        "uneven": False,
        "experts": True,
        "wide": False,
    }
    assert told["differs"]
    assert (told["gpus"], told["versions"]) == (["NVIDIA H200"] * 2, {"vllm": "0.33.0"})
    (packs / "pair/plan.json").write_text((packs / "pair/plan.json").read_text() + "\n")
    with pytest.raises(SystemExit, match=r"code \w+, and not \w+: name another folder"):
        perform("wide")


def test_a_machine_without_gpus_measures_nothing(packs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "gpus", list)
    monkeypatch.setattr(sys, "argv", ["run.py", str(packs), str(tmp_path / "told")])
    assert run.main() == 0
    assert "skipped" in capsys.readouterr().out
    assert not (tmp_path / "told").exists()


def test_a_pairs_results_make_a_report(harness):
    """What the scenarios write is what the report reads."""
    names = ("pair", "experts", "rollouts", "per_transfer", "shared")
    done = {name: harness(name) for name in names}
    told = {
        "date": "2027-01-02",
        "commit": "abc",
        "gpus": ["H200"],
        "versions": {},
        "differs": [],
        "environment": {},
    }
    text = report.report(told | {"scenarios": done})
    for name in names:
        assert f"| `{name}` | ok |" in text
    assert "| 16 | 100,000 | after 8 long prompts | 9,000 |" in text
    assert text.count("2 of 2 same; log probabilities within 0") == 4 + 2
    assert "eager" in text
    assert report.plot(told | {"scenarios": done}).count("<circle") == 2 + 2
