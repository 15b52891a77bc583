"""The pairs to prove and the rounds they are proved in. Quadratic in engines, so not a part of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLD = ("url", "tensor_parallel_size", "pipeline_parallel_size")


def proof_ends(plan: Mapping[str, Any], role: str) -> list[dict[str, Any]]:
    """Where KV is sent from (`prefill`) or to (`decode`): one end for each data-parallel rank, in plan order.

    `rank` counts over all hosts of the engine; None where it has only one, and requests then name none.
    P prefill and D decode ends give P x D pairs in max(P, D) rounds, so both are known without making them.
    """
    return [
        {"engine": engine["name"], "rank": rank} | {key: engine[key] for key in TOLD}
        for engine in plan["engines"]
        if engine["role"] == role
        for rank in (range(engine["data_parallel_size"]) if engine["data_parallel_size"] > 1 else [None])
    ]


def proof_pairs(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter `pairs` of the module kv_proof: [{name, prefill: end, decode: end}], prefill by prefill."""
    decodes = proof_ends(plan, "decode")
    return [
        {"name": f"{_called(prefill)} -> {_called(decode)}", "prefill": prefill, "decode": decode}
        for prefill in proof_ends(plan, "prefill")
        for decode in decodes
    ]


def proof_rounds(plan: Mapping[str, Any]) -> list[list[int]]:
    """Parameter `rounds` of the module kv_proof: lists of indexes into the pairs."""
    prefills, decodes = (len(proof_ends(plan, role)) for role in ("prefill", "decode"))
    return [sorted(p * decodes + d for p, d in turn) for turn in rounds(prefills, decodes)]


def rounds(prefills: int, decodes: int) -> list[list[tuple[int, int]]]:
    """All pairs of a prefill and a decode index in max(P, D) rounds; in one round no index appears twice."""
    longer, shorter = max(prefills, decodes), min(prefills, decodes)
    table = [[(i, (i + turn) % longer) for i in range(shorter)] for turn in range(longer if shorter else 0)]
    return table if prefills <= decodes else [[(b, a) for a, b in turn] for turn in table]


def _called(end: Mapping[str, Any]) -> str:
    return end["engine"] if end["rank"] is None else f"{end['engine']} rank {end['rank']}"
