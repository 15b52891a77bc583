"""The module lab_host against a fake docker client: what it decides. That the hosts work is seen in the lab."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import docker.errors
import pytest

WANT = {
    "name": "rack1-04",
    "image": "lab-host:1",
    "address": "198.18.40.4",
    "authorized_key": "ssh-ed25519 A one",
}
IMAGE = "sha256:1"
HOST_KEY = "ssh-ed25519 HOST root@rack1-04\n"


class FakeContainer:
    """A container that answers what the module asks of it."""

    name = "vllm-fleet-lab-rack1-04"

    def __init__(self, labels=None, status="running", systemd="running", keys=WANT["authorized_key"]):
        self.labels = labels or {}
        self.status = status
        self.answers = {
            "is-system-running": systemd,
            "authorized_keys": keys,
            "ssh_host_ed25519_key.pub": HOST_KEY,
            ":22": "LISTEN 0 128 0.0.0.0:22 0.0.0.0:*",
        }
        self.done: list[str] = []
        self.dies = False

    def exec_run(self, command):
        answer = next((text for word, text in self.answers.items() if command[-1].endswith(word)), "")
        return SimpleNamespace(exit_code=int(answer is None), output=(answer or "").encode())

    def start(self):
        self.done.append("start")
        self.status = "exited" if self.dies else "running"

    def remove(self, *, force):
        assert force
        self.done.append("remove")

    def put_archive(self, path, data):
        self.done.append("authorize")
        self.archive = data
        return True

    def reload(self):
        pass

    def logs(self, *, tail):
        return b"Freezing execution."


class FakeClient(MagicMock):
    """The docker client of a machine with the lab's network and at most one container."""

    @classmethod
    def of(cls, container, *, image=IMAGE, network=True):
        client = cls()
        client.here = container
        client.images.get.side_effect = (
            (lambda _: SimpleNamespace(id=image)) if image else docker.errors.ImageNotFound("no")
        )
        client.networks.list.return_value = [client.network] if network else []

        def get(_name):
            if client.here is None:
                raise docker.errors.NotFound("no")
            return client.here

        def create(_image, *, labels, **_):
            client.here = FakeContainer(labels, status="created")
            return client.here

        client.containers.get.side_effect = get
        client.containers.create.side_effect = create
        client.containers.list.return_value = [container] if container else []
        return client


@pytest.fixture
def run(run_module, monkeypatch):
    """Run the module with a client; what it answers."""
    module = importlib.import_module("lab_host")
    monkeypatch.setattr(module, "BOOT_SECONDS", 0)

    def run(client, *, check=False, **changes):
        monkeypatch.setattr(module.docker, "from_env", lambda **_: client)
        return run_module("lab_host", check=check, **{**WANT, **changes})

    return run


@pytest.fixture
def labels(run):
    """The labels of a container that this version of the module makes."""
    client = FakeClient.of(None)
    assert run(client)["did"] == ["created"]
    return client.here.labels


def test_a_host_is_made_with_what_it_stands_on(run):
    client = FakeClient.of(None, network=False)
    result = run(client)
    assert result["did"] == ["network vllm-fleet-lab created", "created"]
    assert result["host_key"] == "ssh-ed25519 HOST"
    assert client.here.done == ["start"]


def test_a_host_that_is_as_wanted_is_left_alone(run, labels):
    client = FakeClient.of(FakeContainer(labels))
    result = run(client)
    assert (result["changed"], result["did"], client.here.done) == (False, [], [])


@pytest.mark.parametrize(
    "changes", [{"address": "198.18.40.9"}, {"network": "other"}, {"image_id": "sha256:2"}]
)
def test_a_host_made_of_something_else_is_replaced(run, labels, changes):
    old = FakeContainer(labels)
    client = FakeClient.of(old, image=changes.pop("image_id", IMAGE))
    assert run(client, **changes)["did"] == ["removed, for another image, address or settings", "created"]
    assert old.done == ["remove"]
    assert client.here.labels != labels


def test_a_host_that_stopped_is_started(run, labels):
    client = FakeClient.of(FakeContainer(labels, status="exited"))
    assert run(client)["did"] == ["started"]
    assert client.here.done == ["start"]


def test_another_clone_gets_in_beside_the_first(run, labels):
    client = FakeClient.of(FakeContainer(labels))
    assert run(client, authorized_key="ssh-ed25519 B two")["did"] == ["key authorized"]
    assert b"ssh-ed25519 A one\nssh-ed25519 B two\n" in client.here.archive


@pytest.mark.parametrize("container", [None, FakeContainer(), FakeContainer({}, "exited")])
@pytest.mark.parametrize("image", [IMAGE, None])
def test_check_mode_tells_and_changes_nothing(run, container, image):
    client = FakeClient.of(container, image=image)
    result = run(client, check=True)
    assert result["did"][-1] == "created"
    assert result["host_key"] is None
    client.containers.create.assert_not_called()
    assert container is None or container.done == []


def test_the_last_host_takes_the_network_along(run):
    container = FakeContainer()
    client = FakeClient.of(container)
    assert run(client, state="absent")["did"] == ["removed", "volume removed", "network removed"]
    client.containers.list.return_value = [container, SimpleNamespace(name="vllm-fleet-lab-rack1-05")]
    client.volumes.get.side_effect = docker.errors.NotFound("no")
    client.here = None
    assert run(client, state="absent")["did"] == []


def test_no_engine(run_module, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    message = run_module("lab_host", **WANT)["msg"]
    assert message.startswith("rack1-04: no docker engine answers on this machine")
    assert "\n" not in message


def test_no_image(run):
    message = run(FakeClient.of(None, image=None))["msg"]
    assert message == "rack1-04: there is no image lab-host:1 on this machine; run images/build lab-host"


def test_a_host_that_dies_while_starting_shows_its_log(run, labels):
    container = FakeContainer(labels, status="exited")
    container.dies = True
    result = run(FakeClient.of(container))
    assert "stopped while starting:\nFreezing execution." in result["msg"]
    assert result["did"] == ["started"]


def test_a_host_that_hangs_is_told_with_its_state(run, labels):
    message = run(FakeClient.of(FakeContainer(labels, systemd="starting")))["msg"]
    assert "is 'starting' and its sshd listens after" in message


def test_a_host_whose_sshd_does_not_listen_yet_is_not_up(run, labels):
    container = FakeContainer(labels)
    container.answers[":22"] = ""
    assert "is 'running' and its sshd does not listen after" in run(FakeClient.of(container))["msg"]


def test_what_the_engine_refuses_is_told_with_the_host(run, labels):
    container = FakeContainer(labels, status="exited")
    container.start = MagicMock(side_effect=docker.errors.APIError("Address already in use"))
    result = run(FakeClient.of(container))
    assert result["msg"] == "rack1-04: the docker engine on this machine says: Address already in use"
