"""What must hold between values of an inventory: roles, hosts, pairs of engines, transport, ports, names.

Linear in hosts: engines that are alike in what a check looks at are looked at once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_fleet import arguments, model, placement, rules
from vllm_fleet.inventory import (
    OWNED_ENV,
    REGISTRY_GROUP,
    ROLES,
    ROUTER_GROUP,
    Fleet,
    IPAddress,
    is_owned,
    usable_address,
)
from vllm_fleet.placement import GPUS, Engine, Served
from vllm_fleet.problems import Path, Rule, is_vaulted, origin_at, plain, shown
from vllm_fleet.settings import CPU_DTYPE, KV_ROLES

PLAN_GROUPS = ("fleet_engines", "fleet_router", "fleet_registry", "fleet_image_builder")
LOWEST_PORT = 1024
FEWEST_EPHEMERAL = 1000
LONGEST_NAME = 180
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)($|_)", re.IGNORECASE
)
ROUTER_POLICIES = (
    "random",
    "round_robin",
    "cache_aware",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
)
SOCKET_ENV = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
CHANGE_SIZES = {
    "quantization",
    "hf_overrides",
    "cpu_offload_gb",
    "kv_cache_memory_bytes",
    "decode_context_parallel_size",
    "load_format",
}
"""Arguments with which the estimate of memory does not hold."""
IN_HANDSHAKE = (
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "disable_hybrid_kv_cache_manager",
    "speculative_config",
)
"""Arguments that NIXL's compatibility hash follows from, besides the model's (vLLM 0.32.0)."""
WITH_DRAFT_KV = ("eagle", "eagle3", "mtp", "dflash", "dspark")
SYNONYMS = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}
HANDSHAKE_DEFAULTS = {"dtype": "auto", "kv_cache_dtype": "auto", "disable_hybrid_kv_cache_manager": False}
IN_HANDSHAKE_ENV = ("VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT")
OF_ARGUMENT = {
    "unknown": rules.UNKNOWN_ARGUMENT,
    "value": rules.ARGUMENT_VALUE,
    "abbreviated": rules.DEPRECATED_ARGUMENT,
    "deprecated": rules.DEPRECATED_ARGUMENT,
}
OTHER_ALL2ALL = ("deepep", "mori", "moonep")
CONTRADICTIONS: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    # variable, values (a pattern), transports that it contradicts, only for engines over several hosts
    ("NCCL_MNNVL_ENABLE", r"0", ("nvlink",), True),
    ("NCCL_P2P_DISABLE", r"1", ("nvlink",), False),
    ("NCCL_CUMEM_ENABLE", r"0", ("nvlink",), True),
    ("UCX_CUDA_IPC_ENABLE_MNNVL", r"n|no|0", ("nvlink",), False),
    ("UCX_PROTO_ENABLE", r"n|no|0", ("nvlink", "rdma"), False),
    ("NCCL_IB_DISABLE", r"1", ("rdma",), True),
    ("UCX_MODULE_DIR", r".*", ("nvlink", "rdma", "tcp"), False),
    ("LD_LIBRARY_PATH", r".*ucx.*", ("nvlink", "rdma", "tcp"), False),
)


def check_all(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """Judge what needs more than one value; problems go to `fleet.problems`."""
    _check_addresses(fleet)
    _check_names(fleet, engines)
    _check_ports(fleet, engines)
    _check_external(fleet, engines)
    _check_router(fleet)
    _check_arguments(fleet)
    kinds = list(_kinds(fleet, engines))
    for engine in kinds:
        _check_settings(fleet, engine)
        _check_environment(fleet, engine)
        _check_model(fleet, engine)
    _check_interfaces(fleet, engines)
    _check_racks(fleet, engines)
    _check_tensor_parallel(fleet, engines)
    _check_pairs(fleet, kinds)


def _check_arguments(fleet: Fleet) -> None:
    """Names and values of `args` against the argument parser of the image's vLLM."""
    record = arguments.record(fleet.vllm_version)
    if record is None:
        what = f"vLLM {fleet.vllm_version} has no record; there are {', '.join(arguments.records())}"
        fleet.report(rules.ARGUMENTS_NOT_RECORDED, what, ("fleet_image_variant",))
        return
    for pool, sizes in fleet.pools.items():
        for name, finding in _findings(record, sizes.args):
            path: Path = ("fleet_pools", pool, "args", name)
            rule, value = OF_ARGUMENT[finding.kind], sizes.args[name]
            fleet.report(rule, finding.what, path, value=value, remedy=finding.remedy)
    for host in fleet.hosts.values():
        for pool, override in host.vars.pool_overrides.items():
            for name, finding in _findings(record, override.args):
                path = ("fleet_pool_overrides", pool, "args", name)
                fleet.problems.add(
                    OF_ARGUMENT[finding.kind],
                    finding.what,
                    path=path,
                    value=override.args[name],
                    host=host.name,
                    source=host.raw[path[0]],
                    remedy=finding.remedy,
                )


def _findings(record: arguments.Record, args: Mapping[str, Any]) -> Iterator[tuple[str, arguments.Finding]]:
    """What is wrong with arguments that are the operator's to set; the others have been reported."""
    for name, value in args.items():
        if not is_owned(name) and (finding := arguments.check_argument(record, name, value)):
            yield name, finding


def _kinds(fleet: Fleet, engines: Iterable[Engine]) -> Iterator[Engine]:
    """One engine for all that have the same pool, shape, arguments, environment and memory."""
    seen: set[tuple[Any, ...]] = set()
    for engine in engines:
        key = engine.pool, engine.shape, id(engine.args), id(engine.env), _gpu_memory(fleet, engine)
        if key not in seen:
            seen.add(key)
            yield engine


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
    if v.image_variant and (v.image_variant == "cpu") != (v.accelerator == "cpu"):
        what = f"fleet_accelerator is {v.accelerator}"
        fleet.report(rules.OTHER_VARIANT, what, ("fleet_image_variant",), value=v.image_variant)
    if v.accelerator == "cpu" and v.kv_transport != "tcp":
        fleet.report(rules.NEEDS_GPU, "the accelerator is cpu", ("fleet_kv_transport",), value=v.kv_transport)
    _check_hosts(fleet)


def _check_groups(fleet: Fleet) -> None:
    for group, rule in ((ROUTER_GROUP, rules.ROUTER_GROUP), (REGISTRY_GROUP, rules.REGISTRY_GROUP)):
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
    if bool(prefill) != bool(decode) and not by_role["?"]:
        present, absent = ("prefill", "decode") if prefill else ("decode", "prefill")
        what = f"there is a {present} pool but no {absent} pool"
        fleet.report(rules.ONE_ROLE_ONLY, what, ("fleet_pools",))


# --- one engine -----------------------------------------------------------------------------------


def _report(fleet: Fleet, rule: Rule, what: str, engine: Engine, section: str, name: str, value: Any) -> None:
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


def _check_settings(fleet: Fleet, engine: Engine) -> None:
    """Arguments that this engine cannot have, with its role, shape and transport."""
    args = engine.args
    if engine.expert_parallel and fleet.vars.accelerator == "cpu":
        path = ("fleet_pools", engine.pool, "enable_expert_parallel")
        fleet.report(rules.EXPERT_PARALLEL_CPU, "the accelerator is cpu", path, value=True)
    found = [*_experts(fleet, engine)]
    if engine.role in KV_ROLES:
        found += [*_transfer(fleet, engine), *_sleep(fleet, engine)]
    for rule, name, what in found:
        _report(fleet, rule, what, engine, "args", name, args.get(name))


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


def _transfer(fleet: Fleet, engine: Engine) -> Iterator[tuple[Rule, str, str]]:
    args, tp = engine.args, engine.shape.tp
    if args.get("enable_return_routed_experts"):
        yield rules.ROUTED_EXPERTS, "enable_return_routed_experts", f"the engine is a {engine.role}"
    if str(args.get("decode_context_parallel_size", 1)) not in ("1", str(tp)):
        yield rules.CONTEXT_PARALLEL, "decode_context_parallel_size", f"the tensor-parallel size is {tp}"
    exportable = args.get("enable_cumem_allocator") is not False or args.get("enable_sleep_mode")
    if fleet.vars.kv_transport == "nvlink" and not exportable:
        yield rules.NVLINK_ALLOCATOR, "enable_cumem_allocator", "it is switched off"


def _sleep(fleet: Fleet, engine: Engine) -> Iterator[tuple[Rule, str, str]]:
    if not engine.args.get("enable_sleep_mode"):
        return
    if fleet.vars.kv_transport == "nvlink" and fleet.vars.kv_mapping == "cached":
        yield rules.SLEEP_MAPPING, "enable_sleep_mode", "fleet_kv_mapping is cached"
    if _older(fleet.vllm_version, (0, 33)):
        yield rules.SLEEP_VERSION, "enable_sleep_mode", f"the image has vLLM {fleet.vllm_version}"


def _older(version: str, than: tuple[int, int]) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) < than


def _check_environment(fleet: Fleet, engine: Engine) -> None:
    v = fleet.vars

    def refuse(rule: Rule, what: str, name: str) -> None:
        _report(fleet, rule, what, engine, "env", name, engine.env[name])

    for name, pattern, transports, only_over_hosts in CONTRADICTIONS:
        value = engine.env.get(name)
        if (
            value is not None
            and v.kv_transport in transports
            and (engine.spans or not only_over_hosts)
            and (engine.spans or engine.role in KV_ROLES)
            and re.fullmatch(pattern, value, re.IGNORECASE)
        ):
            refuse(rules.TRANSPORT_ENVIRONMENT, f"fleet_kv_transport is {v.kv_transport}", name)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        segments = "expandable_segments:true" in engine.env.get(name, "").replace(" ", "").lower()
        cumem = v.kv_transport == "nvlink" and engine.args.get("enable_cumem_allocator") is not False
        cumem |= bool(engine.args.get("enable_cumem_allocator") or engine.args.get("enable_sleep_mode"))
        if segments and engine.role in KV_ROLES and not cumem:
            refuse(rules.EXPANDABLE_SEGMENTS, f"the engine is a {engine.role}", name)
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
                _report(
                    fleet, rules.PLAIN_SECRET, "it is written there in plain text", engine, "env", name, value
                )
            break


def _at(value: Any, path: Path) -> Any:
    for step in path:
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    return value


# --- the model ------------------------------------------------------------------------------------


def _check_model(fleet: Fleet, engine: Engine) -> None:
    """What the model's config.json says against the engine's shape, and whether it fits on its GPUs."""
    config, shape, args = fleet.vars.model.config, engine.shape, engine.args
    if config is None:
        return
    split: dict[str, Any] = {
        "tp": shape.tp,
        "pp": shape.pp,
        "dp": shape.dp,
        "expert_parallel": engine.expert_parallel,
        "eplb_redundant": _eplb_redundant(args),
    }
    path = ("fleet_pools", engine.pool)
    for finding in model.parallel_findings(config, **split):
        fleet.report(rules.OF_MODEL[finding.kind], f"{engine.name}: {finding.what}", path)
    memory = _gpu_memory(fleet, engine)
    utilization = args.get("gpu_memory_utilization", model.DEFAULT_UTILIZATION)
    length = args.get("max_model_len")
    # vLLM may fit the length itself, and of other settings the estimate knows nothing.
    known = length is None or (isinstance(length, int) and length > 0)
    if (
        not memory
        or not known
        or not isinstance(utilization, float | int)
        or not CHANGE_SIZES.isdisjoint(args)
    ):
        return
    estimate = model.memory_estimate(
        config,
        gpu_bytes=int(memory * model.GIB),
        max_model_len=length,
        kv_dtype=_text(args.get("kv_cache_dtype")),
        dtype=_text(args.get("dtype")),
        gpu_memory_utilization=float(utilization),
        **split,
    )
    if estimate and not estimate.fits:
        fleet.report(rules.MEMORY, f"{engine.name} needs on one GPU: {estimate.sentence}", path)


def _gpu_memory(fleet: Fleet, engine: Engine) -> float:
    """GiB of the smallest GPU of the engine; 0 where it is not known."""
    return min(fleet.hosts[host].vars.gpu_memory_gib or 0 for host in engine.hosts)


def _check_model_pair(fleet: Fleet, prefill: Engine, decode: Engine) -> None:
    config = fleet.vars.model.config
    if config is None:
        return
    for finding in model.transfer_findings(
        config,
        prefill_tp=prefill.shape.tp,
        decode_tp=decode.shape.tp,
        prefill_pp=prefill.shape.pp,
        kv_dtype=_text(decode.args.get("kv_cache_dtype")),
    ):
        what = f"{prefill.name} -> {decode.name}: {finding.what}"
        fleet.report(rules.OF_MODEL[finding.kind], what, ("fleet_pools", prefill.pool))


def _eplb_redundant(args: Mapping[str, Any]) -> int | None:
    """num_redundant_experts, written as a key of eplb_config or behind a dot; None where EPLB is off."""
    if not args.get("enable_eplb"):
        return None
    config = args.get("eplb_config")
    value = args.get("eplb_config.num_redundant_experts")
    value = config.get("num_redundant_experts") if value is None and isinstance(config, Mapping) else value
    return value if isinstance(value, int) else 0


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


# --- pairs of engines -----------------------------------------------------------------------------


def _check_tensor_parallel(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """The ranks of a prefill and of a decode must map onto each other."""
    sizes: dict[str, dict[int, Served]] = {"prefill": {}, "decode": {}, "mixed": {}}
    for engine in placement.served(engines, fleet.vars.external_engines):
        sizes[engine.role].setdefault(engine.tp, engine)
    for prefill in sizes["prefill"].values():
        for decode in sizes["decode"].values():
            if prefill.tp == decode.tp:
                continue
            fleet.report(
                rules.TP_DIFFERS
                if max(prefill.tp, decode.tp) % min(prefill.tp, decode.tp) == 0
                else rules.TP_RATIO,
                f"{prefill.name} has tensor_parallel_size {prefill.tp}, {decode.name} has {decode.tp}",
                decode.path,
                value=decode.tp,
            )


def _check_pairs(fleet: Fleet, kinds: Sequence[Engine]) -> None:
    """What the handshake of a prefill and a decode compares; kinds that agree are one."""
    sides: dict[str, dict[tuple[Any, ...], Engine]] = {"prefill": {}, "decode": {}}
    for engine in kinds:
        if engine.role in sides:
            settings = [engine.args.get(name) for name in (*IN_HANDSHAKE, "block_size", "max_model_len")]
            settings += [engine.env.get(name) for name in IN_HANDSHAKE_ENV]
            sides[engine.role].setdefault((engine.shape.tp, engine.shape.pp, *map(repr, settings)), engine)
    for prefill in sides["prefill"].values():
        for decode in sides["decode"].values():
            _check_pair(fleet, prefill, decode)


def _check_pair(fleet: Fleet, prefill: Engine, decode: Engine) -> None:
    def refuse(rule: Rule, name: str, section: str = "args") -> None:
        values = [getattr(engine, section).get(name) for engine in (prefill, decode)]
        wrong, value = (decode, values[1]) if values[1] is not None else (prefill, values[0])
        # Values of the environment may be secrets, and an argument may be long.
        said = ["none" if v is None else "another" if section == "env" else shown(plain(v)) for v in values]
        what = f"{name}: {prefill.name} has {said[0]}, {decode.name} has {said[1]}"
        _report(fleet, rule, what, wrong, section, name, value)

    cpu = fleet.vars.accelerator == "cpu"
    for name in IN_HANDSHAKE:
        if _hashed(prefill, name, cpu=cpu) != _hashed(decode, name, cpu=cpu):
            refuse(rules.HANDSHAKE, name)
    for name in IN_HANDSHAKE_ENV:
        if prefill.env.get(name) != decode.env.get(name):
            refuse(rules.HANDSHAKE, name, "env")
    p, d = prefill.args.get("block_size"), decode.args.get("block_size")
    if p != d and not (
        isinstance(p, int)
        and isinstance(d, int)
        and p > 0
        and d % p == 0
        and prefill.shape.tp <= decode.shape.tp
    ):
        refuse(rules.BLOCK_SIZE, "block_size")
    _check_model_pair(fleet, prefill, decode)
    p, d = prefill.args.get("max_model_len"), decode.args.get("max_model_len")
    if isinstance(d, int) and isinstance(p, int) and 0 < d < p:
        refuse(rules.SHORTER_DECODE, "max_model_len")


def _hashed(engine: Engine, name: str, *, cpu: bool) -> Any:
    """What the handshake compares of an argument: its meaning, not its spelling."""
    if name == "speculative_config":
        return _speculative(engine.args)
    value = engine.args.get(name, CPU_DTYPE if cpu and name == "dtype" else HANDSHAKE_DEFAULTS.get(name))
    return SYNONYMS.get(value, value) if isinstance(value, str) else value


def _speculative(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is compared of speculative decoding: nothing for methods that keep no KV of their own."""
    config = args.get("speculative_config")
    config = dict(config) if isinstance(config, Mapping) else {}
    config |= {
        key.partition(".")[2]: value for key, value in args.items() if key.startswith("speculative_config.")
    }
    if config.get("method") not in WITH_DRAFT_KV:
        return None
    return {key: config.get(key) for key in ("method", "model", "revision")}


# --- hosts, names, ports --------------------------------------------------------------------------


def _check_interfaces(fleet: Fleet, engines: Sequence[Engine]) -> None:
    wanting = (host for e in engines if e.spans and SOCKET_ENV.isdisjoint(e.env) for host in e.hosts)
    for host in dict.fromkeys(wanting):
        if not fleet.hosts[host].socket_ifname(fleet.vars.kv_transport):
            what = "not set; an engine spans this host and others"
            fleet.problems.add(rules.SOCKET_INTERFACE, what, path=("fleet_socket_ifname",), host=host)


def _check_racks(fleet: Fleet, engines: Sequence[Engine]) -> None:
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


def _check_external(fleet: Fleet, engines: Sequence[Engine]) -> None:
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


def _check_router(fleet: Fleet) -> None:
    for key, value in fleet.vars.router_args.items():
        name = key.replace("-", "_")
        if name in ("policy", "prefill_policy", "decode_policy") and value not in ROUTER_POLICIES:
            what = "it needs KV events" if value == "kv_aware" else "no such policy"
            fleet.report(rules.ROUTER_POLICY, what, ("fleet_router_args", key), value=value)


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


def _check_names(fleet: Fleet, engines: Sequence[Engine]) -> None:
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


def _check_ports(fleet: Fleet, engines: Sequence[Engine]) -> None:
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
