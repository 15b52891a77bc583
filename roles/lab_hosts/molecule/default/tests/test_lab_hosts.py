"""Hosts of the lab: up, reached with the lab's key only, started again, removed without a trace."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import ROOT, converge, host

FOLDER = ROOT / ".state/molecule/lab"
NAME = "molecule-1"
CONTAINER = f"vllm-fleet-lab-{NAME}"
OTHERS = ("rack1-04", "rack1-05", "rack1-router")


def docker(*words: str) -> str:
    """What the docker client of this machine prints."""
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.strip()


def seen(*names: str) -> str:
    """Ids and start times of containers of this machine."""
    return docker(
        "inspect", "--format", "{{.Id}} {{.State.StartedAt}}", *(f"vllm-fleet-lab-{name}" for name in names)
    )


def ssh(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["ssh", "-F", str(FOLDER / "ssh_config"), "-o", "BatchMode=yes", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture(autouse=True)
def others_untouched() -> Iterator[None]:
    """No test touches the lab's own hosts."""
    before = seen(*OTHERS)
    yield
    assert seen(*OTHERS) == before


def test_the_host_is_a_host_of_its_own() -> None:
    there = host(NAME, FOLDER)
    assert there.check_output("hostname") == NAME
    assert there.check_output("ps -o comm= -p 1") == "systemd"
    assert there.service("docker").is_running, there.run("journalctl --no-pager -n 30 -u docker").stdout
    assert there.check_output("docker info --format '{{.Containers}}'") == "0"


def test_only_the_labs_key_logs_in() -> None:
    assert ssh(NAME, "true").returncode == 0
    without = ssh(
        "-o",
        "IdentityFile=none",
        "-o",
        "IdentityAgent=none",
        "-F",
        "/dev/null",
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "root@198.18.40.30",
        "true",
    )
    assert without.returncode == 255
    assert "Permission denied" in without.stderr


def test_another_host_key_is_not_believed(tmp_path: Path) -> None:
    """The address is known, with the key of the host that was made."""
    [line] = (FOLDER / "known_hosts").read_text().splitlines()
    assert line.startswith("198.18.40.30 ssh-ed25519 ")
    empty = tmp_path / "known_hosts"
    empty.touch()
    refused = ssh("-o", f"UserKnownHostsFile={empty}", NAME, "true")
    assert "Host key verification failed" in refused.stderr
    assert (FOLDER / "id_ed25519").stat().st_mode & 0o777 == 0o600


def test_a_host_that_stopped_is_started_again() -> None:
    made = docker("inspect", "--format", "{{.Id}}", CONTAINER)
    docker("kill", CONTAINER)
    assert docker("inspect", "--format", "{{.State.Running}}", CONTAINER) == "false"
    assert converge("lab_hosts").changed("localhost") == 1
    assert docker("inspect", "--format", "{{.Id}}", CONTAINER) == made
    assert ssh(NAME, "true").returncode == 0


def test_a_removed_host_leaves_nothing_and_the_others_stay() -> None:
    assert converge("lab_hosts", lab_hosts_state="absent").changed("localhost") == 1
    assert CONTAINER not in docker("ps", "--all", "--format", "{{.Names}}")
    assert f"{CONTAINER}-docker" not in docker("volume", "ls", "--quiet")
    assert "vllm-fleet-lab" in docker("network", "ls", "--format", "{{.Name}}")
    again = converge("lab_hosts", lab_hosts_state="absent")
    assert again.changed("localhost") == 0
