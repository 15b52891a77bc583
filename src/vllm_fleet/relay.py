"""The command line of pd-relay (images/pd-relay), and who may control it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_fleet.profile import ROUTER_FLAGS

HEALTH = {
    "health_check_interval_secs": "health-interval",
    "health_check_timeout_secs": "health-timeout",
    "health_failure_threshold": "health-failures",
}
"""Flags of the router that the relay has as well: both watch the engines alike."""


def relay_arguments(plan: Mapping[str, Any], host: str) -> list[str]:
    """Arguments of the relay on a host, without the program's name.

    Raises:
        KeyError: the plan has no relay there.

    """
    if host not in relay_hosts(plan):
        raise KeyError(f"relay on {host}")
    flags: dict[str, Any] = {
        "host": plan["hosts"][host]["address"],
        "port": plan["relay"]["port"],
        "request-timeout": plan["timeouts"]["request"],
        "control-timeout": plan["timeouts"]["control"],
    }
    watched = ROUTER_FLAGS[plan["profile"]]
    flags |= {name: watched[flag] for flag, name in HEALTH.items() if flag in watched}
    argv = [f"--{name}={value}" for name, value in flags.items()]
    argv += [f"--{role}={url}" for role in ("prefill", "decode") for url in plan["router"][role]]
    return [*argv, "--controllers", *plan["router"]["control_sources"]]


def relay_hosts(plan: Mapping[str, Any]) -> list[str]:
    """Where relays run; nowhere, unless the inventory has the group."""
    return list(plan["relay"]["urls"]) if plan["relay"] else []
