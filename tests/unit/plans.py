"""Plans made by hand, for what only shows or compares them. Much smaller than real ones, of the same form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any


def engine(
    pool: str,
    role: str,
    hosts: Sequence[str],
    devices: Sequence[int] = (0, 1, 2, 3),
    tp: int = 1,
    pp: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """What `plan` makes an engine of. Its GPUs that are not used for tp and pp are data-parallel ranks."""
    return {
        "pool": pool, "role": role, "hosts": list(hosts), "devices": list(devices), "tp": tp, "pp": pp,
        "args": {}, "env": {}, "shm_size": "16g", "mounts": [], **more,
    }  # fmt: skip


def external(name: str, role: str, url: str, tp: int = 1) -> dict[str, Any]:
    """An engine that others run, as it is in a plan."""
    return {
        "name": name, "pool": None, "role": role, "external": True, "head": None, "hosts": [], "slot": None,
        "url": url, "tensor_parallel_size": tp, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "data_parallel_size_local": None, "nnodes": None, "enable_expert_parallel": None, "gpus": tp,
        "side_channel": None, "members": [], "fixed_ports": None,
    }  # fmt: skip


def plan(
    engines: Sequence[dict[str, Any]],
    hosts: dict[str, str | None],
    *,
    externals: Sequence[dict[str, Any]] = (),
    gpus: int | None = 4,
    router: str = "rack1-router",
    **more: Any,
) -> dict[str, Any]:
    """A plan. `hosts` are name -> rack; the router's host is added."""
    hosts = {**hosts, router: hosts.get(router)}
    addresses = {name: f"10.0.{i // 250}.{i % 250 + 1}" for i, name in enumerate(hosts)}
    members: dict[str, list[dict[str, Any]]] = {name: [] for name in hosts}
    made = []
    for spec in engines:
        one, parts = _engine(spec, addresses)
        made.append(one)
        for host, member in parts:
            members[host].append(member)
    made += externals
    urls = {role: [e["url"] for e in made if e["role"] == role] for role in ("prefill", "decode", "mixed")}
    return {
        "schema": 1,
        "mode": "mixed" if urls["mixed"] else "pd",
        "profile": "serving",
        "accelerator": "cuda",
        "kv_transport": "nvlink",
        "kv_floor_gbps": 10.0,
        "kv_floor_min_bytes": 1024,
        "model": {"path": "/srv/models/tiny", "served_name": "tiny"},
        "image": {"name": "vllm-nixl:1", "variant": "cu13"},
        "fence": None,
        "timeouts": {"start": 1200, "request": 3600},
        "proof": {"prompt_words": 2000, "tokens": 8},
        "engines": made,
        "engine_hosts": [name for name in hosts if members[name]],
        "hosts": {
            name: {"address": addresses[name], "members": members[name], "ports": [], "gpus": gpus, "rack": rack}
            for name, rack in hosts.items()
        },
        "router": {
            "host": router,
            "address": addresses[router],
            "front_port": 30000,
            "url": f"http://{addresses[router]}:30000",
            "slots": {
                "a": {"port": 30001, "metrics_port": 29001},
                "b": {"port": 30002, "metrics_port": 29002},
            },
            "prefill": urls["prefill"],
            "decode": urls["decode"],
            "workers": urls["mixed"],
            "args": {},
        },
        "relay": None,
        "registry": {"host": router, "address": addresses[router], "port": 5000},
        "warnings": [],
    } | more  # fmt: skip


def _engine(
    spec: dict[str, Any], addresses: dict[str, str]
) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    head, nodes, slot = spec["hosts"][0], len(spec["hosts"]), spec["devices"][0]
    size, local = spec["tp"] * spec["pp"], len(spec["devices"])
    dp = nodes * local // size
    each = max(dp // nodes, 1)
    name, port, kv = f"{spec['pool']}-{head}-{slot}", 8000 + 16 * slot, spec["role"] != "mixed"
    base = 5600 + 16 * slot
    parts = []
    for rank, host in enumerate(spec["hosts"]):
        dp_ranks = list(range(rank * each, rank * each + each)) if dp > 1 else [0]
        parts.append(
            (
                host,
                {
                    "engine": name,
                    "pool": spec["pool"],
                    "role": spec["role"],
                    "rank": rank,
                    "head": rank == 0,
                    "name": f"{name}.{rank}" if rank else name,
                    "unit": f"vllm-engine-{name}.service",
                    "address": addresses[host],
                    "http_port": None if rank else port,
                    "side_channel_ports": [base + r for r in dp_ranks] if kv else [],
                    "data_parallel_ranks": dp_ranks,
                    "devices": spec["devices"],
                    "env": {"VLLM_HOST_IP": addresses[host], **spec["env"]},
                    "args": {
                        "host": addresses[host],
                        "port": port,
                        "model": "/srv/models/tiny",
                        **({"headless": True, "data_parallel_start_rank": dp_ranks[0]} if rank else {}),
                        **spec["args"],
                    },
                    "container_options": {
                        "devices": [f"nvidia.com/gpu={gpu}" for gpu in spec["devices"]],
                        "shm_size": spec["shm_size"],
                        "mounts": spec["mounts"],
                    },
                    "operator_env": sorted(spec["env"]),
                },
            )
        )
    applied = [[member["env"], member["args"], member["container_options"]] for _, member in parts]
    fingerprint = hashlib.sha256(json.dumps(applied).encode()).hexdigest()
    for _, member in parts:
        member["fingerprint"] = fingerprint
    ports = {
        "http": port,
        "side_channel": [base + r for r in range(dp)] if kv else [],
        "data_parallel_rpc": 20000 + 16 * slot if nodes > 1 and dp > 1 else None,
        "master": 20001 + 16 * slot if nodes > 1 and dp == 1 else None,
        "link": 20002 + 16 * slot if nodes > 1 else None,
    }
    one = {
        "name": name,
        "pool": spec["pool"],
        "role": spec["role"],
        "external": False,
        "head": head,
        "hosts": spec["hosts"],
        "slot": slot,
        "url": f"http://{addresses[head]}:{port}",
        "tensor_parallel_size": spec["tp"],
        "pipeline_parallel_size": spec["pp"],
        "data_parallel_size": dp,
        "data_parallel_size_local": each,
        "nnodes": nodes,
        "enable_expert_parallel": dp > 1,
        "gpus": nodes * local,
        "side_channel": f"{addresses[head]}:{base}" if kv else None,
        "members": [member["name"] for _, member in parts],
        "fixed_ports": ports,
    }
    return one, parts


def two_hosts() -> dict[str, Any]:
    """The lab: one prefill, one decode engine on a CPU each, a slot free beside it."""
    engines = [
        engine("prefill", "prefill", ["rack1-04"], [0]),
        engine("decode", "decode", ["rack1-05"], [0]),
    ]
    hosts = dict.fromkeys(["rack1-04", "rack1-05"])
    return plan(engines, hosts, gpus=2, accelerator="cpu", kv_transport="tcp")


def wide_ep(racks: int = 1) -> dict[str, Any]:
    """A rack of 18 trays: a decode engine over 16 of them with 64 ranks, two prefill engines on the others."""
    trays = [f"rack1-{i:02}" for i in range(1, 19)]
    engines = [
        engine("prefill", "prefill", [trays[0]], tp=4),
        engine("prefill", "prefill", [trays[1]], tp=4),
        engine("decode", "decode", trays[2:]),
    ]
    return plan(engines, {tray: f"nvl72-{i // (18 // racks) + 1}" for i, tray in enumerate(trays)})


def many(hosts: int = 18, per_host: int = 4) -> dict[str, Any]:
    """Engines of one GPU each on every GPU."""
    names = [f"h{i:02}" for i in range(hosts)]
    engines = [
        engine("all", ("prefill", "decode")[(i + gpu) % 2], [name], [gpu])
        for i, name in enumerate(names)
        for gpu in range(per_host)
    ]
    return plan(engines, dict.fromkeys(names), gpus=per_host)


def mixture() -> dict[str, Any]:
    """Two engines on one tray, engines over hosts in each other's way, 8 GPUs a host, pp, tp over hosts, others' engines."""
    engines = [
        engine("p", "prefill", ["a1"], [0, 1], tp=2),
        engine("p", "prefill", ["a1"], [2, 3], tp=2),
        engine("p", "prefill", ["a2", "a3"], range(4), tp=4, pp=2),
        engine("d", "decode", ["a2", "a3", "a4"], [4, 5]),
        engine("d", "decode", ["a4"], [6, 7], tp=2),
        engine("d", "decode", ["a5", "b1"], range(8), tp=16),
        engine("d", "decode", ["b2"], [0, 1, 2, 3, 4, 5], tp=2),
    ]
    hosts = {"a1": "A", "a2": "A", "a3": "A", "a4": "A", "a5": "A", "b1": "B", "b2": "B", "spare": None}
    others = [
        external("theirs-p", "prefill", "http://192.0.2.7:9000", 8),
        external("theirs-d", "decode", "http://[2001:db8::7]:9000", 4),
    ]
    return plan(engines, hosts, externals=others, gpus=8)


def long_names() -> dict[str, Any]:
    """Names as long as they may be, and characters that mean something to XML and Mermaid."""
    pool = "long-context-prefill-for-the-retrieval-service"
    host = "rack-42-tray-07.compute.datacentre-north-3.example.internal"
    odd = '<b>&"it\'s" #1; `x`</b>\\n\x07'
    return plan(
        [engine(pool, "prefill", [host], tp=4), engine("decode", "decode", ["W" * 60], tp=4)],
        {host: odd, "W" * 60: odd},
        externals=[external(odd, "decode", f"http://{'very-' * 20}long.example:8000")],
        model={"path": "/srv/models/" + "x" * 300, "served_name": odd},
    )
