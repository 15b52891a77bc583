"""Control of the whole fleet while it generates: real engines, router and front; from this machine and as a playbook."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import DECODE, PREFILL, ask
from lab import FRONT, ROOT, fetch
from proxy import ControlProxy

SLOTS = 8  # max_num_seqs of the lab's engines
TOKENS = 3000  # some 15 s, if 8 are generated at once
ADMISSION = "http://198.18.40.2:30010/admission"
PROGRAM = ROOT / ".venv/bin/vllm-fleet"


@pytest.fixture(scope="module")
def rl(fleet, rl_inventory) -> Path:
    """The lab's inventory with the profile rl, deployed."""
    # What a run that was cut off left; no fleet may be there at all.
    for url in (f"{ADMISSION}/open", *(f"http://198.18.40.{last}:8000/resume" for last in (4, 5))):
        with contextlib.suppress(OSError):
            fetch(url, {})
    fleet.deploy(inventory=rl_inventory)
    return rl_inventory


@pytest.fixture(scope="module")
def control(rl):
    """`vllm-fleet rollout` as a trainer's host runs it, with a plan for an inventory.

    `fails` says that it must; `proxied` has other URLs of engines than the plan.
    """
    said = subprocess.run(
        [PROGRAM, "plan", "-i", rl, "--json"], capture_output=True, check=True, text=True
    ).stdout

    def run(*words: str, fails: bool = False, proxied: dict[str, str] | None = None) -> SimpleNamespace:
        plan = json.loads(said)
        for engine in plan["plan"]["engines"]:
            engine["url"] = (proxied or {}).get(engine["name"], engine["url"])
        command = [PROGRAM, "rollout", *words, "--plan", "-", "--json"]
        asked = json.dumps(plan)
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == int(fails), done.stdout + done.stderr
        result = json.loads(done.stdout)
        engines = {engine["name"]: SimpleNamespace(**engine) for engine in result["engines"]}
        states = {name: engine.state for name, engine in engines.items()}
        return SimpleNamespace(**result | {"engines": engines}, states=states)

    # Engines that ran before keep the version they had then.
    run("pause")
    run("set_version", "step-0")
    run("resume")
    return run


def long_request(number: int) -> dict:
    return {
        "prompt": f"Story number {number} " + "and then " * 100,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }


@contextmanager
def load(clients: int):
    """Long generations that begin with the block; afterwards `ends` counts how they ended, `texts` has their texts."""
    seen = SimpleNamespace(ends=Counter(), texts={}, failed=[])

    def generate(number: int) -> None:
        try:
            answer = ask(FRONT, timeout=280, **long_request(number))
        except (OSError, http.client.HTTPException) as error:  # an answer may break off, too
            seen.ends["failed"] += 1
            seen.failed.append(f"{number}: {error} {getattr(error, 'read', bytes)()[:300]!r}")
            return
        choice = answer["choices"][0]
        if choice["finish_reason"] == "length":
            assert answer["usage"]["completion_tokens"] == TOKENS
        seen.ends[choice["finish_reason"]] += 1
        seen.texts[number] = choice["text"]

    threads = [threading.Thread(target=generate, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    wait_until(lambda: fetch(ADMISSION)["in_flight"] == clients, 20)
    time.sleep(0.5)  # all are with an engine, none is done
    yield seen
    for thread in threads:
        thread.join(timeout=280)


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.3)


def refused() -> str:
    """The Retry-After that a new request gets from a front that is closed."""
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(FRONT, prompt="Hello", max_tokens=1)
    assert error.value.code == 503
    assert "admission is closed" in json.load(error.value)["error"]["message"]
    return error.value.headers["Retry-After"]


def test_a_fleet_under_load_sleeps_wakes_and_loses_no_request(control):
    assert control("status").states == {PREFILL: "running", DECODE: "running"}
    with load(SLOTS) as seen:
        paused = control("pause")
        assert paused.states == {PREFILL: "paused", DECODE: "paused"}
        frozen = paused.in_flight
        asleep = control("sleep")
        assert asleep.states == {PREFILL: "asleep 1", DECODE: "asleep 1"}
        assert refused() == "10"
        time.sleep(1)
        assert control("status").in_flight == frozen
        control("wake", "--tags", "weights")
        control("prepare_update")
        control("set_version", "step-1")
        assert control("wake", "--tags", "kv_cache").admission == "closed"
        assert refused() == "10"
        assert control("resume").admission == "open"
    assert (frozen, seen.ends) == (SLOTS, {"length": SLOTS}), seen.failed
    # Frozen, put to sleep and computed again, it is what an engine says that was left alone.
    alone = ask("http://198.18.40.5:8000", timeout=120, **long_request(0) | {"max_tokens": 1500})
    assert seen.texts[0].startswith(alone["choices"][0]["text"])
    after = control("weights_info")
    assert {engine.weight_version for engine in after.engines.values()} == {"step-1"}
    assert all(engine.after["kv_expired"] == engine.before["kv_expired"] for engine in after.engines.values())


def test_the_playbook_does_the_same_and_aborts_where_that_is_said(fleet, rl, control):
    # Half of them wait for a slot, and their prefill for them; on a busy machine the first are done before the play is there.
    with load(2 * SLOTS) as seen:
        done = fleet.play("rollout", "-e", "action=sleep rollout_mode=abort rollout_level=2", inventory=rl)
        assert done.rc == 0, done.output[-4000:]
        assert f"{DECODE} decode 2 asleep 2 discarded" in done.words
    assert seen.ends["abort"] >= SLOTS, seen.failed
    assert seen.ends["abort"] + seen.ends["length"] == 2 * SLOTS, (seen.ends, seen.failed)
    assert "asleep 2 discarded" in fleet.play("status", inventory=rl).words

    done = fleet.play("rollout", "-e", "action=wake", inventory=rl)
    assert done.rc != 0
    assert "without weights" in done.words
    control("set_version", "step-2")
    control("wake")
    assert fleet.play("rollout", "-e", "action=resume", inventory=rl).rc == 0
    assert ask(FRONT, prompt="Hello", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_an_engine_that_is_slow_and_one_whose_answers_are_empty_are_told_and_hold_up_no_other(control):
    """Real engines, each behind a proxy that is late, or drops the bodies of answers."""
    with (
        ControlProxy("http://198.18.40.4:8000").running() as prefill,
        ControlProxy("http://198.18.40.5:8000").running() as decode,
    ):
        proxied = {PREFILL: prefill.url, DECODE: decode.url}
        decode.delays = {"/sleep": 4}
        asleep = control("sleep", proxied=proxied)
        assert asleep.states == {PREFILL: "asleep 1", DECODE: "asleep 1"}
        assert asleep.engines[PREFILL].seconds < 2 < 4 < asleep.engines[DECODE].seconds

        decode.delays = {"/wake_up": 4}
        late = control("wake", "--timeout", "2", fails=True, proxied=proxied)
        assert "/wake_up" in late.engines[DECODE].fault
        assert "did not answer within 2 s" in late.engines[DECODE].fault
        assert late.engines[PREFILL].fault == ""
        assert (late.admission, late.remedy[:14]) == ("closed", "Run wake again")
        decode.delays = {}

        # What an engine was told to do it does; what it was asked it has to say.
        prefill.empty = {"/pause", "/sleep", "/wake_up", "/resume", "/update_weight_version"}
        control("wake", "--tags", "weights", proxied=proxied)
        control("set_version", "step-2", proxied=proxied)
        control("wake", proxied=proxied)
        assert control("resume", proxied=proxied).states == {PREFILL: "running", DECODE: "running"}
        for path in ("/is_paused", "/weight_info", "/metrics"):
            prefill.empty = {path}
            silent = control("sleep", fails=True, proxied=proxied)
            assert path in silent.engines[PREFILL].fault
            assert "Nothing was done" in silent.message
    assert control("status").states == {PREFILL: "running", DECODE: "running"}


def test_an_engine_that_dies_in_the_middle_is_told_and_the_way_back_works(fleet, rl, control):
    """It dies while the call waits for requests; systemd starts it again, with the weights from its disk."""
    pausing = SimpleNamespace(result=None)
    # More than the decode has slots for: they take so long that the call still waits when it dies.
    with load(2 * SLOTS) as seen:
        thread = threading.Thread(
            target=lambda: setattr(pausing, "result", control("pause", "--mode", "wait", fails=True))
        )
        thread.start()
        wait_until(lambda: fetch(ADMISSION)["admission"] == "closed", 30)
        fleet.run("rack1-05", f"docker kill vllm-engine-{DECODE}")
        thread.join(timeout=120)
    # It took its requests with it, but for those that were done.
    assert seen.ends["failed"] >= 1
    assert sum(seen.ends.values()) == sum(seen.ends[end] for end in ("failed", "length")) == 2 * SLOTS, (
        seen.ends
    )
    result = pausing.result
    assert (result.states, result.admission) == ({PREFILL: "paused", DECODE: None}, "closed")
    assert "http://198.18.40.5:8000/" in result.engines[DECODE].fault
    assert result.remedy == "Run pause again to finish it, or resume to go back."

    assert "Nothing was done" in control("resume", fails=True).message
    health = ["curl", "-sf", "http://198.18.40.5:8000/health"]
    wait_until(lambda: subprocess.run(health, check=False).returncode == 0, 150)
    assert f"in {PREFILL}; default in {DECODE}" in control("resume", fails=True).message
    control("pause")
    assert "several versions" in control("prepare_update", fails=True).message
    control("prepare_update", "--allow-mixed")
    control("set_version", "step-3")
    assert control("resume").states == {PREFILL: "running", DECODE: "running"}
    proved = fleet.play("prove", inventory=rl)
    assert proved.rc == 0, proved.output[-4000:]
    assert f"{PREFILL} -> {DECODE} passed" in proved.words


def test_a_trainer_finds_its_peers(control):
    said = control("peers")
    assert [(name, one.rank_offset, one.world_size) for name, one in said.engines.items()] == [
        (PREFILL, 1, 1),
        (DECODE, 2, 1),
    ]
    assert said.world_size == 3
    for engine in said.engines.values():
        with urllib.request.urlopen(engine.url + "/server_info?config_format=json", timeout=30) as answer:
            assert json.load(answer)["vllm_config"]
