"""The fleet at a glance: what is declared, registered, running and known to the router."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fleet.registration import compare_registrations, own_engines, registered_engines, stale_engines
from vllm_fleet.routing import engine_url

HEADINGS = ("engine", "host", "TP", "registered", "unit", "health", "router")
ROLLOUT_HEADINGS = ("state", "weights")
"""What engines of the profile rl have besides."""
NOT_REACHED: Mapping[str, Mapping[str, str]] = {"local": {}, "units": {}, "health": {}}


def learned(
    local: Mapping[str, Any], units: Iterable[Mapping[str, Any]], health: Iterable[Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """What playbooks/status.yml learned on a host, for `status_rows`.

    Args:
        local: the host's local facts.
        units: the results of `systemctl show` for each member.
        health: the results of the module uri for each member's /health.

    """
    return {
        "local": local,
        "units": {done["member"]["name"]: _unit(done["stdout_lines"]) for done in units},
        "health": {done["member"]["name"]: _health(done["status"], done["msg"]) for done in health},
    }


def _unit(lines: Iterable[str]) -> str:
    words = dict(line.split("=", 1) for line in lines)
    return f"{words['ActiveState']}/{words['SubState']}, {words['NRestarts']} restarts"


def _health(status: int, message: str) -> str:
    if status == 200:
        return "ok"
    if status > 0:
        return f"HTTP {status}"
    # Status code was -1 and not [200]: Request failed: <urlopen error [Errno 111] Connection refused>
    cause = re.sub(r"^<urlopen error (\[Errno -?\d+\] )?", "", message.splitlines()[0].rpartition(": ")[2])
    return f"no answer: {cause.rstrip('>')}"


def status_rows(
    plan: Mapping[str, Any],
    hosts: Mapping[str, Mapping[str, Any]],
    workers: Iterable[Mapping[str, Any]],
    states: Iterable[Mapping[str, Any]] = (),
) -> list[dict[str, str]]:
    """One row an engine or headless member: those declared in plan order, then those only their host knows.

    Args:
        plan: the plan.
        hosts: host -> what was `learned` there; hosts that could not be reached are missing.
        workers: what the router's /workers lists; empty where no router answers.
        states: of a fleet of the profile rl, the engines in the result of `Rollout.status` as JSON.

    """
    facts = {host: told["local"] for host, told in hosts.items()}
    router: dict[str, str] = {}
    for worker in workers:
        url = engine_url(worker["url"])
        if not worker["is_healthy"]:
            router[url] = "unhealthy"
        router.setdefault(url, "healthy")
    registered = registered_engines(facts)
    by_name = {state["name"]: state for state in states}
    rows = []
    for engine in own_engines(plan):
        place = engine["head"], engine["name"]
        told = hosts.get(engine["head"], NOT_REACHED)
        differs = compare_registrations({**plan, "engines": [engine]}, {engine["head"]: told["local"]})
        rows.append(
            {
                "engine": engine["name"],
                "host": engine["head"],
                "TP": str(engine["tensor_parallel_size"]),
                "registered": "no" if place not in registered else "differs" if differs else "yes",
                "unit": told["units"].get(engine["name"], "host not reached"),
                "health": told["health"].get(engine["name"], "host not reached"),
                "router": router.get(engine["url"], "unknown" if router else "no router"),
                **_rollout(plan, by_name.get(engine["name"], {})),
            }
        )
        rows += [
            dict.fromkeys(HEADINGS, "")
            | {
                "engine": member,
                "host": host,
                "unit": hosts.get(host, NOT_REACHED)["units"].get(member, "host not reached"),
                "health": "headless",
            }
            for member, host in zip(engine["members"][1:], engine["hosts"][1:], strict=True)
        ]
    for engine in plan["engines"]:
        if engine["external"]:
            known = router.get(engine["url"], "unknown" if router else "no router")
            tp = str(engine["tensor_parallel_size"])
            row = {"engine": engine["name"], "host": "external", "TP": tp, "router": known}
            rows.append(dict.fromkeys(HEADINGS, "") | row)
    undeclared = dict.fromkeys(HEADINGS, "") | {"registered": "not declared"}
    return rows + [undeclared | stale for stale in stale_engines(plan, facts)]


def _rollout(plan: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    if plan["profile"] != "rl":
        return {}
    return {"state": state.get("state") or "unknown", "weights": state.get("weight_version") or ""}


def status_table(rows: list[dict[str, str]]) -> list[str]:
    """The rows as aligned lines, with headings; those of the profile rl where a row has them."""
    headings = [*HEADINGS, *(heading for heading in ROLLOUT_HEADINGS if any(heading in row for row in rows))]
    lines = [headings, *([row.get(heading, "") for heading in headings] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    padded = ([word.ljust(width) for word, width in zip(line, widths, strict=True)] for line in lines)
    return ["  ".join(words).rstrip() for words in padded]
