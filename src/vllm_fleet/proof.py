"""What the proof is told about each prefill-decode pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLD = ("url", "tensor_parallel_size", "pipeline_parallel_size")


def proof_pairs(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter `pairs` of the module kv_proof, in plan order: [{name, prefill: {...}, decode: {...}}]."""
    told = {
        engine["name"]: {"engine": engine["name"]} | {key: engine[key] for key in TOLD}
        for engine in plan["engines"]
    }
    return [
        {
            "name": f"{pair['prefill']} -> {pair['decode']}",
            "prefill": told[pair["prefill"]],
            "decode": told[pair["decode"]],
        }
        for pair in plan["pairs"]
    ]
