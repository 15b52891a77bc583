"""The engines behind the relay: who they are, which of them are healthy, whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pd_relay.log import log

ROLES = ("prefill", "decode")


def normal_url(text: object) -> str:
    """A worker's URL without a trailing slash.

    Raises:
        ValueError: it is not http://HOST:PORT.

    """
    try:
        url = urlsplit(text if isinstance(text, str) else "")
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    bare = url.path in ("", "/") and not (url.query or url.fragment or url.username or url.password)
    if url.scheme != "http" or not url.hostname or not port or not bare:
        raise ValueError(f"{text!r} is not http://HOST:PORT")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"http://{host}:{port}"


@dataclass(eq=False)
class Worker:
    """One engine. It is not healthy before it has said so."""

    url: str
    role: str
    healthy: bool = False
    in_flight: int = 0
    streak: int = field(default=0, repr=False)
    """Answers in a row that contradict `healthy`."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request that is there."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def told(self) -> dict[str, Any]:
        """For GET /workers."""
        return {
            "url": self.url,
            "worker_type": self.role,
            "is_healthy": self.healthy,
            "in_flight": self.in_flight,
        }


@dataclass(frozen=True)
class Health:
    """How often each worker is asked /health, and what follows. Times in seconds."""

    interval: float = 5
    timeout: float = 5
    failures: int = 2
    successes: int = 1


class Pool:
    """The workers, in the order in which they came."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.workers: dict[str, Worker] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._turns = dict.fromkeys(ROLES, 0)

    def add(self, worker: Worker, session: aiohttp.ClientSession) -> None:
        """Take a worker in, and watch it."""
        self.workers[worker.url] = worker
        self._watches[worker.url] = asyncio.create_task(self._watch(worker, session))

    def remove(self, url: str) -> bool:
        """Give a worker no new request; those that it has go on. Whether there was one."""
        if url not in self.workers:
            return False
        del self.workers[url]
        self._watches.pop(url).cancel()
        return True

    def healthy(self, role: str) -> list[Worker]:
        """Those of a role that get requests."""
        return [worker for worker in self.workers.values() if worker.role == role and worker.healthy]

    def pick(self, role: str) -> Worker | None:
        """The next of them, in turn."""
        candidates = self.healthy(role)
        if not candidates:
            return None
        self._turns[role] += 1
        return candidates[self._turns[role] % len(candidates)]

    def state(self) -> dict[str, Any]:
        """For GET /health: `missing` lists the roles that have no healthy worker."""
        roles = {
            role: {
                "healthy": len(self.healthy(role)),
                "total": sum(worker.role == role for worker in self.workers.values()),
            }
            for role in ROLES
        }
        missing = [role for role, counted in roles.items() if not counted["healthy"]]
        return {"status": "unavailable" if missing else "ok", "missing": missing, **roles}

    async def close(self) -> None:
        """End the watches."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, worker: Worker, session: aiohttp.ClientSession) -> None:
        while True:
            problem = await ask_health(worker.url, session, self.health.timeout)
            if (problem is None) == worker.healthy:
                worker.streak = 0
            else:
                worker.streak += 1
                if worker.streak >= (self.health.failures if worker.healthy else self.health.successes):
                    worker.healthy, worker.streak = not worker.healthy, 0
                    log("healthy" if worker.healthy else "unhealthy", worker=worker.url, reason=problem)
            await asyncio.sleep(self.health.interval)


async def ask_health(url: str, session: aiohttp.ClientSession, timeout: float) -> str | None:
    """Why an engine is not healthy, None where it is."""
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=timeout)) as answer:
            return None if answer.status == 200 else f"HTTP {answer.status}"
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return reason(error)


def reason(error: BaseException) -> str:
    """An error in words; some have none of their own."""
    return str(error) or type(error).__name__
