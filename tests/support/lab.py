"""The lab for tests: its hosts over ssh, and runs of ansible-playbook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import testinfra
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "inventory" / "lab"
LOGS = ROOT / ".state" / "logs"
REGISTRY = "http://198.18.40.2:5000"
FRONT = "http://198.18.40.2:30000"
ENGINES = {"rack1-04": "prefill-rack1-04-0", "rack1-05": "decode-rack1-05-0"}
PLAY_SECONDS = 900


@dataclass(frozen=True)
class Play:
    """One run of ansible-playbook."""

    rc: int
    output: str

    @property
    def words(self) -> str:
        """The output on one line: Ansible wraps long messages."""
        return " ".join(self.output.split())

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        """host -> counter -> number."""
        lines = re.findall(r"^(\S+)\s+: (ok=.*)$", self.output.split("PLAY RECAP")[-1], re.MULTILINE)
        return {
            host: {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", counters)}
            for host, counters in lines
        }

    def changed(self, host: str) -> int:
        """How many tasks changed something on a host."""
        return self.recap[host]["changed"]


def host(name: str, folder: Path = ROOT / ".lab") -> Host:
    """A host of the lab, over ssh as Ansible reaches it."""
    return testinfra.get_host(f"ssh://{name}", ssh_config=str(folder / "ssh_config"))


def run(name: str, command: str) -> str:
    """What a shell command that must end well prints on a host."""
    return host(name).check_output(command)


def play(playbook: Path, *words: str, inventory: Path = LAB, **variables: Any) -> Play:
    """Run a playbook to its end; variables win over those that it gives to roles. Its output is kept in LOGS."""
    command = [ROOT / ".venv/bin/ansible-playbook", "-i", inventory, playbook, *words]
    if variables:
        command += ["-e", json.dumps(variables)]
    # Molecule asks for colours, which no test wants to read around.
    plain = {name: value for name, value in os.environ.items() if "COLOR" not in name}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=plain | {"ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PLAY_SECONDS,
        check=False,
    )
    output = done.stdout + done.stderr
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{time.strftime('%H%M%S')}-{playbook.stem}.log").write_text(output)
    # Of Ansible or of ours; an engine's own log may well show one.
    ours = [text for text in tracebacks(output) if re.search(r"/(ansible|vllm_fleet|plugins)/", text)]
    assert not ours, ours[0]
    return Play(done.returncode, output)


def tracebacks(output: str) -> list[str]:
    """Each traceback at the beginning of a line, with its indented lines."""
    return re.findall(r"^Traceback.*\n(?:[ \t].*\n)*", output, re.MULTILINE)


def converge(role: str, *words: str, **variables: Any) -> Play:
    """Run the role as its scenario does, with other variables; the play must end well."""
    done = play(ROOT / "roles" / role / "molecule/default/converge.yml", *words, **variables)
    assert done.rc == 0, done.output[-6000:]
    return done


def refused(role: str, *words: str, **variables: Any) -> str:
    """What the play says of a run that must fail."""
    done = play(ROOT / "roles" / role / "molecule/default/converge.yml", *words, **variables)
    assert done.rc != 0, done.output[-6000:]
    return done.words


def assert_running(name: str, unit: str) -> None:
    """A unit runs and starts with its host; where not, its journal is shown."""
    service = host(name).service(unit)
    journal = f"{name}: {unit}\n" + host(name).run(f"journalctl --no-pager -n 30 -u {unit}").stdout
    assert service.is_running, journal
    assert service.is_enabled, f"{unit} does not start with {name}"


def containers(name: str) -> str:
    """Names, ids and start times of a host's containers, to see that nothing was restarted."""
    return run(
        name,
        "docker ps -q | xargs -r docker inspect --format '{{.Name}} {{.Id}} {{.State.StartedAt}}' | sort",
    )


def main_pid(name: str, unit: str) -> int:
    """The main process of a unit; 0 for one that does not run."""
    return int(run(name, f"systemctl show --property MainPID --value {unit}"))


def fetch(url: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
    """The JSON of an answer to GET, or to POST with a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def complete(url: str, tokens: int = 1) -> dict[str, Any]:
    """One completion by an engine, a router or the front."""
    return fetch(
        f"{url}/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
    )


@contextmanager
def kept(name: str, path: str, then: str) -> Iterator[None]:
    """Give a file of a host back what is in it now, and run a command, when the block ends."""
    run(name, f"cp -p {path} {path}.kept")
    try:
        yield
    finally:
        run(name, f"mv {path}.kept {path} && {then}")


def router_slot() -> str:
    """The slot of the router that starts with its host, which is the one in use."""
    slots = run(
        "rack1-router", "for s in a b; do systemctl is-enabled --quiet vllm-router@$s && echo $s; done; true"
    ).split()
    assert len(slots) == 1, f"routers that start with their host: {slots}"
    return slots[0]


def other(slot: str) -> str:
    """The slot that is free for a candidate."""
    return {"a": "b", "b": "a"}[slot]
