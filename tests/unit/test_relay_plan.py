"""The relay in the plan: where it runs, what it is started with, who dials it."""

from __future__ import annotations

import pytest
import yaml
from fleets import gpu, lab
from host_records import ROOT
from pd_relay.__main__ import parser

from vllm_fleet.comparison import compare
from vllm_fleet.host_check.reach import dials, listeners
from vllm_fleet.picture import svg
from vllm_fleet.relay import relay_arguments, relay_hosts

GROUPS = {"prefill": ["rack1-04"], "decode": ["rack1-05"], "relay": ["rack1-gate"]}


def relayed(**variables):
    return lab(**GROUPS).everywhere(**variables).plan()


def test_without_the_group_there_is_none():
    plan = lab().plan()
    assert plan["relay"] is None
    assert relay_hosts(plan) == []
    assert "fleet_relay" not in {group for _, group in plan["groups"]}
    with pytest.raises(KeyError, match="relay on rack1-router"):
        relay_arguments(plan, "rack1-router")


def test_with_the_group_it_has_a_port_an_image_and_a_url_for_each_host():
    plan = relayed()
    address = plan["hosts"]["rack1-gate"]["address"]
    assert plan["relay"] == {
        "port": 30020,
        "urls": {"rack1-gate": f"http://{address}:30020"},
        "image": {"name": "pd-relay", "variant": "amd64", "architecture": "amd64"},
    }
    assert ["rack1-gate", "fleet_relay"] in plan["groups"]
    assert {"port": 30020, "purpose": "relay"} in plan["hosts"]["rack1-gate"]["ports"]
    assert f"http://{address}:31000" in relayed(fleet_relay_port=31000)["relay"]["urls"].values()


@pytest.mark.parametrize(("told", "architecture"), [(None, "arm64"), ("amd64", "amd64")])
def test_its_hosts_are_what_the_engines_are_unless_it_is_said(told, architecture):
    fleet = gpu(**GROUPS)
    if told:
        fleet.everywhere(fleet_relay_architecture=told)
    image = fleet.plan()["relay"]["image"]
    assert image == {"name": "pd-relay", "variant": architecture, "architecture": architecture}


def test_it_is_started_with_every_engine_the_times_of_the_fleet_and_who_may_control_it():
    plan = relayed(fleet_controllers=["192.0.2.0/24"], fleet_request_timeout=600, fleet_control_timeout=60)
    callers = plan["router"]["control_sources"]
    assert {*(host["address"] for host in plan["hosts"].values()), "192.0.2.0/24"} == set(callers)
    assert relay_arguments(plan, "rack1-gate") == [
        f"--host={plan['hosts']['rack1-gate']['address']}",
        "--port=30020",
        "--request-timeout=600",
        "--control-timeout=60",
        "--health-interval=5",
        "--health-failures=2",
        f"--prefill={plan['router']['prefill'][0]}",
        f"--decode={plan['router']['decode'][0]}",
        "--controllers",
        *callers,
    ]


def test_who_may_control_engines_may_control_it():
    fleet = lab(**GROUPS).everywhere(fleet_controllers=["198.18.0.0/15"])
    fleet.hosts["rack1-04"] |= {"fleet_address": "2001:db8::4"}
    plan = fleet.plan()
    words = relay_arguments(plan, "rack1-gate")
    assert words[words.index("--controllers") + 1 :] == ["198.18.0.0/15", "2001:db8::4"]


def test_nothing_that_happens_on_its_host_keeps_it_down():
    """systemd gives up after 5 starts in 10 s, which is less than docker is away for when it restarts."""
    unit = (ROOT / "templates/pd-relay.service.j2").read_text()
    before_service = unit.partition("[Service]")[0]
    assert "StartLimitIntervalSec=0\n" in before_service
    assert "StartLimit" not in unit.partition("[Service]")[2]


def test_it_knows_the_new_engines_before_the_old_ones_are_removed():
    def plays(name):
        for play in yaml.safe_load((ROOT / "playbooks" / name).read_text()):
            nested = play.get("ansible.builtin.import_playbook")
            yield from plays(nested) if nested else [(name, play["name"])]

    order = list(plays("site.yml"))
    serve, [remove] = (
        order.index(("relay.yml", "Relay")),
        [at for at, (_, name) in enumerate(order) if name == "Retired engines"],
    )
    assert serve < remove
    assert ("router.yml", "Retired engines") in set(plays("router.yml"))


def test_the_relay_understands_them():
    plan = relayed(fleet_profile="rl", fleet_controllers=["2001:db8::/32"])
    options = parser().parse_args(
        [*relay_arguments(plan, "rack1-gate"), "--drain-timeout=30", "--max-body=1"]
    )
    assert options.prefill == plan["router"]["prefill"]
    assert options.decode == plan["router"]["decode"]
    assert [str(network) for network in options.controllers][-1] == "2001:db8::/32"


def test_for_rollouts_it_watches_as_patiently_as_the_router():
    words = relay_arguments(relayed(fleet_profile="rl"), "rack1-gate")
    assert {"--health-interval=10", "--health-timeout=30", "--health-failures=3"} <= set(words)
    assert "--request-timeout=14400" in words


def test_its_host_reaches_engines_and_the_registry_and_its_port_is_looked_at():
    plan = relayed()
    dialed = {
        (dial.target.purpose.partition(" of ")[0], dial.target.port)
        for dial in dials(plan)
        if dial.source == "rack1-gate"
    }
    assert dialed == {("HTTP", 8000), ("registry", 5000)}
    [listener] = listeners(plan, "rack1-gate")
    assert (listener.port, listener.purpose, listener.unit) == (30020, "relay", "pd-relay.service")


def test_it_is_in_the_picture():
    fleet = lab(**GROUPS)
    fleet.hosts["rack1-gate"]["fleet_rack"] = "1"
    assert "relay 30020" in svg(fleet.plan())


def test_a_changed_engine_restarts_it_and_what_does_not_reach_it_does_not():
    plan = relayed()
    assert compare(plan, relayed(fleet_front_port=31000))[0].engine == "router"
    assert "relay" not in {change.engine for change in compare(plan, relayed(fleet_front_port=31000))}
    [change] = [one for one in compare(plan, relayed(fleet_http_port_base=9000)) if one.engine == "relay"]
    assert (change.action, change.reasons) == ("restart", ("its arguments on rack1-gate",))
    [change] = [one for one in compare(lab().plan(), plan) if one.engine == "relay"]
    assert change.reasons == ("new on rack1-gate",)


def test_it_is_refused_beside_ordinary_engines():
    fleet = lab(chat=["rack1-04"], relay=["rack1-router"])
    fleet.everywhere(fleet_pools={"chat": {"role": "mixed", "hosts": "chat", "gpus": 1}})
    assert [problem["rule"] for problem in fleet.judge()[1]] == ["relay-pairs"]


def test_its_port_is_not_another_ones():
    fleet = lab(prefill=["rack1-04"], decode=["rack1-05"], relay=["rack1-router"]).everywhere(
        fleet_relay_port=30010
    )
    assert [problem["rule"] for problem in fleet.judge()[1]] == ["port-collision"]
