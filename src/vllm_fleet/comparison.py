"""What applying a plan would start, stop and restart, and why: against another plan, or against what runs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_fleet.problems import HIDDEN, SECRET_NAME, shown
from vllm_fleet.registration import registered_engines, registration
from vllm_fleet.relay import relay_arguments, relay_hosts
from vllm_fleet.routing import engine_url, router_arguments

type Action = Literal["start", "stop", "restart", "router", "prove", "none"]

CANDIDATE = "a candidate router is started and switched to, without losing requests"
ABSENT = object()
FOLLOWING_ARGS = frozenset(
    {
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_size_local",
        "data_parallel_start_rank",
        "enable_expert_parallel",
        "headless",
        "host",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "port",
    }
)
FOLLOWING_ENV = frozenset(
    {
        "DATA_PARALLEL_SIZE",
        "PIPELINE_PARALLEL_SIZE",
        "TENSOR_PARALLEL_SIZE",
        "VLLM_HOST_IP",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)
"""What follows from an engine's sizes, hosts and ports, which are compared themselves."""
OF_AN_ENGINE = (
    "role",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "hosts",
)
JUDGED = frozenset(
    {
        "accelerator",
        "engine_hosts",
        "engines",
        "groups",
        "hosts",
        "image",
        "kv_transport",
        "mode",
        "model",
        "relay",
        "router",
        "schema",
        "warnings",
    }
)
"""Parts of a plan that reach engines or the router, and are compared there. The others restart nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that would be done, and why.

    `engine` is an engine's name, or `router`, `relay`, `proof` or `fleet`. Actions: `start`, `stop` and
    `restart` of an engine with all its members, or of the relays; `router`; `prove`, named once for all
    engines; `none` for what differs and restarts nothing.
    """

    engine: str
    action: Action
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON: engine, action, reasons."""
        return {"engine": self.engine, "action": self.action, "reasons": list(self.reasons)}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What would be done to come from one plan to another; engines that stay as they are are left out.

    In the order of the new plan; then the engines that are stopped, the router, the proof, and what restarts
    nothing. Values of environment variables are never among the reasons. Images are compared by name, and
    both plans are taken to be of this version: other contents of an image or another unit show on hosts only.
    """
    before, after = _engines(old), _engines(new)
    # How it gets to the hosts restarts nothing.
    image = _differing("image", *(_without(plan["image"], {"source"}) for plan in (old, new)))
    changes: list[Change] = []
    for name, engine in after.items():
        if engine["external"]:
            changes += _compare_external(before.get(name), engine)
        elif name not in before or before[name]["external"]:
            changes.append(Change(name, "start", (f"new on {', '.join(engine['hosts'])}",)))
        elif reasons := [*image, *_reasons(old, before[name], new, engine)]:
            changes.append(Change(name, "restart", tuple(reasons)))
    for name, engine in before.items():
        if not engine["external"] and (name not in after or after[name]["external"]):
            changes.append(Change(name, "stop", ("no longer in the inventory",)))
    changes += _compare_routers(old, new)
    changes += _compare_relays(old, new)
    changes += _proof(changes, after)
    rest = [{key: value for key, value in plan.items() if key not in JUDGED} for plan in (old, new)]
    rest = [part | {"timeouts": {**part["timeouts"], "request": None}} for part in rest]
    if reasons := _differing("", *rest):
        changes.append(Change("fleet", "none", tuple(reasons)))
    return changes


def compare_running(
    plan: Mapping[str, Any],
    registrations: Mapping[str, Mapping[str, Any]],
    running: Mapping[str, Mapping[str, str]],
    workers: Collection[str] | None = None,
    image_id: str | None = None,
) -> list[Change]:
    """What applying the plan would do to the fleet as it is; engines that run as planned are left out.

    Args:
        plan: the plan.
        registrations: host -> fact name -> registration, as `ansible_local` has them.
        running: host -> member -> the revision label of its container, empty where none runs. A host that is
            missing was not reached, and nothing is said about engines on it.
        workers: URLs of the engines that the serving router has, empty where none serves. None: not known.
        image_id: the image that engines would run. None: not known.

    The router's flags are not compared, because a running router does not tell them.

    """
    registered = registered_engines(registrations)
    engines = {name: engine for name, engine in _engines(plan).items() if not engine["external"]}
    changes: list[Change] = []
    for name, engine in engines.items():
        if unknown := [host for host in engine["hosts"] if host not in running]:
            reason = f"{', '.join(unknown)} was not reached: what runs there is not known"
            changes.append(Change(name, "none", (reason,)))
            continue
        places = list(zip(engine["members"], engine["hosts"], strict=True))
        revisions = [running[host].get(member, "") for member, host in places]
        found = registered.get((engine["head"], name))
        planned = registration(plan, name, dict.fromkeys(engine["hosts"], image_id or ""))
        reasons = _unlike(planned, found, engine["head"], image_id)
        if len({revision for revision in revisions if revision}) > 1:
            reasons.append("its members run different revisions")
        if any(revisions):
            down = [place for place, revision in zip(places, revisions, strict=True) if not revision]
            reasons += [f"{member} does not run on {host}" for member, host in down]
            action: Action = "restart"
        else:
            reasons.append("it does not run")
            action = "start"
        if reasons:
            changes.append(Change(name, action, tuple(reasons)))
    declared = {member for engine in engines.values() for member in engine["members"]}
    changes += _left_over(declared, registered, running)
    if workers is not None:
        changes += _compare_workers(plan, workers)
    return changes + _proof(changes, engines)


def change_lines(changes: Sequence[Change]) -> list[str]:
    """The changes as aligned lines with headings, a line for each reason; a sentence where there are none."""
    if not changes:
        return ["Nothing would change."]
    rows = [("action", "engine", "why")]
    for change in changes:
        for number, reason in enumerate(change.reasons):
            rows.append(("", "", reason) if number else (change.action, change.engine, reason))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{action:{widths[0]}}  {engine:{widths[1]}}  {why}" for action, engine, why in rows]


# --- two plans ------------------------------------------------------------------------------------


def _engines(plan: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {engine["name"]: engine for engine in plan["engines"]}


def _members(plan: Mapping[str, Any], engine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The engine's members in rank order."""
    return [
        member
        for host in engine["hosts"]
        for member in plan["hosts"][host]["members"]
        if member["engine"] == engine["name"]
    ]


def _reasons(
    old: Mapping[str, Any],
    before: Mapping[str, Any],
    new: Mapping[str, Any],
    after: Mapping[str, Any],
) -> list[str]:
    """Why an engine's fingerprint is another one; none where it is the same."""
    pairs = list(zip(_members(old, before), _members(new, after), strict=False))
    if pairs[0][0]["fingerprint"] == pairs[0][1]["fingerprint"]:
        return []
    reasons = _differing("accelerator", old["accelerator"], new["accelerator"])
    if after["role"] != "mixed" or after["nnodes"] > 1:
        reasons += _differing("kv_transport", old["kv_transport"], new["kv_transport"])
    for key in OF_AN_ENGINE:
        reasons += _differing(key, before[key], after[key])
    reasons += _differing("ports", before["fixed_ports"], after["fixed_ports"])
    # Mostly all members differ in the same way.
    by_reason: dict[str, list[int]] = {}
    for rank, (host, moved) in enumerate(zip(before["hosts"], after["hosts"], strict=False)):
        for reason in _member_reasons(*pairs[rank], same_host=host == moved):
            by_reason.setdefault(reason, []).append(rank)
    for reason, ranks in by_reason.items():
        some = f" (member {', '.join(map(str, ranks))})" if len(ranks) < len(pairs) else ""
        reasons.append(reason + some)
    return reasons or ["another version of vllm-fleet made the plan"]


def _member_reasons(before: Mapping[str, Any], after: Mapping[str, Any], *, same_host: bool) -> Iterator[str]:
    if same_host:
        yield from _differing("address", before["address"], after["address"])
    yield from _differing("devices", before["devices"], after["devices"])
    args = [_without(member["args"], FOLLOWING_ARGS) for member in (before, after)]
    yield from _differing("args", *args)
    env = [_without(member["env"], FOLLOWING_ENV) for member in (before, after)]
    for name in sorted(env[0] | env[1]):
        if env[0].get(name) != env[1].get(name):
            changed = "added" if name not in env[0] else "removed" if name not in env[1] else "changed"
            yield f"env {name} {changed} (value hidden)"
    options = [member["container_options"] for member in (before, after)]
    # The GPUs are among the devices of the container as well.
    gpus = [
        {**option, "devices": [device for device in option["devices"] if "gpu=" not in device]}
        for option in options
    ]
    yield from _differing("container_options", *gpus)


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _compare_external(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[Change]:
    """Engines of others are neither started nor stopped."""
    if before is None or not before["external"]:
        return [Change(after["name"], "none", ("new external engine",))]
    reasons = _differing("", before, after)
    return [Change(after["name"], "none", tuple(reasons))] if reasons else []


def _compare_routers(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    before, after = old["router"], new["router"]
    reasons = _differing("mode", old["mode"], new["mode"])
    for key in ("prefill", "decode", "workers"):
        reasons += _differing_urls(key, before[key], after[key])
    for key in ("args", "slots"):
        reasons += _differing(key, before[key], after[key])
    reasons += _differing("timeouts.request", old["timeouts"]["request"], new["timeouts"]["request"])
    if not reasons and router_arguments(old, "a") != router_arguments(new, "a"):
        reasons = ["its arguments"]
    moved = _differing("host", before["host"], after["host"])
    if reasons and not moved:
        reasons.append(CANDIDATE)
    reasons = moved + reasons
    if before["url"] != after["url"]:
        reasons.append(f"clients need the new URL: {before['url']} -> {after['url']}")
    return [Change("router", "router", tuple(reasons))] if reasons else []


def _compare_relays(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Relays start, stop and restart alone; what they were asked for meanwhile is lost."""
    before, after = ({host: relay_arguments(plan, host) for host in relay_hosts(plan)} for plan in (old, new))
    reasons = [f"new on {host}" for host in after if host not in before]
    reasons += [f"no longer on {host}" for host in before if host not in after]
    reasons += [
        f"its arguments on {host}" for host in after if host in before and before[host] != after[host]
    ]
    return [Change("relay", "restart", tuple(reasons))] if reasons else []


def _differing_urls(name: str, old: Sequence[str], new: Sequence[str]) -> list[str]:
    """One sentence for each URL that only one of the two has."""
    reasons = [f"{name}: added {url}" for url in new if url not in old]
    reasons += [f"{name}: removed {url}" for url in old if url not in new]
    return reasons or ([f"{name}: the same URLs in another order"] if old != new else [])


def _proof(changes: Iterable[Change], engines: Mapping[str, Mapping[str, Any]]) -> list[Change]:
    """That the pairs of changed prefill and decode engines are proved again, said once."""
    names = [
        change.engine
        for change in changes
        if change.engine in engines
        and engines[change.engine]["role"] != "mixed"
        and (change.action in {"start", "restart"} or engines[change.engine]["external"])
    ]
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [Change("proof", "prove", (f"the pairs of {', '.join(names[:3])}{more} are proved again",))]


# --- what runs ------------------------------------------------------------------------------------


def _unlike(
    planned: Mapping[str, Any], found: Mapping[str, Any] | None, head: str, image_id: str | None
) -> list[str]:
    """How a registration differs from the one that the engine would get."""
    if found is None:
        return [f"not registered on {head}"]
    unimportant = {"fingerprint"} | ({"image_ids"} if image_id is None else set())
    reasons = _differing("", _without(found, unimportant), _without(planned, unimportant))
    if not reasons and found["fingerprint"] != planned["fingerprint"]:
        reasons = ["other settings; its host keeps only their fingerprint, so which ones is not known"]
    return reasons


def _left_over(
    declared: Collection[str],
    registered: Iterable[tuple[str, str]],
    running: Mapping[str, Mapping[str, str]],
) -> list[Change]:
    """Members that are registered or run on a host although the plan does not have them, by name."""
    places: dict[str, dict[str, None]] = {}
    for host, engine in registered:
        places.setdefault(engine, {})[f"registered on {host}"] = None
    for host, members in running.items():
        for member, revision in members.items():
            if revision:
                # Those of an engine that is gone are told as one: theirs are its name and .NUMBER.
                engine = re.sub(r"\.\d+$", "", member)
                places.setdefault(member if engine in declared else engine, {})[f"runs on {host}"] = None
    return [
        Change(engine, "stop", (*places[engine], "no longer in the inventory"))
        for engine in sorted(places)
        if engine not in declared
    ]


def _compare_workers(plan: Mapping[str, Any], workers: Collection[str]) -> list[Change]:
    if not workers:
        return [Change("router", "router", ("no router serves; one is started",))]
    planned = [url for key in ("prefill", "decode", "workers") for url in plan["router"][key]]
    known = sorted({engine_url(worker) for worker in workers})
    reasons = _differing_urls("engines", known, sorted(planned))
    return [Change("router", "router", (*reasons, CANDIDATE))] if reasons else []


# --- values ---------------------------------------------------------------------------------------


def _differing(path: str, old: Any, new: Any) -> list[str]:
    """One sentence for each value that differs: `args.max_num_seqs: 256 -> 512`. Secrets stay hidden."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            reason
            for key in sorted(old.keys() | new.keys())
            for reason in _differing(
                f"{path}.{key}" if path else key, old.get(key, ABSENT), new.get(key, ABSENT)
            )
        ]
    if old == new and type(old) is type(new):  # 1 is not true
        return []
    if any(SECRET_NAME.search(name) for name in path.split(".")):
        return [f"{path}: {HIDDEN}"]
    if isinstance(old, list) and isinstance(new, list):
        added, removed = ([item for item in a if item not in b] for a, b in ((new, old), (old, new)))
        words = [
            f"{word} {_shown(items)}" for word, items in (("added", added), ("removed", removed)) if items
        ]
        return [f"{path}: {', '.join(words) or f'{_shown(old)} -> {_shown(new)}'}"]
    return [f"{path}: {_shown(old)} -> {_shown(new)}"]


def _shown(value: Any) -> str:
    if value is ABSENT or value is None:
        return "not set"
    if isinstance(value, list):
        return shown(", ".join(item if isinstance(item, str) else json.dumps(item) for item in value))
    return shown(value if isinstance(value, str) else json.dumps(value))
