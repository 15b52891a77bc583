"""Who may connect to which port of a host: the data of its nftables rules.

vLLM asks nobody for a key on its control endpoints, and NIXL's side channel on none of its. So what the plan
gives fixed ports is reached by those who need it alone; clients come through the front.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from vllm_fleet import placement
from vllm_fleet.inventory import Fleet
from vllm_fleet.problems import Path
from vllm_fleet.profile import DEV_MODE

FENCED = frozenset(
    {"fleet_http_port_base", "fleet_side_channel_port_base", "fleet_engine_port_base", "fleet_control_port"}
)
"""The variables whose ports are fenced. Front and registry are for others too, routers are on loopback."""
SIDE_CHANNEL = "fleet_side_channel_port_base"

type Sources = dict[str, list[str]]
"""`ipv4` and `ipv6` -> addresses and networks, sorted, none within another."""


def callers(fleet: Fleet) -> list[str]:
    """Who may connect to every fenced port: the fleet's hosts and `fleet_controllers`.

    A host's `ansible_host` is its address where it has no `fleet_address`. Else it says how Ansible reaches
    the host, which may be through a bastion whose other users are nobody's callers.
    """
    return without_nested(
        [*fleet.vars.controllers, *(str(placement.address(fleet, name)) for name in fleet.hosts)]
    )


def peers(fleet: Fleet) -> list[str]:
    """Who may connect to side channels besides: hosts of others' engines.

    Their decodes fetch KV from our prefills. One whose URL has a name is not among them (rule external-name).
    """
    hosts = (urlsplit(engine.url).hostname for engine in fleet.vars.external_engines.values())
    return without_nested(host for host in hosts if host and is_address(host))


def is_address(text: Any) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        ipaddress.ip_address(text if isinstance(text, str) else "")
    except ValueError:
        return False
    return True


def without_nested(sources: Iterable[str]) -> list[str]:
    """Sort addresses and networks, without those that others contain: nft refuses overlaps."""
    networks = sorted(
        (ipaddress.ip_network(source) for source in sources), key=lambda one: (one.version, one)
    )
    found: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    for one in networks:
        last = found[-1] if found else None
        # The networks of one address sort from the widest on, so one that contains this has just been kept.
        if last is None or last.version != one.version or one.network_address not in last:
            found.append(one)
    return [str(one.network_address if one.num_addresses == 1 else one) for one in found]


def of_fleet(fleet: Fleet) -> dict[str, Sources] | None:
    """`callers` and `peers` by family, for every host; None where the operator does without a fence."""
    if not fleet.vars.fence:
        return None
    return {"callers": _by_family(callers(fleet)), "peers": _by_family(peers(fleet))}


def of_host(uses: Sequence[tuple[int, str, Path]]) -> dict[str, list[int]]:
    """The fenced `ports` of a host, and the `side_channel_ports` among them.

    Args:
        uses: the host's own of `placement.ports`.

    """
    return {
        "ports": sorted({port for port, _, path in uses if path[0] in FENCED}),
        "side_channel_ports": sorted({port for port, _, path in uses if path[0] == SIDE_CHANNEL}),
    }


def union(wanted: Mapping[str, Any], in_force: Mapping[str, Any]) -> dict[str, Any]:
    """What lets in everybody whom either lets in, and fences every port that either fences.

    While a fleet changes, engines of the plan before still run, and hosts of the new one dial already.

    Args:
        wanted: `ports`, `side_channel_ports`, `callers` and `peers` of a host.
        in_force: the same, as they were written there.

    """
    both = (wanted, in_force)
    # Peers are kept from what is an engine's other port under either.
    others = {port for one in both for port in one["ports"] if port not in one["side_channel_ports"]}
    return {
        "ports": sorted({port for one in both for port in one["ports"]}),
        "side_channel_ports": sorted(
            {port for one in both for port in one["side_channel_ports"] if port not in others}
        ),
        "callers": _by_family(without_nested(_sources(both, "callers"))),
        "peers": _by_family(without_nested(_sources(both, "peers"))),
    }


def _sources(fences: Iterable[Mapping[str, Any]], who: str) -> list[str]:
    return [source for one in fences for family in one[who].values() for source in family]


def _by_family(sources: Iterable[str]) -> Sources:
    found: Sources = {"ipv4": [], "ipv6": []}
    for source in sources:
        found["ipv6" if ":" in source else "ipv4"].append(source)
    return found


def in_dev_mode(environment: Mapping[str, str]) -> bool:
    """Whether an engine with this environment lets whoever reaches it pause, update or command it."""
    return environment.get(DEV_MODE, "0").strip() not in ("0", "")
