"""Hosts that the fleet would fail on: the check names what is wrong, and site.yml stops before anything is changed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from conftest import DECODE

PREFILL_HOST, DECODE_HOST, ROUTER = HOSTS = ("rack1-04", "rack1-05", "rack1-router")
WEIGHTS = "/srv/models/tiny/model.safetensors"
# What a deployment changes: units, settings, docker's registries, packages' services.
STATE = (
    "ls -la --time-style=full-iso /etc/systemd/system /etc/vllm-fleet /etc/haproxy /etc/docker /etc/ansible 2>&1; "
    "docker image ls -q; docker ps -q; systemctl is-active haproxy docker-registry; true"
)


@pytest.fixture(scope="module", autouse=True)
def no_fleet(fleet):
    """The lab's hosts without a fleet."""
    assert fleet.play("remove").rc == 0


@contextmanager
def broken(fleet, host, breaks, mends):
    fleet.run(host, breaks)
    try:
        yield
    finally:
        fleet.run(host, mends)


@contextmanager
def stranger(fleet, host, address, port):
    """A program of somebody else that listens."""
    command = f"python3 -m http.server --bind {address} {port}"
    waits = f"for i in $(seq 50); do ss -Hltn | grep -q ':{port} ' && exit 0; sleep 0.1; done; exit 1"
    run = f"systemd-run --quiet --unit=stranger {command} && {waits}"
    with broken(fleet, host, run, "systemctl stop stranger"):
        yield


def refused(fleet, *seen):
    """Run site.yml, which must stop in the check, say all of `seen` and change nothing."""
    before = {host: fleet.run(host, STATE) for host in HOSTS}
    done = fleet.play("site")
    assert done.rc != 0, done.output[-3000:]
    for words in seen:
        assert words in done.words
    assert {host: counters["changed"] for host, counters in done.recap.items()} == dict.fromkeys(
        done.recap, 0
    )
    assert "Prepare the engine hosts" not in done.output
    assert {host: fleet.run(host, STATE) for host in HOSTS} == before


def test_the_labs_hosts_pass(fleet):
    before = {host: fleet.run(host, STATE) for host in HOSTS}
    done = fleet.play("check")
    assert done.rc == 0, done.output[-3000:]
    assert "checks, 3 hosts:" in done.words
    assert "Do not apply, because no CUDA engine is planned there: driver, " in done.words
    assert {host: fleet.run(host, STATE) for host in HOSTS} == before


def test_a_port_that_a_stranger_has(fleet):
    with stranger(fleet, DECODE_HOST, "198.18.40.5", 8000):
        taken = f"FAIL ports {DECODE_HOST} port 8000 (HTTP of {DECODE}) is taken by python3 (pid"
        refused(fleet, taken, "stranger.service)", "what to do: Stop that program")


def test_a_truncated_file_of_weights(fleet):
    kept = f"mv /root/kept {WEIGHTS}"
    with broken(fleet, PREFILL_HOST, f"cp -p {WEIGHTS} /root/kept && truncate --size=-100 {WEIGHTS}", kept):
        refused(
            fleet,
            f"FAIL model-files {PREFILL_HOST} model.safetensors has",
            "bytes, its header says",
            "what to do: Copy the model to the host again.",
        )


@pytest.mark.parametrize(
    ("target", "outcome"), [("DROP", "no answer"), ("REJECT --reject-with tcp-reset", "refused")]
)
def test_a_listener_behind_a_firewall(fleet, target, outcome):
    rule = f"INPUT -p tcp --dport 5600 -s 198.18.40.5 -j {target}"
    with broken(fleet, PREFILL_HOST, f"iptables -I {rule}", f"iptables -D {rule}"):
        refused(
            fleet,
            f"FAIL reachable {DECODE_HOST} does not reach NIXL side channel of prefill-rack1-04-0"
            f" ({PREFILL_HOST}, 198.18.40.4:5600): {outcome}",
            "what to do: Open the port between the two hosts",
        )


def test_a_firewall_before_the_ports_that_the_kernel_chooses(fleet):
    rule = "INPUT -p tcp --dport 32768:60999 -s 198.18.40.4 ! -i lo -m conntrack --ctstate NEW -j DROP"
    with broken(fleet, DECODE_HOST, f"iptables -I {rule}", f"iptables -D {rule}"):
        refused(
            fleet, f"FAIL reachable {PREFILL_HOST} does not reach a port of 32768-60999, of which the kernel"
        )


def test_an_accepted_failure_does_not_stop(fleet):
    """The router's metrics port, which nobody needs for this."""
    with stranger(fleet, ROUTER, "127.0.0.1", 29002):
        seen = f"ports {ROUTER} port 29002 (metrics of router b) is taken by python3"
        refused(fleet, f"FAIL {seen}")
        done = fleet.play(
            "check", "-e", "{host_check_accept: {ports: the second router is not needed today}}"
        )
        assert done.rc == 0, done.output[-3000:]
        assert f"ACCEPTED {seen}" in done.words


@pytest.mark.parametrize("names", [[DECODE_HOST], [DECODE_HOST, ROUTER]], ids="+".join)
def test_hosts_that_do_not_answer(fleet, changed_inventory, names):
    def move_ssh(groups):
        for name in names:
            (group,) = (one for one in ("decode", "router") if name in groups[one]["hosts"])
            groups[group]["hosts"][name]["ansible_port"] = 9

    done = fleet.play("site", inventory=changed_inventory(move_ssh))
    assert done.rc != 0
    for name in names:
        assert f"FAIL answers {name}" in done.words
    assert "Connection refused" in done.words
    # The others were looked at all the same.
    assert f"checks, 3 hosts: {len(names)} fail," in done.words
    assert "Refuse hosts that the fleet would fail on" in done.output.rsplit("TASK [", 1)[-1]


def test_a_running_fleet_passes_and_is_left_alone(fleet):
    fleet.deploy()
    before = fleet.containers()
    for _ in range(2):
        done = fleet.play("check")
        assert done.rc == 0, done.output[-3000:]
        assert all(counters["changed"] == 0 for counters in done.recap.values())
    assert fleet.containers() == before
    assert "0 restarts" in fleet.play("status").words
