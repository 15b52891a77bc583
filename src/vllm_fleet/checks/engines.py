"""Arguments and environment of engines, one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_fleet import arguments, placement, profile, rules
from vllm_fleet.inventory import OWNED_ENV, Fleet, is_owned
from vllm_fleet.placement import Engine
from vllm_fleet.problems import SECRET_NAME, Path, Rule, is_vaulted, origin_at
from vllm_fleet.settings import ALLOCATOR, KV_ROLES, Nvlink, has_fabric_memory

OF_ARGUMENT = {
    "unknown": rules.UNKNOWN_ARGUMENT,
    "value": rules.ARGUMENT_VALUE,
    "abbreviated": rules.UNKNOWN_ARGUMENT,
    "deprecated": rules.DEPRECATED_ARGUMENT,
}
OTHER_ALL2ALL = ("deepep", "mori", "moonep")
CONTRADICTIONS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    # variable, values (a pattern), transports that it contradicts, only where this crosses hosts
    ("NCCL_MNNVL_ENABLE", r"0", ("nvlink",), "ranks"),
    ("NCCL_P2P_DISABLE", r"1", ("nvlink",), ""),
    ("NCCL_CUMEM_ENABLE", r"0", ("nvlink",), "ranks"),
    ("UCX_CUDA_IPC_ENABLE_MNNVL", r"n|no|0", ("nvlink",), "KV"),
    ("UCX_PROTO_ENABLE", r"n|no|0", ("nvlink", "rdma"), ""),
    ("NCCL_IB_DISABLE", r"1", ("rdma",), "ranks"),
    ("UCX_MODULE_DIR", r".*", ("nvlink", "rdma", "tcp"), ""),
    ("LD_LIBRARY_PATH", r".*ucx.*", ("nvlink", "rdma", "tcp"), ""),
)


def check_arguments(fleet: Fleet) -> None:
    """Names and values of `args` against the argument parser of the image's vLLM."""
    record = arguments.record(fleet.vllm_version)
    if record is None:
        what = f"vLLM {fleet.vllm_version} has no record; there are {', '.join(arguments.records())}"
        fleet.report(rules.ARGUMENTS_NOT_RECORDED, what, ("fleet_image_variant",))
        return
    for pool, sizes in fleet.pools.items():
        for name, rule, what, remedy in _findings(record, sizes.args):
            path: Path = ("fleet_pools", pool, "args", name)
            fleet.report(rule, what, path, value=sizes.args[name], remedy=remedy)
    for host in fleet.hosts.values():
        for pool, override in host.vars.pool_overrides.items():
            for name, rule, what, remedy in _findings(record, override.args):
                path = ("fleet_pool_overrides", pool, "args", name)
                value, source = override.args[name], host.raw["fleet_pool_overrides"]
                fleet.problems.add(
                    rule, what, path=path, value=value, host=host.name, source=source, remedy=remedy
                )


def _findings(
    record: arguments.Record, args: Mapping[str, Any]
) -> Iterator[tuple[str, Rule, str, str | None]]:
    """What is wrong with arguments whose plain spelling is not owned: name, rule, what, remedy."""
    for name, value in args.items():
        if is_owned(name):
            continue  # reported where the inventory was read
        meant = arguments.canonical_name(record, name)
        if is_owned(meant):
            yield name, rules.OWNED_ARGUMENT, f"another spelling of {meant}, which the plan derives", None
        elif finding := arguments.check_argument(record, name, value):
            yield name, OF_ARGUMENT[finding.kind], finding.what, finding.remedy


def report(fleet: Fleet, rule: Rule, what: str, engine: Engine, section: str, name: str, value: Any) -> None:
    """Report an argument or a variable where the operator wrote it: in the host's override or in the pool."""
    host = fleet.hosts[engine.head]
    override = host.vars.pool_overrides.get(engine.pool)
    for sizes, top in ((override, "fleet_pool_overrides"), (fleet.pools[engine.pool], "fleet_pools")):
        for key in getattr(sizes, section, ()):
            if (section == "args" and next(iter(placement.arguments({key: None}))) != name) or (
                section == "env" and key != name
            ):
                continue
            path: Path = (top, engine.pool, section, key)
            if top == "fleet_pools":
                fleet.report(rule, what, path, value=value)
            else:
                fleet.problems.add(rule, what, path=path, value=value, host=host.name, source=host.raw[top])
            return
    fleet.report(rule, what, ("fleet_pools", engine.pool), value=value)


def check_settings(fleet: Fleet, engine: Engine, links: Nvlink) -> None:
    """Arguments that this engine cannot have, with its role, shape and transport."""
    args = engine.args
    if engine.expert_parallel and fleet.vars.accelerator == "cpu":
        path = ("fleet_pools", engine.pool, "enable_expert_parallel")
        fleet.report(rules.EXPERT_PARALLEL_CPU, "the accelerator is cpu", path, value=True)
    found = [*_experts(fleet, engine)]
    if fleet.vars.profile == "rl" and str(args.get("api_server_count", 1)) != "1":
        found.append((rules.ONE_API_SERVER, "api_server_count", "fleet_profile is rl"))
    if engine.role in KV_ROLES:
        found += [*_transfer(engine, links), *_sleep(fleet, engine)]
    for rule, name, what in found:
        report(fleet, rule, what, engine, "args", name, args.get(name))


def _experts(fleet: Fleet, engine: Engine) -> Iterator[tuple[Rule, str, str]]:
    args = engine.args
    if str(args.get("prefill_context_parallel_size", 1)) != "1":
        what = "the plan has no GPUs for more"
        yield rules.CONTEXT_PARALLEL, "prefill_context_parallel_size", what
    backend = str(args.get("all2all_backend", ""))
    if backend.startswith("flashinfer_") and engine.spans and fleet.vars.kv_transport != "nvlink":
        what = f"the engine spans hosts, and fleet_kv_transport is {fleet.vars.kv_transport}"
        yield rules.ALL2ALL_BACKEND, "all2all_backend", what
    if args.get("enable_eplb"):
        for wrong, what in (
            (not engine.expert_parallel, "the pool has no enable_expert_parallel"),
            (engine.shape.gpus // engine.shape.pp == 1, "the engine has one GPU"),
            (fleet.vars.accelerator == "cpu", "the accelerator is cpu"),
        ):
            if wrong:
                yield rules.EPLB, "enable_eplb", what
    if backend.startswith(OTHER_ALL2ALL):
        yield rules.ALL2ALL_BACKEND, "all2all_backend", "no wheel of the image has its kernels"


def _transfer(engine: Engine, links: Nvlink) -> Iterator[tuple[Rule, str, str]]:
    args, tp = engine.args, engine.shape.tp
    if args.get("enable_return_routed_experts"):
        yield rules.ROUTED_EXPERTS, "enable_return_routed_experts", f"the engine is a {engine.role}"
    if str(args.get("decode_context_parallel_size", 1)) not in ("1", str(tp)):
        yield rules.CONTEXT_PARALLEL, "decode_context_parallel_size", f"the tensor-parallel size is {tp}"
    if links.over_hosts and not has_fabric_memory(engine, over_hosts=True):
        yield rules.NVLINK_ALLOCATOR, ALLOCATOR, "it is switched off"


def _sleep(fleet: Fleet, engine: Engine) -> Iterator[tuple[Rule, str, str]]:
    if not engine.args.get("enable_sleep_mode"):
        return
    if fleet.vars.kv_transport == "nvlink" and fleet.kv_mapping == "cached":
        yield rules.SLEEP_MAPPING, "enable_sleep_mode", "fleet_kv_mapping is cached"
    if _older(fleet.vllm_version, (0, 33)):
        yield rules.SLEEP_VERSION, "enable_sleep_mode", f"the image has vLLM {fleet.vllm_version}"


def check_mapping(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """KV that is mapped for each transfer, for nothing."""
    v = fleet.vars
    asleep = any(engine.args.get("enable_sleep_mode") for engine in engines if engine.role in KV_ROLES)
    if (
        v.kv_mapping == "per_transfer"
        and v.kv_transport == "nvlink"
        and not asleep
        and not _older(fleet.vllm_version, (0, 33))
    ):
        what = f"no engine has sleep mode, and the image has vLLM {fleet.vllm_version}"
        fleet.report(rules.MAPPING_AWAKE, what, ("fleet_kv_mapping",), value=v.kv_mapping)


def _older(version: str, than: tuple[int, int]) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) < than


def check_environment(fleet: Fleet, engine: Engine, links: Nvlink) -> None:
    """Variables of the operator against transport and allocator, and secrets in plain text."""
    v = fleet.vars

    def refuse(rule: Rule, what: str, name: str) -> None:
        report(fleet, rule, what, engine, "env", name, engine.env[name])

    transfers = engine.role in KV_ROLES
    concerned = {
        "": transfers or engine.spans,
        "ranks": engine.spans,
        "KV": transfers and links.over_hosts,
    }
    for name, pattern, transports, between_hosts in CONTRADICTIONS:
        value = engine.env.get(name)
        if (
            value is not None
            and v.kv_transport in transports
            and concerned[between_hosts]
            and re.fullmatch(pattern, value, re.IGNORECASE)
        ):
            refuse(rules.TRANSPORT_ENVIRONMENT, f"fleet_kv_transport is {v.kv_transport}", name)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        segments = "expandable_segments:true" in engine.env.get(name, "").replace(" ", "").lower()
        if segments and transfers and not has_fabric_memory(engine, over_hosts=links.over_hosts):
            refuse(rules.EXPANDABLE_SEGMENTS, f"the engine is a {engine.role}", name)
    for name, value in profile.ENVIRONMENT[v.profile].items():
        if engine.env.get(name, value) != value:
            refuse(rules.OWNED_ENVIRONMENT, f"fleet_profile {v.profile} sets it to {value}", name)
    _check_secrets(fleet, engine)


def _check_secrets(fleet: Fleet, engine: Engine) -> None:
    """A literal in a file of the inventory; vaulted values and those of a template or a lookup are none."""
    for name in engine.env:
        if not SECRET_NAME.search(name) or name.endswith(("_PATH", "_FILE")) or name in OWNED_ENV:
            continue
        host = fleet.hosts[engine.head]
        for raw in (host.raw.get("fleet_pool_overrides"), fleet.raw.get("fleet_pools")):
            path = (engine.pool, "env", name)
            value = _at(raw, path)
            if value is None:
                continue
            if isinstance(value, str) and value and origin_at(value, ()) and not is_vaulted(raw, path):
                report(
                    fleet, rules.PLAIN_SECRET, "it is written there in plain text", engine, "env", name, value
                )
            break


def _at(value: Any, path: Path) -> Any:
    for step in path:
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    return value
