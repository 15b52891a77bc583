"""From inventory variables to the plan: checks that need more than one value, and all arithmetic. No I/O."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet import rules
from vllm_fleet.inventory import (
    IMAGE_VARIANTS,
    KV_FLOORS_GBPS,
    REGISTRY_GROUP,
    ROLES,
    ROUTER_GROUP,
    SHM_SIZES,
    Fleet,
    Host,
    IPAddress,
    Pool,
    Sizes,
    read,
)
from vllm_fleet.problems import Path, Problem, Rule, plain

SCHEMA = 1
LOWEST_PORT, HIGHEST_PORT = 1024, 32767
LONGEST_NAME = 180
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
UCX_TLS = {
    ("cpu", "tcp"): "tcp",
    # UCX stages GPU memory through the host for TCP; that needs cuda_copy.
    ("cuda", "tcp"): "tcp,cuda_copy",
    ("cuda", "nvlink"): "cuda_ipc,cuda_copy,sm,self,tcp",
    ("cuda", "rdma"): "rc,cuda_copy,cuda_ipc,sm,self,tcp",
}
GPUS = "fleet_gpus_per_host"
PLAN_GROUPS = ("fleet_engines", "fleet_router", "fleet_registry", "fleet_image_builder")
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine divides its GPUs: gpus = tp * pp * dp."""

    gpus: int
    tp: int
    pp: int
    dp: int


@dataclass(frozen=True, slots=True)
class Engine:
    """One placed engine. `devices` are GPU ids of its head host; the first one is its slot."""

    pool: str
    role: str
    host: str
    shape: Shape
    devices: range
    args: Mapping[str, Any]
    env: Mapping[str, str]

    @property
    def slot(self) -> int:
        """Where the engine sits on its head host."""
        return self.devices.start

    @property
    def name(self) -> str:
        """Local to pool, host and slot, so other hosts' comings and goings do not change it."""
        return f"{self.pool}-{self.host}-{self.slot}"


def check(
    hosts: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
) -> tuple[Fleet, list[Engine]]:
    """Judge an inventory: the fleet as read, all problems in `fleet.problems`, and its engines in plan order.

    Linear in hosts; pairs of engines are only made by `plan`.
    """
    fleet = read(hosts, groups)
    _check_topology(fleet)
    engines = _place(fleet)
    _check_transfer(fleet, engines)
    _check_addresses(fleet)
    _check_names(fleet, engines)
    _check_ports(fleet, engines)
    return fleet, engines


def plan(
    hosts: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The plan as plain JSON, or None where the inventory has an error; and every problem, warnings included.

    Args:
        hosts: host name -> its variables `fleet_*` and `ansible_host`, in inventory order.
        groups: group name -> its hosts.

    """
    fleet, engines = check(hosts, groups)
    if fleet.problems.errors:
        return None, fleet.problems.all()
    return _plan(fleet, engines), fleet.problems.all()


# --- checks ---------------------------------------------------------------------------------------


def _check_topology(fleet: Fleet) -> None:
    v = fleet.vars
    _check_roles(fleet)
    for name, pool in fleet.pools.items():
        path = ("fleet_pools", name, "hosts")
        if pool.hosts not in fleet.groups:
            fleet.report(rules.UNKNOWN_GROUP, "no such group", path, value=pool.hosts, group=pool.hosts)
        elif not fleet.groups[pool.hosts]:
            fleet.report(rules.EMPTY_GROUP, "it has no hosts", path, value=pool.hosts, group=pool.hosts)
    for group, rule in ((ROUTER_GROUP, rules.ROUTER_GROUP), (REGISTRY_GROUP, rules.REGISTRY_GROUP)):
        hosts = fleet.groups.get(group, [])
        if len(hosts) != 1:
            what = f"it has {len(hosts)}" if group in fleet.groups else "there is no such group"
            fleet.problems.add(rule, what, group=group, value=hosts or None)
    for group in PLAN_GROUPS:
        if group in fleet.groups:
            fleet.problems.add(rules.RESERVED_GROUP, "the plan makes a group of this name", group=group)
    if v.accelerator == "cpu" and v.kv_transport != "tcp":
        fleet.report(rules.NEEDS_GPU, "the accelerator is cpu", ("fleet_kv_transport",), value=v.kv_transport)
    _check_hosts(fleet)


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
    raw = fleet.raw.get("fleet_pools")
    if not isinstance(raw, Mapping):
        return
    if not raw:
        fleet.report(rules.NO_POOLS, "fleet_pools is empty", ("fleet_pools",))
    # Roles come from the raw pools: one with another mistake in it still is a prefill pool.
    by_role: dict[str, list[str]] = defaultdict(list)
    for name, pool in raw.items():
        role = plain(pool.get("role")) if isinstance(pool, Mapping) else None
        by_role[role if role in ROLES else "?"].append(str(name))
    prefill, decode, mixed = by_role["prefill"], by_role["decode"], by_role["mixed"]
    if mixed and (prefill or decode):
        what = f"mixed: {', '.join(mixed)}; prefill or decode: {', '.join([*prefill, *decode])}"
        fleet.report(rules.MIXED_WITH_PD, what, ("fleet_pools",))
    if bool(prefill) != bool(decode) and not by_role["?"]:
        present, absent = ("prefill", "decode") if prefill else ("decode", "prefill")
        what = f"there is a {present} pool but no {absent} pool"
        fleet.report(rules.ONE_ROLE_ONLY, what, ("fleet_pools",))


def _check_transfer(fleet: Fleet, engines: list[Engine]) -> None:
    """What the NIXL handshake would refuse at the first request of a pair."""
    sizes: dict[str, dict[int, Engine]] = {"prefill": {}, "decode": {}, "mixed": {}}
    for engine in engines:
        sizes[engine.role].setdefault(engine.shape.tp, engine)
    for prefill in sizes["prefill"].values():
        for decode in sizes["decode"].values():
            p, d = prefill.shape.tp, decode.shape.tp
            if p == d:
                continue
            fleet.report(
                rules.TP_DIFFERS if max(p, d) % min(p, d) == 0 else rules.TP_RATIO,
                f"{prefill.name} has tensor_parallel_size {p}, {decode.name} has {d}",
                ("fleet_pools", decode.pool, "tensor_parallel_size"),
                value=d,
            )


def _check_addresses(fleet: Fleet) -> None:
    owners: dict[IPAddress, str] = {}
    for host in fleet.hosts.values():
        if host.address is None:
            continue
        owner = owners.setdefault(host.address, host.name)
        if owner != host.name:
            variable = "fleet_address" if "fleet_address" in host.raw else "ansible_host"
            fleet.problems.add(
                rules.ADDRESS_SHARED,
                f"{owner} has the same address",
                path=(variable,),
                host=host.name,
                value=str(host.address),
                source=host.raw.get(variable),
            )


def _check_names(fleet: Fleet, engines: list[Engine]) -> None:
    for pool in fleet.pools:
        if not NAME.fullmatch(pool):
            fleet.report(
                rules.NAME_INVALID, "the pool's name has other characters", ("fleet_pools", pool), value=pool
            )
    for host in {engine.host: None for engine in engines}:
        if not NAME.fullmatch(host):
            fleet.problems.add(
                rules.NAME_INVALID, "the host's name has other characters", host=host, value=host
            )
    owners: dict[str, Engine] = {}
    for engine in engines:
        if len(engine.name) > LONGEST_NAME:
            fleet.problems.add(
                rules.NAME_INVALID,
                f"the name has {len(engine.name)} characters",
                host=engine.host,
                value=engine.name,
                path=("fleet_pools", engine.pool),
            )
        owner = owners.setdefault(engine.name, engine)
        if owner is not engine:
            fleet.problems.add(
                rules.NAME_SHARED,
                f"pool {owner.pool} on {owner.host} gives the same name",
                host=engine.host,
                path=("fleet_pools", engine.pool),
                value=engine.name,
            )


def _check_ports(fleet: Fleet, engines: list[Engine]) -> None:
    v = fleet.vars
    largest = max((engine.shape.dp for engine in engines), default=1)
    if v.port_stride < largest:
        fleet.report(
            rules.PORT_STRIDE,
            f"the largest data_parallel_size is {largest}",
            ("fleet_port_stride",),
            value=v.port_stride,
        )
    for host, uses in _ports(fleet, engines).items():
        taken: dict[int, tuple[str, Path]] = {}
        for port, purpose, path in uses:
            if not LOWEST_PORT <= port <= HIGHEST_PORT:
                fleet.report(
                    rules.PORT_RANGE, f"{_kind(purpose)} needs port {port}", path, value=port, host=host
                )
            other = taken.setdefault(port, (purpose, path))
            if other != (purpose, path):
                fleet.report(
                    rules.PORT_COLLISION,
                    f"port {port} is for {_kind(other[0])} and for {_kind(purpose)}",
                    path,
                    value=port,
                    host=host,
                )


def _kind(purpose: str) -> str:
    """A port's purpose without the engine's name: then the same mistake on many hosts is one problem."""
    return purpose.partition(" of ")[0]


# --- arithmetic -----------------------------------------------------------------------------------


def _place(fleet: Fleet) -> list[Engine]:
    """Give out each host's GPUs: pool after pool in the operator's order, engine after engine.

    Engines that find no GPUs left are not placed: their ports and names would only repeat the one mistake.
    """
    used: dict[str, int] = defaultdict(int)
    engines: list[Engine] = []
    too_large: set[str] = set()
    for name, pool in fleet.pools.items():
        if pool.enable_expert_parallel:
            path = ("fleet_pools", name, "enable_expert_parallel")
            fleet.report(rules.DATA_PARALLEL, "expert parallelism is on", path, value=True)
        for host_name in fleet.groups.get(pool.hosts, ()):
            host = fleet.hosts[host_name]
            override = host.vars.pool_overrides.get(name, Sizes())
            shape = _shape(fleet, name, pool, override, host)
            if shape is None:
                continue
            if not _check_shape(fleet, name, pool, override, host, shape):
                too_large.add(host_name)
                continue
            args = _arguments(pool.args) | _arguments(override.args)
            env = pool.env | override.env
            for _ in range(override.engines_per_host or pool.engines_per_host or 1):
                start = used[host_name]
                used[host_name] += shape.gpus
                if used[host_name] <= (host.vars.gpus_per_host or shape.gpus):
                    devices = range(start, used[host_name])
                    engines.append(Engine(name, pool.role, host_name, shape, devices, args, env))
    for host_name, needed in used.items():
        host = fleet.hosts[host_name]
        limit = host.vars.gpus_per_host
        if limit is not None and needed > limit and host_name not in too_large:
            what = f"its engines need {needed} GPUs, it has {limit}"
            fleet.problems.add(
                rules.TOO_MANY_GPUS, what, path=(GPUS,), value=limit, host=host_name, source=host.raw[GPUS]
            )
    return engines


def _check_shape(fleet: Fleet, name: str, pool: Pool, override: Sizes, host: Host, shape: Shape) -> bool:
    """What engines of this shape cannot do, reported where the size is set; False if they do not fit."""

    def report(rule: Rule, what: str, value: int, *keys: str, at_host: bool = False) -> None:
        for sizes, top in ((override, "fleet_pool_overrides"), (pool, "fleet_pools")):
            for key in keys:
                if getattr(sizes, key) is not None:
                    _report(fleet, rule, what, (top, name, key), value, host, at_host=at_host)
                    return

    if shape.dp > 1:
        what = f"data_parallel_size is {shape.dp}"
        report(rules.DATA_PARALLEL, what, shape.dp, "data_parallel_size")
    if pool.role == "decode" and shape.pp > 1:
        what = f"pipeline_parallel_size is {shape.pp}"
        report(rules.DECODE_PIPELINE, what, shape.pp, "pipeline_parallel_size")
    limit = host.vars.gpus_per_host
    if limit is None or shape.gpus <= limit:
        return True
    what = f"an engine of {shape.gpus} GPUs does not fit on a host with {limit}"
    report(rules.SPANS_HOSTS, what, shape.gpus, "gpus", "tensor_parallel_size", at_host=True)
    return False


def _arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with underscores. vLLM takes dashes alike, so an override must find what it overrides.

    What stands behind a dot is a key inside the argument's value, which vLLM takes to the letter.
    """
    parts = ((*name.partition("."), value) for name, value in args.items())
    return {argument.replace("-", "_") + dot + key: value for argument, dot, key, value in parts}


def _shape(fleet: Fleet, name: str, pool: Pool, override: Sizes, host: Host) -> Shape | None:
    """The shape of the pool's engines on a host; None, and a problem, where the sizes do not fit together.

    An override that gives gpus derives tensor_parallel_size anew; one that gives only parallel sizes keeps
    the pool's other sizes and so changes the number of GPUs.
    """
    base = pool.pipeline_parallel_size or 1, pool.data_parallel_size or 1
    shape = _derive(fleet, pool, *base, ("fleet_pools", name), host)
    pp, dp = override.pipeline_parallel_size or base[0], override.data_parallel_size or base[1]
    if override.gpus:
        return _derive(fleet, override, pp, dp, ("fleet_pool_overrides", name), host)
    tp = override.tensor_parallel_size or (shape.tp if shape else None)
    return Shape(tp * pp * dp, tp, pp, dp) if tp else None


def _derive(fleet: Fleet, sizes: Sizes, pp: int, dp: int, path: Path, host: Host) -> Shape | None:
    """tensor_parallel_size = gpus // (pp * dp), or gpus by it where only tensor_parallel_size is given."""
    gpus, tp = sizes.gpus, sizes.tensor_parallel_size
    if gpus is None:
        if tp is not None:
            return Shape(tp * pp * dp, tp, pp, dp)
        what = "neither gpus nor tensor_parallel_size is set"
        _report(fleet, rules.MISSING, what, (*path, "gpus"), None, host)
        return None
    derived, rest = divmod(gpus, pp * dp)
    if rest:
        what = f"{gpus} GPUs do not divide by pipeline_parallel_size {pp} x data_parallel_size {dp}"
        _report(fleet, rules.DOES_NOT_DIVIDE, what, (*path, "gpus"), gpus, host)
        return None
    if tp not in (None, derived):
        what = f"{gpus} GPUs give tensor_parallel_size {derived}"
        remedy = f"Remove it, write {derived}, or set gpus to {tp * pp * dp}."
        _report(fleet, rules.CONTRADICTS, what, (*path, "tensor_parallel_size"), tp, host, remedy)
        return None
    return Shape(gpus, derived, pp, dp)


def _report(
    fleet: Fleet,
    rule: Rule,
    what: str,
    path: Path,
    value: Any,
    host: Host,
    remedy: str | None = None,
    *,
    at_host: bool = False,
) -> None:
    """Report at a pool's key, or at the host's override of it; `at_host`: the host matters to both."""
    if path[0] == "fleet_pool_overrides":
        source = host.raw[path[0]]
        fleet.problems.add(rule, what, path=path, value=value, host=host.name, source=source, remedy=remedy)
    else:
        fleet.report(rule, what, path, value=value, remedy=remedy, host=host.name if at_host else None)


def _http_port(fleet: Fleet, engine: Engine) -> int:
    return fleet.vars.http_port_base + engine.slot * fleet.vars.port_stride


def _side_channel_ports(fleet: Fleet, engine: Engine) -> list[int]:
    """One port for each data-parallel rank; ordinary engines have no side channel."""
    if engine.role == "mixed":
        return []
    first = fleet.vars.side_channel_port_base + engine.slot * fleet.vars.port_stride
    return list(range(first, first + engine.shape.dp))


def _ports(fleet: Fleet, engines: list[Engine]) -> dict[str, list[tuple[int, str, Path]]]:
    """Host -> every port it uses, what for, and the variable that decides it."""
    uses: dict[str, list[tuple[int, str, Path]]] = defaultdict(list)
    for engine in engines:
        uses[engine.host].append(
            (_http_port(fleet, engine), f"HTTP of {engine.name}", ("fleet_http_port_base",))
        )
        uses[engine.host].extend(
            (port, f"NIXL side channel of {engine.name}", ("fleet_side_channel_port_base",))
            for port in _side_channel_ports(fleet, engine)
        )
    slots = fleet.vars.router_slots
    for host in fleet.routers:
        uses[host].append((fleet.vars.front_port, "front", ("fleet_front_port",)))
        for name, slot in (("a", slots.a), ("b", slots.b)):
            path = ("fleet_router_slots", name)
            uses[host].append((slot.port, f"router {name}", (*path, "port")))
            uses[host].append((slot.metrics_port, f"metrics of router {name}", (*path, "metrics_port")))
    for host in fleet.registries:
        uses[host].append((fleet.vars.registry_port, "registry", ("fleet_registry_port",)))
    return uses


def rounds(prefills: int, decodes: int) -> list[list[tuple[int, int]]]:
    """All pairs of a prefill and a decode index in max(P, D) rounds; in one round no index appears twice."""
    longer, shorter = max(prefills, decodes), min(prefills, decodes)
    table = [[(i, (i + turn) % longer) for i in range(shorter)] for turn in range(longer if shorter else 0)]
    return table if prefills <= decodes else [[(b, a) for a, b in turn] for turn in table]


# --- the plan -------------------------------------------------------------------------------------


def _url(address: IPAddress, port: int) -> str:
    return f"http://{_authority(address, port)}"


def _authority(address: IPAddress, port: int) -> str:
    return f"[{address}]:{port}" if isinstance(address, ipaddress.IPv6Address) else f"{address}:{port}"


def _address(fleet: Fleet, host: str) -> IPAddress:
    address = fleet.hosts[host].address
    if address is None:  # `plan` is only made of a fleet without errors
        raise ValueError(f"{host} has no address")
    return address


def _plan(fleet: Fleet, engines: list[Engine]) -> dict[str, Any]:
    v = fleet.vars
    ports = _ports(fleet, engines)
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for engine in engines:
        members[engine.host].append(_member(fleet, engine))
    prefills = [engine for engine in engines if engine.role == "prefill"]
    decodes = [engine for engine in engines if engine.role == "decode"]
    router, registry = fleet.routers[0], fleet.registries[0]
    return {
        "schema": SCHEMA,
        "mode": "pd" if prefills else "mixed",
        "accelerator": v.accelerator,
        "kv_transport": v.kv_transport,
        "kv_floor_gbps": v.kv_floor_gbps or KV_FLOORS_GBPS[v.kv_transport],
        "kv_floor_min_bytes": v.kv_floor_min_bytes,
        "model": {"path": v.model.path, "served_name": v.model.served_name},
        "image": {"name": v.image, "variant": v.image_variant or IMAGE_VARIANTS[v.accelerator]},
        "timeouts": {"start": v.start_timeout, "request": v.request_timeout},
        "proof": {
            "prompt_words": v.proof_prompt_words,
            "prefix_tokens": v.proof_prefix_tokens,
            "tokens": v.proof_tokens,
            "kv_dtype": _kv_dtype(fleet, decodes[0]) if decodes else None,
        },
        "engines": [_engine(fleet, engine) for engine in engines],
        "engine_hosts": [host for host in fleet.hosts if members[host]],
        "groups": _groups(fleet, members),
        "hosts": {
            host: {
                "address": str(_address(fleet, host)),
                "members": members[host],
                "ports": [{"port": port, "purpose": purpose} for port, purpose, _ in sorted(ports[host])],
            }
            for host in fleet.hosts
        },
        "pairs": [
            {"prefill": prefill.name, "decode": decode.name} for prefill in prefills for decode in decodes
        ],
        "rounds": [
            sorted(p * len(decodes) + d for p, d in turn) for turn in rounds(len(prefills), len(decodes))
        ],
        "router": {
            "host": router,
            "address": str(_address(fleet, router)),
            "front_port": v.front_port,
            "url": _url(_address(fleet, router), v.front_port),
            "slots": v.router_slots.model_dump(),
            **{
                key: [_url(_address(fleet, e.host), _http_port(fleet, e)) for e in engines if e.role == role]
                for key, role in (("prefill", "prefill"), ("decode", "decode"), ("workers", "mixed"))
            },
            "args": dict(sorted(_arguments(v.router_args).items())),
        },
        "registry": {
            "host": registry,
            "address": str(_address(fleet, registry)),
            "port": v.registry_port,
        },
        "warnings": [problem.as_dict() for problem in fleet.problems.warnings],
    }


def _engine(fleet: Fleet, engine: Engine) -> dict[str, Any]:
    address, side_channel = _address(fleet, engine.host), _side_channel_ports(fleet, engine)
    return {
        "name": engine.name,
        "pool": engine.pool,
        "role": engine.role,
        "head": engine.host,
        "slot": engine.slot,
        "url": _url(address, _http_port(fleet, engine)),
        "tensor_parallel_size": engine.shape.tp,
        "pipeline_parallel_size": engine.shape.pp,
        "data_parallel_size": engine.shape.dp,
        "gpus": engine.shape.gpus,
        "side_channel": _authority(address, side_channel[0]) if side_channel else None,
        "members": [engine.name],
    }


def _groups(fleet: Fleet, members: Mapping[str, Any]) -> list[list[str]]:
    """[host, group] for the groups that plays run on. No image_builder means the workstation."""
    hosts = (
        [host for host in fleet.hosts if members[host]],
        fleet.routers,
        fleet.registries,
        fleet.groups.get("image_builder", []),
    )
    return [[host, group] for group, of_group in zip(PLAN_GROUPS, hosts, strict=True) for host in of_group]


def _member(fleet: Fleet, engine: Engine) -> dict[str, Any]:
    """The head's slice: all that its host needs to run it. `fingerprint` changes when any of that does."""
    address = _address(fleet, engine.host)
    applied = {
        "env": _environment(fleet, engine, address),
        "args": _serve_arguments(fleet, engine, address),
        "container_options": _container_options(fleet, engine),
    }
    canonical = json.dumps(applied, sort_keys=True, separators=(",", ":"))
    unit, url = f"vllm-engine-{engine.name}.service", _url(address, _http_port(fleet, engine))
    return {
        "engine": engine.name,
        "role": engine.role,
        "pool": engine.pool,
        "rank": 0,
        "head": True,
        "name": engine.name,
        "unit": unit,
        "container": f"vllm-engine-{engine.name}",
        "url": url,
        # What the module engine_ready asks for; a headless member has no HTTP to ask.
        "ready": {
            "engine": engine.name,
            "unit": unit,
            "url": url,
            "served_name": fleet.vars.model.served_name,
        },
        "address": str(address),
        "http_port": _http_port(fleet, engine),
        "side_channel_ports": _side_channel_ports(fleet, engine),
        "devices": list(engine.devices),
        **applied,
        # Which of the variables are the operator's own, and so may be secrets.
        "operator_env": sorted(engine.env),
        "fingerprint": hashlib.sha256(canonical.encode()).hexdigest(),
    }


def _environment(fleet: Fleet, engine: Engine, address: IPAddress) -> dict[str, str]:
    v = fleet.vars
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if v.accelerator == "cpu":
        # OMP threads bound by two engines to the same cores starve both.
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= engine.env
    env |= {
        "TENSOR_PARALLEL_SIZE": str(engine.shape.tp),
        "PIPELINE_PARALLEL_SIZE": str(engine.shape.pp),
        "DATA_PARALLEL_SIZE": str(engine.shape.dp),
        "VLLM_HOST_IP": str(address),
    }
    if v.accelerator == "cpu":
        env["VLLM_TARGET_DEVICE"] = "cpu"
    if side_channel := _side_channel_ports(fleet, engine):
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": str(address),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel[0]),
            "UCX_TLS": UCX_TLS[v.accelerator, v.kv_transport],
        }
        if device := fleet.hosts[engine.host].vars.net_device:
            env["UCX_NET_DEVICES"] = device
        if v.accelerator == "cuda" and v.kv_mapping == "per_transfer":
            env["UCX_CUDA_IPC_CACHE"] = "n"
    return dict(sorted(env.items()))


def _serve_arguments(fleet: Fleet, engine: Engine, address: IPAddress) -> dict[str, Any]:
    """What `vllm serve --config` reads. The parallel sizes are in the environment."""
    v = fleet.vars
    args: dict[str, Any] = {}
    if v.accelerator == "cpu":
        args["dtype"] = "float32"  # bfloat16 died with SIGILL at the first forward
    if v.kv_transport == "nvlink" and engine.role in KV_ROLES:
        # Plain CUDA allocations cannot be exported over NVLink to another host; KV would silently take TCP.
        args["enable_cumem_allocator"] = True
    args |= engine.args
    args |= {
        "model": v.model.path,
        "served_model_name": v.model.served_name,
        "host": str(address),
        "port": _http_port(fleet, engine),
    }
    if engine.role in KV_ROLES:
        args["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": KV_ROLES[engine.role],
            "kv_buffer_device": v.accelerator,
            "kv_load_failure_policy": "fail",
        }
    return dict(sorted(args.items()))


def _kv_dtype(fleet: Fleet, decode: Engine) -> str | None:
    """What the bytes of an engine's KV follow from, kv_cache_dtype or else dtype. None: the model's own.

    One decode stands for all: NIXL's handshake wants both equal everywhere.
    """
    args = _serve_arguments(fleet, decode, _address(fleet, decode.host))
    cache = args.get("kv_cache_dtype", "auto")
    return args.get("dtype") if cache == "auto" else cache


def _container_options(fleet: Fleet, engine: Engine) -> dict[str, Any]:
    v = fleet.vars
    devices: list[str] = []
    if v.accelerator == "cuda":
        devices = [f"nvidia.com/gpu={device}" for device in engine.devices]
        if engine.role in KV_ROLES:
            devices += {
                "nvlink": ["/dev/nvidia-caps-imex-channels/channel0"],
                "rdma": ["/dev/infiniband"],
            }.get(v.kv_transport, [])
    return {
        "devices": devices,
        # Only where memory is registered with a device: machines without CAP_SYS_RESOURCE refuse to raise it.
        "ulimits": ["memlock=-1:-1"] if v.accelerator == "cuda" else [],
        # Without NUMA nodes to be seen, the CPU NIXL worker does not pin every engine to the same core.
        "tmpfs": ["/sys/devices/system/node"] if v.accelerator == "cpu" else [],
        "shm_size": v.shm_size or SHM_SIZES[v.accelerator],
        "mounts": [{"source": v.model.path, "target": v.model.path, "read_only": True}],
    }
