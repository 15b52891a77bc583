"""The memory of an engine's GPUs before its start: what is judged, over recorded answers, and the role's tasks.

`nvidia-smi` is a stand-in that prints files (data/nvidia-smi/README.md says what was recorded and what was written).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fleets import Fleet, gpu
from role_tasks import run_tasks

from vllm_fleet import gpu_memory

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data/nvidia-smi"
LIMIT = 1024
FIRST, SECOND = (f"GPU-0000000{n}-0000-0000-0000-00000000000{n}" for n in (1, 2))


def recorded(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def answered(stdout: str, **more: Any) -> dict[str, Any]:
    return {"rc": 0, "stdout": stdout, "stderr": ""} | more


def pair(**variables: Any) -> dict[str, Any]:
    """The plan of a prefill on GPU 0 and a decode on GPU 1 of one host."""
    fleet = gpu(prefill=["a"], decode=["a"]).everywhere(fleet_gpus_per_host=2, **variables)
    return fleet.pool("prefill", gpus=1).pool("decode", gpus=1).plan()


def judged(stdout: str, plan: Mapping[str, Any] | None = None, member: str = "prefill-a-0") -> dict[str, Any]:
    return gpu_memory.judge(plan or pair(), member, answered(stdout), LIMIT)


# --- What is judged -----------------------------------------------------------------------------------------------


def test_free_gpus_are_free():
    assert judged(recorded("free")) == {"free": True, "wait": False, "text": ""}


@pytest.mark.parametrize(("used", "free"), [(1024, True), (1025, False)])
def test_up_to_the_limit_may_be_in_use(used, free):
    assert judged(recorded("free").replace(f"{FIRST}, 0,", f"{FIRST}, {used},"))["free"] is free


def test_only_the_members_own_gpus_are_judged():
    busy = recorded("free").replace(f"{SECOND}, 0,", f"{SECOND}, 90000,")
    assert judged(busy)["free"]
    assert not judged(busy, member="decode-a-1")["free"]


def test_processes_are_named():
    verdict = judged(recorded("both-alive"))
    assert (verdict["free"], verdict["wait"]) == (False, True)
    assert "prefill-a-0: on a more than 1024 MiB are in use:" in verdict["text"]
    assert "GPU 0: 4623 of 143771 MiB, by python3 (PID 744, 4614 MiB)" in verdict["text"]
    assert "GPU 1" not in verdict["text"]
    assert "peer" not in verdict["text"]
    assert "decode-a-1" not in verdict["text"]


@pytest.mark.parametrize("mapping", ["cached", "per_transfer"])
def test_without_a_process_the_peers_are_named(mapping):
    verdict = judged(recorded("held-by-a-peer"), pair(fleet_kv_mapping=mapping))
    assert (verdict["free"], verdict["wait"]) == (False, True)
    assert "GPU 0: 4100 of 143771 MiB, and no process is listed" in verdict["text"]
    assert "a decode that still maps a dead prefill's memory holds it" in verdict["text"]
    assert "The decodes: decode-a-1." in verdict["text"]
    assert "They let go when they end, and not before, whatever fleet_kv_mapping is." in verdict["text"]
    assert "Stop them (systemctl stop 'vllm-engine-NAME*' on their hosts)" in verdict["text"]
    assert "Stop the processes" not in verdict["text"]


def test_a_decode_names_the_prefills():
    text = judged(recorded("free").replace(f"{SECOND}, 0,", f"{SECOND}, 90000,"), member="decode-a-1")["text"]
    assert "a prefill that still maps a dead decode's memory holds it" in text
    assert "The prefills: prefill-a-0." in text


def test_a_process_that_explains_too_little_does_not_acquit_the_peers():
    text = judged(recorded("both-alive").replace("0, " + FIRST + ", 4623", "0, " + FIRST + ", 90000"))["text"]
    assert "by python3 (PID 744, 4614 MiB)" in text
    assert "The decodes: decode-a-1." in text


def test_a_process_whose_memory_is_not_told_may_explain_all():
    text = judged(recorded("both-alive").replace("744, 4614", "744, [N/A]"))["text"]
    assert "by python3 (PID 744, ? MiB)" in text
    assert "decode-a-1" not in text


def test_a_name_with_commas_is_one_name():
    answer = recorded("both-alive").replace("4614, python3", "4614, a, b")
    assert "by a, b (PID 744, 4614 MiB)" in judged(answer)["text"]


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_where_kv_takes_no_nvlink_no_peer_maps_anything(transport):
    text = judged(recorded("held-by-a-peer"), pair(fleet_kv_transport=transport))["text"]
    assert "look for containers of others" in text
    assert "decode" not in text


def test_an_ordinary_engine_has_no_peers():
    pools = {"serve": {"role": "mixed", "hosts": "prefill", "gpus": 1}}
    fleet = gpu(prefill=["a"], decode=["a"]).everywhere(fleet_pools=pools)
    text = judged(recorded("held-by-a-peer"), fleet.plan(), "serve-a-0")["text"]
    assert "look for containers of others" in text


def test_many_peers_are_counted():
    hosts = [f"d{number:02}" for number in range(12)]
    fleet = (
        gpu(prefill=["p"], decode=hosts)
        .pool("prefill", gpus=1)
        .everywhere(
            fleet_external_engines={
                "x": {"role": "decode", "url": "http://203.0.113.9:80", "tensor_parallel_size": 1}
            }
        )
    )
    text = judged(recorded("held-by-a-peer"), fleet.pool("decode", gpus=1).plan(), "prefill-p-0")["text"]
    assert "decode-d00-0, " in text
    assert "decode-d07-0, 5 more." in text


def test_engines_of_others_are_said_to_be_theirs():
    fleet = (
        gpu(prefill=["p"], decode=["d"])
        .pool("prefill", gpus=1)
        .pool("decode", gpus=1)
        .everywhere(
            fleet_external_engines={
                "x": {"role": "decode", "url": "http://203.0.113.9:80", "tensor_parallel_size": 1}
            }
        )
    )
    assert (
        "decode-d-0, x (of somebody else)."
        in judged(recorded("held-by-a-peer"), fleet.plan(), "prefill-p-0")["text"]
    )


def test_the_gpus_of_a_headless_member_are_judged_on_its_host():
    fleet: Fleet = gpu(prefill=["p"], decode=["a", "b"]).everywhere(fleet_socket_ifname="eth0")
    plan = fleet.pool("decode", gpus=16, data_parallel_size=16).plan()
    rows = [f"{n}, GPU-{n}, {9000 if n == 7 else 0}, 180000" for n in range(8)]
    text = judged("\n".join([*rows, "processes"]), plan, "decode-a-0.1")["text"]
    assert text.startswith("decode-a-0.1: on b more than 1024 MiB are in use:\n  GPU 7: 9000 of 180000 MiB")


def test_a_gpu_that_is_gone_is_missed_and_not_waited_for():
    verdict = judged(f"0, {FIRST}, 0, 143771\nprocesses\n", member="decode-a-1")
    assert (verdict["free"], verdict["wait"]) == (False, False)
    assert "decode-a-1: a has no GPU 1; nvidia-smi lists 0." in verdict["text"]


@pytest.mark.parametrize(
    "stdout",
    [
        "",
        "\n\n",
        "processes\n",
        "0, GPU-1, 0, 143771\n",  # cut off before the processes
        "0, GPU-1, 0\nprocesses\n",
        "0, GPU-1, [N/A], 143771\nprocesses\n",
        "0, GPU-1, 0 MiB, 143771 MiB\nprocesses\n",
        "index, uuid, memory.used [MiB], memory.total [MiB]\nprocesses\n",
        "No devices were found\nprocesses\n",
        "Unable to determine the device handle for GPU0: Unknown Error\nprocesses\n",
        "0, GPU-1, 0, 143771\nprocesses\nGPU-1, 7\n",
        "0, GPU-1, 0, 143771\nprocesses\nNo running processes found\n",
        "0, GPU-1, 0, 143771\nprocesses\nGPU-1, seven, 5, x\n",
        "0, GPU-1, 0, 143771\nprocesses\nGPU-9, 7, 5, x\n",  # of a GPU that is not listed
        "0, GPU-1, 0, 143771\nKeine Prozesse\n",
    ],
)
def test_what_cannot_be_read_is_never_free_and_not_waited_for(stdout):
    verdict = judged(stdout)
    assert (verdict["free"], verdict["wait"]) == (False, False)
    assert (
        "prefill-a-0: what is in use of its GPUs on a could not be read; nvidia-smi said " in verdict["text"]
    )
    assert "\n" not in verdict["text"]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"rc": 127, "stderr": "sh: 1: nvidia-smi: not found", "stdout": ""}, "nvidia-smi: not found"),
        (
            {"rc": 9, "stderr": "", "stdout": "NVIDIA-SMI has failed\nbecause"},
            '"NVIDIA-SMI has failed because"',
        ),
        ({"rc": 124, "stderr": "", "stdout": ""}, "nothing (exit status 124)"),
        ({"msg": "no sh", "failed": True}, '"no sh" (exit status None)'),
        ({"rc": 1, "stderr": "", "stdout": recorded("free")}, "exit status 1"),
    ],
)
def test_a_command_that_failed_is_quoted(result, words):
    verdict = gpu_memory.judge(pair(), "prefill-a-0", result, LIMIT)
    assert (verdict["free"], verdict["wait"]) == (False, False)
    assert words in verdict["text"]


def test_a_member_that_is_not_planned_is_an_error():
    with pytest.raises(KeyError, match="nobody"):
        judged(recorded("free"), member="nobody")


# --- The role's tasks ---------------------------------------------------------------------------------------------

FAKE = """#!/bin/sh
# Stands in for nvidia-smi: prints what lies in the folder for this call and all later ones.
case $1 in
    --query-gpu=index,uuid,memory.used,memory.total) echo . >>"$FAKE/calls"; part=gpus ;;
    --query-compute-apps=gpu_uuid,pid,used_memory,process_name) part=processes ;;
    *) echo "Field is not a valid field to query."; exit 2 ;;
esac
test "$2" = --format=csv,noheader,nounits || exit 2
call=$(wc -l <"$FAKE/calls")
while ! test -e "$FAKE/$call.txt"; do call=$((call - 1)); test "$call" -gt 0 || exit 9; done
if test "$part" = gpus; then sed '/^processes$/,$d' "$FAKE/$call.txt"; else sed '1,/^processes$/d' "$FAKE/$call.txt"; fi
"""


@pytest.fixture
def role(tmp_path) -> Callable[..., tuple[subprocess.CompletedProcess[str], int]]:
    """Runs the tasks where nvidia-smi gives these answers, one after the other: what was said, and how often asked."""

    def run(
        *answers: str, start: str = "prefill-a-0", seconds: int = 5
    ) -> tuple[subprocess.CompletedProcess[str], int]:
        for number, answer in enumerate(answers, 1):
            (tmp_path / f"{number}.txt").write_text(answer)
        variables = {
            "vllm_engine_plan": pair(),
            "vllm_engine_gpu_memory_timeout": seconds,
            "__vllm_engine_wrong": f"{{{{ member.name == '{start}' }}}}",
        }
        done = run_tasks("vllm_engine", "gpu_memory", tmp_path, {"nvidia-smi": FAKE}, variables)
        calls = tmp_path / "calls"
        return done, len(calls.read_text()) // 2 if calls.exists() else 0

    return run


def test_the_role_goes_on_at_once_where_gpus_are_free(role):
    done, calls = role(recorded("free"))
    assert (done.returncode, calls) == (0, 1), done.stdout


def test_the_role_waits_for_memory_of_an_engine_that_was_just_stopped(role):
    done, calls = role(recorded("both-alive"), recorded("free"))
    assert (done.returncode, calls) == (0, 2), done.stdout


def test_the_role_refuses_after_its_time_and_names_who_may_hold_the_memory(role):
    done, calls = role(recorded("held-by-a-peer"))
    assert (done.returncode, calls) == (2, 2)
    assert "a: engines were stopped and not started again, because their GPUs are not free." in done.stdout
    assert "GPU 0: 4100 of 143771 MiB, and no process is listed" in done.stdout
    assert "The decodes: decode-a-1." in done.stdout


def test_the_role_does_not_wait_for_what_cannot_be_read(role):
    done, calls = role("No devices were found\nprocesses\n", seconds=60)
    assert (done.returncode, calls) == (2, 1)
    assert "could not be read" in done.stdout


def test_the_role_asks_for_members_alone_that_are_started(role):
    done, calls = role(recorded("held-by-a-peer"), start="none")
    assert (done.returncode, calls) == (0, 0), done.stdout
