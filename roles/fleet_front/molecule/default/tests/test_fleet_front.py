"""The front: answers, changes the slot without a reload or a lost request, and keeps it over a restart."""

from __future__ import annotations

import hashlib
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import FRONT, ROOT, assert_running, complete, converge, fetch, host, other, refused, router_slot, run

GATE = "rack1-router"
CONFIG = "/etc/haproxy/haproxy.cfg"
SHOW_STAT = """python3 -c "
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('/run/haproxy/admin.sock')
s.sendall(b'show stat\\n')
print(s.makefile().read())
" """


def serving() -> set[str]:
    """The slots to which the haproxy that runs sends new requests."""
    rows = [line.split(",") for line in run(GATE, SHOW_STAT).splitlines()]
    return {
        row[1] for row in rows if row[0] == "vllm_router" and row[1] in "ab" and row[17] in ("UP", "no check")
    }


def processes() -> str:
    """The processes of haproxy: a reload makes a new worker."""
    return run(GATE, "pgrep haproxy | sort")


@contextmanager
def requests() -> Iterator[list[str]]:
    """Completions one after the other while the block runs; what each of them gave."""
    given: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                given.append("ok" if complete(FRONT, tokens=4)["choices"][0]["text"] else "empty")
            except OSError as error:
                given.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield given
    finally:
        stop.set()
        thread.join(timeout=60)


def test_haproxy_runs_and_completions_and_chats_are_answered() -> None:
    assert_running(GATE, "haproxy")
    assert host(GATE).socket("tcp://198.18.40.2:30000").is_listening
    assert complete(FRONT, tokens=8)["usage"]["completion_tokens"] == 8
    question = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert fetch(f"{FRONT}/v1/chat/completions", question)["choices"][0]["message"]["content"]


def test_it_sends_requests_to_the_router_that_starts_with_the_host() -> None:
    slot = router_slot()
    assert serving() == {slot}
    servers = [line.split() for line in run(GATE, f"grep '^    server ' {CONFIG}").splitlines()]
    assert {words[1]: words[3:] for words in servers} == {slot: [], other(slot): ["disabled"]}


def test_a_switch_loses_no_request_and_stays_after_a_restart() -> None:
    old = router_slot()
    new = other(old)
    # The same engines behind another router.
    converge("vllm_router", retire=False, fleet_router_args={"policy": "random"})
    before = processes()
    try:
        with requests() as given:
            assert converge("fleet_front", router_slot=new).changed(GATE) == 2  # the switch, and the file
        assert len(given) > 2
        assert set(given) == {"ok"}
        assert serving() == {new}
        assert processes() == before
        run(GATE, "systemctl restart haproxy")
        assert serving() == {new}
        assert complete(FRONT)["usage"]["completion_tokens"] == 1
    finally:
        converge("fleet_front")
        converge("vllm_router")  # retires what is not in use
    assert serving() == {old}
    assert complete(FRONT)["usage"]["completion_tokens"] == 1


def test_a_certificate_that_haproxy_does_not_take_changes_nothing(tmp_path: Path) -> None:
    without_key = tmp_path / "ca.pem"
    without_key.write_text((ROOT / ".lab/ca.pem").read_text())
    before = processes()
    assert "failed to validate" in refused("fleet_front", fleet_front_tls_certificate=str(without_key))
    assert not host(GATE).file("/etc/haproxy/vllm-fleet.pem").exists
    assert processes() == before
    assert complete(FRONT)["usage"]["completion_tokens"] == 1


def test_certificate_and_clients_come_and_go() -> None:
    key = "a-key-of-the-test-of-this-role"
    hashes = {"tester": hashlib.sha256(key.encode()).hexdigest()}
    secured = {
        "fleet_front_tls_certificate": str(ROOT / ".lab/front.pem"),
        "fleet_front_client_keys": hashes,
    }
    assert converge("fleet_front", **secured).changed(GATE) > 0
    try:
        assert converge("fleet_front", **secured).changed(GATE) == 0
        for name, mode, group in (
            ("/etc/haproxy/vllm-fleet.pem", 0o640, "haproxy"),
            ("/etc/haproxy/vllm-fleet-clients.map", 0o640, "haproxy"),
            ("/etc/vllm-fleet/front.key", 0o600, "root"),
        ):
            file = host(GATE).file(name)
            assert (file.user, file.group, file.mode) == ("root", group, mode)
        request = urllib.request.Request(
            f"{FRONT.replace('http:', 'https:')}/v1/models", headers={"Authorization": f"Bearer {key}"}
        )
        context = ssl.create_default_context(cafile=ROOT / ".lab/ca.pem")
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            assert answer.status == 200
    finally:
        converge("fleet_front")
    left = "ls /etc/haproxy/vllm-fleet.pem /etc/haproxy/*.map /etc/vllm-fleet/front.key 2>/dev/null || true"
    assert run(GATE, left) == ""
    assert complete(FRONT)["usage"]["completion_tokens"] == 1
