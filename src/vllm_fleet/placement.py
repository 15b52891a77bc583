"""Where engines sit: which hosts, which GPUs, which ports. All arithmetic of the fleet, and no I/O."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet import profile, rules
from vllm_fleet.arguments import config_file, record
from vllm_fleet.inventory import External, Fleet, Host, IPAddress, Pool, Role, Sizes
from vllm_fleet.problems import Path, Rule

GPUS = "fleet_gpus_per_host"
# Offsets in an engine's block of ports at fleet_engine_port_base.
DATA_PARALLEL_RPC, MASTER, LINK = range(3)


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine divides its GPUs: gpus = tp * pp * dp, over nnodes hosts with equally many each."""

    gpus: int
    tp: int
    pp: int
    dp: int
    nnodes: int = 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the engine on each of its hosts."""
        return self.gpus // self.nnodes

    @property
    def dp_local(self) -> int:
        """Data-parallel ranks on each host; a rank that spans hosts counts as one on each of them."""
        return max(self.dp // self.nnodes, 1)


@dataclass(frozen=True, slots=True)
class Engine:
    """One placed engine. `devices` are its GPU ids, the same on each of its hosts; the first is its slot."""

    pool: str
    role: Role
    hosts: tuple[str, ...]
    shape: Shape
    devices: range
    expert_parallel: bool
    args: Mapping[str, Any]
    written: Mapping[str, Any]
    """The arguments as they stand in vLLM's file."""
    env: Mapping[str, str]

    @property
    def head(self) -> str:
        """The host with the engine's URL."""
        return self.hosts[0]

    @property
    def slot(self) -> int:
        """Where the engine sits on each of its hosts."""
        return self.devices.start

    @property
    def spans(self) -> bool:
        """Whether it has more than one host."""
        return len(self.hosts) > 1

    @property
    def name(self) -> str:
        """Local to pool, head host and slot, so other hosts' comings and goings do not change it."""
        return f"{self.pool}-{self.head}-{self.slot}"

    def member(self, rank: int) -> str:
        """The name of its part on `hosts[rank]`. No engine has such a name: theirs end in -NUMBER."""
        return f"{self.name}.{rank}" if rank else self.name

    def ranks(self, rank: int) -> range:
        """The global data-parallel ranks that run on `hosts[rank]`."""
        if self.shape.dp == 1:
            return range(1)
        return range(rank * self.shape.dp_local, (rank + 1) * self.shape.dp_local)


@dataclass(frozen=True, slots=True)
class Served:
    """What a peer or a router sees of an engine, ours or somebody else's."""

    name: str
    role: Role
    tp: int
    path: Path
    """Where its tensor-parallel size is decided."""


def served(engines: Sequence[Engine], external: Mapping[str, External]) -> Iterator[Served]:
    """All engines as their peers see them."""
    for engine in engines:
        path = ("fleet_pools", engine.pool, "tensor_parallel_size")
        yield Served(engine.name, engine.role, engine.shape.tp, path)
    for name, other in external.items():
        path = ("fleet_external_engines", name, "tensor_parallel_size")
        yield Served(name, other.role, other.tensor_parallel_size, path)


def place(fleet: Fleet) -> list[Engine]:
    """Give out the hosts' GPUs: pool after pool in the operator's order, engine after engine.

    An engine over several hosts takes them in the order of its group, and the same GPU ids on each. Engines
    that find no GPUs left are not placed: their ports and names would only repeat the one mistake.
    """
    used: dict[str, int] = defaultdict(int)
    engines: list[Engine] = []
    known = record(fleet.vllm_version)
    for name, pool in fleet.pools.items():
        hosts = fleet.groups.get(pool.hosts, [])
        shared = profile.arguments(fleet.vars.profile, fleet.vars.accelerator) | arguments(pool.args)
        shared_written = config_file(known, shared)
        position = 0
        while position < len(hosts):
            head = fleet.hosts[hosts[position]]
            override = head.vars.pool_overrides.get(name, Sizes())
            shape = _shape(fleet, name, pool, override, head)
            nodes = hosts[position : position + (shape.nnodes if shape else 1)]
            position += len(nodes)
            if shape is None or not _check_shape(fleet, name, pool, override, shape, nodes):
                continue
            args, written = shared, shared_written
            if override.args:
                args = shared | arguments(override.args)
                written = config_file(known, args)
            env = pool.env | override.env if override.env else pool.env
            for _ in range(override.engines_per_host or pool.engines_per_host or 1):
                start = max(used[node] for node in nodes)
                fits = True
                for node in nodes:
                    used[node] = start + shape.gpus_per_node
                    fits &= used[node] <= (fleet.hosts[node].vars.gpus_per_host or used[node])
                if fits:
                    devices = range(start, start + shape.gpus_per_node)
                    engines.append(
                        Engine(
                            name,
                            pool.role,
                            tuple(nodes),
                            shape,
                            devices,
                            pool.enable_expert_parallel,
                            args,
                            written,
                            env,
                        )
                    )
    for host_name, needed in used.items():
        host = fleet.hosts[host_name]
        limit = host.vars.gpus_per_host
        if limit is not None and needed > limit:
            what = f"its engines need {needed} GPUs, it has {limit}"
            fleet.problems.add(
                rules.TOO_MANY_GPUS, what, path=(GPUS,), value=limit, host=host_name, source=host.raw[GPUS]
            )
    return engines


def _check_shape(
    fleet: Fleet, name: str, pool: Pool, override: Sizes, shape: Shape, nodes: Sequence[str]
) -> bool:
    """Whether engines of this shape can be placed. What they cannot do is reported where the size is set."""
    head = fleet.hosts[nodes[0]]

    def report(rule: Rule, what: str, *keys: str) -> None:
        for sizes, top in ((override, "fleet_pool_overrides"), (pool, "fleet_pools")):
            for key in keys:
                if (value := getattr(sizes, key)) is not None:
                    at_host = rule is rules.HOSTS_FOR_ENGINE
                    _report(fleet, rule, what, (top, name, key), value, head, at_host=at_host)
                    return

    if pool.role == "decode" and shape.pp > 1:
        what = f"pipeline_parallel_size is {shape.pp}"
        report(rules.DECODE_PIPELINE, what, "pipeline_parallel_size")
    _check_overrides(fleet, name, nodes)
    sizes = ("gpus", "tensor_parallel_size", "data_parallel_size")
    each, hosts = shape.gpus_per_node, shape.nnodes
    fewest = min(fleet.hosts[node].vars.gpus_per_host or each for node in nodes)
    if shape.gpus % hosts:
        report(rules.GPUS_OVER_HOSTS, f"{shape.gpus} GPUs do not divide by {hosts} hosts", *sizes)
    elif shape.dp > 1 and shape.dp % hosts:
        what = f"{shape.dp} data-parallel ranks do not divide by {hosts} hosts"
        report(rules.RANK_ON_ONE_HOST, what, "data_parallel_size")
    elif each > fewest:
        what = f"an engine of {shape.gpus} GPUs needs {each} on each of {hosts} hosts, and one has {fewest}"
        report(rules.TOO_MANY_GPUS, what, "nnodes", *sizes)
    elif len(nodes) < hosts:
        what = f"an engine of {shape.gpus} GPUs takes {hosts} hosts; left in the group: {', '.join(nodes)}"
        report(rules.HOSTS_FOR_ENGINE, what, *sizes)
    else:
        return True
    return False


def _check_overrides(fleet: Fleet, pool: str, nodes: Sequence[str]) -> None:
    for node in nodes[1:]:
        host, head = fleet.hosts[node], fleet.hosts[nodes[0]]
        override = host.vars.pool_overrides.get(pool, Sizes())
        if override not in (Sizes(), head.vars.pool_overrides.get(pool)):
            what, path = f"the engine's head is on {nodes[0]}", ("fleet_pool_overrides", pool)
            fleet.problems.add(rules.OVERRIDE_ON_HEAD, what, path=path, host=node, source=host.raw[path[0]])


def arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with underscores. vLLM takes dashes alike, so an override must find what it overrides.

    What stands behind a dot is a key inside the argument's value, which vLLM takes to the letter.
    """
    parts = ((*name.partition("."), value) for name, value in args.items())
    return {argument.replace("-", "_") + dot + key: value for argument, dot, key, value in parts}


def _shape(fleet: Fleet, name: str, pool: Pool, override: Sizes, head: Host) -> Shape | None:
    """The shape of the pool's engines on a host; None, and a problem, where the sizes do not fit together.

    An override that gives gpus derives tensor_parallel_size anew; one that gives only parallel sizes keeps
    the pool's other sizes and so changes the number of GPUs. An engine takes the fewest hosts that its GPUs
    fit on, unless nnodes says how many.
    """
    base = pool.pipeline_parallel_size or 1, pool.data_parallel_size or 1
    shape = _derive(fleet, pool, *base, ("fleet_pools", name), head)
    pp, dp = override.pipeline_parallel_size or base[0], override.data_parallel_size or base[1]
    if override.gpus:
        shape = _derive(fleet, override, pp, dp, ("fleet_pool_overrides", name), head)
    else:
        tp = override.tensor_parallel_size or (shape.tp if shape else None)
        shape = Shape(tp * pp * dp, tp, pp, dp) if tp else None
    if shape is None:
        return None
    fewest = -(-shape.gpus // (head.vars.gpus_per_host or shape.gpus))
    return Shape(shape.gpus, shape.tp, pp, dp, override.nnodes or pool.nnodes or fewest)


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


# --- ports ----------------------------------------------------------------------------------------


def http_port(fleet: Fleet, engine: Engine) -> int:
    """The port of the engine's URL, on its head's host."""
    return fleet.vars.http_port_base + engine.slot * fleet.vars.port_stride


def side_channel_base(fleet: Fleet, engine: Engine) -> int | None:
    """What vLLM adds the global data-parallel rank to; ordinary engines have no side channel."""
    if engine.role == "mixed":
        return None
    return fleet.vars.side_channel_port_base + engine.slot * fleet.vars.port_stride


def side_channel_ports(fleet: Fleet, engine: Engine, rank: int) -> list[int]:
    """One port for each data-parallel rank that runs on the engine's host number `rank`."""
    base = side_channel_base(fleet, engine)
    return [] if base is None else [base + dp_rank for dp_rank in engine.ranks(rank)]


def fixed_port(fleet: Fleet, engine: Engine, offset: int) -> int | None:
    """A port on the head's host that the members of an engine over several hosts meet at."""
    if not engine.spans:
        return None
    by_ranks = engine.shape.dp > 1
    if (offset == DATA_PARALLEL_RPC and not by_ranks) or (offset == MASTER and by_ranks):
        return None
    return fleet.vars.engine_port_base + engine.slot * fleet.vars.port_stride + offset


def ports(fleet: Fleet, engines: Sequence[Engine]) -> dict[str, list[tuple[int, str, Path]]]:
    """Host -> every port it uses, what for, and the variable that decides it."""
    uses: dict[str, list[tuple[int, str, Path]]] = defaultdict(list)
    for engine in engines:
        on_head = uses[engine.head]
        on_head.append((http_port(fleet, engine), f"HTTP of {engine.name}", ("fleet_http_port_base",)))
        for rank, host in enumerate(engine.hosts):
            uses[host].extend(
                (port, f"NIXL side channel of {engine.member(rank)}", ("fleet_side_channel_port_base",))
                for port in side_channel_ports(fleet, engine, rank)
            )
        for offset, purpose in (
            (DATA_PARALLEL_RPC, "data-parallel RPC"),
            (MASTER, "rendezvous"),
            (LINK, "link of the members"),
        ):
            if (port := fixed_port(fleet, engine, offset)) is not None:
                on_head.append((port, f"{purpose} of {engine.name}", ("fleet_engine_port_base",)))
    slots = fleet.vars.router_slots
    for host in fleet.routers:
        uses[host].append((fleet.vars.front_port, "front", ("fleet_front_port",)))
        uses[host].append((fleet.vars.control_port, "front's control", ("fleet_control_port",)))
        for name, slot in (("a", slots.a), ("b", slots.b)):
            path = ("fleet_router_slots", name)
            uses[host].append((slot.port, f"router {name}", (*path, "port")))
            uses[host].append((slot.metrics_port, f"metrics of router {name}", (*path, "metrics_port")))
    for host in fleet.relays:
        uses[host].append((fleet.vars.relay_port, "relay", ("fleet_relay_port",)))
    for host in fleet.registries:
        uses[host].append((fleet.vars.registry_port, "registry", ("fleet_registry_port",)))
    return uses


def authority(address: IPAddress, port: int) -> str:
    """ADDRESS:PORT as it stands in a URL."""
    return f"[{address}]:{port}" if isinstance(address, ipaddress.IPv6Address) else f"{address}:{port}"


def url(fleet: Fleet, engine: Engine) -> str:
    """Where the engine's head answers, without a path."""
    return f"http://{authority(address(fleet, engine.head), http_port(fleet, engine))}"


def address(fleet: Fleet, host: str) -> IPAddress:
    """The address of a host of a fleet without errors.

    Raises:
        ValueError: it has none, which was reported as a problem.

    """
    found = fleet.hosts[host].address
    if found is None:
        raise ValueError(f"{host} has no address")
    return found
