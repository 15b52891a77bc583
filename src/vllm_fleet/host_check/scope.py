"""What of a plan decides which checks apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KV_ROLES = ("prefill", "decode")
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


def own_engines(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The engines that the fleet runs itself."""
    return (engine for engine in plan["engines"] if not engine["external"])


def builders(plan: Mapping[str, Any]) -> list[str]:
    """Hosts of the plan that build the image and push it; the workstation is none of them."""
    return [
        host for host, group in plan["groups"] if group == "fleet_image_builder" and host in plan["hosts"]
    ]


def fabric_groups(plan: Mapping[str, Any]) -> list[list[str]]:
    """Groups of hosts whose GPUs reach each other's memory over NVLink.

    The hosts of an engine, and all that exchange KV. An engine alone on its host needs no
    fabric between hosts.
    """
    if plan["kv_transport"] != "nvlink":
        return []
    engines = list(own_engines(plan))
    groups = [list(engine["hosts"]) for engine in engines]
    groups.append([host for e in engines if e["role"] in KV_ROLES for host in e["hosts"]])
    distinct = (list(dict.fromkeys(group)) for group in groups)
    return [group for group in distinct if len(group) > 1]


def fabric_hosts(plan: Mapping[str, Any]) -> list[str]:
    """All hosts of those groups, in plan order."""
    members = {host for group in fabric_groups(plan) for host in group}
    return [host for host in plan["hosts"] if host in members]


def planned_gpus(members: list[Mapping[str, Any]]) -> list[int]:
    """The ids of the GPUs that the plan gives to the members of a host."""
    return sorted({device for member in members for device in member["devices"]})


def device_nodes(members: list[Mapping[str, Any]]) -> list[str]:
    """The device nodes that the members' containers get by path."""
    return [name for name in container_devices(members) if name.startswith("/dev/")]


def container_devices(members: list[Mapping[str, Any]]) -> list[str]:
    """All that docker's --device gives to the members of a host, each once."""
    return list(dict.fromkeys(name for m in members for name in m["container_options"]["devices"]))
