"""Addresses, interfaces, racks, names and ports."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllm_fleet import placement, rules
from vllm_fleet.inventory import Fleet, IPAddress
from vllm_fleet.placement import Engine
from vllm_fleet.problems import Path
from vllm_fleet.settings import KV_ROLES

LOWEST_PORT = 1024
FEWEST_EPHEMERAL = 1000
LONGEST_NAME = 180
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SOCKET_ENV = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


def check_interfaces(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """Which interface the ranks of an engine over several hosts talk over."""
    wanting = (host for e in engines if e.spans and SOCKET_ENV.isdisjoint(e.env) for host in e.hosts)
    for host in dict.fromkeys(wanting):
        if not fleet.hosts[host].socket_ifname(fleet.vars.kv_transport):
            what = "not set; an engine spans this host and others"
            fleet.problems.add(rules.SOCKET_INTERFACE, what, path=("fleet_socket_ifname",), host=host)


def check_racks(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """NVLink ends at the rack; hosts that do not say theirs are not judged."""
    if fleet.vars.kv_transport != "nvlink":
        return
    first: tuple[str, str] | None = None
    for host in dict.fromkeys(host for e in engines if e.spans or e.role in KV_ROLES for host in e.hosts):
        rack = fleet.hosts[host].vars.rack
        if rack is None:
            continue
        first = first or (rack, host)
        if rack != first[0]:
            fleet.problems.add(
                rules.ONE_RACK,
                f"{first[1]} is in rack {first[0]}",
                path=("fleet_rack",),
                value=rack,
                host=host,
                source=fleet.hosts[host].raw.get("fleet_rack"),
            )


def check_numa_nodes(fleet: Fleet) -> None:
    """One NUMA node for each GPU."""
    for host in fleet.hosts.values():
        nodes, gpus = host.vars.numa_nodes, host.vars.gpus_per_host
        if nodes is not None and gpus is not None and len(nodes) != gpus:
            what, path = f"it has {len(nodes)} nodes, the host {gpus} GPUs", ("fleet_numa_nodes",)
            source = host.raw["fleet_numa_nodes"]
            fleet.problems.add(rules.NUMA_NODES, what, path=path, value=nodes, host=host.name, source=source)


def check_addresses(fleet: Fleet) -> None:
    """No address twice."""
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


def check_names(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """Names become units, containers, folders and files."""
    for pool in fleet.pools:
        if not NAME.fullmatch(pool):
            fleet.report(
                rules.NAME_INVALID, "the pool's name has other characters", ("fleet_pools", pool), value=pool
            )
    for host in {host: None for engine in engines for host in engine.hosts}:
        if not NAME.fullmatch(host):
            fleet.problems.add(
                rules.NAME_INVALID, "the host's name has other characters", host=host, value=host
            )
    owners: dict[str, str] = dict.fromkeys(fleet.vars.external_engines, "fleet_external_engines")
    for engine in engines:
        name, path = engine.name, ("fleet_pools", engine.pool)
        if len(name) > LONGEST_NAME:
            what = f"the name has {len(name)} characters"
            fleet.problems.add(rules.NAME_INVALID, what, host=engine.head, value=name, path=path)
        whose = f"pool {engine.pool} on {engine.head}"
        owner = owners.setdefault(name, whose)
        if owner != whose:
            what = f"{owner} gives the same name"
            fleet.problems.add(rules.NAME_SHARED, what, host=engine.head, path=path, value=name)


def check_ports(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """No port twice on a host, none that the kernel gives away."""
    v = fleet.vars
    first, last = (int(part) for part in v.ephemeral_ports.split("-"))
    if last > 65535 or last - first + 1 < FEWEST_EPHEMERAL:
        what = f"it has {max(last - first + 1, 0)} ports" if last <= 65535 else f"there is no port {last}"
        fleet.report(rules.EPHEMERAL_PORTS, what, ("fleet_ephemeral_ports",), value=v.ephemeral_ports)
    spans = any(engine.spans for engine in engines)
    needed = max((engine.shape.dp for engine in engines if engine.role in KV_ROLES), default=1)
    why = f"the largest data_parallel_size is {needed}"
    if spans and needed < placement.LINK + 1:
        needed, why = placement.LINK + 1, "an engine spans hosts"
    if v.port_stride < needed:
        fleet.report(rules.PORT_STRIDE, why, ("fleet_port_stride",), value=v.port_stride)
    for host, uses in placement.ports(fleet, engines).items():
        taken: dict[int, tuple[str, Path]] = {}
        for port, purpose, path in uses:
            if not LOWEST_PORT <= port < first:
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
