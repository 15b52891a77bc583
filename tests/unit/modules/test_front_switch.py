"""Switching with a real haproxy; a fake socket only for answers a real one never gives."""

import http.client
import socket
import subprocess
import threading
import time
from contextlib import suppress

import pytest
from haproxy_program import haproxy_program

CONFIG = """\
global
  stats socket {socket} mode 600 level admin
defaults
  mode http
  timeout connect 2s
  timeout client 30s
  timeout server 30s
frontend front
  bind 127.0.0.1:{port}
  default_backend routers
backend routers
  server a 127.0.0.1:{a} check inter 100ms fall 1 rise 1
  server b 127.0.0.1:{b} check inter 100ms fall 1 rise 1 disabled
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Front:
    def __init__(self, folder, a, b):
        self.socket, self.port = folder / "admin.sock", free_port()
        config = folder / "haproxy.cfg"
        config.write_text(CONFIG.format(socket=self.socket, port=self.port, a=a, b=b))
        self.process = subprocess.Popen([haproxy_program(), "-db", "-q", "-f", str(config)])
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            time.sleep(0.05)
        pytest.fail("haproxy did not start")

    def get(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/who")
        return connection.getresponse().read().decode()


@pytest.fixture
def routers(fake_server):
    servers = {name: fake_server() for name in ("a", "b")}
    for name, server in servers.items():
        server.answer = lambda _path, _body, name=name: (200, name)
    return servers


@pytest.fixture
def front(tmp_path, routers):
    front = Front(tmp_path, *(server.server_address[1] for server in routers.values()))
    yield front
    front.process.terminate()
    front.process.wait()


@pytest.fixture
def switch(run_module, front):
    def run(slot, *, check=False, **params):
        defaults = {"socket": str(front.socket), "backend": "routers", "drain_timeout": 5, "ready_timeout": 2}
        return run_module("front_switch", check=check, slot=slot, **{**defaults, **params})

    return run


def test_check_run_and_run_again(switch, front):
    assert switch("b", check=True)["changed"] is True
    assert front.get() == "a"
    result = switch("b")
    assert (result["changed"], result["drained"], result["sessions"]) == (True, True, {"a": 0})
    assert (result["before"]["b"], result["after"]) == ("MAINT", {"a": "DRAIN", "b": "UP"})
    assert front.get() == "b"
    assert switch("b")["changed"] is False
    assert switch("b", check=True)["changed"] is False
    assert switch("a")["changed"] is True
    assert front.get() == "a"


OURS = "# Of vllm-fleet: written and removed by its role fleet_front.\n"


def test_it_is_asked_which_server_takes_requests(switch, tmp_path):
    config = tmp_path / "other.cfg"
    assert switch(None, config=str(config)) == switch(None, config=str(config), check=True)
    assert switch(None, config=str(config))["serving"] == "a"
    switch("b")
    config.write_text(f"{OURS}backend routers\n    server a 127.0.0.1:1\n    server b 127.0.0.1:2 disabled\n")
    seen = switch(None, config=str(config))
    assert (seen["serving"], seen["ours"], seen["changed"]) == ("b", True, False)


@pytest.mark.parametrize(
    ("text", "serving", "ours"),
    [
        (None, "", False),
        ("    server web 10.0.0.1:80\n", "", False),
        (f"{OURS}    server a 127.0.0.1:1 disabled\n    server b 127.0.0.1:2\n", "b", True),
        (f"{OURS}    server a 127.0.0.1:1 disabled\n    server b 127.0.0.1:2 disabled\n", "", True),
    ],
)
def test_where_no_haproxy_runs_its_configuration_tells(run_module, tmp_path, text, serving, ours):
    config = tmp_path / "haproxy.cfg"
    if text:
        config.write_text(text)
    params = {"socket": str(tmp_path / "none.sock"), "backend": "routers", "config": str(config)}
    seen = run_module("front_switch", **params)
    assert (seen["serving"], seen["ours"]) == (serving, ours)


def test_a_running_request_is_waited_for(switch, front, routers):
    def slowly(_path, _body):
        time.sleep(1)
        return 200, "a"

    routers["a"].answer = slowly
    answers = []
    client = threading.Thread(target=lambda: answers.append(front.get()))
    client.start()
    time.sleep(0.3)
    result = switch("b")
    client.join()
    assert answers == ["a"]
    assert (result["drained"], result["most_sessions"]) == (True, 1)
    assert 0.2 < result["waited"] < 3


@pytest.mark.parametrize("params", [{"drain_timeout": 0.2}, {"wait": False}])
def test_requests_that_outlast_the_wait_are_reported_not_cut(switch, front, routers, params):
    release = threading.Event()

    def held(_path, _body):
        release.wait(10)
        return 200, "a"

    routers["a"].answer = held
    answers = []
    client = threading.Thread(target=lambda: answers.append(front.get()))
    client.start()
    time.sleep(0.3)
    result = switch("b", **params)
    assert (result["changed"], result["drained"], result["sessions"]) == (True, False, {"a": 1})
    again = switch("b", **params)
    assert (again["changed"], again["drained"]) == (False, False)
    release.set()
    client.join()
    assert answers == ["a"]
    assert switch("b")["drained"] is True


def test_a_dead_candidate_leaves_everything_as_it_was(switch, front, routers):
    routers["b"].shutdown()
    routers["b"].socket.close()
    result = switch("b")
    assert "nothing was switched" in result["msg"]
    assert front.get() == "a"
    assert switch("a")["changed"] is False


def test_a_slot_or_backend_that_is_not_there_is_named(switch):
    assert "has no server 'c', only ['a', 'b']" in switch("c")["msg"]
    assert "backend nowhere has no server 'a', only none" in switch("a", backend="nowhere")["msg"]


def test_a_missing_socket_is_one_sentence(run_module, tmp_path):
    result = run_module("front_switch", socket=str(tmp_path / "none.sock"), backend="routers", slot="a")
    assert "did not take 'show servers state routers': [Errno 2]" in result["msg"]
    assert result["msg"].endswith("Is haproxy running, and may this user use its socket?")


@pytest.mark.parametrize("answer", [b"1\n# a b\nx y\n", b"Permission denied\nno\nnot at all\n"])
def test_an_answer_that_is_no_table_is_shown(run_module, tmp_path, answer):
    path = str(tmp_path / "fake.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve():
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    client.recv(100)
                    client.sendall(answer)
                    client.close()

        threading.Thread(target=serve, daemon=True).start()
        result = run_module("front_switch", socket=path, backend="routers", slot="a")
    assert "answered 'show servers state routers' with:" in result["msg"]
