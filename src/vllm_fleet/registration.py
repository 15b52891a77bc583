"""What an engine's head host records about it once it is healthy, compared with the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMA = 1


def registration(plan: Mapping[str, Any], engine_name: str, image_ids: Mapping[str, str]) -> dict[str, Any]:
    """The local fact of a healthy engine. Without timestamps and container ids, a second run changes nothing.

    Args:
        plan: the plan.
        engine_name: one of its engines.
        image_ids: host -> id of the image it runs; where hosts build for themselves, each has its own.

    Raises:
        KeyError: the plan has no such engine, or a host of the engine has no image.

    """
    for engine in plan["engines"]:
        if engine["name"] == engine_name:
            return _planned(plan, engine) | {"image_ids": {host: image_ids[host] for host in engine["hosts"]}}
    raise KeyError(engine_name)


def compare_registrations(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """One sentence for each engine that is declared but not registered as declared.

    Args:
        plan: the plan.
        facts: host -> fact name -> registration, as `ansible_local` has them; other facts are ignored.

    """
    registered = registered_engines(facts)
    problems = []
    for engine in own_engines(plan):
        planned = _planned(plan, engine)
        found = registered.get((engine["head"], engine["name"]))
        if found is None:
            problems.append(f"{engine['name']} is declared but not registered on {engine['head']}.")
            continue
        differing = [
            f"{key} is registered as {found.get(key)!r} and declared as {value!r}"
            for key, value in planned.items()
            if found.get(key) != value
        ]
        if differing:
            problems.append(f"{engine['name']} on {engine['head']}: {'; '.join(differing)}.")
    return problems


def stale_engines(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Engines that are registered on a host but not declared there: [{host, engine}], sorted."""
    declared = {(engine["head"], engine["name"]) for engine in own_engines(plan)}
    stale = registered_engines(facts).keys() - declared
    return [{"host": host, "engine": engine} for host, engine in sorted(stale)]


def registered_engines(facts: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(host, engine) -> its registration. Hosts have facts of other programs as well, which are left out."""
    return {
        (str(host), str(fact["engine"])): fact
        for host, local in facts.items()
        for fact in (local.values() if isinstance(local, Mapping) else ())
        if isinstance(fact, Mapping) and {"engine", "fingerprint", "schema"} <= fact.keys()
    }


def own_engines(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The engines that the fleet runs itself."""
    return [engine for engine in plan["engines"] if not engine["external"]]


def _planned(plan: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    head = next(
        member for member in plan["hosts"][engine["head"]]["members"] if member["name"] == engine["name"]
    )
    return {
        "schema": SCHEMA,
        **{key: engine[key] for key in ("pool", "role", "url", "hosts")},
        "engine": engine["name"],
        "model": plan["model"]["path"],
        "served_name": plan["model"]["served_name"],
        **{
            f"{kind}_parallel_size": engine[f"{kind}_parallel_size"]
            for kind in ("tensor", "pipeline", "data")
        },
        "fingerprint": head["fingerprint"],
    }
