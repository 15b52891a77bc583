"""The HTTP service: two stages for each request, workers, health, broadcasts."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from pd_relay import stages
from pd_relay.log import log
from pd_relay.workers import ROLES, Health, Pool, Worker, normal_url, reason

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = "X-Request-Id"
# What engines trace and bind sessions by. No other header of the client's means the same to both of them.
FORWARDED = ("traceparent", "tracestate", "X-Session-ID")
GOOD_ID = re.compile(r"[!-~]{1,200}")
DESCRIBING = ("Content-Type", "Content-Encoding")
CONNECT_SECONDS = 10
# Shorter than vLLM's own 5 s, or a request goes out on a connection that the engine is about to close.
IDLE_SECONDS = 3
SHOWN = 500


@dataclass(frozen=True)
class Settings:
    """What the relay is started with. Times in seconds, sizes in bytes."""

    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    controllers: Sequence[Network] = ()
    request_timeout: float = 1800
    control_timeout: float = 900
    max_body: int = 64 * 2**20
    health: Health = field(default_factory=Health)


class AnsweredError(Exception):
    """A request that ends here, with this answer."""

    def __init__(self, status: int, content: bytes, headers: Mapping[str, str], why: str) -> None:
        super().__init__(why)
        self.status = status
        self.content = content
        self.headers = headers

    def response(self, **more: str) -> web.Response:
        """The answer, with more headers."""
        return web.Response(status=self.status, body=self.content, headers={**self.headers, **more})


def refusal(status: int, kind: str, message: str, **headers: str) -> AnsweredError:
    """An answer of the relay's own, in the form of OpenAI's errors."""
    told = {"Content-Type": "application/json", **headers}
    return AnsweredError(status, error_json(status, kind, message), told, message)


def error_json(status: int, kind: str, message: str) -> bytes:
    """An error in OpenAI's form, as vLLM writes it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


@dataclass
class Record:
    """What is logged of a request: no prompt, no header of the client's but its id."""

    id: str
    path: str
    client: str | None
    started: float = field(default_factory=time.monotonic)
    prefill: str | None = None
    decode: str | None = None
    status: int | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    bytes: int = 0
    kv_blocks: int | None = None
    kv_tokens: int | None = None
    error: str | None = None

    def since(self) -> float:
        """Milliseconds since the request came."""
        return round((time.monotonic() - self.started) * 1000, 1)

    def write(self) -> None:
        """Log it, at its end."""
        told = {name: value for name, value in vars(self).items() if name != "started"}
        log("request", **told, total_ms=self.since())


class Relay:
    """The handlers and what they share: one client session, one pool."""

    session: aiohttp.ClientSession

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = Pool(settings.health)

    def app(self) -> web.Application:
        """The application; its session and watches live as long as it does."""
        app = web.Application(client_max_size=self.settings.max_body)
        app.cleanup_ctx.append(self._life)
        app.add_routes(
            [
                *(web.post(path, self.generate) for path in stages.PATHS),
                web.get("/health", self.health),
                web.get("/workers", self.workers),
                web.post("/workers", self._controlled(self.add_worker)),
                web.delete("/workers/{url:.+}", self._controlled(self.remove_worker)),
                *(
                    web.post(path, self._controlled(self.broadcast))
                    for path in ("/abort_requests", "/pause", "/resume")
                ),
            ]
        )
        return app

    async def _life(self, _app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, headers={"Accept-Encoding": "identity"}
        ) as self.session:
            for role in ROLES:
                for url in getattr(self.settings, role):
                    self.pool.add(Worker(url, role), self.session)
            log("started", **{role: list(getattr(self.settings, role)) for role in ROLES})
            yield
            await self.pool.close()
        log("stopped")

    # --- requests -------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST of a request: prefill, then decode. The answer is the decode's, byte for byte."""
        record = Record(request_id(request.headers.get(REQUEST_ID)), request.path, request.remote)
        try:
            response = await self._stages(request, record)
        except AnsweredError as answer:
            record.error = str(answer)
            response = answer.response(**{REQUEST_ID: record.id})
            record.bytes, record.status = len(answer.content), answer.status
        except asyncio.CancelledError:
            # The client went, or the relay stops; leaving here closed what was open to an engine.
            record.status, record.error = 499, "cancelled"
            raise
        else:
            record.status = record.status or response.status
        finally:
            record.write()
        return response

    async def _stages(self, request: web.Request, record: Record) -> web.StreamResponse:
        try:
            body = stages.read(await self._content(request))
            if request.headers.get(REQUEST_ID) != record.id and "request_id" in body:
                record.id = request_id(body["request_id"])
            stages.judge(request.path, body)
        except stages.RefusedError as error:
            raise refusal(400, "BadRequestError", str(error)) from None
        missing = self.pool.state()["missing"]
        if missing:
            raise self._nobody(*missing)
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        headers |= {"Content-Type": "application/json", REQUEST_ID: record.id}
        deadline = time.monotonic() + self.settings.request_timeout
        params = await self._prefill(stages.prefill_body(request.path, body), headers, deadline, record)
        return await self._decode(request, stages.decode_body(body, params), headers, deadline, record)

    async def _content(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is larger than {self.settings.max_body} bytes (--max-body)"
            raise refusal(413, "RequestEntityTooLarge", message) from None

    def _nobody(self, *roles: str) -> AnsweredError:
        seconds = max(1, round(self.settings.health.interval))
        message = f"no healthy {' and no healthy '.join(roles)} worker"
        return refusal(503, "ServiceUnavailableError", message, **{"Retry-After": str(seconds)})

    def _pick(self, role: str) -> Worker:
        worker = self.pool.pick(role)
        if worker is None:
            raise self._nobody(role)
        return worker

    def _post(
        self, worker: Worker, path: str, body: dict[str, Any], headers: dict[str, str], deadline: float
    ) -> Any:
        left = max(deadline - time.monotonic(), 0.001)
        return self.session.post(
            worker.url + path,
            data=json.dumps(body).encode(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=left, sock_connect=CONNECT_SECONDS),
        )

    async def _prefill(
        self, body: dict[str, Any], headers: dict[str, str], deadline: float, record: Record
    ) -> dict[str, Any]:
        worker = self._pick("prefill")
        record.prefill = worker.url
        try:
            with worker.busy():
                async with self._post(worker, record.path, body, headers, deadline) as answer:
                    content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._broken(worker, error) from None
        record.prefill_ms = record.since()
        if answer.status != 200:
            raise passed_through(worker, answer, content)
        try:
            params = stages.transfer_params(content)
        except stages.NotEngagedError as error:
            raise refusal(502, "BadGatewayError", f"prefill {worker.url}: {error}") from None
        record.kv_blocks, record.kv_tokens = stages.blocks(params), params.get("remote_num_tokens")
        return params

    async def _decode(
        self,
        request: web.Request,
        body: dict[str, Any],
        headers: dict[str, str],
        deadline: float,
        record: Record,
    ) -> web.StreamResponse:
        worker = self._pick("decode")
        record.decode = worker.url
        try:
            with worker.busy():
                async with self._post(worker, record.path, body, headers, deadline) as answer:
                    if answer.content_type == "text/event-stream":
                        return await self._stream(request, worker, answer, record)
                    content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._broken(worker, error) from None
        record.ttft_ms = record.since()
        if answer.status != 200:
            raise passed_through(worker, answer, content)
        record.bytes = len(content)
        headers = described(answer) | {REQUEST_ID: record.id}
        return web.Response(status=answer.status, body=content, headers=headers)

    async def _stream(
        self, request: web.Request, worker: Worker, answer: aiohttp.ClientResponse, record: Record
    ) -> web.StreamResponse:
        """Hand chunks on as they come; a client that reads slowly slows the decode down."""
        headers = described(answer) | {REQUEST_ID: record.id}
        response = web.StreamResponse(status=answer.status, headers=headers)
        try:
            await response.prepare(request)
            async for chunk in self._chunks(worker, answer, record):
                record.ttft_ms = record.ttft_ms or record.since()
                record.bytes += len(chunk)
                await response.write(chunk)
            await response.write_eof()
        except ConnectionError:  # the client's; an engine's is told in the stream
            record.status, record.error = 499, "cancelled"
        return response

    async def _chunks(
        self, worker: Worker, answer: aiohttp.ClientResponse, record: Record
    ) -> AsyncIterator[bytes]:
        """What the decode sends; where it ends too early, an error event is last."""
        try:
            while chunk := await answer.content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            broken = self._broken(worker, error)
            record.error = str(broken)
            # The line feeds end what it was in the middle of. No [DONE], which would say that all is well.
            yield b"\n\ndata: " + broken.content + b"\n\n"

    def _broken(self, worker: Worker, error: BaseException) -> AnsweredError:
        """A worker that did not answer, or not to the end."""
        name = f"{worker.role} {worker.url}"
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
            message = f"{name}: no end within {self.settings.request_timeout:g} s (--request-timeout)"
            return refusal(504, "GatewayTimeoutError", message)
        return refusal(502, "BadGatewayError", f"{name}: {reason(error)}")

    # --- workers --------------------------------------------------------------------------------------

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: 200 while each role has a healthy worker."""
        state = self.pool.state()
        return web.json_response(state, status=503 if state["missing"] else 200)

    async def workers(self, _request: web.Request) -> web.Response:
        """GET /workers."""
        told = [worker.told() for worker in self.pool.workers.values()]
        return web.json_response({"workers": told, "total": len(told)})

    async def add_worker(self, request: web.Request) -> web.Response:
        """POST /workers {url, worker_type}."""
        body = stages.read(await self._content(request))
        role = body.get("worker_type")
        if role not in ROLES:
            raise stages.RefusedError(f"worker_type {role!r} is not {' or '.join(ROLES)}")
        try:
            url = normal_url(body.get("url"))
        except ValueError as error:
            raise stages.RefusedError(f"url {error}") from None
        if url in self.pool.workers:
            raise refusal(409, "ConflictError", f"{url} is a {self.pool.workers[url].role} worker already")
        worker = Worker(url, role)
        self.pool.add(worker, self.session)
        log("added", worker=url, role=role)
        return web.json_response(worker.told(), status=201)

    async def remove_worker(self, request: web.Request) -> web.Response:
        """DELETE /workers/URL, quoted. Requests that it has finish."""
        try:
            url = normal_url(request.match_info["url"])
        except ValueError as error:
            raise stages.RefusedError(f"url {error}") from None
        if not self.pool.remove(url):
            raise refusal(404, "NotFoundError", f"{url} is no worker")
        log("removed", worker=url)
        return web.json_response({"url": url})

    async def broadcast(self, request: web.Request) -> web.Response:
        """POST of a verb to all workers at once, with its query and body: URL -> ok, status, error."""
        content = await self._content(request)
        urls = list(self.pool.workers)
        if not urls:
            raise refusal(503, "ServiceUnavailableError", "there are no workers")
        calls = (self._control(url + request.path_qs, content) for url in urls)
        done = dict(zip(urls, await asyncio.gather(*calls), strict=True))
        well = all(told["ok"] for told in done.values())
        log("broadcast", path=request.path_qs, failed=[url for url in urls if not done[url]["ok"]])
        return web.json_response(done, status=200 if well else 502)

    async def _control(self, url: str, content: bytes) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=self.settings.control_timeout, sock_connect=CONNECT_SECONDS)
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.post(url, data=content, headers=headers, timeout=limit) as answer:
                said = (await answer.read()).decode(errors="replace")[:SHOWN]
        except TimeoutError:
            error = f"no answer within {self.settings.control_timeout:g} s (--control-timeout)"
            return {"ok": False, "status": None, "error": error}
        except aiohttp.ClientError as failure:
            return {"ok": False, "status": None, "error": reason(failure)}
        ok = 200 <= answer.status < 300
        return {"ok": ok, "status": answer.status, "error": None if ok else said}

    def _controlled(self, handler: Handler) -> Handler:
        """Only for controllers; what is refused is answered as in `generate`."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                if not self._may_control(request.remote):
                    message = f"{request.remote} is none of --controllers"
                    raise refusal(403, "PermissionDeniedError", message)
                return await handler(request)
            except stages.RefusedError as error:
                answer = refusal(400, "BadRequestError", str(error))
            except AnsweredError as error:
                answer = error
            return answer.response()

        return guarded

    def _may_control(self, remote: str | None) -> bool:
        address = ipaddress.ip_address(remote or "::")
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self.settings.controllers)


def request_id(told: object) -> str:
    """The client's id for its request, or a new one."""
    return told if isinstance(told, str) and GOOD_ID.fullmatch(told) else uuid.uuid4().hex


def passed_through(worker: Worker, answer: aiohttp.ClientResponse, content: bytes) -> AnsweredError:
    """What an engine answered instead of 200, as it is."""
    why = f"{worker.role} {worker.url}: HTTP {answer.status}"
    return AnsweredError(answer.status, content, described(answer), why)


def described(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """The headers that say what an engine's bytes are."""
    return {name: answer.headers[name] for name in DESCRIBING if name in answer.headers}
