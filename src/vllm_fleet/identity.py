"""What running engines must be, as the module engine_identity compares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_fleet.registration import registered_engines

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def expected_members(
    plan: Mapping[str, Any], host: str, registrations: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Parameter `engines` of engine_identity for the members on a host of the fleet.

    Args:
        plan: the plan.
        host: one of its hosts.
        registrations: host -> its local facts; an engine that is not registered has no image to be compared.

    Raises:
        KeyError: the plan has no such host.

    """
    engines = {engine["name"]: engine for engine in plan["engines"]}
    registered = registered_engines(registrations)
    specs = []
    for member in plan["hosts"][host]["members"]:
        engine = engines[member["engine"]]
        found = registered.get((engine["head"], engine["name"]), {})
        specs.append(_member(plan, engine, member, found.get("image_ids", {}).get(host)))
    return specs


def expected_external(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter `engines` of engine_identity for the engines that somebody else runs."""
    return [
        {
            "engine": engine["name"],
            "url": engine["url"],
            "expected": _sizes(plan, engine) | {"max_model_len": engine["max_model_len"]},
            "server_info": True,
        }
        for engine in plan["engines"]
        if engine["external"]
    ]


def _sizes(plan: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """What is expected of every engine, ours or not: the model and the parallel sizes."""
    return {
        "model": plan["model"]["path"],
        "served_name": plan["model"]["served_name"],
        **{size: engine[size] for size in SIZES},
    }


def _member(
    plan: Mapping[str, Any],
    engine: Mapping[str, Any],
    member: Mapping[str, Any],
    image_id: str | None,
) -> dict[str, Any]:
    operators = set(member["operator_env"])
    return {
        "engine": engine["name"],
        "member": member["name"],
        "url": member["url"],
        "container": member["container"],
        "unit": member["unit"],
        "image_id": image_id,
        "expected": {
            **_sizes(plan, engine),
            "nnodes": engine["nnodes"],
            "enable_expert_parallel": engine["enable_expert_parallel"],
            "kv_role": member["args"].get("kv_transfer_config", {}).get("kv_role"),
            "version": plan["image"]["vllm_version"],
        },
        "args": member["args"],
        # The operator's own may be secrets, and a difference is printed.
        "env": {name: value for name, value in member["env"].items() if name not in operators},
        "server_info": member["head"] and member["env"].get("VLLM_SERVER_DEV_MODE") == "1",
    }
