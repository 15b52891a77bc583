"""Who dials whom, from plans; and that the listeners are the ports of the plan."""

from __future__ import annotations

import pytest
from host_records import ROOT, plan_of

from vllm_fleet.host_check import reach

RECIPES = sorted(path.parent.name for path in (ROOT / "inventory").glob("*/hosts.yml"))


def dialed(plan, purpose):
    """(source, target host, port) of the dials for a purpose."""
    return {
        (source, target.host, target.port)
        for source, target in reach.dials(plan)
        if target.purpose.startswith(purpose)
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_listeners_are_the_ports_of_the_plan(recipe):
    plan = plan_of(recipe)
    for host, planned in plan["hosts"].items():
        found = [(one.port, one.purpose) for one in reach.listeners(plan, host)]
        assert sorted(port for port, _ in found) == sorted(use["port"] for use in planned["ports"])
        assert {purpose for _, purpose in found} == {use["purpose"] for use in planned["ports"]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_dial_has_somebody_who_listens(recipe):
    plan = plan_of(recipe)
    opened = {
        (host, one["address"], one["port"])
        for host in plan["hosts"]
        for one in reach.questions(plan, host)["listeners"]
    }
    for source, target in reach.dials(plan):
        assert source in plan["hosts"]
        if target.host is not None and target.unit != reach.IMEX_UNIT:
            assert (target.host, target.address, target.port) in opened


def test_two_trays(plan):
    assert dialed(plan, "HTTP") == {("gate-01", "rack1-01", 8000), ("gate-01", "rack1-02", 8000)}
    assert dialed(plan, "NIXL") == {("rack1-02", "rack1-01", 5600)}  # the decode fetches
    assert dialed(plan, "registry") == {("rack1-01", "gate-01", 5000), ("rack1-02", "gate-01", 5000)}
    assert dialed(plan, "front") == {("gate-01", "gate-01", 30000), ("gate-01", "gate-01", 30010)}
    assert dialed(plan, "IMEX") == {("rack1-01", "rack1-02", 50000), ("rack1-02", "rack1-01", 50000)}
    assert dialed(plan, "a port of") == set()  # KV takes NVLink, and no engine spans hosts


def test_a_wide_engine():
    plan = plan_of("gb200-wide-ep")
    decodes, prefills = [f"rack1-{n:02}" for n in range(1, 17)], ["rack1-17", "rack1-18"]
    ports = range(5600, 5604)  # one for each of a prefill's four ranks
    assert dialed(plan, "NIXL") == {(d, p, port) for d in decodes for p in prefills for port in ports}
    rpc = {(source, "rack1-01", 20000) for source in decodes[1:]}
    assert dialed(plan, "data-parallel RPC") == rpc
    assert dialed(plan, "link of the members") == {(source, head, 20002) for source, head, _ in rpc}
    assert dialed(plan, "a port of") == {(a, b, 60999) for a in decodes for b in decodes if a != b}
    assert len(dialed(plan, "IMEX")) == 18 * 17


def test_over_tcp_prefills_and_decodes_meet_at_any_port():
    plan = plan_of("lab")
    assert dialed(plan, "a port of") == {("rack1-04", "rack1-05", 60999), ("rack1-05", "rack1-04", 60999)}


def test_an_engine_of_somebody_else_is_dialed_and_not_opened():
    other = '{"fleet_external_engines": {"theirs": {"role": "decode", "url": "http://192.0.2.77:9000", "tensor_parallel_size": 4}}}'
    plan = plan_of("gb200-two-trays", other)
    assert ("gate-01", None, 9000) in dialed(plan, "HTTP of theirs")
    for host in plan["hosts"]:
        assert 9000 not in [one["port"] for one in reach.questions(plan, host)["listeners"]]


def test_what_a_host_opens_and_dials(plan):
    asked = reach.questions(plan, "rack1-01")
    unit = "vllm-engine-prefill-rack1-01-0.service"
    assert asked["listeners"] == [
        {"address": "192.0.2.101", "port": 8000, "unit": unit},
        {"address": "192.0.2.101", "port": 5600, "unit": unit},
    ]
    assert asked["dials"] == [
        {"address": "192.0.2.10", "port": 5000},
        {"address": "192.0.2.102", "port": 50000},
    ]
