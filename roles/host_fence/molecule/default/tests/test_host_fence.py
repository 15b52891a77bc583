"""The fence: in force whatever nftables.service does, beside the tables of others, gone when removed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab import assert_running, converge, host, run

HOST, ADDRESS = "rack1-05", "198.18.40.5"
FENCED, OTHER = 4998, 4999  # in place of the plan's, which may have no listener now
HERE = "198.18.40.1"  # this machine
TABLE = "nft list table inet vllm_fleet"


def fence(*callers: str, **variables: object) -> int:
    """Let these in, and nobody else; how many tasks changed something."""
    variables = {"host_fence_callers": {"ipv4": list(callers), "ipv6": []}} | variables
    return converge("host_fence", only=HOST, host_fence_ports=[FENCED], **variables).changed(HOST)


def dialed(port: int) -> str:
    """What comes of dialing the host from here, at once."""
    try:
        socket.create_connection((ADDRESS, port), timeout=2).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


@pytest.fixture(autouse=True, scope="module")
def listeners() -> Iterator[None]:
    """Two ports to dial; afterwards the rules of the inventory, and those of docker, which resolve names."""
    run(HOST, "nft list table ip nat > /run/molecule.nft")
    ports = f"[socket.create_server(('', port)) for port in ({FENCED}, {OTHER})]"
    code = f"import socket, time; opened = {ports}; time.sleep(600)"
    run(HOST, f'systemd-run --quiet --collect --unit=molecule-dial python3 -c "{code}"')
    run(HOST, f"timeout 10 sh -c 'until ss -Hltn sport = :{OTHER} | grep -q .; do sleep 0.1; done'")
    yield
    run(HOST, "systemctl stop molecule-dial nftables; nft delete table ip nat 2>/dev/null || true")
    run(HOST, "nft --file /run/molecule.nft && rm /run/molecule.nft")
    converge("host_fence")


@contextmanager
def open_connection() -> Iterator[socket.socket]:
    with socket.create_connection((ADDRESS, FENCED), timeout=2) as connection:
        yield connection


def test_only_who_is_listed_connects() -> None:
    assert fence("198.18.40.99") == 2  # the files, and what is in force
    assert_running(HOST, "vllm-fleet-fence")
    assert (dialed(FENCED), dialed(OTHER), dialed(22)) == ("ConnectionRefusedError", "connected", "connected")
    assert fence("198.18.40.99") == 0
    own = f"python3 -c \"import socket; socket.create_connection(('{ADDRESS}', {FENCED}), 3)\""
    run(HOST, own)


def test_a_change_keeps_the_connections_of_those_who_still_may() -> None:
    assert fence(HERE) == 2
    with open_connection() as connection:
        assert fence(HERE, "198.18.40.99") == 2
        connection.sendall(b"still there")
        assert fence("198.18.40.99", host_fence_keep=True) == 0
        connection.sendall(b"still there")
        assert fence("198.18.40.99") == 2
        connection.sendall(b"gone")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_peers_reach_side_channels_alone() -> None:
    peer = {"host_fence_peers": {"ipv4": [HERE], "ipv6": ["2001:db8::/32"]}}
    fence("198.18.40.99", host_fence_side_channel_ports=[OTHER], **peer)
    assert dialed(FENCED) == "ConnectionRefusedError"
    fence("198.18.40.99", host_fence_side_channel_ports=[FENCED], **peer)
    assert dialed(FENCED) == "connected"


def test_it_outlives_what_nftables_service_does() -> None:
    fence("198.18.40.99")
    for action in ("start", "restart", "reload", "stop", "start", "stop"):
        run(HOST, f"systemctl {action} nftables")
        assert dialed(FENCED) == "ConnectionRefusedError", action


def test_flushed_rules_come_back_and_those_of_others_are_left_alone() -> None:
    fence("198.18.40.99")
    run(HOST, "nft flush chain inet vllm_fleet input")
    assert dialed(FENCED) == "connected"
    assert fence("198.18.40.99") == 1
    run(HOST, "nft flush ruleset; nft add table inet molecule; nft add chain inet molecule kept")
    assert dialed(FENCED) == "connected"
    assert fence("198.18.40.99") == 1
    assert dialed(FENCED) == "ConnectionRefusedError"
    assert "chain kept" in run(HOST, "nft list table inet molecule")
    assert fence("198.18.40.99", part="remove") == 2
    assert dialed(FENCED) == "connected"
    assert host(HOST).run(TABLE).rc != 0
    assert "chain kept" in run(HOST, "nft list table inet molecule && nft delete table inet molecule")
    places = "/etc/vllm-fleet/fence.* /etc/systemd/system/*fence* /etc/systemd/system/nftables.service.d/*"
    assert run(HOST, f"ls -d {places} 2>/dev/null || true") == ""
    assert fence("198.18.40.99", part="remove") == 0
