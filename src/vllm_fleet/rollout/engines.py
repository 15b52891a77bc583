"""What an engine and the front are asked, and what they say: one call, one sentence when it fails.

In vLLM 0.32.0 and 0.33.0 `/is_sleeping` is true of an engine that is only paused, so it tells nothing. The
gauge `vllm:engine_sleep_state` tells sleep and its level, until the engine is wholly awake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from ..fleet_http import HttpError, fetch
from ..fleet_metrics import MetricsError, Sample, parse, total
from .fleet import Engine

DISCARDED = "discarded"
"""The weight version of an engine whose weights `sleep` at level 2 threw away; an update gives it another."""
LEVELS = {"weights_offloaded": 1, "discard_all": 2}


class CallError(Exception):
    """A call that did not do what it should; the text names the URL and what was seen."""


@dataclass(frozen=True)
class State:
    """What one engine is in.

    Attributes:
        paused: its scheduler gives no request a turn. True of an engine that sleeps, too.
        asleep: some of its memory is released.
        level: 1 or 2 while it sleeps, 0 otherwise (and for memory released in another way).
        weight_version: the name its weights have; `default` after a start.
        requests: running or queued in it, as it last counted.
        kv_to_fetch: requests whose KV it still has to fetch from a prefill; 0 for others than decodes.
        kv_held: requests whose KV it has fetched and that had no turn yet; 0 for others than decodes.
        kv_expired: requests, since its start, whose KV no decode fetched within the lease.

    """

    paused: bool
    asleep: bool
    level: int
    weight_version: str
    requests: int
    kv_to_fetch: int
    kv_held: int
    kv_expired: int

    @property
    def word(self) -> str:
        """For people: running, paused, or asleep and the level."""
        if self.asleep:
            return f"asleep {self.level}"
        return "paused" if self.paused else "running"

    @property
    def discarded(self) -> bool:
        """Whether its weights are gone and nobody said that they are back."""
        return self.weight_version == DISCARDED


@dataclass(frozen=True)
class Admission:
    """What the front does: `open` or `closed` to new requests, and how many are with the routers now."""

    word: str
    in_flight: int


def call(url: str, timeout: float, payload: dict[str, Any] | None = None, **query: object) -> dict[str, Any]:
    """POST with this query; the JSON of the answer, {} for an empty body (as /sleep may send).

    Raises:
        CallError: no answer in time, another status than 200, or a body that is no JSON object.

    """
    try:
        answer = fetch(url + (f"?{urlencode(query)}" if query else ""), payload or {}, timeout).expect_ok()
        return answer.json() if answer.body.strip() else {}
    except HttpError as fault:
        raise CallError(str(fault)) from None


def ask(url: str, key: str, kind: type, timeout: float) -> Any:
    """GET, and the value of one key.

    Raises:
        CallError: as `call`, or there is no such value.

    """
    try:
        answer = fetch(url, timeout=timeout)
        if answer.status == 404:
            raise CallError(
                f"{url} answered 404: the engine runs without control endpoints. It was started before "
                "`fleet_profile: rl`: run playbooks/site.yml"
            )
        value = answer.expect_ok().json().get(key)
    except HttpError as fault:
        raise CallError(str(fault)) from None
    if not isinstance(value, kind):
        raise CallError(f"{url} answered without a usable {key}: {answer.excerpt}")
    return value


def observe(engine: Engine, timeout: float) -> State:
    """What an engine is in now.

    Raises:
        CallError: it does not say; the time-out, in seconds, holds for each of three questions.

    """
    paused = ask(f"{engine.url}/is_paused", "is_paused", bool, timeout)
    version = ask(f"{engine.url}/weight_info", "weight_version", str, timeout)
    url = f"{engine.url}/metrics"
    try:
        samples = parse(fetch(url, timeout=timeout).expect_ok().body.decode("utf-8", "replace"))
    except HttpError as fault:
        raise CallError(str(fault)) from None
    except MetricsError as fault:
        raise CallError(f"{url}: {fault}") from None

    awake = _count(samples, "engine_sleep_state", sleep_state="awake")
    if awake is None:
        raise CallError(f"{url} has no vllm:engine_sleep_state: whether the engine sleeps cannot be told")
    # One sample for each rank, set for all of them at once.
    levels = [
        level for word, level in LEVELS.items() if _count(samples, "engine_sleep_state", sleep_state=word)
    ]
    fetching = {
        stage: _count(samples, "num_requests_kv_fetch_by_stage", stage=stage) or 0
        for stage in ("waiting_to_start", "in_progress", "completed_waiting")
    }
    return State(
        paused=paused,
        asleep=not awake,
        level=max(levels, default=0),
        weight_version=version,
        requests=sum(_count(samples, f"num_requests_{word}") or 0 for word in ("running", "waiting")),
        kv_to_fetch=fetching["waiting_to_start"] + fetching["in_progress"],
        kv_held=fetching["completed_waiting"],
        kv_expired=_count(samples, "nixl_num_kv_expired_reqs_total") or 0,
    )


def _count(samples: list[Sample], name: str, **labels: str) -> int | None:
    value = total(samples, f"vllm:{name}", **labels)
    return None if value is None else int(value)


def admission(control_url: str, timeout: float, change: str = "") -> Admission:
    """What the front does, after a change (`close` or `open`) if one is wanted.

    Raises:
        CallError: the front does not say.

    """
    url = f"{control_url}/admission"
    try:
        answer = fetch(f"{url}/{change}", {}, timeout) if change else fetch(url, timeout=timeout)
        if answer.status == 403:
            raise CallError(
                f"{answer.url} answered 403: this host may not control the fleet. Add its address to "
                "fleet_controllers and run playbooks/site.yml, or use playbooks/rollout.yml, which calls "
                "from the router's host"
            )
        said = answer.expect_ok().json()
    except HttpError as fault:
        raise CallError(str(fault)) from None
    word, in_flight = said.get("admission"), said.get("in_flight")
    if word not in {"open", "closed"} or not isinstance(in_flight, int):
        raise CallError(f"{answer.url} answered without a usable admission and in_flight: {answer.excerpt}")
    return Admission(word, in_flight)
