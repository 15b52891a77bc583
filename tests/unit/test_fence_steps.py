"""playbooks/fence.yml on this machine as two hosts: what is fenced before, while and after a fleet changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from role_tasks import ROOT

# The kernel's rules are a file, another one in another network namespace.
PROGRAMS = {
    "nft": """
        kernel="$AT/kernel${NAMESPACE:-}"
        case "$1" in
            --check) ;;
            --file) grep -v '^#\\|^table\\|^delete' "$2" > "$kernel" ;;
            list) cat "$kernel" ;;
            delete) rm "$kernel" ;;
        esac
    """,
    "unshare": 'shift; NAMESPACE=2 exec "$@"',
    "systemctl": """
        echo "$*" >> "$AT/systemctl"
        case "$*" in
            "show "*) echo LoadState=loaded; [ -e "$AT/kernel" ] && echo ActiveState=active || echo ActiveState=inactive ;;
            "reload "* | "start "*) nft --file "$AT/fence.nft" ;;
            "stop "*) nft delete ;;
        esac
    """,
}
HOSTS = ("engine", "relay")


class Machine:
    """A folder for each host, and the playbook run on them."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in PROGRAMS.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}")
            (folder / name).chmod(0o755)
        for host in HOSTS:
            (folder / host).mkdir()
            (folder / host / "systemd").mkdir()
        at = "{{ inventory_dir }}/{{ inventory_hostname }}"
        (folder / "hosts.json").write_text(
            json.dumps(
                {
                    "all": {
                        "vars": {
                            "ansible_connection": "local",
                            "ansible_python_interpreter": sys.executable,
                        },
                        "children": {
                            "fleet_engines": {"hosts": {"engine": None}},
                            "fleet_relay": {"hosts": {"relay": None}},
                        },
                    }
                }
            )
        )
        self.told = {
            "__host_fence_rules": f"{at}/fence.nft",
            "__host_fence_data": f"{at}/fence.json",
            "__host_fence_systemd": f"{at}/systemd",
        }

    def play(self, step, plan, *options):
        told = self.told | {"vllm_fleet": {"plan": plan}, "fence_step": step}
        (self.folder / "vars.json").write_text(json.dumps(told))
        done = subprocess.run(
            ["ansible-playbook", "-i", self.folder / "hosts.json", "playbooks/fence.yml", *options,
             "-e", f"@{self.folder}/vars.json"],
            cwd=ROOT, env=os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}", "AT": str(self.folder / "engine")},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return sum(map(int, re.findall(r"changed=(\d+)", done.stdout)))

    def files(self, host="engine"):
        """Those that the role has written."""
        own = ("kernel", "kernel2", "systemctl")
        found = (path.name for path in (self.folder / host).rglob("*") if path.is_file())
        return sorted(name for name in found if name not in own)

    def kernel(self):
        """The rules in force; none, an empty text."""
        path = self.folder / "engine" / "kernel"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def a_plan(ports, callers):
    families = {"ipv4": callers, "ipv6": []}
    fences = {
        "engine": {"ports": ports, "side_channel_ports": ports[:1]},
        "relay": {"ports": [], "side_channel_ports": []},
    }
    return {
        "groups": [["engine", "fleet_engines"], ["relay", "fleet_relay"]],
        "fence": {"callers": families, "peers": {"ipv4": [], "ipv6": []}},
        "hosts": {host: {"fence": fence} for host, fence in fences.items()},
    }


BEFORE = a_plan([5600, 8000], ["10.0.0.1", "10.0.0.2"])
AFTER = a_plan([5600, 9000], ["10.0.0.2", "10.0.0.3"])
NONE = AFTER | {"fence": None}
REJECT = "tcp dport {{ {} }} reject with tcp reset"
ACCEPT = "tcp dport {{ {} }} ip saddr {{ {} }} accept"
BOTH = "5600, 8000, 9000"


def test_a_fence_is_widened_before_a_change_and_narrowed_after_it(machine):
    # Before the check nothing is written on a host without a fence.
    assert machine.play("widen", BEFORE) == 0
    assert (machine.files(), machine.files("relay")) == ([], [])
    machine.play("keep", BEFORE)
    before = machine.kernel()
    assert REJECT.format("5600, 8000") in before
    assert machine.play("widen", AFTER, "--check") > 0
    assert machine.kernel() == before
    assert machine.play("widen", AFTER) == 2  # the files, and what is in force
    assert ACCEPT.format(BOTH, "10.0.0.1, 10.0.0.2, 10.0.0.3") in machine.kernel()
    assert REJECT.format(BOTH) in machine.kernel()
    assert machine.play("narrow", AFTER) == 2
    assert ACCEPT.format("5600, 9000", "10.0.0.2, 10.0.0.3") in machine.kernel()
    assert "8000" not in machine.kernel()
    # A second run of site.yml.
    assert [machine.play(step, AFTER) for step in ("keep", "narrow")] == [0, 0]
    # The engine has moved to another host.
    machine.play("narrow", a_plan([], ["10.0.0.3"]))
    assert (machine.kernel(), machine.files(), machine.files("relay")) == ("", [], [])


def test_a_fence_is_mended_and_where_it_is_given_up_it_stays_until_the_end(machine):
    machine.play("keep", BEFORE)
    right = machine.kernel()
    (machine.folder / "engine" / "kernel").write_text("tcp dport 8000 accept\n")
    assert machine.play("keep", BEFORE) == 1
    assert machine.kernel() == right
    assert machine.play("keep", NONE) == 0
    assert machine.kernel() == right
    machine.play("narrow", NONE)
    assert (machine.kernel(), machine.files()) == ("", [])
