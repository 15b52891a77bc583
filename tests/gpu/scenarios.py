"""What is done with a fleet on one machine, and what is measured. Each scenario writes what it saw into `result`, as plain data.

It returns why it is not ok: nothing where all was as it had to be. What a scenario that breaks had seen until then stays.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from gpu.load import Transfers, Way, complete, in_turn, prompt, run, why_invalid, why_uncounted
from gpu.machine import ControlPort, Machine, fetch, memory_used, run_module
from vllm_fleet import gpu_memory
from vllm_fleet.host_check import report
from vllm_fleet.kv import kv_bytes_per_token
from vllm_fleet.rollout import Fleet, Rollout

SUCCESS = "vllm:request_success_total"
KV = (
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_xfer_time_seconds_sum",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_bytes_transferred_count",
    "vllm:nixl_num_descriptors_sum",
    "vllm:nixl_post_time_seconds_sum",
)
RATES, LENGTHS, OUTPUT, LOAD_SECONDS = (2, 4, 6), (1024, 4096), 128, 15
PROMPTS, MOST_PROMPTS, IN_TURN = 8, 16, 100
"""Answers that have to be the same, prompts that are asked at most for them, and requests of each way in turn."""
ANSWER, ASKED = 24, 2000
"""Tokens of an answer and of its prompt, where they are compared."""
TRANSFERS = (512, 4096, 16384)
BLOCK = 16
"""vLLM's own, where a plan has no block_size."""
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
COUNTED_SECONDS = 2.0
"""That engines may take to count what they have answered."""
MANY_PIECES = 4
"""A transfer is in one piece a layer where free blocks are neighbours; with so many times more, they were not."""
TIE = 0.05
"""Two engines' log probabilities may differ by this, by rounding; two tokens that are as near may take each other's place."""
UNDER = "under the floor"
"""What the proof says of KV that was too slow."""
ABSENT = "the host has no such program"
EXPLAINED = {"reachable": "what came of dialing", "cdi-fresh": "no CDI specification of nvidia.com/gpu"}
"""Check -> what it sees where nobody dials, and where `nvidia-ctk` is one of the programs that are not there."""
ALONE = {"nvlinks": "no NVLink", "fabric-state": "State N/A", "gpu-count": "the inventory says 1"}
"""Check -> what it sees of a GPU that is the only one of a machine, or of a plan."""


@contextmanager
def fleet(packs: Path, variant: str, out: Path, log: str = "") -> Iterator[Machine]:
    """A variant's machine; all that it runs is ended at the end."""
    machine = Machine(packs / variant, out / "logs" / (log or variant))
    try:
        yield machine
    finally:
        machine.stop_all()


def config(machine: Machine) -> dict[str, Any]:
    """The model's."""
    return dict(json.loads((Path(machine.plan["model"]["path"]) / "config.json").read_text()))


def kv_bytes(machine: Machine) -> int:
    """Of one token, over all layers."""
    return kv_bytes_per_token(config(machine), machine.plan["proof"]["kv_dtype"]) or 0


def block_size(machine: Machine) -> int:
    """Tokens of a block of KV, the same of all engines."""
    (size,) = {member["args"].get("block_size", BLOCK) for member in machine.members.values()}
    return int(size)


def layers(machine: Machine) -> int:
    """Of the model."""
    return int(config(machine)["num_hidden_layers"])


def proof(machine: Machine) -> dict[str, Any]:
    """The proof that a deployment ends with."""
    asked = json.loads((machine.pack / "proof.json").read_text())
    done = run_module("kv_proof", asked | {"bytes_per_token": kv_bytes(machine)})
    lines = done.get("msg", "").splitlines()
    # The first says how many pairs failed, each of the others why one did.
    why = [line.removeprefix("- ") for line in lines[1:]] or lines
    attempts = max((pair["attempts"] for pair in done.get("pairs", [])), default=None)
    return {"passed": not done.get("failed"), "table": done.get("table"), "attempts": attempts, "why": why}


def unproved(told: Mapping[str, Any]) -> list[str]:
    """Why a proof failed: a line for each of its pairs."""
    return list(told["why"])


def host_check(machine: Machine) -> dict[str, Any]:
    """What the host check says of this machine: all that is neither right nor beside the point."""
    asked = json.loads((machine.pack / "observe.json").read_text())
    observed = run_module("host_observe", asked | {"sent": time.time()})["observed"]
    recorded = {machine.host: {"observed": observed, "listeners": [], "dials": []}}
    found = [finding.as_dict() for finding in report.judge(machine.plan, recorded, report.accepted({}))]
    return {
        "passed": [finding["check"] for finding in found if finding["level"] == "pass"],
        "findings": [
            {key: finding[key] for key in ("check", "level", "seen")}
            for finding in found
            if finding["level"] not in ("pass", "not applicable")
        ],
    }


def unexplained(told: Mapping[str, Any], explained: Mapping[str, str] = EXPLAINED) -> list[str]:
    """What failed of a host check, but for what a machine without Ansible, docker and systemd cannot tell."""
    return [
        f"the host check {one['check']} failed: {one['seen']}"
        for one in told["findings"]
        if one["level"] == "fail"
        and ABSENT not in one["seen"]
        and explained.get(one["check"], ABSENT) not in one["seen"]
    ]


# --- tokens ---------------------------------------------------------------------------------------

type Said = list[dict[int, float]]
"""Tokens of an answer: for each the log probabilities of the likeliest, the chosen one first."""


def spoken(machine: Machine, url: str, tokens: list[int], rank: int | None = None) -> Said:
    """What follows a prompt, greedily."""
    header = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    choice = machine.complete(
        url, tokens, ANSWER, headers=header, logprobs=5, return_tokens_as_token_ids=True
    )
    return [
        {chosen: likely[f"token_id:{chosen}"]}
        | {int(word.removeprefix("token_id:")): value for word, value in likely.items()}
        for chosen, likely in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True)
    ]


def told(
    machine: Machine, url: str, *, altered: bool = False, rank: int | None = None, seed: int = 0
) -> Iterator[Said]:
    """What a URL says to one prompt after the other, asked as they are taken; or to the same with another first token."""
    for number in range(MOST_PROMPTS):
        tokens = prompt(seed + number, ASKED)
        yield spoken(machine, url, [tokens[0] + altered, *tokens[1:]], rank)


def chosen(said: Said) -> list[int]:
    """The tokens alone."""
    return [next(iter(likely)) for likely in said]


def compare(reference: Said, other: Said) -> dict[str, Any]:
    """Whether two engines said the same; else where they part, and how much likelier the reference found its own token.

    `noise` is the largest difference of log probabilities up to there, of tokens that both chose.
    """
    tokens = [chosen(reference), chosen(other)]
    at = next((i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), len(reference))
    noise = [abs(reference[i][token] - other[i][token]) for i, token in enumerate(tokens[0][:at])]
    result: dict[str, Any] = {"same": at == len(reference), "noise": round(max(noise, default=0), 4)}
    if not result["same"]:
        own, its = (words[at] for words in tokens)
        likely = reference[at]
        result |= {"at": at, "gap": round(likely[own] - likely[its], 4) if its in likely else None}
    return result


def is_tie(one: Mapping[str, Any]) -> bool:
    """Whether rounding may have decided where two parted."""
    return one["gap"] is not None and one["gap"] <= TIE


def agreement(reference: Iterable[Said], other: Iterable[Said], altered: Iterable[Said]) -> dict[str, Any]:
    """What two said to the same prompts, until PROMPTS answers were the same; and what the reference says to altered ones.

    Those that parted are kept. Of what follows a tie nothing can be told, so each costs another prompt.
    """
    found, changed, distinct = [], [], set[int]()
    for mine, its, unlike in zip(reference, other, altered, strict=False):
        found.append(compare(mine, its))
        changed.append(compare(mine, unlike))
        distinct.update(chosen(mine))
        if sum(one["same"] for one in found) == PROMPTS:
            break
    parted = [one for one in found if not one["same"]]
    return {
        "prompts": len(found),
        "same": len(found) - len(parted),
        "ties": sum(map(is_tie, parted)),
        "noise": max(one["noise"] for one in found),
        "parted": parted,
        "distinct_tokens": len(distinct),
        "altered": changed,
        "asked": ASKED,
        "answer": ANSWER,
    }


def through_router(machine: Machine, url: str, seed: int = 0) -> dict[str, Any]:
    """Whether the router gives the tokens of one engine."""
    return agreement(
        told(machine, url, seed=seed),
        told(machine, machine.router_url, seed=seed),
        told(machine, url, altered=True, seed=seed),
    )


def unlike(found: Mapping[str, Any]) -> list[str]:
    """Why two do not say the same, or cannot be known to."""
    why = [
        f"an answer parts at token {one['at'] + 1}, where the reference prefers its own by {_nats(one['gap'])}"
        for one in found["parted"]
        if not is_tie(one)
    ]
    if found["noise"] > TIE:
        why.append(f"log probabilities of the same tokens differ by {found['noise']:g}")
    if found["same"] < PROMPTS:
        why.append(f"only {found['same']} of {found['prompts']} answers are the same to their end")
    if 2 * sum(not one["same"] for one in found["altered"]) <= len(found["altered"]):
        why.append("blind: most prompts with another first token have the same answer")
    return why


def _nats(gap: float | None) -> str:
    return "far" if gap is None else f"{gap:g}"


# --- figures --------------------------------------------------------------------------------------


def transfers(machine: Machine) -> Transfers | None:
    """What all decodes have counted; None where there are none."""
    decodes = machine.of("decode")
    return Transfers(*(sum(machine.metric(name, key) for name in decodes) for key in KV)) if decodes else None


class Counts:
    """What a machine's engines count from now on."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.before = {name: machine.metric(name, SUCCESS) for name in machine.members}
        self.kv = transfers(machine)

    def requests(self) -> dict[str, float]:
        """Engine -> requests that it ended."""
        return {name: self.machine.metric(name, SUCCESS) - then for name, then in self.before.items()}

    def moved(self) -> Transfers | None:
        """KV; None where there are no decodes."""
        now = transfers(self.machine)
        return now - self.kv if now and self.kv else None

    def figures(self, routed: int, length: int, direct: Mapping[str, int] | None = None) -> dict[str, Any]:
        """The split, KV, and why they make a run no figure.

        Args:
            routed: requests through the router, evenly to all engines of a role.
            length: tokens of each prompt.
            direct: engine -> requests that it had besides.

        """
        machine, begin = self.machine, time.monotonic()
        due = {
            name: routed / len(machine.of(member["role"])) + (direct or {}).get(name, 0)
            for name, member in machine.members.items()
        }
        decoded = sum(due[name] for name in machine.of("decode"))
        block = block_size(machine)
        expected = decoded * (length // block * block) * kv_bytes(machine)
        while True:
            split = {name: round(had / due[name], 3) for name, had in self.requests().items() if due[name]}
            moved = self.moved()
            why = why_uncounted(split, moved, expected)
            if not why or time.monotonic() - begin > COUNTED_SECONDS:
                break
            time.sleep(0.2)
        kv = {"kv_gbps": moved.gbps, "post_ms_each": moved.post_ms_each} if moved else {"kv_gbps": None}
        if moved:
            kv |= {"descriptors_each": moved.descriptors_each, "failed_transfers": moved.failed}
        return {"split": split, **kv, "invalid": why}


def transfer_rate(machine: Machine, length: int, count: int = 8, seed: int = 1000) -> dict[str, Any]:
    """The rate of the decodes' own counters while they fetch the KV of `count` prompts."""
    machine.generate(machine.router_url, prompt(seed + 99_000 + length, length), 1)
    time.sleep(COUNTED_SECONDS / 4)  # until that one is counted
    counts = Counts(machine)
    for number in range(count):
        machine.generate(machine.router_url, prompt(seed + number + length * 100, length), 1)
    seen = counts.figures(count, length)
    return {"tokens": length, "mb_each": round(length * kv_bytes(machine) / 1e6, 1), **seen}


def loaded(machine: Machine, rate: float, length: int, seed: int, seconds: float) -> dict[str, Any]:
    """One rate with one prompt length; a run that is not valid keeps its reasons beside its figures."""
    counts = Counts(machine)
    model = machine.plan["model"]["served_name"]
    seen = run(machine.router_url, model, rate=rate, seconds=seconds, length=length, tokens=OUTPUT, seed=seed)
    counted = counts.figures(seen["sent"], length)
    pieces = counted.get("descriptors_each") or 0
    if pieces > MANY_PIECES * layers(machine):
        seen["note"] = f"each transfer was in {pieces:,.0f} pieces"
    return seen | counted | {"invalid": why_invalid(seen) + counted["invalid"]}


def loads(machine: Machine, seed: int) -> list[dict[str, Any]]:
    """Each rate with each prompt length, after a load that is not counted."""
    loaded(machine, 4, max(LENGTHS), seed, LOAD_SECONDS / 5)
    numbers = iter(range(seed + 10_000, seed + 1_000_000, 10_000))
    return [
        loaded(machine, rate, length, next(numbers), LOAD_SECONDS) for length in LENGTHS for rate in RATES
    ]


def overhead(machine: Machine, seed: int) -> dict[str, Any]:
    """What the router adds: one request after the other, in turn through it and without it.

    Without it, the client asks one ordinary engine, or prefill and decode as the router does.
    """
    prefills, decodes, ordinary = (machine.of(role) for role in ("prefill", "decode", "mixed"))
    length, answer = 64, 8

    def body(number: int, way: int) -> dict[str, Any]:
        tokens = prompt(seed + 2 * number + way, length)
        model = machine.plan["model"]["served_name"]
        return {"model": model, "prompt": tokens, "max_tokens": answer, "temperature": 0, "ignore_eos": True}

    async def router(session: aiohttp.ClientSession, number: int) -> None:
        await complete(session, machine.router_url, body(number, 0))

    async def one_engine(session: aiohttp.ClientSession, number: int) -> None:
        await complete(session, machine.url(ordinary[0]), body(number, 1))

    async def both_stages(session: aiohttp.ClientSession, number: int) -> None:
        asked = body(number, 1)
        first = asked | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        answer = await complete(session, machine.url(prefills[0]), first)
        asked["kv_transfer_params"] = answer["kv_transfer_params"]
        await complete(session, machine.url(decodes[0]), asked)

    ways: dict[str, Way] = {"direct": one_engine if ordinary else both_stages, "router": router}
    counts = Counts(machine)
    took = in_turn(ways, IN_TURN)
    asked = ordinary[:1] or [prefills[0], decodes[0]]
    counted = counts.figures(IN_TURN, length, dict.fromkeys(asked, IN_TURN))
    return {"requests": IN_TURN, "tokens": length, "answer": answer, "ms": took, **counted}


def why_no_figures(result: Mapping[str, Any]) -> list[str]:
    """Why runs of a scenario are no figures, wherever they are in what it saw."""
    why = []
    for key, value in result.items():
        for number, one in enumerate(value if isinstance(value, list) else [value], 1):
            if isinstance(one, dict):
                name = f"{key} {number}" if isinstance(value, list) else key.replace("_", " ")
                why += [f"{name}: {reason}" for reason in one.get("invalid", [])]
                # One level down: what was seen at a level of sleep.
                why += [f"{name}: {reason}" for reason in why_no_figures(one)]
    return why


def answered(machine: Machine, seed: int) -> tuple[bool, str]:
    """One request through the router: whether it came, and its seconds or what it failed with."""
    begin = time.monotonic()
    try:
        machine.generate(machine.router_url, prompt(50_000 + seed, 500), 8, timeout=30)
    except OSError as error:
        return False, f"{error} after {time.monotonic() - begin:.1f} s"
    return True, f"{time.monotonic() - begin:.2f} s"


def until_answered(machine: Machine, seconds: float = 60) -> dict[str, Any]:
    """Requests through the router until one comes, and then four more: what each met, and when the first came."""
    begin, met, after = time.monotonic(), [], 0.0
    good = False
    while not good and time.monotonic() - begin < seconds:
        good, words = answered(machine, len(met))
        met.append(words)
        after = time.monotonic() - begin
        time.sleep(0 if good else 0.5)
    met += [answered(machine, len(met) + number)[1] for number in range(4)]
    return {
        "answered": good,
        "after_seconds": round(after, 1),
        "met": list(dict.fromkeys(met))[:12],
        "requests": len(met),
    }


# --- scenarios ------------------------------------------------------------------------------------


def pair(packs: Path, out: Path, result: dict[str, Any], variant: str) -> list[str]:
    """Prefills and decodes: host check, start-up, tokens, proof, figures, tokens and proof again."""
    with fleet(packs, variant, out) as machine:
        alone = machine.url(machine.of("prefill")[0])
        result["host_check"] = host_check(machine)
        result["start"] = machine.start(*machine.members)
        result["router_seconds"] = machine.start_router()
        result["tokens"] = through_router(machine, alone)
        result["proof"] = proof(machine)
        result["overhead"] = overhead(machine, 3_000_000)
        result["rate"] = transfer_rate(machine, 4096)
        result["loads"] = loads(machine, 1_000_000)
        result["rate_after"] = transfer_rate(machine, 4096, seed=7000)
        result["tokens_after"] = through_router(machine, alone, seed=500)
        result["proof_after"] = proof(machine)
    return [
        *unexplained(result["host_check"]),
        *_each(unlike, result, "tokens", "tokens_after"),
        *_each(unproved, result, "proof", "proof_after"),
        *why_no_figures(result),
    ]


def _each(why: Callable[[Any], list[str]], result: Mapping[str, Any], *keys: str) -> list[str]:
    return [f"{key.replace('_', ' ')}: {reason}" for key in keys for reason in why(result[key])]


def ordinary(packs: Path, out: Path, result: dict[str, Any], variant: str) -> list[str]:
    """The same two GPUs as two ordinary engines behind the same router: what pair is compared with."""
    with fleet(packs, variant, out) as machine:
        result["start"] = machine.start(*machine.members)
        machine.start_router()
        first, second = (machine.url(name) for name in machine.of("mixed"))
        result["tokens"] = agreement(
            told(machine, first), told(machine, second), told(machine, first, altered=True)
        )
        result["overhead"] = overhead(machine, 3_000_000)
        result["loads"] = loads(machine, 1_000_000)
    return [*_each(unlike, result, "tokens"), *why_no_figures(result)]


def experts(packs: Path, out: Path, result: dict[str, Any], variant: str) -> list[str]:
    """Qwen3-30B-A3B's shape as one engine of two data-parallel ranks that share the experts, and as one of one GPU."""
    ranks = (0, 1)

    def counted(machine: Machine) -> list[float]:
        return [machine.metric(machine.of("mixed")[0], SUCCESS, engine=str(rank)) for rank in ranks]

    with fleet(packs, variant, out) as machine:
        result["layers"] = layers(machine)
        result["start"] = machine.start(*machine.members)
        machine.start_router()
        url = machine.url(machine.of("mixed")[0])
        by_rank, result["requests_by_rank"] = [], []
        for rank in ranks:
            before = counted(machine)
            by_rank.append(list(told(machine, url, rank=rank)))
            time.sleep(COUNTED_SECONDS / 4)
            after = counted(machine)
            result["requests_by_rank"].append([now - then for now, then in zip(after, before, strict=True)])
        result["load"] = loaded(machine, 4, 512, 5, LOAD_SECONDS / 2)
    with fleet(packs, f"{variant}_one", out) as machine:
        result["start_one"] = machine.start(*machine.members)
        url = machine.url(machine.of("mixed")[0])
        alone, altered = list(told(machine, url)), list(told(machine, url, altered=True))
    result["tokens_by_rank"] = [agreement(alone, rank, altered) for rank in by_rank]
    why = why_no_figures(result)
    for rank, found, had in zip(ranks, result["tokens_by_rank"], result["requests_by_rank"], strict=True):
        why += [f"rank {rank}: {reason}" for reason in unlike(found)]
        if had != [MOST_PROMPTS * (other == rank) for other in ranks]:
            words = " and ".join(f"{count:g}" for count in had)
            why.append(f"of {MOST_PROMPTS} requests for rank {rank} ranks 0 and 1 counted {words}")
    return why


def rollouts(packs: Path, out: Path, result: dict[str, Any], variant: str) -> list[str]:
    """With the channel: host check and proof, then pause, sleep, wake and resume at both levels, tokens and KV afterwards."""
    with fleet(packs, variant, out) as machine:
        explained = EXPLAINED | (ALONE if machine.plan["hosts"][machine.host]["gpus"] == 1 else {})
        result["host_check"] = host_check(machine)
        port = ControlPort(machine.plan["router"]["control_port"])
        controls = Rollout(Fleet.from_plan(machine.plan))
        alone = machine.url(machine.of("prefill")[0])
        steps: list[dict[str, Any]] = []

        def do(action: str, **options: Any) -> None:
            done = controls.perform(action, options)
            words = " ".join(
                " ".join(value) if isinstance(value, list) else str(value) for value in options.values()
            )
            steps.append(
                {
                    "action": f"{action} {words}".strip(),
                    "ok": done.ok,
                    "seconds": round(done.seconds, 2),
                    "used_mib": memory_used(),
                    "message": done.message,
                }
            )

        result |= {"start": machine.start(*machine.members), "steps": steps}
        machine.start_router()
        result["tokens"] = through_router(machine, alone, seed=500)
        result["proof"] = proof(machine)
        result["rate"] = transfer_rate(machine, 4096)
        before, altered = list(told(machine, alone)), list(told(machine, alone, altered=True))
        do("status")
        for level in (1, 2):
            do("sleep", level=level)
            do("wake", tags=["weights"])
            if level == 2:
                begin = time.monotonic()
                for name in machine.members:
                    reload_weights(machine, name)
                result["reload_seconds"] = round(time.monotonic() - begin, 1)
                do("set_version", version="reloaded")
            do("wake", tags=["kv_cache"])
            do("resume")
            result[f"level_{level}"] = {
                "first_request": answered(machine, level)[1],
                "prefill": agreement(before, told(machine, alone), altered),
                "pair": agreement(before, told(machine, machine.router_url), altered),
                "rate": transfer_rate(machine, 4096, seed=20_000 * level),
                "proof": proof(machine),
            }
        port.close()
    why = [
        *unexplained(result["host_check"], explained),
        *(f"{step['action']}: {step['message']}" for step in steps if not step["ok"]),
        *_each(unlike, result, "tokens"),
        *_each(unproved, result, "proof"),
        *why_no_figures(result),
    ]
    if "imex-channel" not in result["host_check"]["passed"]:
        why.append("the host check imex-channel does not pass, and the channel is there")
    for level in ("level_1", "level_2"):
        own = [*_each(unlike, result[level], "prefill", "pair"), *_each(unproved, result[level], "proof")]
        why += [f"{level.replace('_', ' ')}: {reason}" for reason in own]
    return why


def reload_weights(machine: Machine, name: str) -> None:
    """Have an engine read its weights from disk again, in place of a trainer that sends some."""
    fetch(f"{machine.url(name)}/collective_rpc", {"method": "reload_weights"}, 300)


def gate(packs: Path, out: Path, result: dict[str, Any], variant: str) -> list[str]:
    """Sleep mode without an IMEX channel: KV takes TCP, the host check said so, and the proof fails for its rate."""
    with fleet(packs, variant, out, "gate") as machine:
        result["host_check"] = host_check(machine)
        result["start"] = machine.start(*machine.members)
        machine.start_router()
        result["rate"] = transfer_rate(machine, 4096, count=2)
        result["proof"] = proof(machine)
    channel = [one for one in result["host_check"]["findings"] if "channel" in one["check"]]
    result["channel_findings"] = channel
    why = why_no_figures(result)
    if not any(one["level"] == "fail" for one in channel):
        why.append("the host check does not miss the channel")
    if result["proof"]["passed"]:
        why.append("the proof passed")
    elif not any(UNDER in reason for reason in unproved(result["proof"])):
        why.append(f"the proof failed, and not for its rate: {'; '.join(unproved(result['proof']))}")
    return why


def mapping(packs: Path, out: Path, result: dict[str, Any], variant: str) -> list[str]:
    """Rates, and what a prefill leaves behind that stops while its decode lives; how the pair comes back."""
    with fleet(packs, variant, out) as machine:
        (prefill,), (decode,) = machine.of("prefill"), machine.of("decode")
        result["start"] = machine.start(prefill, decode)
        machine.start_router()
        result["rates"] = [transfer_rate(machine, length) for length in TRANSFERS]
        result["load"] = loaded(machine, 4, 4096, 9_000_000, LOAD_SECONDS / 2)
        device = machine.members[prefill]["devices"][0]
        machine.stop(prefill)
        time.sleep(3)
        result["left_mib"] = memory_used()[device]
        result["memory_check"] = memory_check(machine, prefill)
        begin = time.monotonic()
        try:
            result["restart_alone"] = machine.start(prefill)
        except RuntimeError as error:
            result["restart_failed"] = {"seconds": round(time.monotonic() - begin, 1), "error": str(error)}
            machine.stop(prefill)
            machine.stop(decode)
            time.sleep(3)
            result["left_mib_after_decode"] = memory_used()[device]
            result["restart_both"] = machine.start(prefill, decode)
        result["engines_back_seconds"] = round(time.monotonic() - begin, 1)
        result["through_router"] = until_answered(machine)
        result["back_seconds"] = round(time.monotonic() - begin, 1)
        result["rate_after"] = transfer_rate(machine, 4096, seed=7000)
        result["proof"] = proof(machine)
    why = [*_each(unproved, result, "proof"), *why_no_figures(result)]
    if not result["through_router"]["answered"]:
        why.append("the router did not answer again")
    # Where the check before a start finds the GPU free, the engine must start, and else it cannot.
    if result["memory_check"]["free"] != ("restart_alone" in result):
        why.append("the check before a start said the opposite of what the start did")
    return why


def shared(packs: Path, out: Path, result: dict[str, Any], variant: str) -> list[str]:
    """A prefill and a decode: host check, then tokens, rate and proof, before and after their KV pools were used up."""
    with fleet(packs, variant, out) as machine:
        result["host_check"] = host_check(machine)
        result["start"] = machine.start(*machine.members)
        machine.start_router()
        result["kv_tokens"] = min(map(machine.kv_tokens, machine.members))
        result["block_size"] = block_size(machine)
        result["fresh"] = _whole(machine, 0)
        result["prompts"] = use_up(machine, result["kv_tokens"])
        result["used_up"] = _whole(machine, 500)
        many = MANY_PIECES * layers(machine)
    why = [*unexplained(result["host_check"], EXPLAINED | ALONE), *why_no_figures(result)]
    for when in ("fresh", "used_up"):
        own = [*_each(unlike, result[when], "tokens"), *_each(unproved, result[when], "proof")]
        why += [f"{when.replace('_', ' ')}: {reason}" for reason in own]
    pieces = result["used_up"]["rate"].get("descriptors_each") or 0
    if pieces <= many:
        why.append(f"used up: a transfer is in {pieces:g} pieces, as of a pool that was not")
    return why


def _whole(machine: Machine, seed: int) -> dict[str, Any]:
    return {
        "tokens": through_router(machine, machine.url(machine.of("prefill")[0]), seed=seed),
        "rate": transfer_rate(machine, 4096, seed=20_000 + seed),
        "proof": proof(machine),
    }


def use_up(machine: Machine, tokens: int) -> int:
    """Ask for more than a pool holds, so that no free block has its neighbours any more; how many prompts that took."""
    length = max(TRANSFERS)
    count = tokens // length + 2
    for number in range(count):
        machine.generate(machine.router_url, prompt(40_000_000 + number, length), 1)
    return count


def memory_check(machine: Machine, member: str) -> dict[str, Any]:
    """What the role says before it would start a member."""
    query = "index,uuid,memory.used,memory.total"
    processes = "gpu_uuid,pid,used_memory,process_name"
    words = ["--format=csv,noheader,nounits"]
    out = subprocess.check_output(["nvidia-smi", f"--query-gpu={query}", *words], text=True)
    out += "processes\n" + subprocess.check_output(
        ["nvidia-smi", f"--query-compute-apps={processes}", *words], text=True
    )
    return gpu_memory.judge(machine.plan, member, {"rc": 0, "stdout": out, "stderr": ""}, 1024)


type Scenario = Callable[[Path, Path, dict[str, Any]], list[str]]


def _of(
    do: Callable[..., list[str]], variant: str, *, channel: bool | None = None
) -> tuple[str, Scenario, bool | None]:
    return variant, partial(do, variant=variant), channel


SCENARIOS: dict[str, tuple[str, Scenario, bool | None]] = {
    "pair": _of(pair, "pair"),
    "ordinary": _of(ordinary, "ordinary"),
    "experts": _of(experts, "experts"),
    "rollouts": _of(rollouts, "rollouts", channel=True),
    "gate": _of(gate, "rollouts", channel=False),
    "cached": _of(mapping, "cached"),
    "per_transfer": _of(mapping, "per_transfer"),
    "fabric": _of(mapping, "fabric", channel=True),
    "shared": _of(shared, "shared"),
    "shared_64": _of(shared, "shared_64"),
    "shared_rollouts": _of(rollouts, "shared_rollouts", channel=True),
    "uneven": _of(pair, "uneven"),
    "wide": _of(pair, "wide"),
}
"""Name -> the variant whose pack it needs, what is done, and whether the IMEX channel is there (None: as it is)."""
