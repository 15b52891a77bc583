"""Engine hosts: docker takes the registry and keeps what it had; a host without the model is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from lab import ENGINES, assert_running, containers, converge, host, kept, main_pid, refused, run

REGISTRY = "198.18.40.2:5000"
OTHER = "198.18.40.99:5000"
DAEMON = "/etc/docker/daemon.json"
# A program and what it needs.
SLEEP = "usr/bin/sleep lib/x86_64-linux-gnu/libc.so.6 lib64/ld-linux-x86-64.so.2"


def registries(name: str) -> set[str]:
    """The registries that the running docker engine uses over plain HTTP."""
    known = json.loads(run(name, "docker info --format '{{json .RegistryConfig.IndexConfigs}}'"))
    return {address for address, settings in known.items() if not settings["Secure"]}


@pytest.fixture
def running_container() -> Iterator[str]:
    """A container on rack1-04, made of files of its host: a lab that was just started has no image."""
    name = "rack1-04"
    run(
        name,
        f"tar -chC / {SLEEP} | docker import - molecule",
    )
    run(name, "docker run --detach --name molecule --network none molecule /usr/bin/sleep 600")
    try:
        yield name
    finally:
        run(name, "docker rm --force molecule && docker image rm molecule")


@pytest.mark.parametrize("name", ENGINES)
def test_docker_answers_and_uses_the_fleets_registry(name: str) -> None:
    assert_running(name, "docker")
    assert REGISTRY in registries(name)


@pytest.mark.parametrize("name", ENGINES)
def test_settings_that_were_there_are_kept(name: str) -> None:
    settings = json.loads(run(name, f"cat {DAEMON}"))
    assert settings["bridge"] == "none"
    assert (settings["iptables"], settings["ip6tables"]) == (False, False)


@pytest.mark.parametrize("name", ENGINES)
def test_the_fleets_folders_are_there(name: str) -> None:
    for path in ("/etc/ansible/facts.d", "/etc/vllm-fleet/engines"):
        folder = host(name).file(path)
        assert (folder.is_directory, folder.user, folder.mode) == (True, "root", 0o755)


def test_a_new_registry_restarts_neither_docker_nor_a_container(running_container: str) -> None:
    name = running_container
    before, daemon = containers(name), main_pid(name, "docker")
    assert "molecule" in before
    with kept(name, DAEMON, then="systemctl reload docker"):
        done = converge("engine_host", only=name, engine_host_insecure_registry=OTHER)
        assert done.changed(name) > 0
        assert {REGISTRY, OTHER} <= registries(name)
        assert json.loads(run(name, f"cat {DAEMON}"))["bridge"] == "none"
        assert (containers(name), main_pid(name, "docker")) == (before, daemon)


def test_a_host_without_the_model_is_refused() -> None:
    seen = refused("engine_host", only="rack1-05", engine_host_model_path="/srv/models/absent")
    assert (
        "rack1-05: /srv/models/absent/config.json is not there, so no engine here can load the model." in seen
    )
    assert "Copy the model to this host, or correct fleet_model.path." in seen
