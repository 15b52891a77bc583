"""From inventory variables to the plan: what the roles apply, as plain JSON. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_fleet import checks, fence, front, placement, settings
from vllm_fleet.inventory import IMAGE_ARCHITECTURES, KV_FLOORS_GBPS, External, Fleet, read
from vllm_fleet.placement import Engine
from vllm_fleet.problems import Problem

SCHEMA = 1


def check(
    hosts: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
) -> tuple[Fleet, list[Engine]]:
    """Judge an inventory: the fleet as read, all problems in `fleet.problems`, and its engines in plan order.

    Linear in hosts.
    """
    fleet = read(hosts, groups)
    checks.check_topology(fleet)
    engines = placement.place(fleet)
    checks.check_all(fleet, engines)
    return fleet, engines


def plan(
    hosts: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The plan as plain JSON, or None where the inventory has an error; and every problem, warnings included.

    Linear in hosts and engines; pairs of engines are computed from the plan by `vllm_fleet.proof`.

    Args:
        hosts: host name -> its variables `fleet_*` and `ansible_host`, in inventory order.
        groups: group name -> its hosts.

    """
    fleet, engines = check(hosts, groups)
    if fleet.problems.errors:
        return None, fleet.problems.all()
    return _plan(fleet, engines), fleet.problems.all()


def _plan(fleet: Fleet, engines: Sequence[Engine]) -> dict[str, Any]:
    v = fleet.vars
    ports = placement.ports(fleet, engines)
    links = settings.nvlink(fleet, engines)
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for engine in engines:
        for host, member in zip(engine.hosts, _members(fleet, engine, links), strict=True):
            members[host].append(member)
    decodes = [engine for engine in engines if engine.role == "decode"]
    described = [_engine(fleet, engine) for engine in engines]
    described += [_external(name, engine) for name, engine in v.external_engines.items()]
    router = fleet.routers[0]
    public, control = (
        placement.authority(placement.address(fleet, router), port) for port in (v.front_port, v.control_port)
    )
    return {
        "schema": SCHEMA,
        "mode": "mixed" if any(engine["role"] == "mixed" for engine in described) else "pd",
        "profile": v.profile,
        "accelerator": v.accelerator,
        "kv_transport": v.kv_transport,
        "kv_mapping": fleet.kv_mapping,
        "kv_floor_gbps": v.kv_floor_gbps or KV_FLOORS_GBPS[v.kv_transport],
        "kv_floor_min_bytes": v.kv_floor_min_bytes,
        "model": {"path": v.model.path, "served_name": v.model.served_name},
        "image": {
            "name": v.image,
            "variant": fleet.image_variant,
            "architecture": IMAGE_ARCHITECTURES[fleet.image_variant],
            "vllm_version": fleet.vllm_version,
            "source": v.image_source,
            "reference": v.image_reference,
        },
        "timeouts": {
            "start": v.start_timeout,
            "request": fleet.request_timeout,
            "control": v.control_timeout,
        },
        "controllers": sorted(v.controllers),
        # Who may connect; which ports it is about, each host says.
        "fence": fence.of_fleet(fleet),
        # The hosts of an engine reach each other on these as well: the kernel chooses among them.
        "ephemeral_ports": v.ephemeral_ports,
        "proof": {
            "prompt_words": v.proof_prompt_words,
            "prefix_tokens": v.proof_prefix_tokens,
            "tokens": v.proof_tokens,
            "kv_dtype": settings.kv_dtype(fleet, decodes[0], links) if decodes else None,
        },
        "engines": described,
        "engine_hosts": [host for host in fleet.hosts if members[host]],
        "groups": _groups(fleet, members),
        "hosts": {
            host.name: {
                "address": str(host.address),
                "gpus": host.vars.gpus_per_host,
                "rack": host.vars.rack,
                "members": members[host.name],
                "ports": [
                    {"port": port, "purpose": purpose}
                    for port, purpose, _ in sorted(ports.get(host.name, []))
                ],
                "fence": fence.of_host(ports.get(host.name, [])),
            }
            for host in fleet.hosts.values()
        },
        "router": {
            "host": router,
            "address": str(placement.address(fleet, router)),
            "front_port": v.front_port,
            "control_port": v.control_port,
            "listen": public,
            "url": f"https://{v.tls_name}:{v.front_port}"
            if v.tls_name
            else f"{'https' if v.tls_certificate else 'http'}://{public}",
            # Files of the workstation; empty where the operator has none.
            "tls": {"certificate": v.tls_certificate or "", "ca": v.tls_ca or ""},
            "client_keys": v.client_keys or "",
            # Where admission is closed and opened: of haproxy as well, for the fleet's hosts and controllers.
            "control_listen": control,
            "control_url": f"http://{control}",
            "control_sources": fence.callers(fleet),
            # Method -> what the front lets through; all else is refused.
            "client_paths": front.client_paths(v.client_paths),
            # For those of them no key is asked.
            "open_paths": list(front.HEALTH_PATHS),
            "slots": v.router_slots.model_dump(),
            **{
                key: [engine["url"] for engine in described if engine["role"] == role]
                for key, role in (("prefill", "prefill"), ("decode", "decode"), ("workers", "mixed"))
            },
            "args": dict(sorted(placement.arguments(v.router_args).items())),
        },
        "relay": _relay(fleet),
        "registry": _registry(fleet),
        "warnings": [problem.as_dict() for problem in fleet.problems.warnings],
    }


def _relay(fleet: Fleet) -> dict[str, Any] | None:
    """The relay, host -> URL; None where the inventory has no group of it."""
    if not fleet.relays:
        return None
    architecture = fleet.vars.relay_architecture or IMAGE_ARCHITECTURES[fleet.image_variant]
    port = fleet.vars.relay_port
    return {
        "port": port,
        "urls": {
            host: f"http://{placement.authority(placement.address(fleet, host), port)}"
            for host in fleet.relays
        },
        "image": {"name": "pd-relay", "variant": architecture, "architecture": architecture},
    }


def _registry(fleet: Fleet) -> dict[str, Any] | None:
    """Where the image is pulled from; None where it goes another way."""
    if not fleet.registries:
        return None
    address, port = placement.address(fleet, fleet.registries[0]), fleet.vars.registry_port
    return {
        "host": fleet.registries[0],
        "address": str(address),
        "port": port,
        "authority": placement.authority(address, port),
    }


def _engine(fleet: Fleet, engine: Engine) -> dict[str, Any]:
    side_channel = placement.side_channel_base(fleet, engine)
    ranks = range(len(engine.hosts))
    return {
        "name": engine.name,
        "pool": engine.pool,
        "role": engine.role,
        "external": False,
        "head": engine.head,
        "hosts": list(engine.hosts),
        "slot": engine.slot,
        "url": placement.url(fleet, engine),
        "tensor_parallel_size": engine.shape.tp,
        "pipeline_parallel_size": engine.shape.pp,
        "data_parallel_size": engine.shape.dp,
        "data_parallel_size_local": engine.shape.dp_local,
        "nnodes": engine.shape.nnodes,
        "enable_expert_parallel": engine.expert_parallel,
        "gpus": engine.shape.gpus,
        "side_channel": (
            placement.authority(placement.address(fleet, engine.head), side_channel)
            if side_channel is not None
            else None
        ),
        "fixed_ports": {
            "http": placement.http_port(fleet, engine),
            "side_channel": [
                port for rank in ranks for port in placement.side_channel_ports(fleet, engine, rank)
            ],
            "data_parallel_rpc": placement.fixed_port(fleet, engine, placement.DATA_PARALLEL_RPC),
            "master": placement.fixed_port(fleet, engine, placement.MASTER),
            "link": placement.fixed_port(fleet, engine, placement.LINK),
        },
        "members": [engine.member(rank) for rank in ranks],
    }


def _external(name: str, engine: External) -> dict[str, Any]:
    """An engine of somebody else, with the keys of ours; what is not known of it is null."""
    tp, pp, dp = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size
    return {
        "name": name,
        "pool": None,
        "role": engine.role,
        "external": True,
        "head": None,
        "hosts": [],
        "slot": None,
        "url": engine.url,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        "data_parallel_size_local": None,
        "nnodes": None,
        "enable_expert_parallel": None,
        "max_model_len": engine.max_model_len,
        "gpus": tp * pp * dp,
        "side_channel": None,
        "fixed_ports": None,
        "members": [],
    }


def _groups(fleet: Fleet, members: Mapping[str, Any]) -> list[list[str]]:
    """[host, group] for the groups that plays run on. No image_builder means the workstation."""
    return [
        *([host, "fleet_engines"] for host in fleet.hosts if members[host]),
        *([host, "fleet_router"] for host in fleet.routers),
        *([host, "fleet_relay"] for host in fleet.relays),
        *([host, "fleet_registry"] for host in fleet.registries),
        *([host, "fleet_image_builder"] for host in fleet.groups.get("image_builder", [])),
    ]


def _topology(fleet: Fleet, engine: Engine, rank: int, url: str) -> str:
    """What the member's journal says at each start."""
    shape, host = engine.shape, engine.hosts[rank]
    ports = placement.side_channel_ports(fleet, engine, rank)
    channel = placement.authority(placement.address(fleet, host), ports[0]) if ports else "none"
    return (
        f"engine={engine.name} role={engine.role} host={host} rank={rank}/{shape.nnodes} "
        f"gpus={engine.devices.start}-{engine.devices.stop - 1} tp={shape.tp} pp={shape.pp} dp={shape.dp} "
        f"ep={'yes' if engine.expert_parallel else 'no'} url={url} side_channel={channel}"
    )


def _members(fleet: Fleet, engine: Engine, links: settings.Nvlink) -> list[dict[str, Any]]:
    """Each host's slice of an engine: all that it needs to run it, and no more.

    `fingerprint` changes when anything that any of the members runs with does: they restart together.
    """
    link = settings.link(fleet, engine)
    applied: list[dict[str, Any]] = [
        {
            "env": settings.environment(fleet, engine, rank, links),
            "args": settings.serve_arguments(fleet, engine, rank, links),
            "container_options": settings.container_options(fleet, engine, rank, links),
        }
        for rank in range(len(engine.hosts))
    ]
    canonical = json.dumps([applied, link] if link else applied[0], sort_keys=True, separators=(",", ":"))
    fingerprint = hashlib.sha256(canonical.encode()).hexdigest()
    url = placement.url(fleet, engine)
    members = []
    for rank, host in enumerate(engine.hosts):
        name = engine.member(rank)
        unit, head = f"vllm-engine-{name}.service", rank == 0
        http_port = placement.http_port(fleet, engine) if head else None
        side_channel_ports = placement.side_channel_ports(fleet, engine, rank)
        # Those that the member binds besides: where the others of its engine meet it.
        meeting_ports = [
            port
            for offset in (placement.DATA_PARALLEL_RPC, placement.MASTER, placement.LINK)
            if head and (port := placement.fixed_port(fleet, engine, offset)) is not None
        ]
        needs_fence = fleet.vars.fence and fence.in_dev_mode(applied[rank]["env"])
        members.append(
            {
                "engine": engine.name,
                "role": engine.role,
                "pool": engine.pool,
                "rank": rank,
                "head": head,
                "name": name,
                "unit": unit,
                "container": f"vllm-engine-{name}",
                "url": url if head else None,
                # What the module engine_ready asks for; a headless member has no HTTP to ask.
                "ready": {
                    "engine": name,
                    "unit": unit,
                    "url": url if head else None,
                    "served_name": fleet.vars.model.served_name,
                    "container": f"vllm-engine-{name}",
                },
                "address": str(placement.address(fleet, host)),
                "http_port": http_port,
                "side_channel_ports": side_channel_ports,
                "meeting_ports": meeting_ports,
                "data_parallel_ranks": list(engine.ranks(rank)),
                "devices": list(engine.devices),
                **applied[rank],
                "link": link,
                # Whoever reaches one in dev mode commands it: it does not start unless these are fenced.
                "fenced_ports": sorted(filter(None, [http_port, *side_channel_ports, *meeting_ports]))
                if needs_fence
                else [],
                "topology": _topology(fleet, engine, rank, url),
                # Which of the variables are the operator's own, and so may be secrets.
                "operator_env": sorted(engine.env),
                "fingerprint": fingerprint,
            }
        )
    return members
