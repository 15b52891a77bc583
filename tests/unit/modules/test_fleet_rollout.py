"""The module that playbooks/rollout.yml runs: the package's own code, under Ansible's name, on a host."""

import pytest
from scripted_engine import scripted_fleet


@pytest.fixture
def fleet():
    with scripted_fleet(1, 1) as engines:
        yield engines


@pytest.fixture
def control(run_module, fleet):
    return lambda action, **params: run_module("fleet_rollout", plan=fleet.plan(), action=action, **params)


def test_it_does_what_is_asked_with_its_options(control, fleet):
    result = control("sleep", level=2, mode="abort", timeout=5)
    assert [path for _, path in fleet.calls if "sleep" in path] == ["/sleep?level=2&mode=abort"] * 2
    assert (result["changed"], result["admission"]) == (True, "closed")
    assert [engine["state"] for engine in result["engines"]] == ["asleep 2"] * 2
    assert result["lines"][-1].startswith("sleep: done in")


def test_it_changes_nothing_by_looking(control):
    assert [control(action)["changed"] for action in ("status", "peers", "weights_info")] == [False] * 3


def test_it_fails_with_what_each_engine_is_in(control, fleet):
    fleet.engines["decode-0"].answers["/pause"] = (500, b"no")
    result = control("pause")
    assert "`pause keep` failed at 1 of 2 engines (decode-0)" in result["msg"]
    assert [engine["state"] for engine in result["engines"]] == ["paused", "running"]
    assert result["remedy"].startswith("Run pause again")


def test_it_only_looks_in_check_mode(run_module, fleet):
    result = run_module("fleet_rollout", check=True, plan=fleet.plan(), action="sleep")
    assert (result["changed"], result["action"], fleet.calls) == (False, "status", [])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"action": "pause", "level": 2}, "pause has no option level"),
        ({"action": "set_version"}, "set_version needs a version"),
        ({"action": "status", "timeout": -1}, "must be more than 0"),
        ({"action": "sleep", "level": 3}, "value of level must be one of: 1, 2"),
        ({"action": "nap"}, "value of action must be one of"),
    ],
)
def test_wrong_options_fail_with_a_sentence(control, fleet, params, words):
    assert words in control(**params)["msg"]
    assert fleet.calls == []


def test_a_fleet_for_serving(run_module, fleet):
    plan = fleet.plan() | {"profile": "serving"}
    assert "fleet_profile: rl" in run_module("fleet_rollout", plan=plan, action="pause")["msg"]
