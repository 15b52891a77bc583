"""What tests/gpu makes of numbers and logs: load figures, what is no figure, phases of a start, agreement, packs, report."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path

import by_path
import load
import pytest
import report
import scenarios
import shapes
from load import Seen, Transfers, percentile, prompt, summary, why_invalid
from phases import phases

ROOT = Path(__file__).parents[2]


# --- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([], 0.5, None),
        ([7.0], 0.99, 7.0),
        ([1, 2, 3, 4], 0.5, 2),
        (range(1, 101), 0.99, 99),
        (range(1, 102), 0.99, 100),
        ([3, 1, 2], 0.99, 3),
    ],
)
def test_a_percentile_is_one_of_the_values(values, share, found):
    assert percentile(values, share) == found


def test_prompts_differ_from_their_first_token_on_and_are_the_same_again():
    first = {prompt(seed, 3)[0] for seed in range(50)}
    assert len(first) > 40
    assert prompt(7, 100) == prompt(7, 100)
    assert all(load.FIRST_TOKEN <= token <= load.LAST_TOKEN for token in prompt(1, 1000))


def whole(*chunks: float) -> Seen:
    return Seen(chunks=list(chunks), tokens=len(chunks))


def test_a_summary_is_of_what_came_whole():
    seen = [
        whole(0.1, 0.11, 0.13),
        whole(0.3, 0.31, 0.33),
        Seen(error="HTTP 500"),
        Seen(late=0.2, chunks=[9.0], tokens=1),
    ]
    found = summary(seen, took=2.0, tokens=3)
    assert (found["sent"], found["failed"], found["wrong_length"], found["first_error"]) == (
        4,
        1,
        1,
        "HTTP 500",
    )
    assert found["ttft_ms"] == {"p50": 100.0, "p99": 300.0}
    assert found["itl_ms"] == {"p50": 10.0, "p99": 20.0}
    assert found["output_tokens_per_second"] == 3.0
    assert found["late_ms"] == 200.0


def test_nothing_that_came_whole_has_no_times():
    found = summary([Seen(error="cut")], took=1.0, tokens=3)
    assert found["ttft_ms"] == {"p50": None, "p99": None}


GOOD = summary([whole(0.1, 0.11)] * 10, took=1.0, tokens=2)
KV = Transfers(bytes=100e6, seconds=0.001, failed=0, count=10, descriptors=360)


@pytest.mark.parametrize(
    ("figures", "split", "kv", "expected", "why"),
    [
        ({}, {"p": 1.0, "d": 0.95}, KV, 100e6, None),
        ({}, {"p": 1.0}, None, 0, None),
        ({"failed": 1, "first_error": "HTTP 503"}, {}, KV, 0, "1 requests failed HTTP 503"),
        ({"wrong_length": 2}, {}, KV, 0, "2 answers were not of the length asked for"),
        ({"output_tokens_per_second": 0.0}, {}, KV, 0, "no token was generated"),
        ({"late_ms": 201.0}, {}, KV, 0, "the client sent a request 201 ms late"),
        ({}, {"p": 1.0, "d": 0.89}, KV, 0, "d had 89% of its requests"),
        ({}, {"a": 1.2, "b": 0.9}, None, 0, "a had 120% of its requests"),
        ({}, {}, Transfers(bytes=1e9, failed=3), 0, "3 transfers of KV failed"),
        ({}, {}, KV, 100e6 + 1, "100 MB of KV moved, and 100 MB had to"),
        ({}, {}, Transfers(), 1e6, "0 MB of KV moved, and 1 MB had to"),
    ],
)
def test_what_is_no_figure_is_told(figures, split, kv, expected, why):
    assert why_invalid(GOOD | figures, split, kv, expected) == ([why] if why else [])


def test_transfers_are_counted_between_two_looks():
    moved = Transfers(300e6, 0.003, 1, 20, 720) - Transfers(200e6, 0.002, 1, 10, 360)
    assert (moved.gbps, moved.failed, moved.descriptors_each) == (100.0, 0, 36.0)
    assert (Transfers().gbps, Transfers().descriptors_each) == (None, None)


# --- phases -------------------------------------------------------------------------------------------------------


LOG = """\
W1130 09:36:51.894000 7841 torch/_opaque_base.py:6] no such line has a phase
(EngineCore pid=8055) INFO 11-30 09:37:14 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: ...
(EngineCore pid=8055) INFO 11-30 09:37:24 [model_runner.py:428] Model loading took 12.96 GiB memory and 6.467718 seconds
(EngineCore pid=8055) INFO 11-30 09:38:01 [monitor.py:62] [backbone] torch.compile took 35.56 s in total
(EngineCore pid=8055) INFO 11-30 09:38:17 [kv_cache_utils.py:1147] GPU KV cache size: 829,216 tokens
(EngineCore pid=8055) INFO 11-30 09:38:20 [kernel_warmup.py:179] JIT kernel warmup starting.
(EngineCore pid=8055) INFO 11-30 09:38:41 [core.py:405] init engine (profile, create kv cache, warmup model) took 76.78 s
(APIServer pid=7841) INFO 11-30 09:38:41 [entry.py:139] Starting vLLM server on http://198.18.40.11:8000
""".splitlines()


def at(clock: str) -> float:
    return time.mktime(time.strptime(f"2026-11-30 {clock}", "%Y-%m-%d %H:%M:%S"))


def test_each_phase_ends_with_its_line():
    assert phases(LOG, at("09:36:48"), at("09:38:42") + 0.5) == {
        "Python, configuration, engine process": 26.0,
        "NCCL, model, weights": 10.0,
        "torch.compile": 37.0,
        "memory profile": 16.0,
        "KV cache, NIXL registration": 3.0,
        "warm-up, CUDA graphs": 21.0,
        "API server": 0.0,
        "first token": 1.5,
    }


def test_all_phases_together_are_the_start():
    begin, ready = at("09:36:48"), at("09:38:43")
    assert sum(phases(LOG, begin, ready).values()) == ready - begin


def test_a_phase_that_is_missing_counts_to_the_next():
    eager = [line for line in LOG if "torch.compile" not in line]
    found = phases(eager, at("09:36:48"), at("09:38:43"))
    assert "torch.compile" not in found
    assert found["memory profile"] == 53.0


def test_of_several_ranks_the_last_counts():
    ranks = [*LOG[:3], LOG[2].replace("09:37:24", "09:37:30"), *LOG[3:]]
    assert phases(ranks, at("09:36:48"), at("09:38:43"))["NCCL, model, weights"] == 16.0


def test_a_log_that_says_nothing_has_one_phase():
    assert phases([], at("09:36:48"), at("09:36:58")) == {"first token": 10.0}


# --- agreement ----------------------------------------------------------------------------------------------------


FIRST = [{5: -0.1, 6: -3.0}, {7: -0.7, 8: -0.72}]


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (FIRST, {"same": True, "noise": 0}),
        ([{5: -0.13, 6: -3.0}, {7: -0.7, 8: -0.72}], {"same": True, "noise": 0.03}),
        ([{5: -0.1}, {8: -0.7, 7: -0.71}], {"same": False, "noise": 0, "at": 1, "gap": 0.01}),
        ([{9: -0.1}, {8: -0.7}], {"same": False, "noise": 0, "at": 0, "gap": None}),
        ([{6: -0.1, 5: -0.4}, {8: -0.7}], {"same": False, "noise": 0, "at": 0, "gap": 0.3}),
    ],
)
def test_two_answers_are_compared_up_to_where_they_part(other, found):
    told = scenarios.compare(FIRST, other)
    assert {key: pytest.approx(value) for key, value in found.items()} == told


def test_ties_agree_and_others_do_not():
    tie, apart = ({"same": False, "noise": 0.01, "at": 0, "gap": gap} for gap in (0.0, 0.3))
    same = {"same": True, "noise": 0.02}
    assert scenarios.agree(scenarios.tally([same, tie]))
    assert not scenarios.agree(scenarios.tally([same, apart]))
    assert not scenarios.agree(scenarios.tally([same, tie | {"gap": None}]))
    assert scenarios.tally([same, tie])["noise"] == 0.02


# --- models and recipe --------------------------------------------------------------------------------------------


def test_the_recipes_config_is_that_of_the_model_that_is_made():
    config = json.loads((ROOT / "inventory/h200/group_vars/qwen3-8b-shape.json").read_text())
    assert config == shapes.config(*shapes.MODELS["qwen3-8b-shape"])


def test_models_have_the_vocabulary_of_the_tokenizer():
    tiny_model = by_path.load(ROOT / "roles/lab_hosts/files/tiny_model.py")
    assert {shape["vocab_size"] for shape in shapes.SHAPES.values()} == {tiny_model.VOCAB}


# --- the report ---------------------------------------------------------------------------------------------------


@pytest.fixture
def results():
    return json.loads(report.newest().read_text())


def test_the_documentation_is_what_the_results_give(results):
    page = report.PAGE.read_text()
    assert page == report.page(page, results), "run: python tests/gpu/report.py"
    assert report.PLOT.read_text() == report.plot(results)


def test_an_invalid_run_is_no_figure(results):
    bad = copy.deepcopy(results)
    run = bad["scenarios"]["pair"]["loads"][0]
    run["invalid"] = ["3 requests failed HTTP 500"]
    text = report.report(bad)
    assert "| 1024 | 2 | prefill + decode | invalid: 3 requests failed HTTP 500 | | | | | |" in text
    assert f"{run['ttft_ms']['p50']:.1f}" not in text.split("###")[1].splitlines()[4]
    assert report.plot(bad).count("<circle") == report.plot(results).count("<circle") - 1


@pytest.mark.parametrize(
    "left_out", ["pair", "ordinary", "experts", "rollouts", "gate", "cached", "per_transfer", "fabric"]
)
def test_a_scenario_that_was_not_run_leaves_the_others(results, left_out):
    del results["scenarios"][left_out]
    assert "###" in report.report(results)
    assert report.plot(results).startswith("<svg")


def test_a_scenario_that_broke_or_was_skipped_is_told(results):
    results["scenarios"] |= {
        "experts": {"ok": False, "error": "Traceback ...\nRuntimeError: it ended"},
        "wide": {"ok": False, "skipped": "it needs 4 GPUs, and this machine has 2"},
    }
    words = "Not measured: `experts`: RuntimeError: it ended; `wide`: it needs 4 GPUs, and this machine has 2; `uneven`: not run."
    assert words in report.report(results)
