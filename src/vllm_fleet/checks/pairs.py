"""What the NIXL handshake of a prefill and a decode would refuse at their first request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_fleet import placement, rules
from vllm_fleet.checks.engines import report
from vllm_fleet.checks.models import check_model_pair
from vllm_fleet.inventory import OWNED_ENV, Fleet
from vllm_fleet.placement import Engine, Served
from vllm_fleet.problems import Rule, plain, shown
from vllm_fleet.settings import CPU_DTYPE

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
UCX_OF_LOGS = ("UCX_LOG_", "UCX_PROTO_INFO")
IN_HANDSHAKE_ENV = ("VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT")


def check_tensor_parallel(fleet: Fleet, engines: Sequence[Engine]) -> None:
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


def check_pairs(fleet: Fleet, kinds: Sequence[Engine]) -> None:
    """What the handshake of a prefill and a decode compares; kinds that agree are one."""
    sides: dict[str, dict[tuple[Any, ...], Engine]] = {"prefill": {}, "decode": {}}
    for engine in kinds:
        if engine.role in sides:
            settings = [engine.args.get(name) for name in (*IN_HANDSHAKE, "block_size", "max_model_len")]
            settings += [engine.env.get(name) for name in IN_HANDSHAKE_ENV]
            settings.append(sorted(_ucx(engine)))
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
        report(fleet, rule, what, wrong, section, name, value)

    cpu = fleet.vars.accelerator == "cpu"
    for name in IN_HANDSHAKE:
        if _hashed(prefill, name, cpu=cpu) != _hashed(decode, name, cpu=cpu):
            refuse(rules.HANDSHAKE, name)
    for name in IN_HANDSHAKE_ENV:
        if prefill.env.get(name) != decode.env.get(name):
            refuse(rules.HANDSHAKE, name, "env")
    for name in sorted({name for name, _ in _ucx(prefill) ^ _ucx(decode)}):
        refuse(rules.UCX_EQUAL, name, "env")
    p, d = prefill.args.get("block_size"), decode.args.get("block_size")
    if p != d and not (
        isinstance(p, int)
        and isinstance(d, int)
        and p > 0
        and d % p == 0
        and prefill.shape.tp <= decode.shape.tp
    ):
        refuse(rules.BLOCK_SIZE, "block_size")
    check_model_pair(fleet, prefill, decode)
    p, d = prefill.args.get("max_model_len"), decode.args.get("max_model_len")
    if isinstance(d, int) and isinstance(p, int) and 0 < d < p:
        refuse(rules.SHORTER_DECODE, "max_model_len")


def _ucx(engine: Engine) -> set[tuple[str, str]]:
    """The operator's UCX variables that decide how memory moves; a log may be wanted of one side alone."""
    return {
        (name, value)
        for name, value in engine.env.items()
        if name.startswith("UCX_") and not name.startswith(UCX_OF_LOGS) and name not in OWNED_ENV
    }


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
