"""The verdict, over counters recorded from a real transfer."""

import random
import re
from dataclasses import replace

import pytest
from ansible.module_utils.fleet_metrics import parse
from ansible.module_utils.fleet_proof import (
    FAILED,
    NOT_ATTRIBUTABLE,
    PASSED,
    Evidence,
    Terms,
    by_engines,
    judge,
    make_prompts,
    read_counters,
    report,
    tie,
)

TERMS = Terms(
    transport="tcp",
    floor_gbps=0.001,
    floor_min_bytes=1_000_000,
    bytes_per_token=1024,
    compared_tokens=None,
    transfers_per_request=1,
    decode_rank=None,
)


@pytest.fixture
def evidence(data):
    before, block_size = read_counters(parse(data("decode-fresh.txt")))
    after, _ = read_counters(parse(data("decode-one-request.txt")))
    return Evidence(
        prompt_tokens=1544,
        block_size=block_size,
        reference=[1, 2, 3, 4],
        altered=[1, 9, 3, 4],
        tokens=[1, 2, 3, 4],
        text="some words",
        finish_reason="length",
        before=before,
        after=after,
    )


def seen(evidence, **after):
    return replace(evidence, after=replace(evidence.after, **after))


def test_a_clean_transfer_passes_with_its_numbers(evidence):
    judgement = judge(evidence, TERMS)
    assert (judgement.verdict, judgement.reasons) == (PASSED, [])
    assert (judgement.bytes, judgement.expected_bytes) == (1703936, 12 * 128 * 1024)
    assert judgement.rate_gbps == pytest.approx(1703936 / 0.154932 / 1e9, abs=1e-6)
    assert judgement.rate_verdict == "ok"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [1, 2, 8, 4]}, r"differ from the prefill's own from token 3 on: expected \[1, 2, 3, 4\]"),
        ({"tokens": [1, 2, 3]}, "differ .* from token 4 on"),
        ({"altered": [1, 2, 3, 4]}, "the check is blind"),
        ({"finish_reason": "error"}, "finish_reason 'error'"),
        ({"text": ""}, "without any text"),
    ],
)
def test_a_wrong_answer_fails(evidence, change, reason):
    judgement = judge(replace(evidence, **change), TERMS)
    assert judgement.verdict == FAILED
    assert any(re.search(reason, text) for text in judgement.reasons), judgement.reasons


@pytest.mark.parametrize(
    ("third", "tokens", "undecided"),
    [
        ({"token_id:3": -0.69, "token_id:8": -0.75}, [1, 2, 8, 4], "by 0.06 nats only"),
        # The second is likelier: the prefill has turned it round by itself.
        ({"token_id:8": -0.69, "token_id:3": -0.75}, [1, 2, 8, 4], "by 0.06 nats only"),
        ({"token_id:3": -0.4, "token_id:8": -1.1}, [1, 2, 8, 4], None),  # it was sure
        ({"token_id:8": -0.4, "token_id:3": -1.1}, [1, 2, 8, 4], None),
        ({"token_id:3": -0.69, "token_id:9": -0.75}, [1, 2, 8, 4], None),  # between other tokens
        ({}, [1, 2, 8, 4], None),
        ({"token_id:3": -0.69, "token_id:8": -0.75}, [1, 2], None),  # none is wrong, some are missing
        ({"token_id:3": -0.69, "token_id:8": -0.75}, [1, 7, 8, 4], None),  # an earlier one is wrong
    ],
)
def test_a_token_that_rounding_may_decide(evidence, third, tokens, undecided):
    sure = [{f"token_id:{token}": -0.01, "token_id:0": -5.0} for token in evidence.reference]
    words = tie(replace(evidence, tokens=tokens), [*sure[:2], third, sure[3]])
    assert (undecided in words) if undecided else (words is None)
    assert tie(replace(evidence, tokens=tokens), []) is None


def test_right_tokens_without_kv_bytes_fail(evidence):
    judgement = judge(seen(evidence, bytes=0.0, transfers=0.0, seconds=0.0), TERMS)
    assert judgement.verdict == FAILED
    assert judgement.reasons[0].startswith("no KV bytes were moved")
    assert judgement.tokens_equal is True


def test_a_rank_that_counted_nothing_did_not_get_the_request(evidence):
    nothing = {"bytes": 0.0, "transfers": 0.0, "seconds": 0.0}
    rank = replace(TERMS, decode_rank=3)
    judgement = judge(seen(evidence, finished=0.0, **nothing), rank)
    assert judgement.verdict == FAILED
    assert judgement.reasons[0].startswith("rank 3 of the decode counted no request")
    assert "X-data-parallel-rank" in judgement.reasons[0]
    # It got the request and computed the prompt itself, or no rank was named.
    for terms, finished in ((rank, 1.0), (TERMS, 0.0)):
        judgement = judge(
            seen(evidence, **nothing | {"finished": evidence.before.finished + finished}), terms
        )
        assert judgement.reasons[0].startswith("no KV bytes were moved")
    assert judge(evidence, rank).verdict == PASSED


def test_a_transfer_of_less_than_the_full_blocks_fails(evidence):
    full = 12 * 128 * 1024
    assert judge(seen(evidence, bytes=float(full)), TERMS).verdict == PASSED
    judgement = judge(seen(evidence, bytes=float(full - 1)), TERMS)
    assert judgement.reasons == [f"only {full - 1} KV bytes were moved, the prompt's full blocks are {full}"]


def test_without_bytes_per_token_any_byte_will_do(evidence):
    judgement = judge(seen(evidence, bytes=1.0), replace(TERMS, bytes_per_token=None))
    assert (judgement.verdict, judgement.expected_bytes) == (PASSED, None)


def test_a_failed_transfer_fails_even_when_the_tokens_are_right(evidence):
    judgement = judge(seen(evidence, failed_transfers=1.0), TERMS)
    assert judgement.reasons == ["the decode counted 1 failed KV transfers"]


def test_a_rate_under_the_floor_fails_and_says_what_it_means(evidence):
    judgement = judge(evidence, replace(TERMS, transport="nvlink", floor_gbps=10.0))
    assert (judgement.verdict, judgement.rate_verdict) == (FAILED, "below the floor")
    assert "0.011 GB/s, under the floor of 10 GB/s for nvlink" in judgement.reasons[0]
    assert "IMEX channel" in judgement.reasons[0]


def test_the_rate_of_few_bytes_is_not_judged(evidence):
    judgement = judge(evidence, replace(TERMS, floor_gbps=1e6, floor_min_bytes=2_000_000))
    assert (judgement.verdict, judgement.rate_verdict) == (PASSED, "not judged")


OTHER_TRAFFIC = [
    ({"running": 1.0}, {}, "busy before"),
    ({"waiting": 1.0}, {}, "busy before"),
    ({}, {"running": 1.0}, "still busy after"),
    ({}, {"finished": 3.0}, "finished 3 requests"),
    ({}, {"finished": 0.0}, "finished 0 requests"),
    ({}, {"transfers": 2.0}, "counted 2 transfers, one request makes 1"),
]


@pytest.mark.parametrize(
    ("seconds", "posting", "pieces", "carried"),
    [
        (
            0.0372,
            0.0298,
            9000,
            None,
        ),  # NVLink, as measured on H200: 16 GB/s of the floor's 20, 81 but for posting
        (1.128, 0.0007, 36, "0.531 GB/s"),  # TCP
        (1.128, 1.128, 36, "0.531 GB/s"),  # TCP that moves the data while it is posted
        (1.128, 1.128, 9000, "0.553 GB/s"),
        (0.04, 0.04, 9000, "15 GB/s"),  # nothing would be left
        (0.04, 0.04, 0, "15 GB/s"),
    ],
)
def test_the_floor_is_the_transports_and_not_that_of_posting_pieces(
    evidence, seconds, posting, pieces, carried
):
    terms = replace(TERMS, transport="nvlink", floor_gbps=20)
    judgement = judge(seen(evidence, bytes=599e6, seconds=seconds, posting=posting, pieces=pieces), terms)
    assert judgement.rate_gbps == pytest.approx(599e6 / seconds / 1e9, rel=1e-4), "the table's has all of it"
    if carried is None:
        assert (judgement.verdict, judgement.rate_verdict) == (PASSED, "ok")
    else:
        assert (judgement.verdict, judgement.rate_verdict) == (FAILED, "below the floor")
        assert (
            f"KV moved at {carried}, under the floor of 20 GB/s for nvlink (599000000 bytes"
            in judgement.reasons[0]
        )


@pytest.mark.parametrize(("before", "after", "reason"), OTHER_TRAFFIC)
def test_counters_that_others_may_have_moved_are_never_a_pass(evidence, before, after, reason):
    judgement = judge(seen(replace(evidence, before=replace(evidence.before, **before)), **after), TERMS)
    assert judgement.verdict == NOT_ATTRIBUTABLE
    assert reason in judgement.reasons[0]


@pytest.mark.parametrize(
    "fault",
    [{"bytes": 0.0}, {"seconds": 10_000.0}],
    ids=["zero", "slow"],
)
def test_a_fault_amid_other_traffic_is_still_a_failure(evidence, fault):
    assert judge(seen(evidence, finished=3.0, **fault), TERMS).verdict == FAILED


def test_failed_transfers_amid_other_traffic_may_be_somebody_elses(evidence):
    judgement = judge(seen(evidence, finished=3.0, failed_transfers=1.0), TERMS)
    assert judgement.verdict == NOT_ATTRIBUTABLE
    assert "1 failed KV transfers" in judgement.reasons[-1]


def test_wrong_tokens_amid_other_traffic_are_still_a_failure(evidence):
    assert judge(seen(replace(evidence, tokens=[7]), finished=3.0), TERMS).verdict == FAILED


def test_counters_that_went_back_mean_a_restart(evidence):
    judgement = judge(replace(evidence, before=evidence.after, after=evidence.before), TERMS)
    assert judgement.verdict == FAILED
    assert "restarted during the proof" in judgement.reasons[0]


def test_with_different_tp_only_the_declared_prefix_counts(evidence):
    late = replace(evidence, tokens=[1, 2, 8, 8])
    assert judge(late, replace(TERMS, compared_tokens=2)).verdict == PASSED
    blind = judge(replace(late, altered=[1, 2, 5, 5]), replace(TERMS, compared_tokens=2))
    assert "blind" in blind.reasons[0]


def test_each_rank_may_make_a_transfer(evidence):
    assert judge(seen(evidence, transfers=4.0), replace(TERMS, transfers_per_request=4)).verdict == PASSED


def test_prompts_differ_in_one_early_word_and_are_never_the_same():
    randomness = random.Random(1)
    prompts = make_prompts(randomness, 50)
    original, altered = prompts.original.split(), prompts.altered.split()
    assert [i for i, (a, b) in enumerate(zip(original, altered, strict=True)) if a != b] == [3]
    assert len(original) > 50
    assert make_prompts(randomness, 50) != prompts


def row(prefill, decode, **more):
    """What the module tells about a pair; an end is an engine's name, or a name and a rank."""
    ends = [(end, None) if isinstance(end, str) else end for end in (prefill, decode)]
    called = [name if rank is None else f"{name} rank {rank}" for name, rank in ends]
    return {
        "name": " -> ".join(called),
        "prefill": {"engine": ends[0][0], "rank": ends[0][1]},
        "decode": {"engine": ends[1][0], "rank": ends[1][1]},
        "verdict": PASSED,
        "prompt_tokens": 1544,
        "bytes": 1703936,
        "rate_gbps": 0.0110,
        "rate_verdict": "ok",
        "warmups": [{"ok": True}],
        "ttft": 0.99,
        **more,
    }


UNREACHED = {
    "verdict": FAILED,
    "prompt_tokens": None,
    "bytes": None,
    "rate_gbps": None,
    "ttft": None,
    "warmups": [],
}


def test_the_table_is_aligned_and_shows_what_matters():
    low = {"verdict": FAILED, "rate_verdict": "below the floor", "warmups": [{"ok": False}, {"ok": True}]}
    head, *rows = report([row("p", "d", **low), row("p", "e", **UNREACHED)])
    assert rows[0].split("  ")[0] == "p -> d"
    assert "1.7 MB" in rows[0]
    assert "0.011 GB/s (below the floor)" in rows[0]
    assert "2 (1 failed)" in rows[0]
    assert [line.index("failed") for line in rows] == [head.index("verdict")] * 2


def cells(line):
    return re.split(r" {2,}", line.strip())


def test_ranks_of_the_same_engines_that_passed_are_one_line_with_the_worst_of_each():
    pairs = [row("p", ("d", rank)) for rank in range(64)]
    pairs[7] |= {"rate_gbps": 0.002, "rate_verdict": "not judged", "bytes": 1000, "prompt_tokens": 1400}
    pairs[9] |= {"ttft": 7.5, "warmups": [{"ok": False}, {"ok": True}]}
    _, *rows = report([*pairs, row("p", "e")])
    assert cells(rows[0]) == [
        *("p -> d (64 rank pairs)", "passed", "1400 tokens", "0.001 MB"),
        *("0.002 GB/s (not judged)", "65 (1 failed)", "7.50 s"),
    ]
    assert [cells(line)[0] for line in rows[1:]] == ["p -> e"]


def test_each_pair_of_ranks_that_did_not_pass_has_its_line():
    pairs = [row(("p", a), ("d", b)) for a in range(4) for b in range(4)]
    pairs[6] |= {"verdict": NOT_ATTRIBUTABLE, "rate_gbps": 9.0}
    _, *rows = report(pairs)
    assert cells(rows[0])[:2] == ["p -> d (16 rank pairs)", "not attributable (1 of 16)"]
    assert [cells(line)[:2] for line in rows[1:]] == [["p rank 1 -> d rank 2", "not attributable"]]
    pairs[12] |= UNREACHED
    pairs[3] |= {"verdict": FAILED, "rate_gbps": 0.001, "rate_verdict": "below the floor"}
    _, *rows = report(pairs)
    assert cells(rows[0])[1:5] == [
        "failed (2 of 16)",
        "1544 tokens",
        "1.7 MB",
        "0.001 GB/s (below the floor)",
    ]
    assert [cells(line)[:2] for line in rows[1:]] == [
        ["p rank 0 -> d rank 3", "failed"],
        ["p rank 1 -> d rank 2", "not attributable"],
        ["p rank 3 -> d rank 0", "failed"],
    ]


def test_ranks_of_engines_that_could_not_be_reached_have_no_numbers():
    _, summary, *_ = report([row("p", ("d", rank), **UNREACHED) for rank in range(2)])
    assert cells(summary) == ["p -> d (2 rank pairs)", "failed (2 of 2)", "-", "-", "-", "0", "-"]


def test_pairs_are_told_by_their_engines_and_not_by_their_names():
    groups = by_engines([row("p", ("d", 0)), row("p", "e"), row("p", ("d", 1)), row("q", ("d", 0))])
    assert {engines: len(pairs) for engines, pairs in groups.items()} == {
        ("p", "d"): 2,
        ("p", "e"): 1,
        ("q", "d"): 1,
    }
