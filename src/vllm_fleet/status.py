"""The fleet at a glance: what is declared, registered, running and known to the router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fleet.registration import compare_registrations, registered_engines, stale_engines

HEADINGS = ("engine", "host", "TP", "registered", "unit", "health", "router")


def status_rows(
    plan: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]], workers: Iterable[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """One row an engine: the declared ones in plan order, then those that only their host knows.

    Args:
        plan: the plan.
        hosts: host -> what playbooks/status.yml learned there: `local` (its local facts), `units` (engine ->
            words of `systemctl show`: state, substate, restarts) and `health` (engine -> what /health said).
        workers: what the router's /workers lists; empty where no router answers.

    """
    facts = {host: learned["local"] for host, learned in hosts.items()}
    router = {worker["url"]: "healthy" if worker["is_healthy"] else "unhealthy" for worker in workers}
    registered = registered_engines(facts)
    rows = []
    for engine in plan["engines"]:
        place = engine["head"], engine["name"]
        learned = hosts.get(engine["head"], {"units": {}, "health": {}})
        differs = compare_registrations({**plan, "engines": [engine]}, facts)
        rows.append(
            {
                "engine": engine["name"],
                "host": engine["head"],
                "TP": str(engine["tensor_parallel_size"]),
                "registered": "no" if place not in registered else "differs" if differs else "yes",
                "unit": learned["units"].get(engine["name"], "host not reached"),
                "health": learned["health"].get(engine["name"], "host not reached"),
                "router": router.get(engine["url"], "unknown" if router else "no router"),
            }
        )
    rows += [
        dict.fromkeys(HEADINGS, "") | stale | {"registered": "not declared"} for stale in stale_engines(plan, facts)
    ]
    return rows


def status_table(rows: list[dict[str, str]]) -> list[str]:
    """The rows as aligned lines, with headings."""
    lines = [HEADINGS, *([row[heading] for heading in HEADINGS] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
