"""The command line of vllm-router 0.1.17, with every setting that matters written out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm_fleet.profile import ROUTER_FLAGS

LOOPBACK = "127.0.0.1"


def router_arguments(plan: Mapping[str, Any], slot: str) -> list[str]:
    """Arguments of the router in slot `a` or `b`, without the program's name.

    Raises:
        KeyError: the plan has no such slot.

    """
    router = plan["router"]
    ports = router["slots"][slot]
    flags: dict[str, Any] = {
        # Clients reach the front; a router on a public port would bypass its path allowlist.
        "host": LOOPBACK,
        "port": ports["port"],
        # Two routers with one metrics port: the second dies at start.
        "prometheus_host": LOOPBACK,
        "prometheus_port": ports["metrics_port"],
        # Every engine was found healthy before the router starts, so a long wait would only hide a fault.
        "worker_startup_timeout_secs": 60,
        "worker_startup_check_interval": 1,
        # It cuts streams as well: as long as the longest generation.
        "request_timeout_secs": plan["timeouts"]["request"],
        **ROUTER_FLAGS[plan["profile"]],
        "health_success_threshold": 1,
        # Loads all engines alike and keeps no state, so a change to the other slot forgets nothing.
        "policy": "round_robin",
        # At info some policies log every request.
        "log_level": "warning",
    } | router["args"]
    argv = [word for name, value in flags.items() for word in _words(name, value)]
    if plan["mode"] == "pd":
        argv += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        argv += [
            word for role in ("prefill", "decode") for url in router[role] for word in (f"--{role}", url)
        ]
    else:
        argv += ["--worker-urls", *router["workers"]]
    return argv


def engine_url(worker: str) -> str:
    """The URL of the engine that a router's worker belongs to: it lists data-parallel ranks as URL@RANK."""
    return re.sub(r"@\d+$", "", worker)


def _words(name: str, value: Any) -> list[str]:
    """`true` is a bare flag, `false` leaves it out, anything else is its value."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]
