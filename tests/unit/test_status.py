"""The table of the fleet: every engine says what is known of it, whatever is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from by_path import load
from fleets import lab

from vllm_fleet.registration import registration
from vllm_fleet.status import HEADINGS, learned, status_rows, status_table

ROOT = Path(__file__).parents[2]
WORKERS = json.loads((ROOT / "tests/unit/modules/data/router-pd-workers.json").read_text())["workers"]
P, D = "prefill-rack1-04-0", "decode-rack1-05-0"
FILTER = load(ROOT / "plugins" / "filter" / "fleet.py").FilterModule().filters()["fleet_status_table"]


@pytest.fixture
def plan():
    return lab().plan()


def unit(name, active="active", sub="running", restarts=0):
    """A result of `systemctl show`, as the module command registers it."""
    return {
        "member": {"name": name},
        "stdout_lines": [f"ActiveState={active}", f"SubState={sub}", f"NRestarts={restarts}"],
    }


def health(name, status=200, msg="OK (0 bytes)"):
    """A result of the module uri."""
    return {"member": {"name": name}, "status": status, "msg": msg}


def local(plan, name):
    return {
        "vllm-engine-x": registration(plan, name, dict.fromkeys(plan["hosts"], "sha256:1")),
        "other": {"engine": "diesel"},
    }


@pytest.fixture
def hosts(plan):
    return {
        "rack1-04": learned(local(plan, P), [unit(P)], [health(P)]),
        "rack1-05": learned(local(plan, D), [unit(D)], [health(D)]),
    }


@pytest.fixture
def workers(plan):
    """What a real router said, with the lab's URLs."""
    urls = [plan["engines"][1]["url"], plan["engines"][0]["url"]]
    return [{**worker, "url": url} for worker, url in zip(WORKERS, urls, strict=True)]


def column(rows, heading):
    return [row[heading] for row in rows]


def test_a_fleet_that_is_well(plan, hosts, workers):
    assert status_table(status_rows(plan, hosts, workers)) == [
        "engine              host      TP  registered  unit                        health  router",
        "prefill-rack1-04-0  rack1-04  1   yes         active/running, 0 restarts  ok      healthy",
        "decode-rack1-05-0   rack1-05  1   yes         active/running, 0 restarts  ok      healthy",
    ]


def test_a_host_that_was_not_reached(plan, hosts, workers):
    del hosts["rack1-05"]
    rows = status_rows(plan, hosts, workers)
    assert list(rows[1].values()) == [
        D,
        "rack1-05",
        "1",
        "no",
        "host not reached",
        "host not reached",
        "healthy",
    ]


def test_a_new_fleet_has_nothing_yet(plan):
    hosts = {
        "rack1-04": learned({}, [unit(P, "inactive", "dead")], [health(P, -1, "x: Connection refused")]),
        "rack1-05": learned({}, [unit(D, "inactive", "dead")], [health(D, -1, "x: Connection refused")]),
    }
    for row in status_rows(plan, hosts, []):
        assert list(row.values())[3:] == [
            "no",
            "inactive/dead, 0 restarts",
            "no answer: Connection refused",
            "no router",
        ]


def test_an_engine_that_runs_with_other_settings_than_declared(plan, hosts):
    hosts["rack1-05"]["local"]["vllm-engine-x"]["fingerprint"] = "old"
    assert column(status_rows(plan, hosts, []), "registered") == ["yes", "differs"]


def test_an_engine_that_is_no_longer_declared_comes_last(plan, hosts):
    old = {**registration(plan, D, {"rack1-05": "sha256:1"}), "engine": "decode-rack1-04-1"}
    hosts["rack1-04"]["local"]["vllm-engine-y"] = old
    rows = status_rows(plan, hosts, [])
    assert rows[-1] == dict.fromkeys(HEADINGS, "") | {
        "engine": "decode-rack1-04-1",
        "host": "rack1-04",
        "registered": "not declared",
    }
    assert len(rows) == 3


def test_what_the_router_thinks(plan, hosts, workers):
    workers[0]["is_healthy"] = False
    assert column(status_rows(plan, hosts, workers), "router") == ["healthy", "unhealthy"]
    assert column(status_rows(plan, hosts, workers[:1]), "router") == ["unknown", "unhealthy"]
    assert column(status_rows(plan, hosts, []), "router") == ["no router", "no router"]


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        (200, "OK (0 bytes)", "ok"),
        (503, "Status code was 503 and not [200]: HTTP Error 503: Service Unavailable", "HTTP 503"),
        (
            -1,
            "Status code was -1 and not [200]: Request failed: <urlopen error [Errno 111] Connection refused>",
            "no answer: Connection refused",
        ),
        (
            -1,
            "Status code was -1 and not [200]: Request failed: <urlopen error timed out>",
            "no answer: timed out",
        ),
        (
            -1,
            "Status code was -1 and not [200]: Connection failure: timed out\nmore",
            "no answer: timed out",
        ),
    ],
)
def test_health_is_told_in_a_few_words(status, message, shown):
    told = learned({}, [], [health(P, status, message)])
    assert told["health"] == {P: shown}


def test_the_filter_takes_what_the_playbook_registers(plan, workers):
    variables = {
        "rack1-04": {
            "ansible_facts": {"ansible_local": local(plan, P)},
            "status_units": {"results": [unit(P, restarts=2)]},
            "status_health": {"results": [health(P)]},
        },
        "rack1-05": {"ansible_facts": {}},
    }
    lines = FILTER(plan, variables, workers)
    assert lines[1].split(maxsplit=4)[3:] == ["yes", "active/running, 2 restarts  ok                healthy"]
    assert lines[2].split(maxsplit=4)[3:] == ["no", "host not reached            host not reached  healthy"]


def test_the_playbook_registers_what_the_filter_takes():
    playbook = (ROOT / "playbooks" / "status.yml").read_text()
    for name in (
        "status_units",
        "status_health",
        "loop_var: member",
        *(f"--property={p}" for p in ("ActiveState", "SubState", "NRestarts")),
    ):
        assert name in playbook


def test_ranks_that_the_router_lists_belong_to_their_engine(plan, hosts, workers):
    decode, prefill = workers
    ranks = [{**decode, "url": f"{decode['url']}@{rank}", "is_healthy": rank == 0} for rank in (0, 1)]
    assert column(status_rows(plan, hosts, [prefill, ranks[0]]), "router") == ["healthy", "healthy"]
    assert column(status_rows(plan, hosts, [prefill, *ranks]), "router") == ["healthy", "unhealthy"]
    assert column(status_rows(plan, hosts, [prefill, *reversed(ranks)]), "router") == ["healthy", "unhealthy"]


def test_members_and_engines_of_others_have_rows_of_their_own():
    other = {"role": "decode", "url": "http://10.9.9.9:8000", "tensor_parallel_size": 4}
    fleet = lab(prefill=["a"], decode=["b", "c"]).everywhere(
        fleet_socket_ifname="eth0", fleet_external_engines={"theirs": other}
    )
    plan = fleet.pool("decode", gpus=2, nnodes=2, data_parallel_size=2).plan()
    hosts = {"c": learned({}, [unit("decode-b-0.1")], [])}
    rows = {row["engine"]: row for row in status_rows(plan, hosts, [])}
    assert (rows["decode-b-0.1"]["host"], rows["decode-b-0.1"]["health"]) == ("c", "headless")
    assert rows["decode-b-0.1"]["unit"].startswith("active/running")
    assert rows["decode-b-0"]["unit"] == "host not reached"
    assert (rows["theirs"]["host"], rows["theirs"]["TP"]) == ("external", "4")


STATES = [
    {"name": P, "state": "asleep 2", "weight_version": "step-7"},
    {"name": D, "state": None, "weight_version": None},
]


def test_a_fleet_for_rl_shows_what_its_engines_are_in(hosts, workers):
    plan = lab().everywhere(fleet_profile="rl").plan()
    lines = status_table(status_rows(plan, hosts, workers, STATES))
    assert lines[0].endswith("health  router   state     weights")
    assert lines[1].endswith("ok      healthy  asleep 2  step-7")
    assert lines[2].endswith("ok      healthy  unknown")
    assert status_table(status_rows(plan, hosts, workers))[1].endswith("unknown")


def test_the_filter_takes_the_states(plan):
    plan = lab().everywhere(fleet_profile="rl").plan()
    assert "asleep 2  step-7" in FILTER(plan, {}, [], STATES)[1]


def test_a_fleet_for_serving_has_no_such_columns(plan, hosts, workers):
    assert "state" not in status_table(status_rows(plan, hosts, workers, STATES))[0]
