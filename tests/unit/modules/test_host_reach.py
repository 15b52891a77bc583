"""host_reach: listeners that open, greet, leave running units alone and end; and what comes of dialing."""

from __future__ import annotations

import socket
import time
from contextlib import closing

import host_reach
import pytest

# The process that forks is the one of all tests, where others left threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture
def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@pytest.fixture
def reach(run_module, monkeypatch):
    """Run the module; whatever it opened is closed at the end. No unit runs."""
    monkeypatch.setattr(host_reach, "CONTROL", f"\0vllm-fleet-test-{time.monotonic_ns()}")
    monkeypatch.setattr(host_reach, "running", lambda _units: set())

    def run(state, **params):
        result = run_module("host_reach", state=state, **params)
        assert result["changed"] is False
        return result

    yield run
    run("closed")


def spec(port, unit="", address="127.0.0.1"):
    return {"address": address, "port": port, "unit": unit}


def listen(reach, *specs, **params):
    return reach("listening", name="rack1-04", listeners=list(specs), **params)


def dial(reach, port, address="127.0.0.1", **params):
    [told] = reach("dialed", dials=[{"address": address, "port": port}], **params)["dials"]
    return told


def gone(port):
    """Whether nobody listens any more, within a second."""
    for _ in range(50):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def test_a_listener_greets_with_its_hosts_name(reach, free_port):
    opened = listen(reach, spec(free_port, "one.service"))
    assert opened["listeners"] == [spec(free_port, "one.service") | {"outcome": "listening"}]
    assert opened["held"] is True
    for _ in range(3):
        told = dial(reach, free_port)
        assert (told["outcome"], told["greeting"]) == ("connected", "rack1-04")


def test_closing_frees_the_ports_at_once(reach, free_port):
    listen(reach, spec(free_port))
    reach("closed")
    socket.create_server(("127.0.0.1", free_port)).close()


def test_the_listeners_end_by_themselves(reach, free_port):
    listen(reach, spec(free_port), seconds=0.2)
    time.sleep(0.2)
    assert gone(free_port)


def test_a_second_call_takes_the_place_of_the_first(reach, free_port):
    listen(reach, spec(free_port))
    assert listen(reach, spec(free_port))["listeners"][0]["outcome"] == "listening"


def test_the_ports_of_a_unit_that_runs_are_left_to_it(reach, free_port, monkeypatch):
    monkeypatch.setattr(host_reach, "running", lambda units: set(units) & {"engine.service"})
    opened = listen(reach, spec(free_port, "engine.service"))
    assert opened["listeners"][0]["outcome"] == "left to its unit"
    assert opened["held"] is False
    assert dial(reach, free_port)["outcome"] == "refused"


def test_a_port_without_a_unit_need_not_be_closed(reach, free_port):
    assert listen(reach, spec(free_port))["held"] is False


def test_ports_that_cannot_be_opened_say_why(reach):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        opened = listen(reach, spec(port), spec(port, address="192.0.2.1"))
    outcomes = [one["outcome"] for one in opened["listeners"]]
    assert outcomes == ["taken", "the host does not have that address"]


def test_some_other_program_that_answers_is_connected_without_a_greeting(reach):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        told = dial(reach, server.getsockname()[1])
    assert (told["outcome"], told["greeting"]) == ("connected", None)


def test_nobody_there(reach, free_port):
    assert dial(reach, free_port)["outcome"] == "refused"


def test_an_address_that_does_not_answer(reach):
    """A full backlog drops what comes, as a firewall does."""
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.settimeout(0)
            one.connect_ex(("127.0.0.1", port))
        began = time.monotonic()
        assert dial(reach, port, timeout=0.3)["outcome"] == "no answer"
        assert time.monotonic() - began < 3
        for one in waiting:
            one.close()


def test_all_are_dialed_at_once(reach, free_port):
    dials = [{"address": "127.0.0.1", "port": free_port}] * 40
    assert {one["outcome"] for one in reach("dialed", dials=dials)["dials"]} == {"refused"}


def test_a_name_that_is_none(reach):
    assert "not known" in dial(reach, 80, address="no-such-host.invalid")["outcome"]


def test_which_units_run(monkeypatch):
    shown = "Id=a.service\nActiveState=active\n\nId=b.service\nActiveState=inactive\n\nId=c.service\nActiveState=activating\n"
    done = host_reach.subprocess.CompletedProcess([], 0, shown, "")
    monkeypatch.setattr(host_reach.subprocess, "run", lambda *_, **__: done)
    assert host_reach.running(["a.service", "b.service", "c.service"]) == {"a.service", "c.service"}
    assert host_reach.running([]) == set()


def test_where_systemd_does_not_answer_no_port_of_a_unit_is_opened(monkeypatch):
    def fail(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(host_reach.subprocess, "run", fail)
    assert host_reach.running(["a.service"]) == {"a.service"}
