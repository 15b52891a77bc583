"""The pairs to prove, in the shape that the module kv_proof takes."""

from __future__ import annotations

from pathlib import Path

from ansible.parsing.plugin_docs import read_docstring
from fleets import lab

from vllm_fleet.proof import proof_pairs

MODULE = Path(__file__).parents[2] / "plugins" / "modules" / "kv_proof.py"


def test_each_pair_of_the_plan_in_its_order():
    plan = lab(prefill=["p1"], decode=["d1", "d2"]).pool("decode", tensor_parallel_size=2, gpus=2).plan()
    pairs = proof_pairs(plan)
    assert [pair["name"] for pair in pairs] == [f"prefill-p1-0 -> decode-{host}-0" for host in ("d1", "d2")]
    url = {engine["name"]: engine["url"] for engine in plan["engines"]}
    assert pairs[1]["prefill"] == {
        "engine": "prefill-p1-0",
        "url": url["prefill-p1-0"],
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    assert pairs[1]["decode"]["url"] == url["decode-d2-0"]
    assert pairs[1]["decode"]["tensor_parallel_size"] == 2
    assert sorted(index for one in plan["rounds"] for index in one) == [0, 1]


def test_a_mixed_fleet_has_no_pairs():
    fleet = lab().pool("prefill", role="mixed").pool("decode", role="mixed")
    assert proof_pairs(fleet.plan()) == []


def test_the_module_takes_them():
    options = read_docstring(str(MODULE))["doc"]["options"]["pairs"]["suboptions"]
    (pair,) = proof_pairs(lab().plan())
    assert pair.keys() == options.keys()
    for role in ("prefill", "decode"):
        assert pair[role].keys() == options[role]["suboptions"].keys()
