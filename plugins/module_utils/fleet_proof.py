"""What the proof asks and how it judges: no I/O here."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

from ansible.module_utils.fleet_metrics import MetricsError, Sample, label, total

PASSED, FAILED, NOT_ATTRIBUTABLE = "passed", "failed", "not attributable"
RATE_OK, RATE_LOW, RATE_NOT_JUDGED = "ok", "below the floor", "not judged"

GIGABYTE = 1e9
# Logits are bfloat16, so beyond 16 they are 0.125 apart, and two engines may add up in different orders.
TIE_NATS = 0.5
PIECE_SECONDS = 5e-6  # to post one piece of a transfer, at most; 3.3 us on average, measured on H200
SLOW_CAUSES = {
    "nvlink": "UCX has usually fallen back to TCP: no IMEX channel in the container, KV memory that is not "
    "exportable (cumem allocator off), UCX_TLS without cuda_ipc, or GPUs without NVLink",
    "rdma": "UCX has usually fallen back to TCP: no RDMA device in the container, UCX_NET_DEVICES naming "
    "another one, or a memlock limit",
    "tcp": "UCX_NET_DEVICES may name a slow interface, or the hosts are busy",
}

# Common words: one token each for most tokenizers, so that the prompt's length can be foreseen.
TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home
water room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name
"""
WORDS = TEXT.split()


@dataclass(frozen=True)
class Prompts:
    original: str
    altered: str


def make_prompts(randomness: random.Random, words: int) -> Prompts:
    """A prompt nobody has sent before, and the same with one early word changed.

    What follows depends on the early word: a language model repeats it, the lab's model attends to it.
    """
    first, second = (f"{randomness.getrandbits(32):08x}" for _ in range(2))
    middle = " ".join(randomness.choice(WORDS) for _ in range(words))

    def prompt(secret: str) -> str:
        return f"Remember this code: {secret}. Then read on. {middle}. The code, repeated exactly, is: "

    return Prompts(prompt(first), prompt(second))


@dataclass(frozen=True)
class Counters:
    """What an engine's /metrics says about KV transfers and about whose they may be."""

    bytes: float
    transfers: float
    seconds: float
    posting: float  # of the seconds
    pieces: float
    failed_transfers: float
    finished: float
    running: float
    waiting: float

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


_METRICS = {
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "transfers": "vllm:nixl_bytes_transferred_count",
    "seconds": "vllm:nixl_xfer_time_seconds_sum",
    "posting": "vllm:nixl_post_time_seconds_sum",
    "pieces": "vllm:nixl_num_descriptors_sum",
    # vLLM counts failed handshakes and notifications in here too.
    "failed_transfers": "vllm:nixl_num_failed_transfers_total",
    "finished": "vllm:request_success_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}


_GAUGES = ("running", "waiting")
_BLOCK_SIZE = "vllm:cache_config_info"
COUNTED = frozenset({*_METRICS.values(), _BLOCK_SIZE})


def read_counters(samples: list[Sample], rank: int | None = None) -> tuple[Counters, int]:
    """The counters and the KV block size in a /metrics page, of one data-parallel rank or of all together."""
    # vLLM's label `engine` is the rank, counted over all hosts of the engine.
    labels = {} if rank is None else {"engine": str(rank)}
    values = {key: total(samples, name, **labels) for key, name in _METRICS.items()}
    if values["finished"] == 0:
        # Where several API servers share the page, a rank's gauges appear with its first step.
        values.update({gauge: values[gauge] or 0.0 for gauge in _GAUGES})
    missing = sorted(_METRICS[key] for key, value in values.items() if value is None)
    block_size = label(samples, _BLOCK_SIZE, "block_size", **labels)
    if block_size is None or not block_size.isdigit():
        missing.append(f"{_BLOCK_SIZE}{{block_size}}")
    if missing:
        whose = "" if rank is None else f' of engine="{rank}" (the data-parallel rank)'
        raise MetricsError(
            f"it lacks {', '.join(missing)}{whose}. An engine has them when it runs with NixlConnector in "
            "its kv_transfer_config and without disable_log_stats"
        )
    return Counters(**values), int(block_size or 0)


@dataclass(frozen=True)
class Terms:
    """What a pair must meet."""

    transport: str
    floor_gbps: float
    floor_min_bytes: int
    bytes_per_token: int | None
    compared_tokens: int | None  # None: every token
    transfers_per_request: int
    decode_rank: int | None  # whose counters these are; None: the whole engine's


@dataclass(frozen=True)
class Evidence:
    """What one measured request showed."""

    prompt_tokens: int
    block_size: int
    reference: list[int]
    altered: list[int]
    tokens: list[int]
    text: str
    finish_reason: str | None
    before: Counters
    after: Counters


@dataclass
class Judgement:
    verdict: str
    reasons: list[str] = field(default_factory=list)
    bytes: int | None = None
    expected_bytes: int | None = None
    failed_transfers: int | None = None
    seconds: float | None = None
    rate_gbps: float | None = None
    rate_verdict: str = RATE_NOT_JUDGED
    tokens_equal: bool | None = None


def judge(evidence: Evidence, terms: Terms) -> Judgement:
    delta = evidence.after - evidence.before
    head = slice(terms.compared_tokens)
    moved, seconds = int(delta.bytes), delta.seconds
    expected = _expected_bytes(evidence, terms)
    rate = moved / seconds / GIGABYTE if seconds > 0 else None
    carrying = _carrying(delta)
    carried = moved / carrying / GIGABYTE if carrying > 0 else None
    judged = carried is not None and moved >= terms.floor_min_bytes
    low = judged and carried is not None and carried < terms.floor_gbps

    reasons = _wrong_answers(evidence, head)
    others = _other_traffic(evidence, delta, terms)
    if _went_back(delta):
        reasons.append("the decode's counters went back: it was restarted during the proof")
    else:
        reasons += _wrong_transfer(delta, expected, terms.decode_rank)
        if delta.failed_transfers:
            # Somebody else's, perhaps: our own request got the right tokens or is in the reasons already.
            failed = f"the decode counted {delta.failed_transfers:.0f} failed KV transfers"
            (others or reasons).append(failed)
        if low:
            reasons.append(
                f"KV moved at {carried:.3g} GB/s, under the floor of {terms.floor_gbps:g} GB/s for "
                f"{terms.transport} ({moved} bytes in {carrying:.3g} s). {SLOW_CAUSES[terms.transport]}"
            )

    return Judgement(
        verdict=FAILED if reasons else NOT_ATTRIBUTABLE if others else PASSED,
        reasons=reasons or others,
        bytes=moved,
        expected_bytes=expected if terms.bytes_per_token else None,
        failed_transfers=int(delta.failed_transfers),
        seconds=round(seconds, 6),
        rate_gbps=None if rate is None else round(rate, 6),
        rate_verdict=(RATE_LOW if low else RATE_OK) if judged else RATE_NOT_JUDGED,
        tokens_equal=evidence.tokens[head] == evidence.reference[head],
    )


def _carrying(delta: Counters) -> float:
    """Seconds of a transfer in which the transport had it: not those that posting its pieces takes an engine.

    Over NVLink posting 9,000 took 30 of 37 ms (measured on H200). Data may move while they are posted,
    so no more is left out than pieces take.
    """
    carrying = delta.seconds - min(delta.posting, delta.pieces * PIECE_SECONDS)
    return carrying if carrying > 0 else delta.seconds


def _wrong_answers(evidence: Evidence, head: slice) -> list[str]:
    reasons = []
    if evidence.finish_reason == "error":
        reasons.append("the decode ended the request with finish_reason 'error'")
    if not evidence.text:
        reasons.append("the decode answered without any text")
    if evidence.reference[head] == evidence.altered[head]:
        reasons.append(
            "the check is blind: two prompts that differ in one early word give the same tokens, so tokens "
            "cannot tell right KV from wrong (a model with random weights, or an unsuitable prompt)"
        )
    if evidence.tokens[head] != evidence.reference[head]:
        reasons.append(_difference(evidence, head))
    return reasons


def _wrong_transfer(delta: Counters, expected: int, rank: int | None) -> list[str]:
    reasons = []
    if rank is not None and delta.bytes <= 0 and delta.finished == 0:
        reasons.append(
            f"rank {rank} of the decode counted no request and no KV bytes: another rank took the request "
            "(the header X-data-parallel-rank did not reach the engine)"
        )
    elif delta.bytes <= 0:
        reasons.append(
            "no KV bytes were moved: the decode computed the prompt itself (kv_transfer_params did not reach "
            "it, or it could not use them: see its log)"
        )
    elif delta.bytes < expected:
        reasons.append(f"only {delta.bytes:.0f} KV bytes were moved, the prompt's full blocks are {expected}")
    return reasons


def _expected_bytes(evidence: Evidence, terms: Terms) -> int:
    full_blocks = evidence.prompt_tokens // evidence.block_size
    return full_blocks * evidence.block_size * (terms.bytes_per_token or 0)


def _went_back(delta: Counters) -> bool:
    return any(getattr(delta, f.name) < 0 for f in fields(delta) if f.name not in _GAUGES)


def tie(evidence: Evidence, likeliest: list[dict[str, float]]) -> str | None:
    """How little the prefill preferred its own token to the first wrong one, in words; None if clearly.

    Rounding may decide such a token, and wrong KV as well: it proves neither.

    Args:
        evidence: of a request whose tokens are not those of the reference.
        likeliest: for each token of the reference the two that the prefill found likeliest, each as
            `token_id:N` (vLLM's `return_tokens_as_token_ids`) -> log probability.

    """
    at = _differs_at(evidence.reference, evidence.tokens)
    if at >= min(len(evidence.reference), len(evidence.tokens), len(likeliest)):
        return None
    ours, theirs = (
        likeliest[at].get(f"token_id:{tokens[at]}") for tokens in (evidence.reference, evidence.tokens)
    )
    if ours is None or theirs is None or abs(ours - theirs) > TIE_NATS:
        return None
    return f"the prefill preferred its own by {abs(ours - theirs):.2g} nats only, which rounding may turn"


def _differs_at(want: list[int], got: list[int]) -> int:
    shorter = min(len(want), len(got))
    return next((i for i in range(shorter) if want[i] != got[i]), shorter)


def _difference(evidence: Evidence, head: slice) -> str:
    want, got = evidence.reference[head], evidence.tokens[head]
    at = _differs_at(want, got)
    return (
        f"the tokens differ from the prefill's own from token {at + 1} on: expected {want}, got {got}. "
        "The decode worked on wrong KV, or the two engines do not run the same model in the same way"
    )


def _other_traffic(evidence: Evidence, delta: Counters, terms: Terms) -> list[str]:
    """Why the counters may hold somebody else's transfers."""
    seen = []
    if not evidence.before.idle:
        seen.append("the decode was busy before the measured request")
    if not evidence.after.idle:
        seen.append("the decode was still busy after it")
    if delta.finished != 1:
        seen.append(f"the decode finished {delta.finished:.0f} requests meanwhile")
    if delta.transfers > terms.transfers_per_request:
        seen.append(
            f"it counted {delta.transfers:.0f} transfers, one request makes {terms.transfers_per_request}"
        )
    return seen


_WORST_FIRST = (FAILED, NOT_ATTRIBUTABLE, PASSED)


def report(pairs: list[dict[str, Any]]) -> list[str]:
    """The table a person reads: a line for each two engines, and one for each rank pair that did not pass."""
    rows: list[tuple[str, ...]] = [("pair", "verdict", "prompt", "KV", "rate", "warm-ups", "TTFT")]
    for (prefill, decode), group in by_engines(pairs).items():
        if len(group) == 1:
            rows.append(_row(group[0]))
            continue
        rows.append(_row(_least(f"{prefill} -> {decode} ({len(group)} rank pairs)", group)))
        rows += [_row(pair | {"name": f"  {pair['name']}"}) for pair in group if pair["verdict"] != PASSED]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


def by_engines(pairs: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The pairs of ranks of each pair of engines."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in pairs:
        groups.setdefault((pair["prefill"]["engine"], pair["decode"]["engine"]), []).append(pair)
    return groups


def _least(name: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    """What is true of every pair of a group: the worst verdict, the least bytes, the slowest answer..."""
    verdicts = [pair["verdict"] for pair in group]
    worst = min(verdicts, key=_WORST_FIRST.index)
    slowest = min(group, key=lambda pair: float("inf") if pair["rate_gbps"] is None else pair["rate_gbps"])

    def seen(key: str) -> list[Any]:
        return [pair[key] for pair in group if pair[key] is not None]

    return {
        "name": name,
        "verdict": worst if worst == PASSED else f"{worst} ({verdicts.count(worst)} of {len(group)})",
        "prompt_tokens": min(seen("prompt_tokens"), default=None),
        "bytes": min(seen("bytes"), default=None),
        "rate_gbps": slowest["rate_gbps"],
        "rate_verdict": slowest["rate_verdict"],
        "warmups": [warmup for pair in group for warmup in pair["warmups"]],
        "ttft": max(seen("ttft"), default=None),
    }


def _row(pair: dict[str, Any]) -> tuple[str, ...]:
    failed = sum(not warmup["ok"] for warmup in pair["warmups"])
    rate = "-" if pair["rate_gbps"] is None else f"{pair['rate_gbps']:.3g} GB/s"
    if pair["rate_verdict"] != RATE_OK and pair["rate_gbps"] is not None:
        rate += f" ({pair['rate_verdict']})"
    return (
        pair["name"],
        pair["verdict"],
        "-" if pair["prompt_tokens"] is None else f"{pair['prompt_tokens']} tokens",
        "-" if pair["bytes"] is None else f"{pair['bytes'] / 1e6:.3g} MB",
        rate,
        f"{len(pair['warmups'])}" + (f" ({failed} failed)" if failed else ""),
        "-" if pair["ttft"] is None else f"{pair['ttft']:.2f} s",
    )
