"""Pools, roles, groups, the router and engines of others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from vllm_fleet import placement, rules
from vllm_fleet.checks.hosts import NAME
from vllm_fleet.inventory import REGISTRY_GROUP, RELAY_GROUP, ROLES, ROUTER_GROUP, Fleet, usable_address
from vllm_fleet.placement import GPUS, Engine
from vllm_fleet.problems import plain

PLAN_GROUPS = ("fleet_engines", "fleet_router", "fleet_relay", "fleet_registry", "fleet_image_builder")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
ROUTER_POLICIES = (
    "random",
    "round_robin",
    "cache_aware",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
)


def check_topology(fleet: Fleet) -> None:
    """Judge pools, roles and groups, before engines are placed."""
    v = fleet.vars
    for name in v.rule_overrides:
        known = rules.BY_ID.get(name)
        if known is None or not known.overridable:
            what = "this rule cannot be overridden" if known else "no such rule"
            fleet.report(rules.RULE_OVERRIDES, what, ("fleet_rule_overrides", name), value=name)
    _check_roles(fleet)
    for name, pool in fleet.pools.items():
        path = ("fleet_pools", name, "hosts")
        if pool.hosts not in fleet.groups:
            fleet.report(rules.UNKNOWN_GROUP, "no such group", path, value=pool.hosts, group=pool.hosts)
        elif not fleet.groups[pool.hosts]:
            fleet.report(rules.EMPTY_GROUP, "it has no hosts", path, value=pool.hosts, group=pool.hosts)
    _check_groups(fleet)
    _check_image(fleet)
    if v.image_variant and (v.image_variant == "cpu") != (v.accelerator == "cpu"):
        what = f"fleet_accelerator is {v.accelerator}"
        fleet.report(rules.OTHER_VARIANT, what, ("fleet_image_variant",), value=v.image_variant)
    if v.accelerator == "cpu" and v.kv_transport != "tcp":
        fleet.report(rules.NEEDS_GPU, "the accelerator is cpu", ("fleet_kv_transport",), value=v.kv_transport)
    _check_hosts(fleet)


def _check_image(fleet: Fleet) -> None:
    """One image, from one place."""
    reference, source = fleet.vars.image_reference, fleet.vars.image_source
    if reference and not DIGEST.fullmatch(reference.partition("@")[2]):
        what = "it has no digest" if "@" not in reference else "what follows @ is no sha256 digest"
        fleet.report(rules.IMAGE_DIGEST, what, ("fleet_image_reference",), value=reference)
    if reference and "fleet_image" in fleet.raw:
        what = "fleet_image_reference names another image"
        fleet.report(rules.OTHER_IMAGE, what, ("fleet_image",), value=fleet.vars.image)
    if reference and source == "build":
        what = "fleet_image_reference is not built"
        fleet.report(rules.OTHER_IMAGE, what, ("fleet_image_source",), value=source)
    if not reference and fleet.vars.image_vllm_version:
        what = "there is no fleet_image_reference"
        version = fleet.vars.image_vllm_version
        fleet.report(rules.OTHER_IMAGE, what, ("fleet_image_vllm_version",), value=version)


def _check_groups(fleet: Fleet) -> None:
    wanted = [(ROUTER_GROUP, rules.ROUTER_GROUP)]
    if fleet.vars.image_source == "registry":
        wanted.append((REGISTRY_GROUP, rules.REGISTRY_GROUP))
    for group, rule in wanted:
        hosts = fleet.groups.get(group, [])
        if len(hosts) != 1:
            what = f"it has {len(hosts)}" if group in fleet.groups else "there is no such group"
            fleet.problems.add(rule, what, group=group, value=hosts or None)
    for group in PLAN_GROUPS:
        if group in fleet.groups:
            fleet.problems.add(rules.RESERVED_GROUP, "the plan makes a group of this name", group=group)


def _check_hosts(fleet: Fleet) -> None:
    """What hosts with engines must say, and what they may override."""
    members = {name: set(fleet.groups.get(pool.hosts, ())) for name, pool in fleet.pools.items()}
    with_engines = set().union(*members.values())
    for host in fleet.hosts.values():
        if host.name in with_engines and GPUS not in host.raw:
            what = "not set; hosts with engines need it"
            fleet.problems.add(rules.MISSING, what, path=(GPUS,), host=host.name)
        for name in host.vars.pool_overrides:
            if name in members and host.name not in members[name]:
                path = ("fleet_pool_overrides", name)
                what = f"the host is not in group {fleet.pools[name].hosts}"
                fleet.problems.add(
                    rules.NOT_IN_POOL, what, path=path, host=host.name, source=host.raw[path[0]]
                )


def _check_roles(fleet: Fleet) -> None:
    raw, external = fleet.raw.get("fleet_pools"), fleet.raw.get("fleet_external_engines")
    if not isinstance(raw, Mapping):
        return
    external = external if isinstance(external, Mapping) else {}
    if not raw and not external:
        fleet.report(rules.NO_POOLS, "fleet_pools is empty", ("fleet_pools",))
    # Roles come from the raw pools: one with another mistake in it still is a prefill pool.
    by_role: dict[str, list[str]] = defaultdict(list)
    for name, pool in [*raw.items(), *external.items()]:
        role = plain(pool.get("role")) if isinstance(pool, Mapping) else None
        by_role[role if role in ROLES else "?"].append(str(name))
    prefill, decode, mixed = by_role["prefill"], by_role["decode"], by_role["mixed"]
    if mixed and (prefill or decode):
        what = f"mixed: {', '.join(mixed)}; prefill or decode: {', '.join([*prefill, *decode])}"
        fleet.report(rules.MIXED_WITH_PD, what, ("fleet_pools",))
    if mixed and fleet.relays:
        what = f"mixed: {', '.join(mixed)}"
        fleet.problems.add(rules.RELAY_NEEDS_PD, what, group=RELAY_GROUP, value=fleet.relays)
    if bool(prefill) != bool(decode) and not by_role["?"]:
        present, absent = ("prefill", "decode") if prefill else ("decode", "prefill")
        what = f"there is a {present} pool but no {absent} pool"
        fleet.report(rules.ONE_ROLE_ONLY, what, ("fleet_pools",))


def check_router(fleet: Fleet) -> None:
    """The router's policies."""
    for key, value in fleet.vars.router_args.items():
        name = key.replace("-", "_")
        if name in ("policy", "prefill_policy", "decode_policy") and value not in ROUTER_POLICIES:
            what = "it needs KV events" if value == "kv_aware" else "no such policy"
            fleet.report(rules.ROUTER_POLICY, what, ("fleet_router_args", key), value=value)


def check_external(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """URLs and shapes of engines that somebody else runs."""
    for name, engine in fleet.vars.external_engines.items():
        path = ("fleet_external_engines", name, "url")
        host, _, port = engine.url.removeprefix("http://").rpartition(":")
        host = host.strip("[]")
        if (why := usable_address(host)) or not 0 < int(port) <= 65535:
            fleet.report(rules.EXTERNAL_URL, why or f"there is no port {port}", path, value=engine.url)
        if not NAME.fullmatch(name):
            fleet.report(rules.NAME_INVALID, "the engine's name has other characters", path[:2], value=name)
    urls = {placement.url(fleet, e): e.name for e in engines if fleet.hosts[e.head].address}
    for name, engine in fleet.vars.external_engines.items():
        if engine.role == "decode" and engine.pipeline_parallel_size > 1:
            what, path = f"{name} is a decode", ("fleet_external_engines", name, "pipeline_parallel_size")
            fleet.report(rules.DECODE_PIPELINE, what, path, value=engine.pipeline_parallel_size)
        if (first := urls.setdefault(engine.url, name)) != name:
            path = ("fleet_external_engines", name, "url")
            fleet.report(rules.EXTERNAL_URL, f"{first} has the same", path, value=engine.url)
