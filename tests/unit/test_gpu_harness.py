"""What tests/gpu makes of numbers and logs: load figures, what is no figure, phases of a start, agreement, packs, report."""

from __future__ import annotations

import copy
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import by_path
import pytest
from gpu import load, machine, report, run, scenarios, shapes
from gpu.load import Seen, Transfers, percentile, prompt, summary, why_invalid, why_uncounted
from gpu.phases import phases
from gpu.scenarios import SCENARIOS

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
    return Seen(chunks=list(chunks), tokens=len(chunks), prompt_tokens=7)


def test_a_summary_is_of_what_came_whole():
    seen = [
        whole(0.1, 0.11, 0.13),
        whole(0.3, 0.31, 0.33),
        Seen(error="HTTP 500"),
        Seen(late=0.2, chunks=[9.0], tokens=1, prompt_tokens=6),
    ]
    found = summary(seen, took=2.0, length=7, tokens=3)
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
    assert (found["wrong_prompt"], found["chunks_each_token"]) == (1, 1.0)


def test_nothing_that_came_whole_has_no_times():
    found = summary([Seen(error="cut")], took=1.0, length=7, tokens=3)
    assert found["ttft_ms"] == {"p50": None, "p99": None}


GOOD = summary([whole(0.1, 0.11)] * 10, took=1.0, length=7, tokens=2)
KV = Transfers(bytes=100e6, seconds=0.001, failed=0, count=10, descriptors=360)


@pytest.mark.parametrize(
    ("figures", "split", "kv", "expected", "why"),
    [
        ({}, {"p": 1.0, "d": 0.95}, KV, 100e6, None),
        ({}, {"p": 1.0}, None, 0, None),
        ({"failed": 1, "first_error": "HTTP 503"}, {}, KV, 0, "1 requests failed HTTP 503"),
        ({"wrong_length": 2}, {}, KV, 0, "2 answers were not of the length asked for"),
        ({"output_tokens_per_second": 0.0}, {}, KV, 0, "no token was generated"),
        ({"wrong_prompt": 3}, {}, KV, 0, "3 prompts were not of the length sent"),
        ({"chunks_each_token": 0.97}, {}, KV, 0, None),
        (
            {"chunks_each_token": 0.96},
            {},
            KV,
            0,
            "tokens came in 96% as many chunks, so ITL is not theirs",
        ),
        ({"late_ms": 201.0}, {}, KV, 0, "the client sent a request 201 ms late"),
        ({}, {"p": 1.0, "d": 0.89}, KV, 0, "d had 89% of its requests"),
        ({}, {"a": 1.2, "b": 0.9}, None, 0, "a had 120% of its requests"),
        ({}, {}, Transfers(bytes=1e9, failed=3), 0, "3 transfers of KV failed"),
        ({}, {}, KV, 100e6 + 1, "100 MB of KV moved, and 100 MB had to"),
        ({}, {}, Transfers(), 1e6, "0 MB of KV moved, and 1 MB had to"),
    ],
)
def test_what_is_no_figure_is_told(figures, split, kv, expected, why):
    found = why_invalid(GOOD | figures) + why_uncounted(split, kv, expected)
    assert found == ([why] if why else [])


def test_tokens_that_come_together_are_seen_in_the_stream():
    """vLLM puts what it has into one chunk when a client is slow to be served."""
    merged = Seen(chunks=[0.1, 0.2], tokens=4, prompt_tokens=7)
    found = summary([merged, whole(0.1, 0.2, 0.3, 0.4)], took=1.0, length=7, tokens=4)
    assert found["chunks_each_token"] == 0.75
    assert "75% as many chunks" in why_invalid(found)[0]


def test_transfers_are_counted_between_two_looks():
    moved = Transfers(300e6, 0.003, 1, 20, 720, 0.01) - Transfers(200e6, 0.002, 1, 10, 360, 0.005)
    assert (moved.gbps, moved.failed, moved.descriptors_each, moved.post_ms_each) == (100.0, 0, 36.0, 0.5)
    assert (Transfers().gbps, Transfers().descriptors_each, Transfers().post_ms_each) == (None, None, None)


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
        ([{5: -0.1}, {8: -0.7, 7: -0.71}], {"same": False, "noise": 0, "at": 1, "gap": 0.02}),
        ([{9: -0.1}, {8: -0.7}], {"same": False, "noise": 0, "at": 0, "gap": None}),
        # How near the two are is the reference's word alone: wrong KV may find anything as likely.
        ([{6: -0.1, 5: -0.1}, {8: -0.7}], {"same": False, "noise": 0, "at": 0, "gap": 2.9}),
    ],
)
def test_two_answers_are_compared_up_to_where_they_part(other, found):
    told = scenarios.compare(FIRST, other)
    assert {key: pytest.approx(value) for key, value in found.items()} == told


def said(token: int, sure: float = 3.0, noise: float = 0.0) -> list[dict[int, float]]:
    """An answer of two tokens; a token and the next one are told, this much apart."""
    return [{token: -0.1 - noise, token + 1: -0.1 - noise - sure}, {7: -0.7}]


SAME, TIED, APART = (said(10), said(10)), (said(10, 0.04), said(11)), (said(10, 0.06), said(11))
NOISY, LOST = (said(10), said(10, noise=0.06)), (said(10), said(20))


def agreed(*pairs, altered=None):
    """What is said against it, of pairs of answers to one prompt after the other."""
    reference, other = zip(*pairs, strict=True)
    found = scenarios.agreement(reference, other, altered or [said(30)] * len(pairs))
    return found, scenarios.unlike(found)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([SAME] * 8, []),
        ([TIED, *[SAME] * 8], []),
        ([*[SAME] * 4, TIED, TIED, *[SAME] * 4], []),
        ([APART, *[SAME] * 8], ["an answer parts at token 1, where the reference prefers its own by 0.06"]),
        ([LOST, *[SAME] * 8], ["an answer parts at token 1, where the reference prefers its own by far"]),
        ([NOISY, *[SAME] * 7], ["log probabilities of the same tokens differ by 0.06"]),
        ([*[TIED] * 9, *[SAME] * 7], ["only 7 of 16 answers are the same to their end"]),
    ],
)
def test_ties_agree_where_enough_answers_are_the_same(pairs, why):
    assert agreed(*pairs)[1] == why


def test_no_more_prompts_are_asked_than_it_takes():
    found, why = agreed(TIED, *[SAME] * 12)
    assert (found["prompts"], found["same"], found["ties"], why) == (9, 8, 1, [])


def test_prompts_that_change_nothing_tell_nothing():
    blind = ["blind: most prompts with another first token have the same answer"]
    assert agreed(*[SAME] * 8, altered=[*[said(10)] * 4, *[said(30)] * 4])[1] == blind
    assert agreed(*[SAME] * 8, altered=[*[said(10)] * 3, *[said(30)] * 5])[1] == []


def test_reasons_are_found_wherever_a_run_is():
    bad, good = {"invalid": ["KV failed"]}, {"invalid": []}
    result = {"loads": [good, bad], "rate_after": bad, "level_1": {"rate": bad}, "ok": False, "proof": {}}
    assert scenarios.why_no_figures(result) == [
        "loads 2: KV failed",
        "rate after: KV failed",
        "level 1: rate: KV failed",
    ]


# --- the machine --------------------------------------------------------------------------------------------------


@pytest.fixture
def channel(tmp_path, monkeypatch):
    """The channel's node as a file, so that no device is made."""
    node = tmp_path / "imex/channel0"
    monkeypatch.setattr(machine, "CHANNEL", node)
    monkeypatch.setattr(os, "mknod", lambda path, mode, device: Path(path).write_text(f"{mode:o} {device}"))
    devices = tmp_path / "devices"
    devices.write_text("Character devices:\n  1 mem\n234 nvidia-caps-imex-channels\n")
    monkeypatch.setattr(machine, "DEVICES", devices)
    return node


def test_the_channel_is_made_and_removed_again(channel):
    with machine.imex_channel(there=True):
        assert channel.read_text() == f"20666 {os.makedev(234, 0)}"
    assert not channel.exists()


def test_one_that_was_there_is_put_back(channel):
    channel.parent.mkdir()
    channel.touch()
    with machine.imex_channel(there=True):
        assert channel.read_text() == ""
    with machine.imex_channel(there=False):
        assert not channel.exists()
    assert channel.exists()


def test_it_is_put_back_too_where_a_scenario_breaks(channel):
    with pytest.raises(ZeroDivisionError), machine.imex_channel(there=True):
        _ = 1 / 0
    assert not channel.exists()


def test_scenarios_that_do_not_need_it_leave_it_alone(channel):
    with machine.imex_channel(there=None):
        assert not channel.exists()


def test_a_driver_without_channels_skips(channel):
    machine.DEVICES.write_text("Character devices:\n  1 mem\n")
    with pytest.raises(machine.SkipError, match="driver has no"), machine.imex_channel(there=True):
        pass


def test_the_address_is_taken_away_again(monkeypatch):
    """Asked of the kernel by number; no address of this machine is touched."""
    asked = []
    monkeypatch.setattr(machine.fcntl, "ioctl", lambda _, number, words: asked.append((number, words)))
    with machine.address("127.0.0.9"):
        assert not asked
    with machine.address("192.0.2.1"):
        assert [number for number, _ in asked] == [0x8916, 0x891C]
        assert asked[0][1] == struct.pack("16sH2s4s16x", b"lo:1", 2, b"", bytes([192, 0, 2, 1]))
    assert asked[2:] == [(0x8914, struct.pack("16s24x", b"lo:1"))]


def test_why_an_engine_ended_is_one_line_without_paths():
    fake = type("Fake", (), {"cause": machine.Machine.cause, "lines": lambda *_: log})()
    log = [
        "(EngineCore pid=1) ERROR core.py ValueError: Free memory",
        '  File "/tmp/site/vllm/x.py", line 762',
        "ValueError: Free memory on device cuda:0",
        "RuntimeError: Engine core initialization failed.",
        "",
    ]
    assert fake.cause("x") == "ValueError: Free memory on device cuda:0"
    log = log[3:]
    assert fake.cause("x").startswith("RuntimeError: ")
    log = ["usage: vllm serve"]
    assert fake.cause("x") == "usage: vllm serve"
    log = []
    assert fake.cause("x") == ""


def test_results_are_continued_under_the_same_conditions_only(tmp_path):
    file = tmp_path / "results.json"
    here = {"commit": "aaa", "code": "1", "gpus": ["H200"], "versions": {"vllm": "0.33.0"}}
    told = run.continued(file, here)
    assert told["scenarios"] == {}
    file.write_text(json.dumps(told))
    assert run.continued(file, here) == told
    for key, value in (("commit", "bbb"), ("code", "2"), ("versions", {"vllm": "0.34.0"})):
        with pytest.raises(SystemExit, match=f"{key} .*name another folder"):
            run.continued(file, here | {key: value})


def test_what_is_set_besides_is_told_without_paths(tmp_path, monkeypatch):
    (tmp_path / "commit").write_text("aaa\n")
    monkeypatch.setattr(run, "versions", dict)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)
    found = run.conditions(tmp_path, ["H200"])["environment"]
    assert (found["NCCL_NVLS_ENABLE"], found["CUDA_HOME"]) == ("0", "a path")
    assert "NVSHMEM_DISABLE_NVLS" not in found


def test_a_scenario_that_breaks_says_so_in_a_line(tmp_path, monkeypatch):
    (tmp_path / "commit").write_text("aaa\n")

    def broken(*_):
        raise RuntimeError("it ended")

    monkeypatch.setattr(run, "_performed", broken)
    done = {"ok": False}
    run.perform("pair", tmp_path, tmp_path, done, 2)
    assert (done["ok"], done["why"], done["commit"]) == (False, ["it broke: RuntimeError: it ended"], "aaa")
    monkeypatch.setattr(run, "_performed", lambda *_: [])
    run.perform("pair", tmp_path, tmp_path, done, 2)
    assert done["ok"]


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
    return next(found for found in report.newest() if "pair" in found["scenarios"])


def test_the_documentation_is_what_the_results_give(results):
    page = report.PAGE.read_text()
    assert page == report.page(page, report.newest()), "run: python tests/gpu/report.py"
    assert report.plot_of(results).read_text() == report.plot(results)


def test_an_invalid_run_is_no_figure(results):
    bad = copy.deepcopy(results)
    run = bad["scenarios"]["pair"]["loads"][0]
    run["invalid"] = ["3 requests failed HTTP 500"]
    text = report.report(bad)
    assert re.search(
        r"^\| 1024 \| 2 \| prefill \+ decode \| invalid: 3 requests failed HTTP 500 [| ]+$",
        text,
        re.MULTILINE,
    )
    assert f"{run['ttft_ms']['p50']:.1f}" not in text.split("### Prefill")[1].splitlines()[6]
    assert report.plot(bad).count("<circle") == report.plot(results).count("<circle") - 1


def runs(value):
    """All that may be invalid, wherever it is."""
    if isinstance(value, dict):
        if "invalid" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from runs(one)


KEPT = {report.machine(found): found for found in report.newest()}
"""Machine -> the newest results of it."""


@pytest.mark.parametrize("kept", KEPT)
def test_no_table_has_a_figure_of_an_invalid_run(kept):
    """Every figure of a run is replaced by one that is found nowhere else: none of them may be told."""

    def marked(value):
        if isinstance(value, dict):
            return {key: marked(one) for key, one in value.items()}
        return 98765.4 if isinstance(value, float) or value is None else value

    figures = ("ms", "ttft_ms", "itl_ms", "kv_gbps", "post_ms_each", "output_tokens_per_second")
    results = copy.deepcopy(KEPT[kept])
    done = results["scenarios"]
    done = results["scenarios"] = {
        name: one for name, one in done.items() if "it broke" not in "".join(one["why"])
    }
    for one in runs(results):
        one.update({key: marked(one[key]) for key in figures if key in one}, invalid=["for the test"])
    text = report.report(results)
    assert "98,765" not in text
    assert "98765" not in text
    assert "98765" not in report.plot(results)
    # Of results that have them all; three runs are in no table.
    untold = {("pair", "rate"), ("pair", "rate_after"), ("experts", "load")}
    every = sum(
        len(list(runs(value)))
        for name, one in done.items()
        for key, value in one.items()
        if (name, key) not in untold
    )
    assert text.count("for the test") == every


def test_a_load_without_times_breaks_no_table(results):
    for one in runs(results):
        for kind in ("ttft_ms", "itl_ms"):
            if kind in one:
                one[kind] = {"p50": None, "p99": None}
        one["kv_gbps"] = None
    first = results["scenarios"]["pair"]["loads"][0]
    row = f"| {first['prompt_tokens']} | {first['rate']} | prefill + decode | - | - | - | - | "
    assert row in report.report(results)
    assert "<polyline" not in report.plot(results)


def test_each_scenario_has_its_verdict_and_all_its_reasons(results):
    results["scenarios"] |= {
        "pair": results["scenarios"]["pair"]
        | {"ok": False, "begun": "now", "seconds": 2, "commit": "abc", "why": ["first", "second"]},
        "experts": {"ok": False, "begun": "then", "seconds": 1, "commit": "abc", "why": ["it broke: x"]},
        "wide": {
            "ok": False,
            "begun": "then",
            "seconds": 0,
            "commit": "abc",
            "why": [],
            "skipped": "it needs 4 GPUs",
        },
    }
    rows = report.report(results).split("### Scenario by scenario")[1].split("###")[0]
    assert "| `pair` | not ok | now | 2 | abc | first; second |" in rows
    assert "| `experts` | not ok | then | 1 | abc | it broke: x |" in rows
    assert "| `wide` | skipped | then | 0 | abc | it needs 4 GPUs |" in rows
    results["scenarios"].pop("uneven", None)
    assert "| `uneven` | not run |" in report.report(results)


def test_a_proofs_reasons_are_told_whole(results):
    told = results["scenarios"]["gate"]["proof"]
    told["why"] = ["a -> b: one; two", "c -> d: three"]
    text = report.report(results)
    assert text.count("| a -> b: one; two; c -> d: three |") == 2


def test_reports_say_what_is_different_and_set(results):
    results |= {
        "differs": ["members are processes"],
        "environment": {"PATH": "a path", "NCCL_NVLS_ENABLE": "0"},
    }
    text = report.report(results)
    assert "- members are processes\n" in text
    assert "`PATH` (a path), `NCCL_NVLS_ENABLE=0`" in text


def test_what_is_kept_has_no_path_of_a_machine():
    for file in report.RESULTS.glob("*.json"):
        assert not re.search(r"/tmp/|/home/|site-packages|File \\\"", file.read_text()), file


def test_of_each_number_of_gpus_the_newest_results_are_told(results, tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(report, "RESULTS", tmp_path / "kept")
    file = tmp_path / "results.json"
    names = []
    for date, gpus in (("2027-01-02", 2), ("2027-01-03", 2), ("2027-01-01", 1), ("2027-01-02", 4)):
        file.write_text(json.dumps(results | {"date": date, "gpus": ["H200"] * gpus}))
        names.append(report.keep(file).name)
    assert names == [
        "2027-01-02-2gpu.json",
        "2027-01-03-2gpu.json",
        "2027-01-01-1gpu.json",
        "2027-01-02-4gpu.json",
    ]
    kept = [(found["date"], len(found["gpus"])) for found in report.newest()]
    assert kept == [("2027-01-02", 4), ("2027-01-03", 2), ("2027-01-01", 1)]


@pytest.mark.parametrize(
    ("kept", "left_out"), [(kept, name) for kept, found in KEPT.items() for name in found["scenarios"]]
)
def test_a_scenario_that_was_not_run_or_broke_early_leaves_the_others(kept, left_out):
    results = copy.deepcopy(KEPT[kept])
    del results["scenarios"][left_out]
    assert "###" in report.report(results)
    assert report.plot(results).startswith("<svg")
    broken = {"ok": False, "begun": "then", "seconds": 1, "commit": "abc", "why": ["it broke"]}
    results["scenarios"][left_out] = broken
    assert "it broke" in report.report(results)
    assert report.plot(results).startswith("<svg")


def test_what_a_machine_of_one_gpu_skips_hides_nothing_that_it_ran():
    results = copy.deepcopy(KEPT["1x NVIDIA H200"])
    skipped = {
        "ok": False,
        "begun": "then",
        "seconds": 0,
        "commit": "abc",
        "why": [],
        "skipped": "it needs 2 GPUs",
    }
    results["scenarios"] = {**dict.fromkeys(SCENARIOS, skipped), **results["scenarios"]}
    text = report.report(results)
    assert "| sleep 1 | 15.22 |" in text
    assert "| 64 | 326,592 | after 21 long prompts | 2,304 |" in text
    assert not report.has_loads(results["scenarios"])
    for words in ("against the same GPUs as ordinary engines", ".svg"):
        assert words not in text


# --- make gpu -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "measured"), [(0, True), (1, True), (0, False), (4, False)])
def test_make_gpu_reports_what_was_measured_and_ends_as_pytest_did(tmp_path, status, measured):
    """With programs in place of pytest, Python and scripts/setup that write down what they are asked."""
    results = ".state/gpu/out/results.json"
    programs = {
        ".venv/bin/pytest": f"{f'sleep 0.1; touch {results}; ' if measured else ''}exit {status}",
        ".venv/bin/python": 'echo "python $*" >>calls',
        "scripts/setup": 'echo "setup $*" >>calls',
    }
    for name, words in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    # Of another day; a run that is skipped leaves it, and it is not reported again.
    (tmp_path / results).parent.mkdir(parents=True)
    (tmp_path / results).touch()
    os.utime(tmp_path / results, (1, 1))
    done = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "gpu"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == (2 if status else 0), done  # make's own, for any that is not 0
    reported = [f"python tests/gpu/report.py {results}"] if measured else []
    assert (tmp_path / "calls").read_text().splitlines() == ["setup --venv", *reported]


def test_a_machine_without_gpus_keeps_the_results_that_it_has(tmp_path):
    """And says skipped, for each scenario."""
    kept = ROOT / ".state/gpu/out/kept-by-a-test"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()
    words = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", ROOT / "tests/gpu"]
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert f"{len(SCENARIOS)} skipped" in done.stdout, done
    kept.unlink()
