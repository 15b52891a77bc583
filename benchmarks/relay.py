"""Measures what relay and router add to a request: the same stand-ins for engines, the same run, 64 at once.

    python benchmarks/relay.py [--requests 1200] [--concurrency 64]

The stand-ins answer after PREFILL and about DECODE seconds and tell how long it was; what a request took
besides is told here. The base is a client that asks both stages itself. The router is installed from its
locked wheels into .state. All share this machine's cores, so the proxies' CPU time is told as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".state/benchmark-router"
LOCK = ROOT / "roles/vllm_router/files/requirements.txt"
PATH = "/v1/completions"
PREFILL, DECODE, CHUNKS = 0.02, 0.5, 16
PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [list(range(32))],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}
BODY = {"model": "m", "prompt": "A prompt of two thousand characters. " * 54, "max_tokens": 16}
ROUNDS = 3
DIRECT, ROUTER, RELAY = "both stages asked directly", "vllm-router", "pd-relay"


async def engine(request: web.Request) -> web.StreamResponse:
    """A prefill where it is asked to be one, else a decode."""
    if request.method == "GET":
        return web.json_response({"status": "ok"})
    body = await request.json()
    if body["kv_transfer_params"].get("do_remote_decode"):
        await asyncio.sleep(PREFILL)
        return web.json_response({"choices": [], "kv_transfer_params": PARAMS})
    # Not all alike, or the clients would walk in step.
    slept = DECODE * random.uniform(0.5, 1.5)
    if not body.get("stream"):
        await asyncio.sleep(slept)
        return web.json_response({"slept": slept, "choices": [{"text": "x" * 64}]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(CHUNKS):
        await asyncio.sleep(slept / CHUNKS)
        await response.write(f'data: {{"slept": {slept}, "choices": [{{"text": "xxxx"}}]}}\n\n'.encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def serve_engine(port: int) -> None:
    """A stand-in, in a process of its own."""
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", engine)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def free_ports(number: int) -> list[int]:
    """Ports that nobody has."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(number)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def router_program() -> Path:
    """vllm-router, from its locked wheels."""
    program = VENV / "bin/vllm-router"
    if not program.exists():
        version, machine = f"{sys.version_info[0]}.{sys.version_info[1]}", platform.machine()
        wheels = ROOT / f".state/wheelhouse/vllm-router-{version}-{machine}"
        target = (f"--python={version}", f"--arch={machine}", "--glibc=2.28")
        fetch = ROOT / "images/fetch-wheels"
        subprocess.run([sys.executable, fetch, LOCK, wheels, *target], check=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        options = ("--quiet", "--no-index", f"--find-links={wheels}", "--require-hashes", "--no-deps")
        subprocess.run([VENV / "bin/pip", "install", *options, "-r", LOCK], check=True)
    return program


@contextlib.contextmanager
def running(command: Sequence[str | Path], url: str) -> Iterator[int]:
    """A proxy, once it is ready; its process id."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "images/pd-relay/src")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                time.sleep(0.1)
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            else:
                sys.exit(f"{command[0]} does not answer at {url}")
            yield process.pid
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Result:
    """Seconds of each request beside the engines', to first chunk and end; the proxy's CPU seconds."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    cpu: float = 0


async def one(client: aiohttp.ClientSession, way: list[str], body: dict[str, Any], result: Result) -> None:
    """A request through a proxy (one URL), or to a prefill and a decode (two)."""
    start = time.perf_counter()
    if len(way) == 2:
        asked = body | {"kv_transfer_params": {"do_remote_decode": True}}
        async with client.post(way[0] + PATH, json=asked) as answer:
            body = body | {"kv_transfer_params": (await answer.json())["kv_transfer_params"]}
    async with client.post(way[-1] + PATH, json=body) as answer:
        if answer.status != 200:
            sys.exit(f"HTTP {answer.status}: {(await answer.text())[:300]}")
        chunk = await answer.content.readany()
        first = time.perf_counter() - start
        slept = float(chunk.partition(b'"slept": ')[2].partition(b",")[0])
        await answer.read()
    engines = PREFILL + (slept / CHUNKS if body["stream"] else slept)
    result.first.append(first - engines)
    result.total.append(time.perf_counter() - start - PREFILL - slept)


async def load(way: list[str], body: dict[str, Any], requests: int, concurrency: int, result: Result) -> None:
    """Keep that many requests under way."""
    left = iter(range(requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def worker() -> None:
            for _ in left:
                await one(client, way, body, result)

        await asyncio.gather(*(worker() for _ in range(concurrency)))


def milliseconds(times: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    cuts = statistics.quantiles(times, n=100)
    return 1e3 * cuts[49], 1e3 * cuts[98]


def main() -> None:
    """Print a row for each way."""
    options = argparse.ArgumentParser(description="What relay and router add to a request.")
    options.add_argument("--requests", type=int, default=1200, help="for each way, stream or not")
    options.add_argument("--concurrency", type=int, default=64)
    told = options.parse_args()
    program = router_program()
    prefill, decode, relay, router, metrics = free_ports(5)
    urls = [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
    for port in (prefill, decode):
        multiprocessing.Process(target=serve_engine, args=(port,), daemon=True).start()
    router_command: list[str | Path] = [
        *(program, "--host=127.0.0.1", f"--port={router}", f"--prometheus-port={metrics}"),
        *("--vllm-pd-disaggregation", "--kv-connector=nixl", "--policy=round_robin", "--log-level=warning"),
        *("--worker-startup-check-interval=1", "--prefill", urls[0], "--decode", urls[1]),
    ]
    relay_command: list[str | Path] = [sys.executable, "-m", "pd_relay", f"--port={relay}"]
    relay_command += [f"--prefill={urls[0]}", f"--decode={urls[1]}"]
    ways = {DIRECT: urls, ROUTER: [f"http://127.0.0.1:{router}"], RELAY: [f"http://127.0.0.1:{relay}"]}
    with (
        running(relay_command, *ways[RELAY]) as relay_pid,
        running(router_command, *ways[ROUTER]) as router_pid,
    ):
        pids = {ROUTER: router_pid, RELAY: relay_pid}
        for stream in (False, True):
            results = {name: Result() for name in ways}
            for _ in range(ROUNDS):  # in turn, so that what else uses the machine meets all of them
                for name, way in ways.items():
                    used = cpu_seconds(pids[name]) if name in pids else 0
                    body = BODY | {"stream": stream}
                    asyncio.run(load(way, body, told.requests // ROUNDS, told.concurrency, results[name]))
                    if name in pids:
                        results[name].cpu += cpu_seconds(pids[name]) - used
            show(results, "streams" if stream else "whole answers", told.concurrency)


def show(results: dict[str, Result], what: str, concurrency: int) -> None:
    """A table of milliseconds."""
    print(f"{what}, {concurrency} at once: ms beside those of the engines, CPU ms of the proxy")
    print(f"{'':28} {'first p50':>9} {'p99':>7} {'total p50':>9} {'p99':>7} {'CPU':>6}")
    told = {}
    for name, result in results.items():
        cpu = 1e3 * result.cpu / len(result.total)
        told[name] = [*milliseconds(result.first), *milliseconds(result.total), cpu]
        row = (f"{value:{width}.2f}" for value, width in zip(told[name], (9, 7, 9, 7, 6), strict=True))
        print(f"{name:28}", *row)
    ratios = (one / other for one, other in zip(told[RELAY][2:], told[ROUTER][2:], strict=True))
    print("pd-relay : vllm-router = {:.1f} (p50), {:.1f} (p99), {:.1f} (CPU)\n".format(*ratios))


if __name__ == "__main__":
    main()
