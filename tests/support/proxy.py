"""A proxy in front of an engine, for faults that no engine has on demand."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward(self.rfile.read(int(self.headers["Content-Length"])))

    def _forward(self, body: bytes | None = None) -> None:
        upstream, path = urlsplit(self.server.upstream), urlsplit(self.path).path
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=120)
        try:
            if body is not None:
                body = self.server.change_request(path, body)
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            kind = response.headers.get("Content-Type", "")
            content = self.server.change_answer(path, kind, response.read())
        except OSError as error:
            self.send_error(502, f"upstream: {error}")
            return
        finally:
            connection.close()
        self.send_response(response.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        return


class Proxy(ThreadingHTTPServer):
    """Passes everything on as it is; a kind of it says what it changes."""

    daemon_threads = True

    def __init__(self, upstream: str, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, _Handler)
        self.upstream = upstream.rstrip("/")

    def change_request(self, path: str, body: bytes) -> bytes:
        """What the engine gets instead of the body of a POST."""
        return body

    def change_answer(self, path: str, kind: str, body: bytes) -> bytes:
        """What the client gets instead of an answer of this content type."""
        return body

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Serve while the block runs."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()


class ControlProxy(Proxy):
    """In front of any engine: what it does it does, but late, or without saying so.

    Attributes:
        delays: path -> seconds before the engine gets the request.
        empty: paths whose answers lose their body.

    """

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.delays: dict[str, float] = {}
        self.empty: set[str] = set()

    def change_request(self, path: str, body: bytes) -> bytes:
        time.sleep(self.delays.get(path, 0))
        return body

    def change_answer(self, path: str, kind: str, body: bytes) -> bytes:
        return b"" if path in self.empty else body
