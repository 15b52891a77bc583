"""What the front lets through and what it answers itself: its own configuration in a real haproxy, on loopback."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar, trust_as_template
from ansible.utils.collection_loader import AnsibleCollectionConfig
from haproxy_program import haproxy_program

from vllm_fleet import front

ROOT = Path(__file__).parents[3]
ROLE = ROOT / "roles" / "fleet_front"
CERTIFICATES = ROOT / "roles" / "lab_hosts" / "files" / "certificates.py"
if AnsibleCollectionConfig.collection_finder is None:
    init_plugin_loader()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Front:
    """haproxy with the role's configuration, in front of a server that stands for the router."""

    def __init__(self, folder: Path, router: int, **variables: Any) -> None:
        self.folder = folder
        self.port, self.control_port = free_port(), free_port()
        (folder / "admission").touch()
        self.variables: dict[str, Any] = {
            "fleet_front_socket": str(folder / "admin.sock"),
            "fleet_front_listen": f"127.0.0.1:{self.port}",
            "fleet_front_control_listen": f"127.0.0.1:{self.control_port}",
            "fleet_front_control_sources": ["127.0.0.1"],
            "fleet_front_paths": front.client_paths(["/v1/embeddings"]),
            "fleet_front_open_paths": list(front.HEALTH_PATHS),
            "fleet_front_slots": {"a": router, "b": 1},
            "__fleet_front_active": "a",
            "__fleet_front_admission_state": str(folder / "admission"),
            "__fleet_front_admission_lua": str(folder / "admission.lua"),
            "__fleet_front_clients": str(folder / "clients.map"),
            "__fleet_front_certificate": str(folder / "front.pem"),
            "__fleet_front_hashes": {},
        }
        self.context: ssl.SSLContext | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.start(**variables)

    def write(self, **variables: Any) -> None:
        """Write the configuration anew."""
        self.variables |= variables
        role = {}
        for path in ("defaults/main.yml", "vars/main.yml"):
            role |= yaml.safe_load((ROLE / path).read_text())
        templar = Templar(DataLoader(), role | self.variables)
        for source, target in (
            ("haproxy.cfg", "haproxy.cfg"),
            ("haproxy-admission.lua", "admission.lua"),
            ("haproxy-clients.map", "clients.map"),
        ):
            path = json.dumps(str(ROOT / "templates" / f"{source}.j2"))
            text = templar.template(
                trust_as_template(f"{{{{ lookup('ansible.builtin.template', {path}) }}}}")
            )
            # Here it runs as whoever runs the tests.
            (self.folder / target).write_text(re.sub(r"(?m)^    (user|group) haproxy\n", "", text))

    def start(self, **variables: Any) -> None:
        self.write(**variables)
        self.log = (self.folder / "log").open("w+")
        command = [haproxy_program(), "-W", "-f", str(self.folder / "haproxy.cfg")]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            # The worker may answer before the main process minds signals.
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                if "Loading success" in self.logged():
                    return
            time.sleep(0.05)
        pytest.fail(f"haproxy did not start: {(self.folder / 'log').read_text()}")

    def reload(self, **variables: Any) -> None:
        """What systemctl reload does, and wait for the new worker."""
        self.write(**variables)
        assert self.process is not None
        before = self.logged().count("Loading success")
        for _ in range(4):  # on a busy machine it may miss one
            self.process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + 8
            while time.monotonic() < deadline:
                if self.logged().count("Loading success") > before:
                    return
                time.sleep(0.05)
        pytest.fail(f"haproxy did not reload: {self.logged()}")

    def logged(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait(timeout=10)

    def send(
        self, method: str, path: str, body: Any = None, port: int | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """One request, its path as it is written; status, headers and body of the answer."""
        place = ("127.0.0.1", port or self.port)
        if self.context and not port:
            connection = http.client.HTTPSConnection(*place, timeout=10, context=self.context)
        else:
            connection = http.client.HTTPConnection(*place, timeout=10)
        with_body = {"Content-Type": "application/json"} if body is not None else {}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, with_body | headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        known = {name.lower(): value for name, value in answer.getheaders()}
        is_json = known.get("content-type") == "application/json"
        return answer.status, known, json.loads(text) if is_json and text else text

    def control(self, method: str, path: str) -> tuple[int, Any]:
        status, _, body = self.send(method, path, port=self.control_port)
        return status, body


@pytest.fixture
def router(fake_server: Callable[[], Any]) -> Any:
    server = fake_server()
    server.answer = lambda path, _body: (200, {"path": path})
    return server


@pytest.fixture
def haproxy(tmp_path: Path, router: Any) -> Iterator[Front]:
    started = Front(tmp_path, router.server_address[1])
    yield started
    started.stop()


# --- paths -------------------------------------------------------------------------------------------------------


def test_what_clients_need_reaches_the_router(haproxy: Front, router: Any) -> None:
    for path in front.CLIENT_PATHS["GET"]:
        assert haproxy.send("GET", path)[0] == 200
    for path in (*front.CLIENT_PATHS["POST"], "/v1/embeddings"):
        assert haproxy.send("POST", path, {"a": 1})[0] == 200
    assert haproxy.send("POST", "/v1/completions?a=/sleep", {})[0] == 200
    assert len(router.asked) == len(front.CLIENT_PATHS["GET"]) + len(front.CLIENT_PATHS["POST"]) + 2


@pytest.mark.parametrize("path", sorted(front.CONTROL_PATHS))
def test_no_control_call_reaches_the_router(haproxy: Front, router: Any, path: str) -> None:
    status, _, body = haproxy.send("POST", path, {})
    assert (status, body["error"]["code"], body["error"]["type"]) == (404, 404, "NotFoundError")
    assert "their own URLs" in body["error"]["message"]
    assert not router.asked


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/"),
        ("POST", "/v1/../sleep"),
        ("POST", "//sleep"),
        ("POST", "/%73leep"),
        ("POST", "/v1/completions/../../sleep"),
        ("POST", "/v1/completions/"),
        ("POST", "//v1/completions"),
        ("POST", "/v1/completions%2f..%2f..%2fsleep"),
        ("POST", "/v1/completions;/sleep"),
        ("POST", "/V1/COMPLETIONS"),
        ("POST", "http://any.where/sleep"),
        ("POST", "/v1/completions#/../../sleep"),
        ("POST", "/health"),
        ("GET", "/v1/completions"),
        ("GET", "/metrics"),
        ("GET", "/workers"),
        ("GET", "/sleep"),
        ("DELETE", "/workers/http%3A%2F%2F198.18.40.4%3A8000"),
        ("PUT", "/v1/completions"),
        ("TRACE", "/health"),
    ],
)
def test_a_path_passes_as_a_whole_or_not_at_all(haproxy: Front, router: Any, method: str, path: str) -> None:
    assert haproxy.send(method, path, {} if method in ("POST", "PUT") else None)[0] in (400, 404)
    assert not router.asked


# --- admission ---------------------------------------------------------------------------------------------------


@contextmanager
def under_way(router: Any, seconds: float, send: Callable[[], tuple[int, Any, Any]]) -> Iterator[list[int]]:
    """A request that the router answers when the block ends; what is given has its status then."""
    arrived, go_on = threading.Event(), threading.Event()

    def slow(path: str, _body: Any) -> tuple[int, dict[str, str]]:
        arrived.set()
        assert go_on.wait(seconds)
        return 200, {"path": path}

    router.answer = slow
    given: list[int] = []
    thread = threading.Thread(target=lambda: given.append(send()[0]))
    thread.start()
    assert arrived.wait(10)
    yield given
    go_on.set()
    thread.join(seconds)


def test_closed_admission_refuses_requests_and_lets_those_that_run_end(haproxy: Front, router: Any) -> None:
    with under_way(router, 10, lambda: haproxy.send("POST", "/v1/completions", {"stream": True})) as given:
        assert haproxy.control("GET", "/admission") == (200, {"admission": "open", "in_flight": 1})
        closed = {"admission": "closed", "in_flight": 1}
        assert haproxy.control("POST", "/admission/close") == (200, closed)
        assert haproxy.control("POST", "/admission/close") == (200, closed)
        status, headers, body = haproxy.send("POST", "/v1/completions", {})
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "10", 503)
    assert given == [200]
    assert haproxy.control("GET", "/admission") == (200, {"admission": "closed", "in_flight": 0})
    assert haproxy.send("GET", "/health")[0] == 200
    for _ in range(2):
        assert haproxy.control("POST", "/admission/open") == (200, {"admission": "open", "in_flight": 0})
    assert haproxy.send("POST", "/v1/completions", {})[0] == 200


def test_closed_admission_stays_so_after_a_restart_even_of_a_haproxy_that_was_killed(haproxy: Front) -> None:
    haproxy.control("POST", "/admission/close")
    assert haproxy.process is not None
    haproxy.process.kill()
    haproxy.process.wait(10)
    haproxy.start(fleet_front_listen=f"127.0.0.1:{haproxy.port}")
    assert haproxy.control("GET", "/admission")[1]["admission"] == "closed"
    assert haproxy.send("POST", "/v1/completions", {})[0] == 503
    haproxy.control("POST", "/admission/open")
    haproxy.stop()
    haproxy.start()
    assert haproxy.control("GET", "/admission")[1]["admission"] == "open"


def test_admission_closed_after_a_reload_is_closed_for_connections_of_before_it(
    haproxy: Front, router: Any
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", haproxy.port, timeout=10)
    given = []
    for reload in (True, False):
        connection.request("POST", "/v1/completions", "{}")
        answer = connection.getresponse()
        answer.read()
        given.append(answer.status)
        if reload:
            before = connection.sock
            haproxy.reload()
            haproxy.control("POST", "/admission/close")
            assert connection.sock is before
    assert given == [200, 503]
    assert len(router.asked) == 1


def test_what_the_old_worker_is_told_of_admission_the_new_one_knows(haproxy: Front) -> None:
    with socket.create_connection(("127.0.0.1", haproxy.control_port), timeout=10) as caller:
        # A call that is on its way during the reload.
        caller.sendall(b"POST /admission/close HTTP/1.1\r\nHost: front\r\nContent-Length: 0\r\n")
        time.sleep(0.2)
        haproxy.reload()
        caller.sendall(b"\r\n")
        assert b'{"admission": "closed", "in_flight": 0}' in caller.recv(65536)
    assert haproxy.control("GET", "/admission")[1]["admission"] == "closed"
    assert haproxy.send("POST", "/v1/completions", {})[0] == 503


def test_admission_that_cannot_be_read_or_kept_is_closed_and_said(haproxy: Front) -> None:
    state = haproxy.folder / "admission"
    state.unlink()
    state.mkdir()
    assert haproxy.control("GET", "/admission")[1]["admission"] == "closed"
    assert haproxy.send("POST", "/v1/completions", {})[0] == 503
    assert haproxy.control("POST", "/admission/open")[1]["admission"] == "closed"


def test_closing_again_never_opens_it_for_a_moment(haproxy: Front) -> None:
    haproxy.control("POST", "/admission/close")
    state = haproxy.folder / "admission"
    before = state.stat().st_mtime_ns
    haproxy.control("POST", "/admission/close")
    assert state.stat().st_mtime_ns == before


def test_only_who_is_listed_controls_admission(tmp_path: Path, router: Any) -> None:
    haproxy = Front(
        tmp_path, router.server_address[1], fleet_front_control_sources=["10.0.0.0/8", "2001:db8::1"]
    )
    try:
        for method, path in (("GET", "/admission"), ("POST", "/admission/close")):
            status, body = haproxy.control(method, path)
            assert (status, body["error"]["code"]) == (403, 403)
        assert haproxy.send("POST", "/v1/completions", {})[0] == 200
    finally:
        haproxy.stop()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/admission/close"),
        ("GET", "/admission/open"),
        ("POST", "/admission"),
        ("POST", "/admission/close/"),
        ("GET", "/v1/models"),
    ],
)
def test_other_paths_of_the_control_port_change_nothing(
    haproxy: Front, router: Any, method: str, path: str
) -> None:
    for state in ("open", "close"):
        _, before = haproxy.control("POST", f"/admission/{state}")
        assert haproxy.control(method, path)[0] == 404
        assert haproxy.control("GET", "/admission") == (200, before)
    assert not router.asked


# --- clients -----------------------------------------------------------------------------------------------------

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32


def clients(**keys: str) -> dict[str, Any]:
    """The role's variables for these clients."""
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    return {"fleet_front_client_keys": hashes, "__fleet_front_hashes": hashes}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(tmp_path: Path, router: Any) -> Iterator[Front]:
    started = Front(tmp_path, router.server_address[1], **clients(alice=ALICE, bob=BOB))
    yield started
    started.stop()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        {"Authorization": f"Bearer {hashlib.sha256(ALICE.encode()).hexdigest()}"},
        {"Authorization": f"Bearer {ALICE}x"},
        {"Authorization": "Bearer alice"},
        {"X-Api-Key": ALICE},
    ],
)
def test_without_a_key_there_is_no_answer(keyed: Front, router: Any, headers: dict[str, str]) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
        status, seen, body = keyed.send(method, path, {} if method == "POST" else None, **headers)
        assert (status, seen["www-authenticate"], body["error"]["code"]) == (401, "Bearer", 401)
    assert not router.asked
    assert keyed.send("GET", "/health", **headers)[0] == 200


def test_a_client_is_known_by_name_and_its_key_goes_no_further(keyed: Front, router: Any) -> None:
    headers: list[Any] = []

    def keep(path: str, _body: Any) -> tuple[int, dict[str, str]]:
        headers.append(dict(router.request.headers))
        return 200, {"path": path}

    router.answer = keep
    assert keyed.send("POST", "/v1/completions", {}, **bearer(ALICE))[0] == 200
    assert keyed.send("GET", "/v1/models", **bearer(BOB))[0] == 200
    assert [name for seen in headers for name in seen if name.lower() == "authorization"] == []
    # A line is written after its answer.
    deadline = time.monotonic() + 5
    while "client=bob " not in keyed.logged() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "client=alice ip=127.0.0.1 method=POST path=/v1/completions status=200" in keyed.logged()
    assert "client=bob " in keyed.logged()
    said = keyed.logged() + "".join(path.read_text() for path in keyed.folder.glob("*.*") if path.is_file())
    assert ALICE not in said
    assert BOB not in said


def test_no_key_reaches_engines_where_none_is_asked_for(haproxy: Front, router: Any) -> None:
    headers: list[Any] = []
    router.answer = lambda _path, _body: headers.append(dict(router.request.headers)) or (200, {})
    assert haproxy.send("POST", "/v1/completions", {}, **bearer(ALICE))[0] == 200
    assert "Authorization" not in headers[0]


def test_keys_change_under_an_open_stream(keyed: Front, router: Any) -> None:
    with under_way(router, 20, lambda: keyed.send("POST", "/v1/completions", {}, **bearer(ALICE))) as given:
        keyed.reload(**clients(bob=BOB))
        router.answer = lambda path, _body: (200, {"path": path})
        assert keyed.send("POST", "/v1/completions", {}, **bearer(ALICE))[0] == 401
        assert keyed.send("POST", "/v1/completions", {}, **bearer(BOB))[0] == 200
    assert given == [200]


# --- TLS ---------------------------------------------------------------------------------------------------------


def test_tls_and_a_new_certificate(tmp_path: Path, router: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        subprocess.run([sys.executable, CERTIFICATES, folder, "127.0.0.1"], check=True)
    (tmp_path / "front.pem").write_text((first / "front.pem").read_text())
    haproxy = Front(tmp_path, router.server_address[1], fleet_front_tls_certificate="given")
    try:
        with pytest.raises(http.client.HTTPException):
            haproxy.send("GET", "/health")
        haproxy.context = ssl.create_default_context(cafile=first / "ca.pem")
        assert haproxy.send("GET", "/health")[0] == 200
        (tmp_path / "front.pem").write_text((second / "front.pem").read_text())
        haproxy.reload()
        with pytest.raises(ssl.SSLCertVerificationError):
            haproxy.send("GET", "/health")
        haproxy.context = ssl.create_default_context(cafile=second / "ca.pem")
        assert haproxy.send("POST", "/v1/completions", {})[0] == 200
        assert haproxy.control("GET", "/admission")[0] == 200
    finally:
        haproxy.stop()
