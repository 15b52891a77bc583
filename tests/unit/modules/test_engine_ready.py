"""Readiness is gated on the unit; engines and systemd are fakes here."""

import time
from datetime import UTC, datetime, timedelta

import pytest

UNIT = "vllm-engine-p.service"


class FakeEngine:
    def __init__(self, server):
        self.server = server
        self.healthy = True
        self.models = {"data": [{"id": "tiny"}]}
        self.completion = {"usage": {"completion_tokens": 1}}
        self.delay = 0.0
        self.paused = 404, b""  # not in dev mode
        server.answer = self._answer

    def _answer(self, path, body):
        if path == "/health":
            return (200, b"") if self.healthy else (503, b"")
        if path == "/v1/models":
            return 200, self.models
        if path == "/is_paused":
            return self.paused
        time.sleep(self.delay)
        return 200, self.completion

    @property
    def generations(self):
        return [body for path, body in self.server.asked if path == "/v1/completions"]

    def spec(self, unit=UNIT):
        return {"engine": "p", "unit": unit, "url": self.server.url, "served_name": "tiny"}


@pytest.fixture
def engine(fake_server):
    return FakeEngine(fake_server())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("engine_ready.PAUSE", 0.02)


@pytest.fixture
def wait(run_module, engine):
    return lambda **params: run_module("engine_ready", **{"engines": [engine.spec()], "slice": 0.3, **params})


def test_ready_means_one_generated_token(wait, engine, systemd):
    systemd.unit(UNIT)
    result = wait()
    assert result["ready"] is True
    assert [body["max_tokens"] for body in engine.generations] == [1]
    assert "kv_transfer_params" not in engine.generations[0]
    assert result["engines"][0] == {
        "engine": "p",
        "ready": True,
        "state": "active/running",
        "seconds": pytest.approx(0, abs=1),
    }
    assert result["summary"].startswith("1 of 1 engines ready")
    assert result["changed"] is False


def test_one_that_a_trainer_paused_is_ready_without_a_token_and_told(wait, engine, systemd, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(
        "ansible.module_utils.basic.AnsibleModule.warn", lambda _module, text: warnings.append(text)
    )
    systemd.unit(UNIT)
    engine.paused = 200, {"is_paused": True}
    result = wait()
    assert (result["ready"], engine.generations) == (True, [])
    assert len(warnings) == 1
    assert "p is paused" in warnings[0]


def test_one_in_dev_mode_that_runs_is_asked_for_a_token(wait, engine, systemd):
    systemd.unit(UNIT)
    engine.paused = 200, {"is_paused": False}
    assert (wait()["ready"], len(engine.generations)) == (True, 1)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"healthy": False}, "/health answered 503"),
        ({"models": {"data": [{"id": "other"}]}}, "lists ['other'], not the served name 'tiny'"),
        ({"models": {"data": None}}, "lists [], not the served name"),
        ({"completion": {"usage": {"completion_tokens": 0}}}, "answered 200 but generated no token"),
        ({"completion": {}}, "answered 200 but generated no token"),
    ],
)
def test_a_slow_engine_ends_the_slice_and_at_last_the_time_out(wait, engine, systemd, change, seen):
    systemd.unit(UNIT)
    vars(engine).update(change)
    result = wait()
    assert (result["ready"], result["ready_engines"]) == (False, [])
    assert seen in result["summary"]
    result = wait(started=100, timeout=100.1)
    assert "Not ready after 100 s" in result["msg"]
    assert seen in result["msg"]


def test_nothing_listening_yet_is_named_at_the_time_out(run_module, systemd):
    systemd.unit(UNIT)
    spec = {"engine": "p", "unit": UNIT, "url": "http://127.0.0.1:9", "served_name": "tiny"}
    result = run_module("engine_ready", engines=[spec], timeout=0.1)
    assert "p (vllm-engine-p.service active/running): http://127.0.0.1:9/health refused" in result["msg"]


DEATHS = [
    ({"NRestarts": "1"}, "was restarted by systemd (NRestarts 0 -> 1"),
    ({"ActiveState": "activating", "SubState": "auto-restart", "ExecMainStatus": "137"}, "exit status 137"),
    ({"ActiveState": "failed", "SubState": "failed", "Result": "start-limit-hit"}, "start-limit-hit"),
    ({"ActiveState": "inactive", "SubState": "dead"}, "is inactive"),
    (
        {"LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"},
        "does not exist on this host",
    ),
]


@pytest.mark.parametrize(("state", "seen"), DEATHS)
def test_a_dying_engine_fails_at_once_with_its_log(wait, engine, systemd, state, seen):
    engine.healthy = False
    systemd.unit(UNIT, {}, {}, state)
    systemd.journal = "loading\nRuntimeError: no such model"
    began = time.monotonic()
    result = wait(slice=60)
    assert time.monotonic() - began < 5
    assert f"Engine p: its unit {UNIT} " in result["msg"]
    assert seen in result["msg"]
    assert result["msg"].endswith("loading\nRuntimeError: no such model")


def test_a_unit_about_to_be_restarted_is_never_ready_although_its_port_answers(wait, systemd):
    systemd.unit(UNIT, {"ActiveState": "activating", "SubState": "auto-restart"})
    assert "died and is about to be started again" in wait()["msg"]


def test_restarts_before_the_start_do_not_count_and_later_ones_do(wait, systemd):
    systemd.unit(UNIT, {"NRestarts": "3"})
    assert wait()["restarts"] == {UNIT: 3}
    assert wait(restarts={UNIT: 3})["ready"] is True
    assert "NRestarts 2 -> 3" in wait(restarts={UNIT: 2})["msg"]


def test_a_death_is_seen_while_a_generation_hangs(wait, engine, systemd):
    engine.delay = 30
    systemd.unit(UNIT, *[{}] * 10, {"NRestarts": "1"})
    began = time.monotonic()
    assert "NRestarts 0 -> 1" in wait(slice=60)["msg"]
    assert time.monotonic() - began < 5


def test_a_generation_under_way_is_waited_for_past_the_slice(wait, engine, systemd):
    engine.delay = 0.6
    systemd.unit(UNIT)
    assert wait(slice=0.1)["ready"] is True
    assert len(engine.generations) == 1


def test_an_engine_found_ready_before_is_not_probed_again_but_watched(wait, engine, systemd):
    systemd.unit(UNIT)
    assert wait(ready_engines=["p"])["ready"] is True
    assert engine.server.asked == []
    systemd.unit(UNIT, {"ActiveState": "failed"})
    assert "is failed" in wait(ready_engines=["p"])["msg"]


def test_a_starting_unit_is_not_probed(wait, engine, systemd):
    systemd.unit(UNIT, {"ActiveState": "activating", "SubState": "start-pre"})
    result = wait()
    assert result["engines"][0]["state"] == "activating/start-pre"
    assert engine.server.asked == []


def test_without_systemd_the_message_says_so(wait, systemd):
    assert "systemctl show vllm-engine-p.service gave no state" in wait()["msg"]


def test_it_runs_in_check_mode(run_module, engine, systemd):
    systemd.unit(UNIT)
    assert run_module("engine_ready", check=True, engines=[engine.spec()])["ready"] is True


HEADLESS = {"engine": "d.1", "unit": UNIT, "url": None, "served_name": "tiny", "container": "vllm-engine-d.1"}


def started(seconds_ago):
    since = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    return 0, "true " + since.strftime("%Y-%m-%dT%H:%M:%S.123456789Z\n")


@pytest.mark.parametrize(
    ("docker", "ready", "seen"),
    [
        (lambda: started(16), True, "1 of 1 engines ready"),
        (lambda: started(7), False, "its container has run for"),
        (lambda: (0, "false 0001-01-01T00:00:00Z\n"), False, "waits for the other members"),
        (lambda: (1, ""), False, "waits for the other members"),
    ],
)
def test_a_headless_member_is_ready_when_its_container_has_run_for_a_while(
    run_module, systemd, docker, ready, seen
):
    systemd.unit(UNIT)
    systemd.docker = docker()
    result = run_module("engine_ready", engines=[HEADLESS], slice=0.1)
    assert (result["ready"], result["ready_engines"]) == (ready, ["d.1"] if ready else [])
    assert seen in result["summary"]


def test_a_headless_member_that_dies_fails_at_once_however_long_its_container_ran(run_module, systemd):
    systemd.unit(UNIT, {"NRestarts": "1"})
    systemd.docker = started(100)
    assert "NRestarts 0 -> 1" in run_module("engine_ready", engines=[HEADLESS], restarts={UNIT: 0})["msg"]


def test_a_head_without_a_container_is_told_from_one_that_is_slow(run_module, engine, systemd):
    systemd.unit(UNIT)
    engine.healthy = False
    spec = engine.spec() | {"container": "vllm-engine-p"}
    waits = "its container does not run, it starts or waits for the other members"
    assert waits in run_module("engine_ready", engines=[spec], slice=0.1)["summary"]
    systemd.docker = started(1)
    assert waits not in run_module("engine_ready", engines=[spec], slice=0.1)["summary"]


def test_the_time_out_shows_the_logs_of_those_that_are_late(wait, engine, systemd):
    systemd.unit(UNIT)
    engine.healthy = False
    systemd.journal = "[vllm-link] waiting for decode.1"
    assert wait(timeout=0.1)["msg"].endswith("ends with:\n[vllm-link] waiting for decode.1")
