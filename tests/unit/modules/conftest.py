"""Modules are imported as files and run in this process, with their arguments where Ansible puts them."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ansible.module_utils
import pytest
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent / "data"

ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))
sys.path += [str(ROOT / "plugins" / "modules"), str(ROOT / "tests" / "support")]


@pytest.fixture
def data() -> Callable[[str], str]:
    return lambda name: (DATA / name).read_text()


@pytest.fixture
def run_module(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a module by name; the JSON it answers."""

    def run(name: str, /, *, check: bool = False, **params: Any) -> dict[str, Any]:
        module = importlib.import_module(name)
        with (
            patch_module_args({**params, "_ansible_check_mode": check}),
            pytest.raises(SystemExit) as ended,
        ):
            module.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert bool(result.get("failed")) == bool(ended.value.code)
        return result

    return run


Answerer = Callable[[str, dict[str, Any] | None], "tuple[int, bytes | str | dict[str, Any]] | None"]


class FakeServer(ThreadingHTTPServer):
    """A fake engine or router: `answer(path, body)` gives status and body, or None to hang up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Answerer = lambda _path, _body: (404, b"")
        self.asked: list[tuple[str, dict[str, Any] | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any] | None) -> None:
        self.server.asked.append((self.path, body))
        answer = self.server.answer(self.path, body)
        if answer is None:
            return
        status, content = answer
        kind = "application/json" if isinstance(content, dict) else "text/plain"
        if isinstance(content, dict):
            content = json.dumps(content)
        if isinstance(content, str):
            content = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        return


@pytest.fixture
def fake_server() -> Iterator[Callable[[], FakeServer]]:
    servers: list[FakeServer] = []

    def start() -> FakeServer:
        server = FakeServer()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class FakeSystemd:
    """systemctl and journalctl as a module sees them; each unit's states come one a question."""

    def __init__(self) -> None:
        self.states: dict[str, list[dict[str, str]]] = {}
        self.journal = ""

    def unit(self, name: str, *states: dict[str, str]) -> None:
        running = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "0"}
        running |= {"Result": "success", "ExecMainStatus": "0"}
        self.states[name] = [{**running, **state} for state in states or ({},)]

    def run_command(self, _module: Any, command: list[str], **_more: Any) -> tuple[int, str, str]:
        if command[0] == "journalctl":
            return 0, "".join(f"{json.dumps({'MESSAGE': line})}\n" for line in self.journal.splitlines()), ""
        states = self.states.get(command[-1])
        if states is None:
            return 1, "", "Failed to connect to bus: No such file or directory"
        state = states.pop(0) if len(states) > 1 else states[0]
        return 0, "".join(f"{key}={value}\n" for key, value in state.items()), ""


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> FakeSystemd:
    fake = FakeSystemd()
    monkeypatch.setattr(
        "ansible.module_utils.basic.AnsibleModule.run_command", lambda m, c, **k: fake.run_command(m, c)
    )
    return fake
