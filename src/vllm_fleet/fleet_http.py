"""HTTP for modules that talk to engines and routers: bounded in time and size, and every fault a sentence."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

MAX_BODY = 64 * 1024 * 1024
EXCERPT = 300


class HttpError(Exception):
    """An exchange that gave nothing usable; the text names the URL and what was seen.

    `status` is that of an answer that was not 200, else None.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """What came: where from, the status, the whole body."""

    url: str
    status: int
    body: bytes

    @property
    def excerpt(self) -> str:
        """The beginning of the body on one line, for messages."""
        text = " ".join(self.body[: 4 * EXCERPT].decode("utf-8", "replace").split())
        return text[:EXCERPT] + ("..." if len(text) > EXCERPT else "") or "(empty body)"

    def expect_ok(self) -> Answer:
        """Itself; HttpError for any status but 200."""
        if self.status != 200:
            raise HttpError(f"{self.url} answered {self.status}: {self.excerpt}", self.status)
        return self

    def json(self) -> dict[str, Any]:
        """The body as a JSON object."""
        return parse_object(self.url, self.body, self.excerpt)


def parse_object(url: str, text: bytes, excerpt: str) -> dict[str, Any]:
    """JSON that must be an object; HttpError with the URL and the excerpt if it is not."""
    try:
        value = json.loads(text)
    except ValueError:
        raise HttpError(f"{url} answered with something that is not JSON: {excerpt}") from None
    if not isinstance(value, dict):
        raise HttpError(f"{url} answered with JSON that is not an object: {excerpt}")
    return value


def fetch(
    url: str,
    payload: dict[str, Any] | None = None,
    timeout: float = 10.0,
    headers: dict[str, str] | None = None,
    ca: str | None = None,
) -> Answer:
    """GET, or POST of a JSON payload. The time-out covers the whole exchange; `ca` is a PEM file to trust."""
    status, chunks = _exchange(url, payload, timeout, headers, ca)
    return Answer(url, status, b"".join(chunks))


def fetch_json(
    url: str,
    payload: dict[str, Any] | None = None,
    timeout: float = 10.0,
    headers: dict[str, str] | None = None,
    ca: str | None = None,
) -> dict[str, Any]:
    """As `fetch`; the JSON object that came with status 200."""
    return fetch(url, payload, timeout, headers, ca).expect_ok().json()


def stream_events(
    url: str, payload: dict[str, Any], timeout: float, headers: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """POST and yield the JSON of each server-sent event, until `[DONE]`."""
    status, chunks = _exchange(url, payload, timeout, headers)
    if status != 200:
        Answer(url, status, b"".join(chunks)).expect_ok()
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            yield parse_object(url, data, Answer(url, status, data).excerpt)
    raise HttpError(f"{url} ended its stream early, without [DONE]")


def _exchange(
    url: str,
    payload: dict[str, Any] | None,
    timeout: float,
    more: dict[str, str] | None,
    ca: str | None = None,
) -> tuple[int, Iterator[bytes]]:
    """Send the request; the status, and the body as it comes."""
    parts = urlsplit(url)
    deadline = time.monotonic() + timeout
    body = None if payload is None else json.dumps(payload).encode()
    headers = {"Accept": "*/*"} if body is None else {"Content-Type": "application/json"}
    headers.update(more or {})
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with _Faults(url, timeout):
        connection = _connection(parts, max(timeout, 0.001), ca)
        connection.connect()
        sock = connection.sock
        connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
        response = connection.getresponse()

    def chunks() -> Iterator[bytes]:
        total = 0
        try:
            # Newer Pythons (3.12.3, 3.13) close the socket with the body's last byte if the peer does.
            while not response.isclosed():
                with _Faults(url, timeout):
                    # A peer that sends a byte now and then must not outlive the time-out.
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise TimeoutError
                    sock.settimeout(remaining)
                    chunk = response.read1(65536)
                    if not chunk and response.length:
                        raise http.client.IncompleteRead(b"", response.length)
                if not chunk:
                    return
                total += len(chunk)
                if total > MAX_BODY:
                    raise HttpError(f"{url} sent more than {MAX_BODY} bytes")
                yield chunk
        finally:
            response.close()
            connection.close()

    return response.status, chunks()


def _connection(parts: SplitResult, timeout: float, ca: str | None) -> http.client.HTTPConnection:
    host, port = parts.hostname or "", parts.port
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=ca)
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    return http.client.HTTPConnection(host, port, timeout=timeout)


class _Faults:
    """Turn whatever the network does into a HttpError."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, HttpError):
            return
        if isinstance(error, (TimeoutError, socket.timeout)):  # two classes before Python 3.10
            seen = f"did not answer within {self.timeout:.3g} s"
        elif isinstance(error, ConnectionRefusedError):
            seen = "refused the connection: nothing listens there"
        elif isinstance(error, ssl.SSLCertVerificationError):
            seen = f"has a certificate that cannot be believed: {error.verify_message}"
        elif isinstance(error, (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError)):
            seen = "closed the connection in the middle of the answer"
        elif isinstance(error, http.client.HTTPException):
            seen = f"answered with something that is not HTTP ({error!r})"
        elif isinstance(error, (OSError, ValueError)):
            seen = f"cannot be reached: {error}"
        else:
            return
        raise HttpError(f"{self.url} {seen}") from None
