"""Who dials whom: the listeners of a plan and the hosts that will connect to them.

Not dialed are the routers' ports, which only haproxy on the same host asks over loopback, and side channels
of decodes, because it is the decode that fetches KV from a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vllm_fleet.host_check.scope import KV_ROLES, builders, fabric_hosts, own_engines
from vllm_fleet.relay import relay_hosts

LOOPBACK = "127.0.0.1"
REGISTRY_UNIT = "docker-registry.service"
RELAY_UNIT = "pd-relay.service"
IMEX_PORT, IMEX_UNIT = 50000, "nvidia-imex.service"


class Listener(NamedTuple):
    """A TCP port, and the unit that has it while the fleet runs, if one has.

    `host` is None where somebody else runs it.
    """

    host: str | None
    address: str
    port: int
    purpose: str
    unit: str | None


class Dial(NamedTuple):
    """A connection that a host will make."""

    source: str
    target: Listener


def listeners(plan: Mapping[str, Any], host: str) -> list[Listener]:
    """Every port that the plan gives to a host, with the address it is bound to."""
    planned = plan["hosts"][host]
    address = planned["address"]
    found = [listener for member in planned["members"] for listener in _of_member(plan, host, member)]
    router = plan["router"]
    if host == router["host"]:
        found += _front(plan)
        for slot, ports in router["slots"].items():
            unit = f"vllm-router@{slot}.service"
            found += [
                Listener(host, LOOPBACK, ports["port"], f"router {slot}", unit),
                Listener(host, LOOPBACK, ports["metrics_port"], f"metrics of router {slot}", unit),
            ]
    if host in relay_hosts(plan):
        found.append(Listener(host, address, plan["relay"]["port"], "relay", RELAY_UNIT))
    if plan["registry"] and host == plan["registry"]["host"]:
        found.append(Listener(host, address, plan["registry"]["port"], "registry", REGISTRY_UNIT))
    return found


def dials(plan: Mapping[str, Any]) -> Iterator[Dial]:
    """Every connection that the fleet will need, those of a host to itself over its address included."""
    for part in (_to_engines, _to_side_channels, _between_members, _to_registry, _to_any_port, _to_imex):
        yield from part(plan)


def _to_engines(plan: Mapping[str, Any]) -> Iterator[Dial]:
    """The router's host asks all engines and the front: router, proof and the last check of a deployment.

    A relay's host asks all engines.
    """
    router = plan["router"]["host"]
    for source in dict.fromkeys([router, *relay_hosts(plan)]):
        for engine in plan["engines"]:
            yield Dial(source, _external(engine) if engine["external"] else _on_head(plan, engine)[0])
    yield from (Dial(router, target) for target in _front(plan))


def _to_side_channels(plan: Mapping[str, Any]) -> Iterator[Dial]:
    """Every host of a decode fetches KV from each rank of a prefill."""
    engines = list(own_engines(plan))
    decodes = dict.fromkeys(host for one in engines if one["role"] == "decode" for host in one["hosts"])
    for engine in engines:
        if engine["role"] == "prefill":
            for target in _side_channels(plan, engine):
                yield from (Dial(source, target) for source in decodes)


def _between_members(plan: Mapping[str, Any]) -> Iterator[Dial]:
    for engine in own_engines(plan):
        meeting = [one for one in _on_head(plan, engine) if not one.purpose.startswith(("HTTP", "NIXL"))]
        for source in engine["hosts"][1:]:
            yield from (Dial(source, target) for target in meeting)


def _to_registry(plan: Mapping[str, Any]) -> Iterator[Dial]:
    pulling = [*plan["engine_hosts"], *relay_hosts(plan)]
    if not pulling or not plan["registry"]:
        return
    registry = plan["registry"]
    target = Listener(registry["host"], registry["address"], registry["port"], "registry", REGISTRY_UNIT)
    for source in dict.fromkeys([*pulling, *builders(plan)]):
        yield Dial(source, target)


def _to_any_port(plan: Mapping[str, Any]) -> Iterator[Dial]:
    """Hosts that meet at ports the kernel chose. The last of its ports stands for all of them."""
    port = int(plan["ephemeral_ports"].partition("-")[2])
    purpose = f"a port of {plan['ephemeral_ports']}, of which the kernel chooses"
    for group in _any_port_groups(plan):
        for target in group:
            listener = Listener(target, plan["hosts"][target]["address"], port, purpose, None)
            yield from (Dial(source, listener) for source in group if source != target)


def _to_imex(plan: Mapping[str, Any]) -> Iterator[Dial]:
    hosts = fabric_hosts(plan)
    for target in hosts:
        listener = Listener(target, plan["hosts"][target]["address"], IMEX_PORT, "IMEX", IMEX_UNIT)
        yield from (Dial(source, listener) for source in hosts if source != target)


def questions(plan: Mapping[str, Any], host: str) -> dict[str, list[dict[str, Any]]]:
    """What the module host_reach is to open and to dial on a host."""
    opened: dict[tuple[str, int], Listener] = {}
    dialed: dict[tuple[str, int], None] = {}
    for source, target in dials(plan):
        place = (target.address, target.port)
        if target.host == host and target.unit != IMEX_UNIT:
            opened[place] = target
        if source == host:
            dialed[place] = None
    return {
        "listeners": [
            {"address": one.address, "port": one.port, "unit": one.unit or ""} for one in opened.values()
        ],
        "dials": [{"address": address, "port": port} for address, port in dialed],
    }


def _any_port_groups(plan: Mapping[str, Any]) -> list[list[str]]:
    """The hosts of one engine, and over TCP those of all prefills and decodes."""
    engines = list(own_engines(plan))
    groups = [list(dict.fromkeys(engine["hosts"])) for engine in engines if len(engine["hosts"]) > 1]
    if plan["kv_transport"] == "tcp":
        groups.append(
            list(dict.fromkeys(host for e in engines if e["role"] in KV_ROLES for host in e["hosts"]))
        )
    return groups


def _of_member(plan: Mapping[str, Any], host: str, member: Mapping[str, Any]) -> Iterator[Listener]:
    name, unit, address = member["name"], member["unit"], member["address"]
    if member["http_port"] is not None:
        yield Listener(host, address, member["http_port"], f"HTTP of {name}", unit)
    for port in member["side_channel_ports"]:
        yield Listener(host, address, port, f"NIXL side channel of {name}", unit)
    if member["head"]:
        [engine] = [one for one in plan["engines"] if one["name"] == member["engine"]]
        for kind, purpose in (
            ("data_parallel_rpc", "data-parallel RPC"),
            ("master", "rendezvous"),
            ("link", "link of the members"),
        ):
            if (port := engine["fixed_ports"][kind]) is not None:
                yield Listener(host, address, port, f"{purpose} of {name}", unit)


def _on_head(plan: Mapping[str, Any], engine: Mapping[str, Any]) -> list[Listener]:
    """The ports of the engine on its head's host, its HTTP first."""
    host = engine["head"]
    [member] = [one for one in plan["hosts"][host]["members"] if one["name"] == engine["name"]]
    return list(_of_member(plan, host, member))


def _side_channels(plan: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[Listener]:
    for host in engine["hosts"]:
        for member in plan["hosts"][host]["members"]:
            if member["engine"] == engine["name"]:
                found = _of_member(plan, host, member)
                yield from (one for one in found if one.purpose.startswith("NIXL"))


def _front(plan: Mapping[str, Any]) -> list[Listener]:
    """Where haproxy listens."""
    router = plan["router"]
    return [
        Listener(router["host"], router["address"], router[port], purpose, "haproxy.service")
        for port, purpose in (("front_port", "front"), ("control_port", "front's control"))
    ]


def _external(engine: Mapping[str, Any]) -> Listener:
    url = urlsplit(engine["url"])
    return Listener(None, url.hostname or "", url.port or 80, f"HTTP of {engine['name']}", None)
