"""The role engine_host has docker hand out GPUs. `docker` and `systemctl` are stand-ins that answer and record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from role_tasks import run_tasks

ROOT = Path(__file__).parents[2]
DIRS = ["/etc/cdi", "/var/run/cdi"]
# `docker info` of docker 27 has these keys among others; CDISpecDirs is null while CDI is off, and dockers before 25 lack it.
DOCKER = '#!/bin/sh\ntest "$*" = "info --format {{json .}}" || exit 2\ncat "$FAKE/info.json"\n'
SYSTEMCTL = """#!/bin/sh
echo "$*" >>"$FAKE/calls"
case $1 in show) printf 'Id=docker.service\\nLoadState=loaded\\nActiveState=active\\n' ;; esac
"""


class Done(NamedTuple):
    code: int
    said: str
    settings: dict[str, Any] | None
    restarted: bool


@pytest.fixture
def role(tmp_path) -> Callable[..., Done]:
    """Runs the tasks on a host with such a docker and daemon.json."""

    def run(info: dict[str, Any], daemon: dict[str, Any] | None = None, *options: str) -> Done:
        info = {"ServerVersion": "27.5.1", "CDISpecDirs": None, "ContainersRunning": 0} | info
        (tmp_path / "info.json").write_text(json.dumps({"LiveRestoreEnabled": False} | info) + "\n")
        file = tmp_path / "daemon.json"
        if daemon is not None:
            # As the role writes it.
            file.write_text(json.dumps(daemon, indent=4, sort_keys=True) + "\n")
        variables = {"__engine_host_daemon_file": str(file)}
        programs = {"docker": DOCKER, "systemctl": SYSTEMCTL}
        done = run_tasks("engine_host", "cdi", tmp_path, programs, variables, *options)
        calls = tmp_path / "calls"
        recorded = calls.read_text() if calls.exists() else ""
        settings = json.loads(file.read_text()) if file.exists() else None
        return Done(done.returncode, " ".join(done.stdout.split()), settings, "restart docker" in recorded)

    return run


def test_docker_25_to_27_has_it_switched_on_beside_its_other_settings(role):
    done = role({}, {"bridge": "none", "features": {"buildkit": True}})
    assert done.code == 0, done.said
    assert done.settings == {"bridge": "none", "features": {"buildkit": True, "cdi": True}}
    assert done.restarted


def test_a_docker_without_settings_gets_some(role):
    assert role({})[2:] == ({"features": {"cdi": True}}, True)


def test_a_docker_that_has_it_on_is_left_alone(role):
    daemon = {"bridge": "none"}
    done = role({"ServerVersion": "28.3.0", "CDISpecDirs": DIRS, "ContainersRunning": 9}, daemon)
    assert done[2:] == (daemon, False)
    assert (done.code, "changed=0" in done.said) == (0, True), done.said


def test_a_run_that_was_cut_off_before_the_restart_is_finished(role):
    done = role({}, {"features": {"cdi": True}})
    assert (done.code, done.restarted) == (0, True), done.said


def test_a_docker_that_cannot_is_refused(role):
    info = {"ServerVersion": "20.10.24", "CDISpecDirs": []}
    done = role(info, {})
    assert (done.code, done.settings, done.restarted) == (2, {}, False)
    assert "a: docker 20.10.24 cannot hand out GPUs by CDI, which docker has since version 25." in done.said


def test_containers_are_not_stopped(role):
    done = role({"ContainersRunning": 3}, {})
    assert (done.code, done.settings, done.restarted) == (2, {}, False)
    assert "docker must be restarted, which stops 3 running containers" in done.said


def test_containers_that_outlive_a_restart_are_no_obstacle(role):
    done = role({"ContainersRunning": 3, "LiveRestoreEnabled": True}, {})
    assert (done.code, done.restarted) == (0, True), done.said


def test_who_switched_it_off_is_not_contradicted(role):
    daemon = {"features": {"cdi": False}}
    done = role({"ServerVersion": "28.3.0"}, daemon)
    assert (done.code, done.settings, done.restarted) == (2, daemon, False)
    assert "features.cdi is switched off" in done.said


def test_check_mode_says_it_and_changes_nothing(role):
    done = role({}, {}, "--check")
    assert (done.code, done.settings, done.restarted) == (0, {}, False), done.said
    assert "changed=" in done.said
