"""The role container_image tests an image on a host's GPUs. `docker` is a stand-in that answers and records."""

from __future__ import annotations

from pathlib import Path

import pytest
from role_tasks import run_tasks

ROOT = Path(__file__).parents[2]
IMAGE = "sha256:" + "ab" * 32
DOCKER = '#!/bin/sh\necho "$*" >>"$FAKE/calls"\ncat "$FAKE/says"\nexit $(cat "$FAKE/status")\n'


@pytest.fixture
def role(tmp_path):
    """Runs the tasks on a host whose docker says that and ends so: status, output, calls of docker so far, changed."""

    def run(status: int = 0, says: str = "the image is accepted\n", *options: str, **variables):
        (tmp_path / "says").write_text(says)
        (tmp_path / "status").write_text(str(status))
        told = {
            "container_image_gpus": True,
            "container_image_folder": str(tmp_path / "folder"),
            "container_image_here": {"id": IMAGE},
        } | variables
        done = run_tasks("container_image", "gpu_test", tmp_path, {"docker": DOCKER}, told, *options)
        calls = tmp_path / "calls"
        return (
            done.returncode,
            " ".join(done.stdout.split()),
            [call for call in calls.read_text().splitlines() if call.startswith("run ")]
            if calls.exists()
            else [],
            "changed=1" in done.stdout,
        )

    return run


def test_an_image_is_tested_once_on_each_host(role):
    code, said, calls, changed = role()
    assert (code, changed) == (0, True), said
    (call,) = calls
    assert "--device=nvidia.com/gpu=all" in call
    assert call.endswith(f"--entrypoint=vllm-acceptance {IMAGE} --gpu")
    code, _, calls, changed = role()
    assert (code, len(calls), changed) == (0, 1, False)
    assert len(role(container_image_here={"id": "sha256:" + "cd" * 32})[2]) == 2


def test_one_that_does_not_work_is_refused_and_tested_again(role):
    code, said, _, _ = role(1, "the image is not accepted:\n  UCX has no cuda_ipc\n")
    assert code != 0
    assert (
        f"the image {IMAGE} does not work with this host's GPUs, so no engine was started or stopped" in said
    )
    assert "UCX has no cuda_ipc" in said
    assert role()[0] == 0
    assert len(role()[2]) == 2


def test_one_that_hangs_is_said_to(role):
    assert "stopped after 900 s: CUDA, UCX or NIXL hangs" in role(124, "")[1]
    assert "stopped after 900 s" not in role(125, "docker: could not select device driver\n")[1]


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (["--check"], {}),
        ([], {"container_image_other": "x/vllm@sha256:" + "ab" * 32}),
        ([], {"container_image_gpus": False}),
    ],
)
def test_it_is_left_out(role, options, variables):
    assert role(1, "", *options, **variables)[::2] == (0, [])
