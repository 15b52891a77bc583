"""End-to-end tests: real engines, NIXL, router, haproxy, systemd, ssh and docker, in the lab on this machine.

They change the lab's fleet: at the end it is removed, the lab's hosts stay.
"""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lab
import pytest
import yaml
from lab import ENGINES, FRONT, LAB, ROOT, Play
from testinfra.host import Host

PREFILL, DECODE = ENGINES["rack1-04"], ENGINES["rack1-05"]
PAIR = f"{PREFILL} -> {DECODE}"


class Fleet:
    """The lab's fleet as its operator sees it."""

    def play(self, name: str, *words: str, inventory: Path = LAB) -> Play:
        """Run playbooks/NAME.yml to its end."""
        return lab.play(ROOT / "playbooks" / f"{name}.yml", *words, inventory=inventory)

    def deploy(self, *words: str, inventory: Path = LAB) -> Play:
        """Run site.yml, which must end well."""
        done = self.play("site", *words, inventory=inventory)
        assert done.rc == 0, done.output[-6000:]
        return done

    def host(self, name: str) -> Host:
        """A host of the lab."""
        return lab.host(name)

    def run(self, name: str, command: str) -> str:
        """What a shell command that must end well prints on a host."""
        return lab.run(name, command)

    def module(self, name: str, module: str, **params: Any) -> dict[str, Any]:
        """Run one module on a host; what it returned."""
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", module, "-a", json.dumps(params), "--tree", folder]
            command = [ROOT / ".venv/bin/ansible", name, "-i", LAB, *words]
            subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
            return json.loads((Path(folder) / name).read_text())

    def containers(self) -> dict[str, str]:
        """Engine -> id of its container and main process of its router, to see that nothing was restarted."""
        seen = {
            host: self.run(host, "docker ps --no-trunc --format '{{.Names}} {{.ID}}' | sort")
            for host in ("rack1-04", "rack1-05")
        }
        return seen | {
            "rack1-router": self.run(
                "rack1-router", "systemctl show --property MainPID 'vllm-router@*' haproxy"
            )
        }


def ask(url: str, path: str = "/v1/completions", timeout: float = 90, **body: Any) -> dict[str, Any]:
    """POST, and the JSON of the answer."""
    request = urllib.request.Request(
        url + path, json.dumps({"model": "tiny"} | body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def ask_streamed(url: str, path: str = "/v1/completions", timeout: float = 90, **body: Any) -> str:
    """POST with stream, and the whole text; every chunk must be there, up to [DONE]."""
    request = urllib.request.Request(
        url + path,
        json.dumps({"model": "tiny", "stream": True} | body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise OSError(f"the stream was cut after {len(events)} events")
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@dataclass
class Stream:
    """What clients saw that kept asking through the front."""

    sent: int = 0
    failed: list[str] = field(default_factory=list)


@contextmanager
def steady_stream(clients: int = 2, pause: float = 2.5, most: int = 500) -> Iterator[Stream]:
    """Keep streaming completions from several clients while the block runs; each must come whole and with a text."""
    stream, stop = Stream(), threading.Event()

    def keep_asking(client: int) -> None:
        for number in range(most):
            if stop.wait(pause):
                return
            stream.sent += 1
            name = f"request {number} of client {client}"
            try:
                if not ask_streamed(
                    FRONT, prompt=f"{name} in a steady stream", max_tokens=32, ignore_eos=True
                ):
                    stream.failed.append(f"{name}: no text")
            except urllib.error.HTTPError as error:
                stream.failed.append(f"{name}: {error.code} {error.read()[:300]!r}")
            except OSError as error:
                stream.failed.append(f"{name}: {error}")

    threads = [threading.Thread(target=keep_asking, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield stream
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=120)


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    """The lab, up (make lab)."""
    subprocess.run(["make", "lab"], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    return Fleet()


def write_inventory(parent: Path, hosts: Any = None, **variables: Any) -> Path:
    """An inventory that is the lab's with changed hosts.yml and group_vars/all.yml."""
    folder = Path(tempfile.mkdtemp(prefix="inventory", dir=parent))
    (folder / "group_vars").mkdir()
    tree = yaml.safe_load((LAB / "hosts.yml").read_text())
    if hosts:
        hosts(tree["all"]["children"])
    (folder / "hosts.yml").write_text(yaml.safe_dump(tree, sort_keys=False))
    all_vars = yaml.safe_load((LAB / "group_vars" / "all.yml").read_text()) | variables
    (folder / "group_vars" / "all.yml").write_text(yaml.safe_dump(all_vars, sort_keys=False))
    lab_vars = (LAB / "group_vars" / "lab.yml").read_text()
    (folder / "group_vars" / "lab.yml").write_text(lab_vars.replace("{{ inventory_dir }}/../..", str(ROOT)))
    return folder


@pytest.fixture
def changed_inventory(tmp_path: Path):
    """Make such an inventory."""
    return functools.partial(write_inventory, tmp_path)


@pytest.fixture(scope="session")
def rl_inventory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's with `fleet_profile: rl`: one for all tests that need it, so that its engines start once."""
    return write_inventory(tmp_path_factory.mktemp("rl"), fleet_profile="rl")
