"""A bundle of what is committed deploys a fleet without a network.

The workstation is a network namespace of this machine that reaches the lab's hosts and nothing else; the hosts have
no default route. Docker is the machine's own, over its Unix socket.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import docker
import pytest
from conftest import write_inventory
from lab import FRONT, LOGS, PLAY_SECONDS, ROOT, run

HOSTS = ("rack1-04", "rack1-05", "rack1-router")
NAMESPACE = "vllm-fleet-air-gap"
ADDRESS = "198.18.40.200/24"  # of no host
OUTSIDE = "192.0.2.1"
AS_ROOT = [] if os.geteuid() == 0 else ["sudo"]


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ip(8); its status is the caller's to judge."""
    return subprocess.run([*AS_ROOT, "ip", *words], capture_output=True, text=True, check=False)


def must(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"


@contextmanager
def namespace() -> Iterator[None]:
    """A namespace with one interface, on the lab's bridge."""
    bridge = f"br-{docker.from_env().networks.get('vllm-fleet-lab').id[:12]}"
    ip("netns", "delete", NAMESPACE)
    must(ip("netns", "add", NAMESPACE))
    try:
        inside = ("-netns", NAMESPACE)
        must(ip("link", "add", "air-gap", "type", "veth", "peer", "name", "eth0", "netns", NAMESPACE))
        must(ip("link", "set", "air-gap", "master", bridge, "up"))
        must(ip(*inside, "address", "add", ADDRESS, "dev", "eth0"))
        for link in ("lo", "eth0"):
            must(ip(*inside, "link", "set", link, "up"))
        yield
    finally:
        ip("netns", "delete", NAMESPACE)  # the link goes with it
        ip("link", "delete", "air-gap")


@contextmanager
def without_default_route(host: str) -> Iterator[None]:
    """A host of the lab that reaches only the lab."""
    route = run(host, "ip route show default")
    run(host, "ip route delete default")
    try:
        yield
    finally:
        run(host, f"ip route replace {route}")


@contextmanager
def without_image(tag: str) -> Iterator[None]:
    """This machine's docker, without the name of the engines' image; its layers are kept for the other tests."""
    images = docker.from_env().images
    kept = images.get(tag)
    kept.tag("vllm-fleet/kept", "air-gap")
    images.remove(tag)
    try:
        yield
    finally:
        kept.tag(*tag.split(":"))
        images.remove("vllm-fleet/kept:air-gap")


def docker_settings(host: str) -> str:
    return run(host, "cat /etc/docker/daemon.json")


class Site:
    """The folder of an unpacked bundle, and commands in it without a network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = dict(line.split("=", 1) for line in (folder / ".state/bundle").read_text().splitlines())
        self.docker_settings = {host: docker_settings(host) for host in HOSTS}

    def __call__(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace, without anything of this repository or of its settings for pip."""
        known = {"HOME", "LANG", "LC_ALL", "PATH", "USER"}
        environment = {name: value for name, value in os.environ.items() if name in known}
        environment["PATH"] = environment["PATH"].replace(f"{ROOT}/.venv/bin:", "")
        done = subprocess.run(
            [*AS_ROOT, "ip", "netns", "exec", NAMESPACE, *command],
            cwd=self.folder,
            env=environment
            | {
                "ANSIBLE_NOCOLOR": "1",
                "PIP_CONFIG_FILE": os.devnull,
                # Connections that stay open die with the namespace; nobody else may take them up.
                "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder.parent / "cp"),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PLAY_SECONDS,
            check=False,
        )
        LOGS.mkdir(parents=True, exist_ok=True)
        (LOGS / f"air-gap-{Path(command[0]).name}.log").write_text(done.stdout + done.stderr)
        return done


@pytest.fixture(scope="module")
def site(fleet, tmp_path_factory) -> Iterator[Site]:
    """An unpacked bundle, with no network from here on: of the workstation, and of hosts that have no image."""
    folder = tmp_path_factory.mktemp("air-gap")
    bundle = folder / "bundle.tar"
    command = [ROOT / ".venv/bin/python", ROOT / "scripts/bundle", "--inventory", ROOT / "inventory/lab"]
    subprocess.run([*command, "--output", bundle], check=True)
    with tarfile.open(bundle) as tar:
        tar.extractall(folder, filter="tar")
    bundle.unlink()
    [unpacked] = folder.iterdir()
    made = Site(unpacked)
    assert fleet.play("remove", "-e", "remove_images=true").rc == 0
    with ExitStack() as stack:
        stack.enter_context(without_image(made.about["bundle_image_tag"]))
        stack.enter_context(namespace())
        for host in HOSTS:
            stack.enter_context(without_default_route(host))
        yield made
    shutil.rmtree(unpacked)  # 2 GB
    assert fleet.play("remove").rc == 0


def test_the_network_is_cut(site):
    """Nothing outside the lab has a route: a connection fails at once, and so does asking a name server."""
    routes = site("ip", "-json", "route").stdout
    assert [route["dst"] for route in json.loads(routes)] == ["198.18.40.0/24"]
    assert "unreachable" in site("ip", "route", "get", OUTSIDE).stderr.lower()
    for host in HOSTS:
        seen = run(host, f"ip route get {OUTSIDE} 2>&1 || true; ip -6 route show default")
        assert seen.lower().count("unreachable") == 1, seen
        assert run(host, "docker image ls --quiet") == ""


@pytest.mark.parametrize("name", ["scripts/setup", "*.whl", "part.0001"])
def test_a_flipped_byte_is_named_and_nothing_is_installed(site, name):
    damaged = next(path for path in sorted(site.folder.rglob(Path(name).name)) if path.match(name))
    with damaged.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    try:
        done = site("./install")
    finally:
        with damaged.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(byte)
    assert done.returncode == 1
    assert f"{damaged.relative_to(site.folder)}: FAILED" in done.stderr
    assert "nothing was installed" in done.stderr
    assert not (site.folder / ".venv").exists()


def test_the_bundle_installs(site):
    done = site("./install")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"loading the image {site.about['bundle_image_tag']}" in done.stderr
    assert docker.from_env().images.get(site.about["bundle_image_tag"]).id == site.about["bundle_image_id"]
    again = site("./install")
    assert again.returncode == 0
    assert f"the image {site.about['bundle_image_tag']} is there" in again.stderr


def test_the_fleet_is_deployed_from_it_and_serves(site):
    def without_registry(groups):
        del groups["registry"]

    mine = write_inventory(site.folder / "inventory", hosts=without_registry, fleet_image_source="archive")
    playbook: Sequence[str] = (".venv/bin/ansible-playbook", "-i", str(mine), "playbooks/site.yml")
    done = site(*playbook)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    for host in HOSTS[:2]:
        image = run(host, "docker ps --quiet | xargs docker inspect --format '{{.Image}}'")
        assert image == site.about["bundle_image_id"]
        assert docker_settings(host) == site.docker_settings[host]
    ask = f"""import json, urllib.request
body = json.dumps({{"model": "tiny", "prompt": "Hello", "max_tokens": 4}}).encode()
request = urllib.request.Request("{FRONT}/v1/completions", body, {{"Content-Type": "application/json"}})
print(json.load(urllib.request.urlopen(request, timeout=90))["usage"]["completion_tokens"])"""
    answered = site(".venv/bin/python", "-c", ask)
    assert answered.stdout == "4\n", answered.stderr
