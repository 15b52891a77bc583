"""Stand-ins for engines and the front: their control endpoints as vLLM 0.32.0 has them, and nothing that computes.

What they do was seen of real engines (docs/rollout.md): /wake_up resumes an engine that is only paused, a prefill's
/pause takes as long as its KV is not fetched, /sleep fails over requests with fetched KV that had no turn, the level
of sleep is told until all is awake. Slowness and faults are scripted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

type Answer = tuple[int, bytes]


class Scripted(ThreadingHTTPServer):
    """A server on loopback that writes down what it is asked to do, in the order of all servers of a fleet.

    Attributes:
        delays: path -> seconds that it takes.
        answers: path -> status and body instead of its own, for ever; the state does not change.
        dies_at: path that it breaks the connection at, and never answers again.
        calls: (name, path with query) of each POST, of the whole fleet.

    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, name: str, calls: list[tuple[str, str]], address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        super().__init__(address, _Handler)
        self.name, self.calls = name, calls
        self.delays: dict[str, float] = {}
        self.answers: dict[str, Answer] = {}
        self.dies_at: str | None = None
        self.dead = False
        self.asked = threading.local()  # its headers, while it is answered
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any] | None) -> Answer:
        raise NotImplementedError

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: Scripted
    wbufsize = -1  # head and body at once: apart, the client's delayed acknowledgement costs 40 ms

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self.server.calls.append((self.server.name, self.path))
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any] | None) -> None:
        parts = urlsplit(self.path)
        if self.server.dead or parts.path == self.server.dies_at:
            self.server.dead = True
            return
        self.server.asked.headers = self.headers
        if body is not None:
            time.sleep(self.server.delays.get(parts.path, 0))
        answer = self.server.answers.get(parts.path)
        status, text = answer or self.server.answer(parts.path, parse_qs(parts.query), body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


class ScriptedEngine(Scripted):
    """The head of an engine of one rank.

    Attributes:
        requests: that run or wait in it.
        kv_to_fetch: as a decode; the number goes down by one with each look at its metrics.
        kv_held: as a decode: requests with fetched KV that had no turn yet; they get one when it runs.
        drains: whether /abort_requests ends requests.

    """

    def __init__(
        self, name: str, calls: list[tuple[str, str]], address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        super().__init__(name, calls, address)
        self.paused = False
        self.sleeping: set[str] = set()
        self.level = 0
        self.version = "default"
        self.requests = self.kv_to_fetch = self.kv_held = self.kv_expired = 0
        self.drains = True
        self.world_size = 1
        self.frozen_at_pause: list[int] = []  # kv_to_fetch whenever it was paused

    def restart(self) -> None:
        """What systemd does to an engine that ended."""
        self.paused, self.sleeping, self.level, self.version = False, set(), 0, "default"
        self.requests = self.kv_to_fetch = self.kv_held = self.kv_expired = 0
        self.dead, self.dies_at = False, None

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any] | None) -> Answer:
        if (body is None) != (path in self.GET):
            return 405, b'{"detail": "Method Not Allowed"}'
        method = (self.GET if body is None else self.POST).get(path)
        if method is None:
            return 404, b'{"detail": "Not Found"}'
        answer = method(self, query, body or {})
        return answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode())

    def _metrics(self, _query: Any, _body: Any) -> Answer:
        fetching = self.kv_to_fetch
        self.kv_to_fetch = max(0, fetching - 1)
        states = {
            "awake": not self.level,
            "weights_offloaded": self.level == 1,
            "discard_all": self.level == 2,
        }
        stages = {"waiting_to_start": 0, "in_progress": fetching, "completed_waiting": self.kv_held}
        lines = [
            "# HELP vllm:engine_sleep_state Engine sleep state",
            *(
                f'vllm:engine_sleep_state{{engine="0",sleep_state="{word}"}} {int(on)}.0'
                for word, on in states.items()
            ),
            *(
                f'vllm:num_requests_kv_fetch_by_stage{{engine="0",stage="{one}"}} {n}.0'
                for one, n in stages.items()
            ),
            f'vllm:num_requests_running{{engine="0"}} {self.requests}.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            f'vllm:nixl_num_kv_expired_reqs_total{{engine="0"}} {self.kv_expired}.0',
        ]
        return 200, "\n".join(lines).encode()

    def _pause(self, query: Any, _body: Any) -> Any:
        self.frozen_at_pause.append(self.kv_to_fetch)
        self.paused = True
        if query["mode"] == ["abort"]:
            self.requests = self.kv_held = 0
        return {"status": "paused"}

    def _resume(self, _query: Any = None, _body: Any = None) -> Any:
        self.paused, self.kv_held = False, 0
        return {"status": "resumed"}

    def _sleep(self, query: Any, _body: Any) -> Any:
        self.paused = True
        if query["mode"] == ["abort"]:
            self.requests = self.kv_held = 0
        if self.kv_held:
            return 500, b'{"error": {"message": "Failed to reset KV cache"}}'
        self.sleeping |= {"weights", "kv_cache"}
        self.level = int(query["level"][0])
        return {"status": "sleeping", "level": self.level}

    def _wake(self, query: Any, _body: Any) -> Any:
        self.sleeping -= set(query.get("tags", ["weights", "kv_cache"]))
        if not self.sleeping:
            self.level = 0
            self._resume()
        return {"status": "sleeping" if self.sleeping else "awake", "tags": query.get("tags")}

    def _abort(self, _query: Any, _body: Any) -> Any:
        aborted = self.requests
        if self.drains:
            self.requests = 0
        return {"status": "aborted", "aborted": aborted}

    def _reset(self, query: Any, _body: Any) -> Any:
        return {"success": not self.requests or query["reset_running_requests"] == ["true"]}

    def _name(self, _query: Any, body: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    GET: ClassVar = {
        "/is_paused": lambda self, _query, _body: {"is_paused": self.paused},
        "/is_sleeping": lambda self, _query, _body: {"is_sleeping": self.paused or bool(self.sleeping)},
        "/weight_info": lambda self, _query, _body: {"weight_version": self.version},
        "/get_world_size": lambda self, _query, _body: {"world_size": self.world_size},
        "/metrics": _metrics,
    }
    POST: ClassVar = {
        "/pause": _pause,
        "/resume": _resume,
        "/sleep": _sleep,
        "/wake_up": _wake,
        "/abort_requests": _abort,
        "/reset_prefix_cache": _reset,
        "/update_weight_version": _name,
    }


class ScriptedFront(Scripted):
    """The front's control port. `drains` requests leave it with each look."""

    def __init__(self, calls: list[tuple[str, str]]) -> None:
        super().__init__("front", calls)
        self.admission, self.in_flight, self.drains = "open", 0, 1

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any] | None) -> Answer:
        if body is not None:
            self.admission = {"/admission/close": "closed", "/admission/open": "open"}[path]
        text = json.dumps({"admission": self.admission, "in_flight": self.in_flight})
        self.in_flight = max(0, self.in_flight - self.drains)
        return 200, text.encode()


class ScriptedFleet:
    """Engines `prefill-0` ... and `decode-0` ..., and their front."""

    def __init__(self, prefills: int, decodes: int) -> None:
        self.calls: list[tuple[str, str]] = []
        names = [f"prefill-{i}" for i in range(prefills)] + [f"decode-{i}" for i in range(decodes)]
        self.engines = {name: ScriptedEngine(name, self.calls) for name in names}
        self.front = ScriptedFront(self.calls)

    def plan(self) -> dict[str, Any]:
        """As much of a plan as control takes, with an engine of somebody else."""
        engines = [self._planned(name, engine.url) for name, engine in self.engines.items()]
        engines.append(self._planned("decode-theirs", "http://127.0.0.1:9", external=True))
        return {
            "schema": 1,
            "profile": "rl",
            "engines": engines,
            "router": {"control_url": self.front.url},
            "timeouts": {"control": 900},
        }

    @staticmethod
    def _planned(name: str, url: str, *, external: bool = False) -> dict[str, Any]:
        sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1)
        return {"name": name, "role": name.split("-", 1)[0], "url": url, "external": external, **sizes}

    def made(self, path: str) -> list[str]:
        """Who was asked to do this, in order."""
        return [name for name, called in self.calls if urlsplit(called).path == path]


@contextmanager
def scripted_fleet(prefills: int, decodes: int) -> Iterator[ScriptedFleet]:
    """A fleet that ends with the block."""
    fleet = ScriptedFleet(prefills, decodes)
    with ExitStack() as stack:
        for server in (fleet.front, *fleet.engines.values()):
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        yield fleet
