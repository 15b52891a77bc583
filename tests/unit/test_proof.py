"""The pairs to prove and their rounds, in the shape that the module kv_proof takes."""

from __future__ import annotations

import json
from pathlib import Path

from ansible.parsing.plugin_docs import read_docstring
from fleets import gpu, lab
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fleet.proof import proof_ends, proof_pairs, proof_rounds, rounds

MODULE = Path(__file__).parents[2] / "plugins" / "modules" / "kv_proof.py"


def engines(**shapes):
    """As much of a plan as the proof reads: engine -> role, data-parallel size and TP size."""
    return {
        "engines": [
            {
                "name": name,
                "role": role,
                "url": f"http://{name}:8000",
                "data_parallel_size": dp,
                "tensor_parallel_size": tp,
                "pipeline_parallel_size": 1,
            }
            for name, (role, dp, tp) in shapes.items()
        ]
    }


def ends_of(pair):
    return [(pair[role]["engine"], pair[role]["rank"]) for role in ("prefill", "decode")]


@given(st.integers(0, 30), st.integers(0, 30))
def test_rounds_are_disjoint_and_cover_all_pairs(prefills, decodes):
    table = rounds(prefills, decodes)
    assert sorted(pair for turn in table for pair in turn) == [
        (p, d) for p in range(prefills) for d in range(decodes)
    ]
    assert len(table) == (max(prefills, decodes) if prefills and decodes else 0)
    for turn in table:
        assert len({p for p, _ in turn}) == len({d for _, d in turn}) == len(turn)


ranks = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4)


@given(ranks, ranks)
@settings(deadline=None)
def test_every_rank_of_a_prefill_meets_every_rank_of_a_decode_and_never_two_at_once(prefills, decodes):
    plan = engines(
        **{f"p{i}": ("prefill", dp, 1) for i, dp in enumerate(prefills)},
        **{f"d{i}": ("decode", dp, 1) for i, dp in enumerate(decodes)},
    )
    pairs, turns = proof_pairs(plan), proof_rounds(plan)

    def declared(letter, sizes):
        return {
            (f"{letter}{i}", rank) for i, dp in enumerate(sizes) for rank in (range(dp) if dp > 1 else [None])
        }

    assert {tuple(ends_of(pair)) for pair in pairs} == {
        (p, d) for p in declared("p", prefills) for d in declared("d", decodes)
    }
    assert len(pairs) == sum(prefills) * sum(decodes) == len({pair["name"] for pair in pairs})
    assert sorted(index for turn in turns for index in turn) == list(range(len(pairs)))
    assert len(turns) == max(sum(prefills), sum(decodes))
    for turn in turns:
        used = [end for index in turn for end in ends_of(pairs[index])]
        assert len(used) == len(set(used))


def test_each_pair_of_a_plan_in_its_order():
    plan = lab(prefill=["p1"], decode=["d1", "d2"]).pool("decode", tensor_parallel_size=2, gpus=2).plan()
    pairs = proof_pairs(plan)
    assert [pair["name"] for pair in pairs] == [f"prefill-p1-0 -> decode-{host}-0" for host in ("d1", "d2")]
    url = {engine["name"]: engine["url"] for engine in plan["engines"]}
    assert pairs[1]["prefill"] == {
        "engine": "prefill-p1-0",
        "url": url["prefill-p1-0"],
        "rank": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    assert pairs[1]["decode"]["url"] == url["decode-d2-0"]
    assert pairs[1]["decode"]["tensor_parallel_size"] == 2
    assert proof_rounds(plan) == [[0], [1]]


def test_only_engines_with_several_ranks_have_them_in_their_names():
    pairs = proof_pairs(engines(p=("prefill", 1, 4), d=("decode", 2, 2)))
    assert [pair["name"] for pair in pairs] == ["p -> d rank 0", "p -> d rank 1"]
    assert [pair["decode"]["rank"] for pair in pairs] == [0, 1]
    assert {pair["decode"]["tensor_parallel_size"] for pair in pairs} == {2}
    assert proof_pairs(engines(p=("prefill", 2, 1), d=("decode", 2, 1)))[3]["name"] == "p rank 1 -> d rank 1"


def test_the_ranks_of_a_data_parallel_engine_of_a_plan():
    plan = gpu().pool("decode", data_parallel_size=4, enable_expert_parallel=True).plan()
    assert [ends_of(pair)[1] for pair in proof_pairs(plan)] == [
        ("decode-rack1-05-0", rank) for rank in range(4)
    ]
    assert proof_rounds(plan) == [[0], [1], [2], [3]]


def test_a_wide_decode_and_four_prefills_are_a_thousand_pairs():
    plan = engines(**{f"p{i}": ("prefill", 4, 1) for i in range(4)}, d=("decode", 64, 1))
    assert len(proof_pairs(plan)) == 1024
    assert [len(turn) for turn in proof_rounds(plan)] == [16] * 64


def test_the_ends_are_counted_without_making_the_pairs():
    half = 5000
    plan = engines(
        **{f"p{i}": ("prefill", 1, 1) for i in range(half)},
        **{f"d{i}": ("decode", 2, 1) for i in range(half)},
    )
    assert [len(proof_ends(plan, role)) for role in ("prefill", "decode", "mixed")] == [half, 2 * half, 0]


def test_the_plan_itself_has_no_pairs():
    assert not {"pairs", "rounds"} & lab().plan().keys()


def test_a_mixed_fleet_has_no_pairs():
    plan = lab().pool("prefill", role="mixed").pool("decode", role="mixed").plan()
    assert (proof_pairs(plan), proof_rounds(plan)) == ([], [])


def test_the_module_takes_them():
    options = read_docstring(str(MODULE))["doc"]["options"]["pairs"]["suboptions"]
    (pair,) = json.loads(json.dumps(proof_pairs(lab().plan())))
    assert pair.keys() == options.keys()
    for role in ("prefill", "decode"):
        assert pair[role].keys() == options[role]["suboptions"].keys()
