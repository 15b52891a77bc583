"""pd-relay between stand-ins for engines, in one event loop on loopback.

A stand-in answers what its script says and keeps what it was asked. It is no engine: that real ones answer
like this is what tests/e2e/test_relay.py sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from pd_relay.server import Relay, Settings
from pd_relay.workers import Health

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 8, 9]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "cmpl-1",
    "remote_host": "198.18.40.4",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 300,
    "something_new": {"of": ["a", "later", "vLLM"]},
}
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
QUICK = Health(interval=0.05, timeout=0.5, failures=2, successes=1)
type Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """A stand-in for an engine."""

    script: Script
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    health: int = 200
    cancelled: int = 0
    looks: int = 0
    """How often it was asked for its health."""
    server: TestServer | None = None
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.looks += 1
            return web.Response(status=self.health)
        content = await request.read()
        self.asked.append(json.loads(content) if content else {})
        self.headers.append(request.headers.copy())
        self.paths.append(request.path_qs)
        try:
            return await self.script(request, self.asked[-1])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.server = TestServer(app)
        await self.server.start_server(shutdown_timeout=0)
        self.url = str(self.server.make_url("/")).rstrip("/")

    async def close(self) -> None:
        """A second time does no harm."""
        if self.server:
            await self.server.close()
            self.server = None


async def prefilled(_request: web.Request, _body: dict[str, Any]) -> web.Response:
    return web.json_response({"id": "p", "choices": [], "kv_transfer_params": PARAMS})


async def decoded(_request: web.Request, _body: dict[str, Any]) -> web.Response:
    return web.json_response({"id": "d", "choices": [{"text": " hello"}]}, headers={"X-Of-The-Engine": "1"})


def answering(status: int, body: Any, content_type: str = "application/json") -> Script:
    async def script(_request: web.Request, _body: dict[str, Any]) -> web.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(status=status, body=content, headers={"Content-Type": content_type})

    return script


def streaming(*chunks: bytes, pause: float = 0, cut: bool = False) -> Script:
    """Chunks as server-sent events; `cut` breaks the connection off after them."""

    async def script(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(pause)
        if cut:
            request.transport.abort()
        return response

    return script


async def never(_request: web.Request, _body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("nobody cancelled it")


@dataclass
class Scene:
    """The relay, and its client."""

    relay: Relay
    server: TestServer
    client: aiohttp.ClientSession

    def url(self, path: str) -> str:
        return str(self.server.make_url(path))

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any, Any]:
        """Status, body (JSON where it is), headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, data=data, **options)

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, Any, Any]:
        async with self.client.request(method, self.url(path), **options) as answer:
            content = await answer.read()
            with contextlib.suppress(ValueError):
                content = json.loads(content)
            return answer.status, content, answer.headers.copy()

    async def until(self, holds: Callable[[], bool], seconds: float = 5) -> None:
        for _ in range(int(seconds / 0.01)):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come to hold")


@contextlib.asynccontextmanager
async def scene(
    prefill: list[Engine] | None = None,
    decode: list[Engine] | None = None,
    *,
    wait: bool = True,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """A relay between those engines, once it knows that they are healthy."""
    prefill = [Engine(prefilled)] if prefill is None else prefill
    decode = [Engine(decoded)] if decode is None else decode
    for engine in prefill + decode:
        if engine.server is None:
            await engine.start()
    told = {
        "prefill": [engine.url for engine in prefill],
        "decode": [engine.url for engine in decode],
        "controllers": LOOPBACK,
        "health": QUICK,
        **settings,
    }
    relay = Relay(Settings(**told))
    server = TestServer(relay.app())
    await server.start_server(shutdown_timeout=1)
    try:
        async with aiohttp.ClientSession() as client:
            found = Scene(relay, server, client)
            if wait:
                await found.until(lambda: all(worker.healthy for worker in relay.pool.workers.values()))
            yield found
    finally:
        await server.close()
        for engine in prefill + decode:
            await engine.close()


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, for 30 s at most."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test(*args, **named)

        asyncio.run(bounded())

    return run
