"""The model's config.json against the shapes of engines and of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_fleet import model, rules
from vllm_fleet.inventory import Fleet
from vllm_fleet.placement import Engine
from vllm_fleet.problems import Rule

CHANGE_SIZES = {
    "quantization",
    "hf_overrides",
    "cpu_offload_gb",
    "kv_cache_memory_bytes",
    "decode_context_parallel_size",
    "load_format",
}
"""Arguments with which the estimate of memory does not hold."""


def report_shape(fleet: Fleet, rule: Rule, what: str, engine: Engine) -> None:
    """Report a shape where it is decided: in the host's override of the pool, or in the pool."""
    host = fleet.hosts[engine.head]
    if engine.pool in host.vars.pool_overrides:
        path, source = ("fleet_pool_overrides", engine.pool), host.raw["fleet_pool_overrides"]
        fleet.problems.add(rule, what, path=path, host=host.name, source=source)
    else:
        fleet.report(rule, what, ("fleet_pools", engine.pool))


def check_model(fleet: Fleet, engine: Engine) -> None:
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
    for finding in model.parallel_findings(config, **split):
        report_shape(fleet, rules.OF_MODEL[finding.kind], f"{engine.name}: {finding.what}", engine)
    memory = gpu_memory(fleet, engine)
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
        report_shape(fleet, rules.MEMORY, f"{engine.name} needs on one GPU: {estimate.sentence}", engine)


def gpu_memory(fleet: Fleet, engine: Engine) -> float:
    """GiB of the smallest GPU of the engine; 0 where it is not known."""
    return min(fleet.hosts[host].vars.gpu_memory_gib or 0 for host in engine.hosts)


def check_model_pair(fleet: Fleet, prefill: Engine, decode: Engine) -> None:
    """What NIXL refuses between the two because of the model."""
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
        report_shape(fleet, rules.OF_MODEL[finding.kind], what, prefill)


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
