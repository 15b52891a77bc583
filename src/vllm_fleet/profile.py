"""What `fleet_profile: rl` means: engines that a trainer can attach to, and a router for long generations.

Sources: vime's check of external engines (it reads /server_info and compares what it started nothing of
itself with its own arguments), vLLM 0.32.0 and 0.33.0, vllm-router 0.1.17.
"""

from __future__ import annotations

from typing import Any, Literal

type Profile = Literal["serving", "rl"]

DEV_MODE = "VLLM_SERVER_DEV_MODE"
"""Opens /sleep, /pause, /update_weights, /collective_rpc, /server_info and the like, without any key."""
ENVIRONMENT: dict[Profile, dict[str, str]] = {"serving": {}, "rl": {DEV_MODE: "1"}}
"""What engines of a profile have besides; not the operator's to change."""
REQUEST_TIMEOUTS: dict[Profile, int] = {"serving": 1800, "rl": 14400}
"""Seconds. A rollout of a long chain of thought takes hours; vime waits 14,400 s."""
KV_MAPPINGS: dict[Profile, Literal["cached", "per_transfer"]] = {"serving": "cached", "rl": "per_transfer"}
"""A prefill that sleeps while a decode maps its memory frees nothing (measured on 2x H200)."""
MOST_API_SERVERS: dict[Profile, int] = {"serving": 4, "rl": 1}
"""Of an engine with data-parallel ranks. One of its servers takes a call to /abort_requests, and ends its own
requests alone (vLLM 0.32.0 and 0.33.0, entrypoints/rl/online/api_router.py)."""
ROUTER_FLAGS: dict[Profile, dict[str, Any]] = {
    "serving": {
        # Only this loop takes a dead engine out (the circuit breaker does not, for prefill and decode):
        # 10 s instead of the default's 3 minutes of errors.
        "health_check_interval_secs": 5,
        "health_failure_threshold": 2,
    },
    "rl": {
        # An engine that syncs weights or is full of long generations answers /health late and is not dead.
        "health_check_interval_secs": 10,
        "health_check_timeout_secs": 30,
        "health_failure_threshold": 3,
        # Answers of a paused or aborted engine are no failures of it.
        "disable_circuit_breaker": True,
    },
}
"""Where the router's flags follow from the profile; `fleet_router_args` still wins."""


def arguments(profile: Profile, accelerator: str) -> dict[str, Any]:
    """Arguments of `vllm serve` that a pool has unless its `args` say otherwise.

    Args:
        profile: the fleet's.
        accelerator: cuda or cpu; sleep mode exists on cuda alone.

    """
    if profile == "serving":
        return {}
    found: dict[str, Any] = {
        # /inference/v1/generate takes and gives tokens.
        "enable_scale_out": True,
        "weight_transfer_config": {"backend": "nccl"},
    }
    if accelerator == "cuda":
        found["enable_sleep_mode"] = True
    return found
