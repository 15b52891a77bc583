"""Requests at a steady rate, what their clients saw, and whether a run counts at all.

Arrivals do not wait for answers (open loop): a slow fleet gets as many requests as a fast one.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import aiohttp

type Way = Callable[[aiohttp.ClientSession, int], Awaitable[Any]]
"""Sends the request of a number, and waits for all of its answer."""

FIRST_TOKEN, LAST_TOKEN = 3, 500
"""Ids that the generated tokenizer has and that are no special tokens."""
LEAST_SHARE, MOST_SHARE = 0.9, 1.1
"""Of the requests that an engine had to have: the wrong split is outside of it."""
LEAST_CHUNKS = 0.97
"""Of the tokens: with fewer, several came at once, and the times between chunks are not those between tokens."""
MOST_LATE_MS = 200
"""A request sent later than this after its time means that the client, not the fleet, was measured."""


@dataclass
class Seen:
    """One request: how late it was sent, seconds to each chunk since then, tokens (of the prompt, too), and what went wrong."""

    late: float = 0.0
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Transfers:
    """What the decodes counted of KV during a run.

    `seconds` end when the engine looks, which it does once a step; `posting` are those of them that it took to post.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    failed: float = 0.0
    count: float = 0.0
    descriptors: float = 0.0
    posting: float = 0.0

    def __sub__(self, earlier: Transfers) -> Transfers:
        now, then = astuple(self), astuple(earlier)
        return Transfers(*(late - early for late, early in zip(now, then, strict=True)))

    @property
    def gbps(self) -> float | None:
        """GB/s (1e9 bytes); None where nothing moved."""
        return round(self.bytes / self.seconds / 1e9, 1) if self.seconds else None

    @property
    def descriptors_each(self) -> float | None:
        """Pieces that a transfer was cut into; None where nothing moved."""
        return round(self.descriptors / self.count, 1) if self.count else None

    @property
    def post_ms_each(self) -> float | None:
        """Milliseconds to post a transfer; None where nothing moved."""
        return round(self.posting / self.count * 1000, 2) if self.count else None


def prompt(seed: int, length: int) -> list[int]:
    """Token ids, unlike those of other seeds from the first on."""
    draw = random.Random(seed)
    return [draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of all is not above (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None


def quantiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99 in milliseconds."""
    found = {name: percentile(seconds, share) for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {name: None if value is None else round(value * 1000, 2) for name, value in found.items()}


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any], seen: Seen) -> None:
    sent = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                seen.error = f"HTTP {answer.status}: {(await answer.text())[:200]}"
                return
            ended = False
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    ended = True
                    break
                event = json.loads(line[6:])
                if usage := event.get("usage"):
                    seen.tokens, seen.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                if event.get("choices"):
                    seen.chunks.append(time.monotonic() - sent)
            if not ended:
                seen.error = "the stream was cut"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
        seen.error = f"{type(error).__name__}: {error}"


async def _all(
    url: str, model: str, rate: float, requests: int, length: int, tokens: int, seed: int
) -> tuple[list[Seen], float]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        begin, tasks, all_seen = time.monotonic(), [], []
        for number in range(requests):
            await asyncio.sleep(max(begin + number / rate - time.monotonic(), 0))
            body = {
                "model": model,
                "prompt": prompt(seed + number, length),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            seen = Seen(late=time.monotonic() - begin - number / rate)
            all_seen.append(seen)
            tasks.append(asyncio.create_task(_one(session, url, body, seen)))
        await asyncio.gather(*tasks)
        return all_seen, time.monotonic() - begin


def run(
    url: str, model: str, *, rate: float, seconds: float, length: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Send `rate` requests a second for `seconds`, each a prompt of `length` tokens for `tokens` more.

    Returns:
        What was asked, and `sent`, `failed`, `wrong_length`, `wrong_prompt`, `first_error`, `chunks_each_token`,
        `late_ms` of the request sent latest, `output_tokens_per_second`, and `ttft_ms` and `itl_ms`, each with p50 and p99, of the requests that came
        whole.

    """
    requests = max(round(rate * seconds), 1)
    all_seen, took = asyncio.run(_all(url, model, rate, requests, length, tokens, seed))
    return {"rate": rate, "prompt_tokens": length, "max_tokens": tokens} | summary(
        all_seen, took, length, tokens
    )


def summary(all_seen: Sequence[Seen], took: float, length: int, tokens: int) -> dict[str, Any]:
    """The figures of a run."""
    whole = [seen for seen in all_seen if not seen.error and seen.tokens == tokens]
    gaps = [late - early for seen in whole for early, late in zip(seen.chunks, seen.chunks[1:], strict=False)]
    firsts = [seen.chunks[0] for seen in whole if seen.chunks]
    generated = sum(seen.tokens for seen in whole)

    return {
        "sent": len(all_seen),
        "failed": sum(bool(seen.error) for seen in all_seen),
        "wrong_length": sum(not seen.error and seen.tokens != tokens for seen in all_seen),
        "wrong_prompt": sum(not seen.error and seen.prompt_tokens != length for seen in all_seen),
        "chunks_each_token": round(sum(len(seen.chunks) for seen in whole) / generated, 3)
        if generated
        else 0,
        "first_error": next((seen.error for seen in all_seen if seen.error), ""),
        "late_ms": round(max((seen.late for seen in all_seen), default=0) * 1000, 1),
        "seconds": round(took, 2),
        "output_tokens_per_second": round(generated / took, 1),
        "ttft_ms": quantiles(firsts),
        "itl_ms": quantiles(gaps),
    }


def why_invalid(figures: dict[str, Any]) -> list[str]:
    """Why what the clients saw (`run`) is no figure; nothing where it is one."""
    why = []
    for key, words in (
        ("failed", "requests failed"),
        ("wrong_length", "answers were not of the length asked for"),
        ("wrong_prompt", "prompts were not of the length sent"),
    ):
        if figures[key]:
            why.append(f"{figures[key]} {words} {figures['first_error']}".rstrip())
    if not figures["output_tokens_per_second"]:
        why.append("no token was generated")
    elif figures["chunks_each_token"] < LEAST_CHUNKS:
        why.append(f"tokens came in {figures['chunks_each_token']:.0%} as many chunks, so ITL is not theirs")
    if figures["late_ms"] > MOST_LATE_MS:
        why.append(f"the client sent a request {figures['late_ms']:g} ms late")
    return why


def why_uncounted(split: Mapping[str, float], kv: Transfers | None, expected_bytes: float) -> list[str]:
    """Why what the engines counted during a run makes it no figure; nothing where it is one.

    Args:
        split: engine -> requests that it had, as a share of those that it had to have.
        kv: of the decodes; None where there are none.
        expected_bytes: of KV that had to move.

    """
    why = [
        f"{engine} had {share:.0%} of its requests"
        for engine, share in split.items()
        if not LEAST_SHARE <= share <= MOST_SHARE
    ]
    if kv and kv.failed:
        why.append(f"{kv.failed:g} transfers of KV failed")
    if kv and kv.bytes < expected_bytes:
        why.append(f"{kv.bytes / 1e6:.0f} MB of KV moved, and {expected_bytes / 1e6:.0f} MB had to")
    return why


def in_turn(ways: Mapping[str, Way], count: int) -> dict[str, dict[str, float | None]]:
    """One request after the other, each way in turn: milliseconds of a whole answer, p50 and p99, by way.

    The first tenth of each is not counted.
    """
    return asyncio.run(_in_turn(ways, count))


async def _in_turn(ways: Mapping[str, Way], count: int) -> dict[str, dict[str, float | None]]:
    took: dict[str, list[float]] = {name: [] for name in ways}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for number in range(count):
            for name, way in ways.items():
                begin = time.monotonic()
                await way(session, number)
                took[name].append(time.monotonic() - begin)
    return {name: quantiles(seconds[count // 10 :]) for name, seconds in took.items()}


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a completion that is not streamed."""
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return dict(await answer.json(content_type=None))
