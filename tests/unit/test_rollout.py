"""Control of a whole fleet, against scripted engines: order, repetition, and every way in which one engine fails."""

from __future__ import annotations

import ast
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fleets import lab
from scripted_engine import ScriptedFleet, scripted_fleet
from test_cli import run

from vllm_fleet.cli import _read_plan
from vllm_fleet.rollout import ACTIONS, DISCARDED, Fleet, Rollout, RolloutError
from vllm_fleet.rollout import rollout as sequences

ROOT = Path(__file__).parents[2]
PREFILLS = [f"prefill-{i}" for i in range(4)]
DECODES = [f"decode-{i}" for i in range(4)]


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.setattr(sequences, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sequences, "RESET_PAUSE_SECONDS", 0.02)
    with scripted_fleet(4, 4) as engines:
        yield engines


def controls(fleet, timeout=30, **more):
    return Rollout(Fleet.from_plan(fleet.plan()), timeout, **more)


def everywhere(fleet, **attributes):
    for engine in fleet.engines.values():
        for name, value in attributes.items():
            setattr(engine, name, value)


def done(result):
    assert result.ok, result.lines()
    assert (result.message, result.remedy, result.missed) == ("", "", ())
    return result


def failed(result, *words):
    """The message of a call that must fail, with words that must be in what people see."""
    told = "\n".join(result.lines())
    assert not result.ok, told
    for word in words:
        assert word in told
    return result


def verbs(fleet):
    """All that was called: path with query -> names, in the order of their first calls."""
    seen = {}
    for name, path in fleet.calls:
        seen.setdefault(path, []).append(name)
    return seen


# Order


def test_pause_closes_admission_then_pauses_prefills_then_decodes(fleet):
    result = done(controls(fleet).pause())
    names = [name for name, _ in fleet.calls]
    assert names[0] == "front"
    assert (sorted(names[1:5]), sorted(names[5:])) == (sorted(PREFILLS), sorted(DECODES))
    assert set(verbs(fleet)) == {"/admission/close", "/pause?mode=keep&clear_cache=false"}
    assert {one.after.word for one in result.engines} == {"paused"}
    assert result.admission.word == "closed"


def test_decodes_fetch_all_kv_before_they_pause(fleet):
    """Each look at a scripted decode finds one request less to fetch."""
    for name in DECODES:
        fleet.engines[name].kv_to_fetch = 5
    done(controls(fleet).pause())
    assert [fleet.engines[name].frozen_at_pause for name in DECODES] == [[0]] * 4


def test_no_decode_pauses_before_the_slowest_prefill_has_given_its_kv_away(fleet):
    fleet.engines["prefill-2"].delays["/pause"] = 0.5
    seen = []
    fleet.engines["prefill-2"].answer = lambda *asked, real=fleet.engines["prefill-2"].answer: (
        asked[0] == "/pause" and seen.extend(fleet.made("/pause")),
        real(*asked),
    )[1]
    done(controls(fleet).pause())
    assert sorted(seen) == sorted(PREFILLS)


def test_sleep_and_wake_in_order(fleet):
    done(controls(fleet).sleep())
    done(controls(fleet).wake())
    assert [path for path in verbs(fleet) if not path.startswith("/admission")] == [
        "/pause?mode=keep&clear_cache=false",
        "/sleep?level=1&mode=keep",
        "/wake_up?tags=weights",
        "/wake_up?tags=kv_cache",
    ]
    woken = [name for name, path in fleet.calls if path == "/wake_up?tags=kv_cache"]
    assert (sorted(woken[:4]), sorted(woken[4:])) == (sorted(DECODES), sorted(PREFILLS))
    assert fleet.front.admission == "closed"


def test_resume_decodes_first_and_admission_last(fleet):
    done(controls(fleet).pause())
    fleet.calls.clear()
    done(controls(fleet).resume())
    names = [name for name, _ in fleet.calls]
    assert (sorted(names[:4]), sorted(names[4:8]), names[8:]) == (
        sorted(DECODES),
        sorted(PREFILLS),
        ["front"],
    )
    assert fleet.front.admission == "open"


def test_a_mixed_fleet_has_no_order_and_no_kv_to_wait_for():
    with scripted_fleet(0, 2) as fleet:
        plan = fleet.plan()
        for engine in plan["engines"]:
            engine["role"] = "mixed"
        done(Rollout(Fleet.from_plan(plan), 5).sleep())
        assert sorted(fleet.made("/sleep")) == ["decode-0", "decode-1"]


def test_engines_of_others_are_never_called_and_that_is_said(fleet):
    assert "Not ours, so not called: decode-theirs." in done(controls(fleet).pause()).notes


def test_slow_engines_do_not_hold_up_others(fleet):
    """8 engines of 0.5 s each take little more than one."""
    for engine in fleet.engines.values():
        engine.delays["/sleep"] = 0.5
    began = time.monotonic()
    result = done(controls(fleet).sleep())
    assert 0.5 <= time.monotonic() - began < 2
    assert min(one.seconds for one in result.engines) >= 0.5


# Modes


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_the_mode_is_sent_to_all_for_pause_and_for_sleep(fleet, mode):
    done(controls(fleet).sleep(2, mode))
    calls = ["/admission/close"]
    calls += ["/abort_requests"] if mode == "abort" else []
    calls += [
        f"/pause?mode={mode}&clear_cache=false",
        "/update_weight_version",
        f"/sleep?level=2&mode={mode}",
    ]
    assert list(verbs(fleet)) == calls


def test_wait_lets_the_front_run_empty_before_any_engine_is_paused(fleet):
    fleet.front.in_flight = 5
    done(controls(fleet).pause("wait"))
    assert fleet.front.in_flight == 0
    assert verbs(fleet)["/pause?mode=wait&clear_cache=false"]


def test_wait_gives_up_in_time_and_leaves_the_engines_running(fleet):
    fleet.front.in_flight, fleet.front.drains = 3, 0
    failed(
        controls(fleet, 3).pause("wait"),
        "3 requests still run after 3 s",
        "Admission at the front: closed",
    )
    assert fleet.made("/pause") == []


def test_wait_does_not_wait_for_requests_that_are_frozen(fleet):
    done(controls(fleet).pause())
    fleet.front.in_flight, fleet.front.drains = 3, 0
    began = time.monotonic()
    failed(controls(fleet).pause("wait"), "3 requests are frozen", "Run resume first")
    assert time.monotonic() - began < 2


def test_a_paused_fleet_may_be_paused_in_another_mode(fleet):
    done(controls(fleet).pause())
    everywhere(fleet, requests=2)
    done(controls(fleet).pause("abort"))
    assert {engine.requests for engine in fleet.engines.values()} == {0}


# Again


@pytest.mark.parametrize("action", ["pause", "resume", "sleep", "wake", "abort", "reset", "prepare_update"])
def test_once_more_changes_nothing(fleet, action):
    if action in {"wake", "prepare_update"}:
        done(controls(fleet).sleep())
    first = done(getattr(controls(fleet), action)())
    again = done(getattr(controls(fleet), action)())
    assert [one.after for one in again.engines] == [one.after for one in first.engines]
    assert again.admission == first.admission


def test_wake_does_not_resume_an_engine_that_is_only_paused(fleet):
    """vLLM's /wake_up resumes an engine that does not sleep."""
    done(controls(fleet).pause())
    done(controls(fleet).wake())
    done(controls(fleet).prepare_update())
    assert fleet.made("/wake_up") == []
    assert all(engine.paused for engine in fleet.engines.values())


def test_sleep_at_another_level_is_refused_because_vllm_would_only_say_so(fleet):
    done(controls(fleet).sleep(1))
    fleet.calls.clear()
    failed(controls(fleet).sleep(2), "asleep at another level", "Nothing was done", "Run wake first.")
    assert fleet.calls == []


# Faults


def test_an_engine_that_does_not_answer_at_first_stops_all_before_anything_is_done(fleet):
    fleet.engines["decode-1"].dead = True
    result = failed(
        controls(fleet).pause(), "Nothing was done", "decode-1", "closed the connection", "unknown"
    )
    assert fleet.calls == []
    assert (result.missed[0], result.changed) == ("prefill-0", False)


def test_an_engine_that_dies_in_the_middle_is_told_and_the_next_run_finishes(fleet):
    fleet.engines["decode-2"].dies_at = "/sleep"
    result = failed(
        controls(fleet).sleep(),
        "`sleep at level 1` failed at 1 of 8 engines (decode-2)",
        "decode-2: http://127.0.0.1",
        "closed the connection in the middle",
        "Admission at the front: closed",
        "Run sleep again to finish it, or wake and then resume to go back.",
    )
    assert result.missed == ("decode-2",)
    assert set(fleet.made("/sleep")) == {*PREFILLS, *DECODES}, "the others were not held up"

    fleet.engines["decode-2"].restart()
    result = done(controls(fleet).sleep())
    assert {one.after.word for one in result.engines} == {"asleep 1"}


def test_an_engine_that_restarts_between_call_and_look_is_seen(fleet):
    engine = fleet.engines["decode-3"]
    engine.POST = {**engine.POST, "/pause": lambda *_: {"status": "paused"}}
    result = failed(controls(fleet).sleep(), "decode-3", "not paused, though the call succeeded")
    assert result.missed == (*PREFILLS, *DECODES)
    assert fleet.made("/sleep") == []


def test_a_call_that_succeeds_and_does_nothing_is_seen(fleet):
    engine = fleet.engines["decode-3"]
    engine.POST = {**engine.POST, "/sleep": lambda *_: {"status": "sleeping", "level": 1}}
    result = failed(controls(fleet).sleep(), "1 of 8 engines (decode-3) answered as it should")
    assert result.missed == ("decode-3",)


def test_an_empty_body_is_all_right(fleet):
    engine = fleet.engines["prefill-0"]
    real = engine.POST["/sleep"]
    engine.POST = {**engine.POST, "/sleep": lambda *asked: (real(*asked), (200, b""))[1]}
    done(controls(fleet).sleep())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, b'{"error": "CUDA out of memory"}'), 'answered 500: {"error": "CUDA out of memory"}'),
        ((200, b"<html>"), "answered with something that is not JSON: <html>"),
        ((200, b"[]"), "answered with JSON that is not an object"),
    ],
)
def test_an_answer_that_is_no_answer(fleet, answer, words):
    fleet.engines["prefill-3"].answers["/wake_up"] = answer
    done(controls(fleet).sleep())
    result = failed(controls(fleet).wake(), "`wake weights` failed at 1 of 8 engines (prefill-3)", words)
    assert fleet.made("/wake_up").count("decode-0") == 1, "KV caches stay asleep"
    assert result.admission.word == "closed"


@pytest.mark.parametrize("path", ["/metrics", "/weight_info", "/is_paused"])
def test_garbage_instead_of_a_state(fleet, path):
    fleet.engines["prefill-3"].answers[path] = (200, b"{}")
    failed(controls(fleet).status(), "prefill-3", path)


def test_metrics_without_the_sleep_state(fleet):
    fleet.engines["prefill-3"].answers["/metrics"] = (200, b"up 1")
    failed(controls(fleet).status(), "has no vllm:engine_sleep_state")


def test_an_engine_without_control_endpoints(fleet):
    fleet.engines["decode-0"].answers["/is_paused"] = (404, b"")
    failed(controls(fleet).pause(), "runs without control endpoints", "fleet_profile: rl")


def test_an_engine_that_takes_too_long(fleet):
    fleet.engines["decode-0"].delays["/sleep"] = 30
    began = time.monotonic()
    failed(controls(fleet, 1).sleep(), "decode-0", "did not answer within 1 s")
    assert time.monotonic() - began < 5


def test_a_front_that_does_not_answer_stops_all_before_anything_is_done(fleet):
    fleet.front.dead = True
    failed(controls(fleet).pause(), "The front: http://127.0.0.1", "Nothing was done")
    assert fleet.made("/pause") == []


def test_a_front_that_knows_this_host_not(fleet):
    fleet.front.answers["/admission"] = (403, b"{}")
    failed(controls(fleet).pause(), "fleet_controllers", "playbooks/rollout.yml")


def test_a_front_that_does_not_close(fleet):
    fleet.front.answers["/admission/close"] = (200, b'{"admission": "open", "in_flight": 0}')
    failed(controls(fleet).pause(), "The front answered the call to close admission, and it is open")
    assert fleet.made("/pause") == []


def test_admission_is_not_opened_when_an_engine_does_not_resume(fleet):
    done(controls(fleet).pause())
    fleet.engines["prefill-1"].answers["/resume"] = (200, b'{"status": "resumed"}')
    failed(controls(fleet).resume(), "prefill-1", "still paused")
    assert fleet.front.admission == "closed"
    del fleet.engines["prefill-1"].answers["/resume"]
    done(controls(fleet).resume())
    assert fleet.front.admission == "open"


def test_resume_of_engines_that_sleep_is_refused(fleet):
    done(controls(fleet).sleep())
    failed(controls(fleet).resume(), "asleep", "Nothing was done")
    assert fleet.made("/resume") == []


def test_a_prefill_whose_kv_is_not_fetched_in_time_is_told_with_the_reason(fleet):
    fleet.engines["prefill-1"].delays["/pause"] = 30
    words = "did not answer within 1 s", "a decode fetches it when it has a slot free"
    assert failed(controls(fleet, 1).pause(), *words).missed == ("prefill-1", *DECODES)


def test_kv_that_nobody_fetched_is_told(fleet):
    engine = fleet.engines["prefill-1"]
    real = engine.POST["/pause"]
    engine.POST = {
        **engine.POST,
        "/pause": lambda *asked: (setattr(engine, "kv_expired", 2), real(*asked))[1],
    }
    [note] = [note for note in done(controls(fleet).pause()).notes if "KV" in note]
    assert note.startswith("prefill-1: no decode fetched the KV of 2 requests in time")


@pytest.mark.parametrize(
    "action", ["pause", "sleep", "wake", "abort", "reset", "prepare_update", "set_version"]
)
def test_admission_that_somebody_else_opens_is_seen(fleet, action):
    """Another controller resumes while this one works."""
    options = {"version": "step-7"} if action == "set_version" else {}
    done(controls(fleet).pause() if action == "pause" else controls(fleet).sleep())
    for engine in fleet.engines.values():
        engine.answer = lambda *asked, real=engine.answer: (
            asked[2] is None or setattr(fleet.front, "admission", "open"),
            real(*asked),
        )[1]
    result = failed(
        controls(fleet).perform(action, options),
        f"admission is open, and {action} leaves it closed",
        "one controller at a time, and run pause",
    )
    assert result.missed == ()


def test_admission_that_somebody_else_closes_is_seen(fleet):
    done(controls(fleet).pause())
    real = fleet.front.answer

    def closed_again(path, query, body):
        answer = real(path, query, body)
        fleet.front.admission = "closed"
        return answer

    fleet.front.answer = closed_again
    failed(controls(fleet).resume(), "admission is closed, and resume leaves it open", "run resume")


def test_wake_closes_admission_that_was_opened_while_engines_sleep(fleet):
    """An engine that is wholly awake runs, and the others do not yet."""
    done(controls(fleet).sleep())
    fleet.front.admission = "open"
    done(controls(fleet).wake())
    assert fleet.front.admission == "closed"


def test_wake_of_a_fleet_that_runs_does_nothing(fleet):
    result = done(controls(fleet).wake())
    assert (result.changed, fleet.front.admission, fleet.calls) == (False, "open", [])


@pytest.mark.parametrize("fault", ["engine", "front"])
@pytest.mark.parametrize("action", ACTIONS)
def test_whatever_is_not_right_has_a_remedy(fleet, action, fault):
    (fleet.front if fault == "front" else fleet.engines["decode-1"]).dead = True
    result = controls(fleet, 1).perform(action, {"version": "step-7"} if action == "set_version" else {})
    assert f"run {action} again" in result.remedy
    assert result.lines()[-1] == result.remedy


def test_frozen_requests_with_fetched_kv_get_a_turn_so_that_sleep_succeeds(fleet):
    fleet.engines["decode-1"].kv_held = 3
    done(controls(fleet).sleep())
    asked = [path for name, path in fleet.calls if name == "decode-1"]
    assert asked == [
        "/pause?mode=keep&clear_cache=false",
        "/sleep?level=1&mode=keep",
        "/resume",
        "/pause?mode=keep&clear_cache=false",
        "/sleep?level=1&mode=keep",
    ]
    assert fleet.made("/resume") == ["decode-1"]


def test_an_unexpected_error_is_not_swallowed(fleet, monkeypatch):
    def broken(*_args, **_more):
        raise ZeroDivisionError

    monkeypatch.setattr(sequences, "call", broken)
    with pytest.raises(ZeroDivisionError):
        controls(fleet).pause()


# Abort and reset


def test_abort_ends_all_and_leaves_admission_as_it_was(fleet):
    everywhere(fleet, requests=3)
    done(controls(fleet).abort())
    assert {engine.requests for engine in fleet.engines.values()} == {0}
    assert [path for name, path in fleet.calls if name == "front"] == ["/admission/close", "/admission/open"]
    done(controls(fleet).pause())
    done(controls(fleet).abort())
    assert fleet.front.admission == "closed"


def test_a_second_abort_says_that_admission_is_closed(fleet):
    fleet.engines["decode-0"].answers["/abort_requests"] = (500, b"no")
    failed(controls(fleet).abort(), "resume")
    del fleet.engines["decode-0"].answers["/abort_requests"]
    assert [note for note in done(controls(fleet).abort()).notes if "resume opens it" in note]
    done(controls(fleet).resume())
    assert not [note for note in done(controls(fleet).abort()).notes if "resume" in note]


@pytest.mark.parametrize("action", ["abort", "pause", "sleep"])
def test_requests_that_one_abort_does_not_reach_are_aborted_again(fleet, action, monkeypatch):
    """Some come from the routers after it: each abort ends one of three."""
    monkeypatch.setattr(sequences, "ABORT_AGAIN_SECONDS", 0.05)
    engine = fleet.engines["decode-0"]
    engine.requests = 3
    fewer = lambda *_: setattr(engine, "requests", max(0, engine.requests - 1)) or {"status": "aborted"}  # noqa: E731
    engine.POST = {**engine.POST, "/abort_requests": fewer}
    done(controls(fleet).perform(action, {} if action == "abort" else {"mode": "abort"}))
    asked = [path.split("?")[0] for name, path in fleet.calls if name == "decode-0"]
    assert asked[:3] == ["/abort_requests"] * 3
    assert asked.count("/abort_requests") == 3


@pytest.mark.parametrize("action", ["abort", "pause", "sleep"])
def test_abort_is_asked_again_and_gives_up_in_time(fleet, action, monkeypatch):
    monkeypatch.setattr(sequences, "ABORT_AGAIN_SECONDS", 0.1)
    engine = fleet.engines["decode-0"]
    engine.requests, engine.drains = 4, False
    failed(
        controls(fleet, 3).perform(action, {} if action == "abort" else {"mode": "abort"}),
        "decode-0",
        "still has 4 requests after 3 s",
        "Admission at the front: closed",
    )
    assert fleet.made("/abort_requests").count("decode-0") >= 2
    assert fleet.made("/abort_requests").count("prefill-0") == 1


def test_reset_waits_until_blocks_are_free(fleet):
    """Of three requests one ends with each call."""
    engine = fleet.engines["decode-0"]
    engine.requests = 3
    real = engine.POST["/reset_prefix_cache"]
    fewer = lambda *asked: (real(*asked), setattr(engine, "requests", engine.requests - 1))[0]  # noqa: E731
    engine.POST = {**engine.POST, "/reset_prefix_cache": fewer}
    done(controls(fleet).reset())
    assert fleet.made("/reset_prefix_cache").count("decode-0") == 4


def test_reset_gives_up_in_time_and_says_what_to_do(fleet):
    fleet.engines["decode-0"].requests = 1
    failed(controls(fleet, 3).reset(), "answered {'success': False}: requests hold blocks", "recompute")
    done(controls(fleet).reset(recompute=True))


# Weights


def test_level_2_marks_the_weights_before_they_are_gone(fleet):
    fleet.engines["prefill-0"].dies_at = "/sleep"
    failed(controls(fleet).sleep(2), "Run sleep at level 2 again", "prepare_update", "set_version")
    assert {engine.version for engine in fleet.engines.values()} == {DISCARDED}


def test_discarded_weights_neither_wake_wholly_nor_resume(fleet):
    done(controls(fleet).sleep(2))
    failed(controls(fleet).wake(), "without weights", "set_version")
    assert {frozenset(engine.sleeping) for engine in fleet.engines.values()} == {frozenset({"kv_cache"})}
    failed(controls(fleet).wake(["kv_cache"]), "without weights")

    failed(controls(fleet).resume(), "without weights", "Send new weights")
    failed(controls(fleet).sleep(1), "asleep at another level", "Send new weights")

    everywhere(fleet, sleeping=set(), level=0)  # as if woken by hand
    failed(controls(fleet).resume(), "without weights")
    assert (fleet.made("/resume"), fleet.front.admission) == ([], "closed")


def test_kv_caches_that_wake_alone_say_that_weights_have_to_wake_too(fleet):
    """Which tags sleep, no engine tells: so it is seen only afterwards."""
    done(controls(fleet).sleep())
    failed(controls(fleet).wake(["kv_cache"]), "its weights sleep", "Run wake with weights and kv_cache")
    done(controls(fleet).wake())
    done(controls(fleet).resume())


def test_an_update_brings_discarded_weights_back(fleet):
    done(controls(fleet).sleep(2))
    done(controls(fleet).prepare_update())
    done(controls(fleet).set_version("step-7"))
    done(controls(fleet).wake(["kv_cache"]))
    done(controls(fleet).resume())
    assert {engine.version for engine in fleet.engines.values()} == {"step-7"}
    assert fleet.front.admission == "open"


def test_one_engine_that_got_no_weights_keeps_the_fleet_closed(fleet):
    done(controls(fleet).sleep(2))
    done(controls(fleet).prepare_update())
    everywhere(fleet, version="step-7")
    fleet.engines["decode-2"].version = DISCARDED
    failed(controls(fleet).wake(["kv_cache"]), "decode-2", "without weights")


def test_an_engine_that_restarted_has_other_weights_and_keeps_the_fleet_closed(fleet):
    done(controls(fleet).sleep())
    done(controls(fleet).set_version("step-7"))
    fleet.engines["prefill-1"].restart()
    done(controls(fleet).wake())
    words = "step-7 in prefill-0, prefill-2, prefill-3, decode-0, decode-1, decode-2, decode-3; default in prefill-1"
    failed(controls(fleet).resume(), words, "prepare_update")
    assert fleet.front.admission == "closed"
    failed(controls(fleet).weights_info(), words)
    done(controls(fleet).resume(allow_mixed=True))


def test_an_update_is_refused(fleet):
    failed(controls(fleet).prepare_update(), "8 of 8 engines", "not paused", "Nothing was done")
    done(controls(fleet).sleep())
    fleet.engines["decode-0"].world_size = 2
    failed(controls(fleet).prepare_update(), "decode-0", "has 2 ranks, and the plan says 1")
    fleet.engines["decode-0"].world_size = 1
    fleet.engines["decode-0"].version = "step-6"
    failed(controls(fleet).prepare_update(), "several versions")
    assert fleet.made("/wake_up") == []
    done(controls(fleet).prepare_update(allow_mixed=True))
    fleet.engines["decode-0"].dead = True
    failed(controls(fleet).prepare_update(allow_mixed=True), "1 of 8 engines (decode-0) did not say")


def test_an_update_finds_weights_awake_and_kv_caches_asleep(fleet):
    done(controls(fleet).sleep())
    done(controls(fleet).prepare_update())
    assert {frozenset(engine.sleeping) for engine in fleet.engines.values()} == {frozenset({"kv_cache"})}


def test_weights_are_named_only_while_nothing_generates(fleet):
    failed(controls(fleet).set_version("step-7"), "not paused")
    assert fleet.made("/update_weight_version") == []


def test_a_name_that_did_not_stick_is_seen(fleet):
    done(controls(fleet).pause())
    fleet.engines["decode-0"].answers["/update_weight_version"] = (200, b"{}")
    assert failed(controls(fleet).set_version("step-7")).missed == ("decode-0",)


def test_peers_have_ranks_in_plan_order_after_the_trainer(fleet):
    plan = fleet.plan()
    plan["engines"][0] |= {"tensor_parallel_size": 2, "data_parallel_size": 4}
    fleet.engines["prefill-0"].world_size = 8
    said = done(Rollout(Fleet.from_plan(plan), 5).peers()).as_dict()
    assert [(one["name"], one["rank_offset"], one["world_size"]) for one in said["engines"][:3]] == [
        ("prefill-0", 1, 8),
        ("prefill-1", 9, 1),
        ("prefill-2", 10, 1),
    ]
    assert said["world_size"] == 1 + 8 + 7
    assert said["engines"][0]["url"] == fleet.engines["prefill-0"].url
    assert (said["engines"][0]["weight_version"], said["changed"]) == ("default", False)


def test_peers_with_other_ranks_than_planned_are_refused(fleet):
    fleet.engines["decode-3"].world_size = 4
    failed(controls(fleet).peers(), "decode-3", "has 4 ranks, and the plan says 1")


# What people see


def test_the_table(fleet):
    done(controls(fleet).sleep())
    done(controls(fleet).set_version("step-7"))
    lines = controls(fleet).status().lines()
    assert lines[:2] == [
        "engine     role     ranks  state     weights  requests  seconds",
        "prefill-0  prefill  1      asleep 1  step-7   0         0.0",
    ]
    assert lines[-3] == "Admission at the front: closed, 0 requests in flight."


def test_progress_is_told_engine_by_engine_as_they_are_done(fleet):
    fleet.engines["prefill-0"].delays["/pause"] = 0.8
    told = []
    done(controls(fleet, progress=told.append).pause())
    assert len(told) == 9
    assert "front: admission closed" in told[0]
    assert "prefill-0: pause keep: " in told[4], "the slow one is the last of the prefills"


# Wrong use


@pytest.mark.parametrize(
    ("action", "options", "words"),
    [
        ("sleeep", {}, "There is no action sleeep; there are status, pause"),
        ("pause", {"mode": "now"}, "There is no mode now; there are keep, wait, abort"),
        ("sleep", {"level": 0}, "There is no level 0; there are 1, 2"),
        ("wake", {"tags": ["cuda_graph"]}, "There is no tag cuda_graph; there are weights, kv_cache"),
        ("pause", {"level": 1}, "pause has no option level; it has mode"),
        ("set_version", {}, "set_version needs a version"),
        ("set_version", {"version": DISCARDED}, "must be a name"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_asked(fleet, action, options, words):
    with pytest.raises(RolloutError, match=words):
        controls(fleet).perform(action, options)
    assert fleet.calls == []


def test_a_time_out_of_nothing(fleet):
    with pytest.raises(RolloutError, match="must be more than 0"):
        controls(fleet, 0)


@pytest.mark.parametrize("document", [None, [], {}, {"plan": None}, {"engines": []}])
def test_what_is_no_plan(document):
    with pytest.raises(RolloutError, match="This is no plan"):
        Fleet.from_plan(document)


def test_a_fleet_for_serving_cannot_be_controlled():
    with pytest.raises(RolloutError, match="fleet_profile: rl"):
        Fleet.from_plan(lab().plan())


def test_a_fleet_of_somebody_elses_engines_neither(fleet):
    plan = fleet.plan()
    for engine in plan["engines"]:
        engine["external"] = True
    with pytest.raises(RolloutError, match="external"):
        Fleet.from_plan(plan)


def test_a_real_plan_is_taken():
    plan = lab().everywhere(fleet_profile="rl", fleet_control_timeout=60).plan()
    for document in (plan, {"ok": True, "plan": plan}, json.loads(json.dumps(plan))):
        fleet = Fleet.from_plan(document)
        assert [engine.name for engine in fleet.engines] == ["prefill-rack1-04-0", "decode-rack1-05-0"]
        assert (fleet.timeout, fleet.control_url) == (60, plan["router"]["control_url"])


# The command


@pytest.fixture
def plan_file(fleet, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"ok": True, "problems": [], "plan": fleet.plan()}))
    return str(path)


def test_the_command_shows_progress_on_stderr_and_the_table_on_stdout(fleet, plan_file):
    result = run("rollout", "sleep", "--level", "2", "--mode", "abort", "--plan", plan_file)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("sleep at level 2") == 8
    assert "asleep 2" in result.stdout
    assert "front: admission closed" not in result.stdout
    assert "/sleep?level=2&mode=abort" in verbs(fleet)


def test_the_command_takes_tags_and_a_version(fleet, plan_file):
    for words in (
        ["sleep"],
        ["wake", "--tags", "weights"],
        ["set_version", "step-7"],
        ["wake", "--tags", "kv_cache"],
    ):
        result = run("rollout", *words, "--plan", plan_file)
        assert result.exit_code == 0, result.output
    assert [path for path in verbs(fleet) if "wake" in path] == [
        "/wake_up?tags=weights",
        "/wake_up?tags=kv_cache",
    ]
    assert {engine.version for engine in fleet.engines.values()} == {"step-7"}


def test_the_command_prints_json(fleet, plan_file):
    result = run("rollout", "peers", "--json", "--plan", plan_file)
    assert json.loads(result.stdout)["world_size"] == 9


def test_the_command_exits_1_where_the_fleet_is_not_there(fleet, plan_file):
    fleet.engines["decode-0"].dead = True
    result = run("rollout", "pause", "--timeout", "1", "--plan", plan_file)
    assert result.exit_code == 1
    assert "decode-0" in result.stdout


def test_the_command_can_be_interrupted_while_an_engine_is_slow(fleet, plan_file):
    fleet.engines["decode-0"].delays["/sleep"] = 600
    command = [
        sys.executable,
        "-c",
        "from vllm_fleet.cli import main; main()",
        "rollout",
        "sleep",
        "--plan",
        plan_file,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        while "sleep at level 1" not in program.stderr.readline():
            pass
        program.send_signal(signal.SIGINT)
        told = program.communicate(timeout=30)
    assert program.returncode == 1
    assert told[1].endswith("Interrupted. Calls that were made go on; run sleep again to finish it.\n")


@pytest.mark.parametrize(
    "words",
    [
        ["pause"],
        ["pause", "-i", "x", "--plan", "y"],
        ["nonsense", "--plan", "{plan}"],
        ["pause", "--level", "2", "--plan", "{plan}"],
        ["pause", "--plan", "no-such-file"],
        ["pause", "--plan", __file__],
    ],
)
def test_the_command_exits_2_for_wrong_usage(plan_file, words):
    result = run("rollout", *(plan_file if word == "{plan}" else word for word in words))
    assert (result.exit_code, result.stdout) == (2, "")


def test_the_command_reads_a_plan_from_stdin(fleet, plan_file, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path(plan_file).read_text()))
    assert Fleet.from_plan(_read_plan("-")).world_size == 9


def test_the_help_names_every_action():
    told = " ".join(run("rollout", "--help").output.replace("│", " ").split())
    assert ", ".join(list(ACTIONS)[:-1]) + " or " + list(ACTIONS)[-1] in told


def test_with_a_plan_neither_ansible_nor_anything_else_heavy_is_loaded(fleet, plan_file):
    code = (
        "import sys; from vllm_fleet.cli import app\n"
        f"try: app(['rollout', 'status', '--plan', {plan_file!r}])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print([name for name in ('ansible', 'jinja2', 'yaml', 'vllm_fleet.inventory') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1] == "[]"


def test_the_package_takes_the_python_of_the_hosts():
    """Debian 11 has 3.9: no newer syntax, and only the standard library."""
    files = [*(ROOT / "src/vllm_fleet/rollout").glob("*.py"), *(ROOT / "src/vllm_fleet").glob("fleet_*.py")]
    assert len(files) == 8
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= sys.stdlib_module_names, file
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] in sys.stdlib_module_names, file


def test_the_stand_in_records_a_whole_cycle_in_order(fleet: ScriptedFleet):
    """The order over 8 engines, step by step."""
    for action in ("pause", "sleep", "wake", "resume"):
        done(getattr(controls(fleet), action)())
    steps, last = [], None
    for name, path in fleet.calls:
        step = (name.rstrip("-0123456789"), path.split("&clear")[0])
        if step != last:
            steps.append(step)
        last = step
    kinds = [path for _, path in steps]
    assert kinds[0] == "/admission/close"
    assert kinds[-1] == "/admission/open"
    assert steps[1:3] == [("prefill", "/pause?mode=keep"), ("decode", "/pause?mode=keep")]
    assert steps[-3:-1] == [("decode", "/wake_up?tags=kv_cache"), ("prefill", "/wake_up?tags=kv_cache")]
