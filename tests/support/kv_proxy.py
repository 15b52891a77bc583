"""A proxy in front of an engine that breaks KV transfer the way real faults do.

    kv_proxy.py --upstream http://HOST:PORT --fault wrong-kv|strip|ignore [--listen 127.0.0.1:8200]

wrong-kv  In front of a prefill. Requests with kv_transfer_params reach it with one early word changed, so
          the decode pulls the KV of another prompt. Everything else passes untouched: references stay right.
strip     In front of a prefill. Its answers lose their kv_transfer_params, so the decode never hears of them.
ignore    In front of a decode. Requests lose their kv_transfer_params, so it computes the prompt itself: the
          right tokens, and no KV moved.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("wrong-kv", "strip", "ignore")


def change_early_word(prompt: str) -> str:
    """The same prompt with its fourth word written backwards: in the proof's prompts that is the code."""
    words = prompt.split(" ")
    words[3] = words[3][::-1]
    return " ".join(words)


def alter_request(body: dict[str, Any], fault: str) -> dict[str, Any]:
    if not body.get("kv_transfer_params"):
        return body
    if fault == "wrong-kv":
        return {**body, "prompt": change_early_word(body["prompt"])}
    return without_transfer(body) if fault == "ignore" else body


def alter_answer(body: dict[str, Any], fault: str) -> dict[str, Any]:
    return without_transfer(body) if fault == "strip" else body


def without_transfer(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "kv_transfer_params"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: KvProxy

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._forward(alter_request(body, self.server.fault))

    def _forward(self, body: dict[str, Any] | None) -> None:
        upstream = urlsplit(self.server.upstream)
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=120)
        try:
            connection.request(
                self.command,
                self.path,
                body=None if body is None else json.dumps(body),
                headers={} if body is None else {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            content = response.read()
        except OSError as error:
            self.send_error(502, f"upstream: {error}")
            return
        finally:
            connection.close()
        kind = response.headers.get("Content-Type", "")
        if kind.startswith("application/json") and content:
            content = json.dumps(alter_answer(json.loads(content), self.server.fault)).encode()
        self.send_response(response.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        return


class KvProxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str, fault: str, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        if fault not in FAULTS:
            raise ValueError(f"unknown fault {fault!r}, choose from {', '.join(FAULTS)}")
        super().__init__(address, _Handler)
        self.upstream, self.fault = upstream.rstrip("/"), fault

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


@contextmanager
def running(upstream: str, fault: str, address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[str]:
    """The proxy's URL, while the block runs."""
    proxy = KvProxy(upstream, fault, address)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield proxy.url
    finally:
        proxy.shutdown()
        proxy.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A proxy that breaks KV transfer, for tests.")
    parser.add_argument("--upstream", required=True, help="the prefill engine's URL")
    parser.add_argument("--fault", required=True, choices=FAULTS)
    parser.add_argument("--listen", default="127.0.0.1:8200", metavar="HOST:PORT")
    arguments = parser.parse_args()
    host, port = arguments.listen.rsplit(":", 1)
    KvProxy(arguments.upstream, arguments.fault, (host, int(port))).serve_forever()


if __name__ == "__main__":
    main()
