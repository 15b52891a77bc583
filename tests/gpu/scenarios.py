"""What is done with a fleet on one machine, and what is measured. Each scenario writes what it saw into `result`, as plain data.

`ok` says whether what had to be was; what a scenario that breaks had seen until then stays.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from load import Transfers, Way, complete, in_turn, prompt, run, why_invalid
from machine import ControlPort, Machine, fetch, imex_channel, memory_used, run_module

from vllm_fleet import gpu_memory
from vllm_fleet.host_check import report
from vllm_fleet.kv import kv_bytes_per_token
from vllm_fleet.rollout import Fleet, Rollout

SUCCESS = "vllm:request_success"
KV = (
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_xfer_time_seconds_sum",
    "vllm:nixl_num_failed_transfers",
    "vllm:nixl_bytes_transferred_count",
    "vllm:nixl_num_descriptors_sum",
)
RATES, LENGTHS, OUTPUT, LOAD_SECONDS = (2, 4, 6), (1024, 4096), 128, 15
PROMPTS, IN_TURN = 8, 100
TRANSFERS = (512, 4096, 16384)
BLOCK = 16
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
TIE = 0.05
"""Where two engines part, both tokens were this near in log probability in one of them: rounding decided."""


@contextmanager
def fleet(packs: Path, variant: str, out: Path, log: str = "") -> Iterator[Machine]:
    """A variant's machine; all that it runs is ended at the end."""
    machine = Machine(packs / variant, out / "logs" / (log or variant))
    try:
        yield machine
    finally:
        machine.stop_all()


def kv_bytes(machine: Machine) -> int:
    """Of one token, over all layers."""
    config = json.loads((Path(machine.plan["model"]["path"]) / "config.json").read_text())
    return kv_bytes_per_token(config, machine.plan["proof"]["kv_dtype"]) or 0


def proof(machine: Machine) -> dict[str, Any]:
    """The proof that a deployment ends with."""
    asked = json.loads((machine.pack / "proof.json").read_text())
    done = run_module("kv_proof", asked | {"bytes_per_token": kv_bytes(machine)})
    return {"passed": not done.get("failed"), "table": done.get("table"), "msg": done.get("msg", "")[:1500]}


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


# --- tokens ---------------------------------------------------------------------------------------


def spoken(machine: Machine, url: str, tokens: list[int], rank: int | None = None) -> list[dict[int, float]]:
    """Greedy tokens that follow a prompt: for each the log probabilities of the likeliest, the chosen one first."""
    header = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    choice = machine.complete(url, tokens, 24, headers=header, logprobs=5, return_tokens_as_token_ids=True)
    return [
        {chosen: likely[f"token_id:{chosen}"]}
        | {int(word.removeprefix("token_id:")): value for word, value in likely.items()}
        for chosen, likely in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True)
    ]


def chosen(said: list[dict[int, float]]) -> list[int]:
    """The tokens alone."""
    return [next(iter(likely)) for likely in said]


def compare(first: list[dict[int, float]], other: list[dict[int, float]]) -> dict[str, Any]:
    """Whether two engines said the same; else where they part, and how near the two tokens were in either's eyes.

    `noise` is the largest difference of log probabilities up to there, of tokens that both chose.
    """
    tokens = [chosen(first), chosen(other)]
    at = next((i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), len(first))
    noise = [abs(first[i][token] - other[i][token]) for i, token in enumerate(tokens[0][:at])]
    result: dict[str, Any] = {"same": at == len(first), "noise": round(max(noise, default=0), 4)}
    if not result["same"]:
        a, b = (own[at] for own in tokens)
        gaps = [
            likely[own] - likely[its]
            for likely, own, its in ((first[at], a, b), (other[at], b, a))
            if its in likely
        ]
        result |= {"at": at, "gap": round(min(gaps), 4) if gaps else None}
    return result


def tally(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Comparisons, counted; those that parted are kept."""
    parted = [one for one in told if not one["same"]]
    return {
        "prompts": len(told),
        "same": len(told) - len(parted),
        "ties": sum(one["gap"] is not None and one["gap"] <= TIE for one in parted),
        "noise": max(one["noise"] for one in told),
        "parted": parted,
    }


def agreement(machine: Machine, first: str, other: str, length: int = 2000) -> dict[str, Any]:
    """What two URLs say to the same prompts; and, to see what that can tell, to prompts whose first token differs."""
    told, altered, distinct = [], [], set()
    for seed in range(PROMPTS):
        tokens = prompt(seed, length)
        mine = spoken(machine, first, tokens)
        told.append(compare(mine, spoken(machine, other, tokens)))
        altered.append(compare(mine, spoken(machine, first, [tokens[0] + 1, *tokens[1:]])))
        distinct.update(chosen(mine))
    return tally(told) | {"distinct_tokens": len(distinct), "altered": altered}


def agree(found: dict[str, Any]) -> bool:
    """Whether the two say the same, but for ties."""
    return bool(found["same"] + found["ties"] == found["prompts"])


# --- figures --------------------------------------------------------------------------------------


def transfers(machine: Machine) -> Transfers | None:
    """What all decodes have counted; None where there are none."""
    decodes = machine.of("decode")
    return Transfers(*(sum(machine.metric(name, key) for name in decodes) for key in KV)) if decodes else None


def transfer_rate(machine: Machine, length: int, count: int = 8, seed: int = 1000) -> dict[str, Any]:
    """The rate of the decodes' own counters while they fetch the KV of `count` prompts."""
    machine.generate(machine.router_url, prompt(seed + 99_000 + length, length), 1)
    before = transfers(machine)
    for number in range(count):
        machine.generate(machine.router_url, prompt(seed + number + length * 100, length), 1)
    after = transfers(machine)
    if before is None or after is None:
        raise RuntimeError("no decode is there")
    moved = after - before
    return {
        "tokens": length,
        "mb_each": round(moved.bytes / count / 1e6, 1),
        "gbps": moved.gbps,
        "descriptors_each": moved.descriptors_each,
        "failed_transfers": moved.failed,
    }


def loaded(machine: Machine, rate: float, length: int, seed: int, seconds: float) -> dict[str, Any]:
    """One rate with one prompt length; a run that is not valid keeps its reasons beside its figures."""
    names = list(machine.members)
    before = {name: machine.metric(name, SUCCESS) for name in names}
    kv = transfers(machine)
    model = machine.plan["model"]["served_name"]
    seen = run(machine.router_url, model, rate=rate, seconds=seconds, length=length, tokens=OUTPUT, seed=seed)
    alike = {name: len(machine.of(member["role"])) for name, member in machine.members.items()}
    seen["split"] = {
        name: round((machine.metric(name, SUCCESS) - before[name]) * alike[name] / seen["sent"], 3)
        for name in names
    }
    after = transfers(machine)
    moved = after - kv if after and kv else None
    seen["kv_gbps"] = moved.gbps if moved else None
    seen["descriptors_each"] = moved.descriptors_each if moved else None
    expected = seen["sent"] * (length // BLOCK * BLOCK) * kv_bytes(machine) if moved else 0
    seen["invalid"] = why_invalid(seen, seen["split"], moved, expected)
    return seen


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

    def body(number: int, way: int) -> dict[str, Any]:
        tokens = prompt(seed + 2 * number + way, 64)
        model = machine.plan["model"]["served_name"]
        return {"model": model, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

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
    return {"requests": IN_TURN, "ms": in_turn(ways, IN_TURN)}


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


def pair(packs: Path, out: Path, result: dict[str, Any], variant: str) -> None:
    """Prefills and decodes: host check, start-up, tokens, proof, figures, proof."""
    with fleet(packs, variant, out) as machine:
        result["host_check"] = host_check(machine)
        result["start"] = machine.start(*machine.members)
        result["router_seconds"] = machine.start_router()
        result["tokens"] = agreement(machine, machine.url(machine.of("prefill")[0]), machine.router_url)
        result["proof"] = proof(machine)
        result["overhead"] = overhead(machine, 3_000_000)
        result["rate"] = transfer_rate(machine, 4096)
        result["loads"] = loads(machine, 1_000_000)
        result["rate_after"] = transfer_rate(machine, 4096, seed=7000)
        result["proof_after"] = proof(machine)
        result["ok"] = (
            agree(result["tokens"])
            and result["proof"]["passed"]
            and result["proof_after"]["passed"]
            and not any(figures["invalid"] for figures in result["loads"])
        )


def ordinary(packs: Path, out: Path, result: dict[str, Any], variant: str) -> None:
    """The same two GPUs as two ordinary engines behind the same router: what pair is compared with."""
    with fleet(packs, variant, out) as machine:
        result["start"] = machine.start(*machine.members)
        machine.start_router()
        first, second = machine.of("mixed")
        result["tokens"] = agreement(machine, machine.url(first), machine.url(second))
        result["overhead"] = overhead(machine, 3_000_000)
        result["loads"] = loads(machine, 1_000_000)
        result["ok"] = agree(result["tokens"]) and not any(figures["invalid"] for figures in result["loads"])


def experts(packs: Path, out: Path, result: dict[str, Any], variant: str) -> None:
    """Qwen3-30B-A3B's shape as one engine of two data-parallel ranks that share the experts, and as one of one GPU."""
    prompts = [prompt(seed, 500) for seed in range(PROMPTS)]

    def tell(machine: Machine, rank: int | None) -> list[list[dict[int, float]]]:
        url = machine.url(machine.of("mixed")[0])
        return [spoken(machine, url, tokens, rank) for tokens in prompts]

    with fleet(packs, variant, out) as machine:
        result["start"] = machine.start(*machine.members)
        machine.start_router()
        by_rank = [tell(machine, rank) for rank in (0, 1)]
        result["load"] = loaded(machine, 4, 512, 5, LOAD_SECONDS / 2)
        lines = fetch(f"{machine.url(machine.of('mixed')[0])}/metrics").splitlines()
        result["requests_by_rank"] = {
            rank: sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith(SUCCESS) and f'engine="{rank}"' in line
            )
            for rank in ("0", "1")
        }
    with fleet(packs, f"{variant}_one", out) as machine:
        result["start_one"] = machine.start(*machine.members)
        alone = tell(machine, None)
    result["tokens_by_rank"] = [
        tally([compare(a, b) for a, b in zip(alone, rank, strict=True)]) for rank in by_rank
    ]
    result["distinct_tokens"] = len({token for said in alone for token in chosen(said)})
    result["ok"] = (
        all(result["requests_by_rank"].values())
        and not result["load"]["invalid"]
        and all(agree(rank) for rank in result["tokens_by_rank"])
    )


def rollouts(packs: Path, out: Path, result: dict[str, Any], variant: str) -> None:
    """With the channel: the proof, then pause, sleep, wake and resume at both levels, and KV afterwards."""
    with fleet(packs, variant, out) as machine:
        port = ControlPort(machine.plan["router"]["control_port"])
        controls = Rollout(Fleet.from_plan(machine.plan))
        alone = machine.url(machine.of("prefill")[0])
        tokens = prompt(77, 1000)
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
        result["tokens"] = agreement(machine, alone, machine.router_url)
        result["proof"] = proof(machine)
        result["rate"] = transfer_rate(machine, 4096)
        do("status")
        for level in (1, 2):
            before = spoken(machine, alone, tokens)
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
                "prefill": compare(before, spoken(machine, alone, tokens)),
                "pair": compare(before, spoken(machine, machine.router_url, tokens)),
                "rate": transfer_rate(machine, 4096, seed=20_000 * level),
                "proof": proof(machine),
            }
        port.close()
        levels = [result[f"level_{level}"] for level in (1, 2)]
        result["ok"] = (
            all(step["ok"] for step in steps)
            and agree(result["tokens"])
            and result["proof"]["passed"]
            and all(level["proof"]["passed"] for level in levels)
            and all(agree(tally([level[who]])) for level in levels for who in ("prefill", "pair"))
        )


def reload_weights(machine: Machine, name: str) -> None:
    """Have an engine read its weights from disk again, in place of a trainer that sends some."""
    fetch(f"{machine.url(name)}/collective_rpc", {"method": "reload_weights"}, 300)


def gate(packs: Path, out: Path, result: dict[str, Any], variant: str) -> None:
    """Sleep mode without an IMEX channel: KV takes TCP, the host check said so, and the proof fails."""
    imex_channel(there=False)
    try:
        with fleet(packs, variant, out, "gate") as machine:
            result["host_check"] = host_check(machine)
            result["start"] = machine.start(*machine.members)
            machine.start_router()
            result["rate"] = transfer_rate(machine, 4096, count=2)
            result["proof"] = proof(machine)
    finally:
        imex_channel(there=True)
    channel = [one for one in result["host_check"]["findings"] if "channel" in one["check"]]
    result["channel_findings"] = channel
    result["ok"] = not result["proof"]["passed"] and any(one["level"] == "fail" for one in channel)


def mapping(packs: Path, out: Path, result: dict[str, Any], variant: str) -> None:
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
        except RuntimeError:
            result["restart_failed"] = {
                "seconds": round(time.monotonic() - begin, 1),
                "log": [line for line in machine.lines(prefill) if "Error" in line or "emory" in line][-12:],
            }
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
        result["ok"] = (
            result["through_router"]["answered"]
            and result["proof"]["passed"]
            # Where the check before a start finds the GPU free, the engine must start, and else it cannot.
            and result["memory_check"]["free"] == ("restart_alone" in result)
        )


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


type Scenario = Callable[[Path, Path, dict[str, Any]], None]


def _of(do: Callable[..., None], variant: str) -> tuple[str, Scenario]:
    return variant, partial(do, variant=variant)


SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "pair": _of(pair, "pair"),
    "ordinary": _of(ordinary, "ordinary"),
    "experts": _of(experts, "experts"),
    "rollouts": _of(rollouts, "rollouts"),
    "gate": _of(gate, "rollouts"),
    "cached": _of(mapping, "cached"),
    "per_transfer": _of(mapping, "per_transfer"),
    "fabric": _of(mapping, "fabric"),
    "uneven": _of(pair, "uneven"),
    "wide": _of(pair, "wide"),
}
"""Name -> the variant whose pack it needs, and what is done."""
