"""Who may connect to what: the data of the fence, from plans."""

from __future__ import annotations

import ipaddress
import re
import shlex
import subprocess

import pytest
from fleets import gpu, lab
from host_records import ROOT, plan_of

from vllm_fleet import fence
from vllm_fleet.host_check import reach

RECIPES = sorted(path.parent.name for path in (ROOT / "inventory").glob("*/hosts.yml"))
EXTERNAL = {"role": "decode", "tensor_parallel_size": 1, "url": "http://198.18.77.1:8000"}


def addresses(sources):
    return sources["ipv4"] + sources["ipv6"]


def test_the_hosts_of_the_fleet_and_its_controllers_are_callers():
    plan = lab().everywhere(fleet_controllers=["198.18.50.0/24", "2001:db8::1"]).plan()
    assert plan["fence"]["callers"] == {
        "ipv4": ["198.18.40.1", "198.18.40.2", "198.18.40.3", "198.18.50.0/24"],
        "ipv6": ["2001:db8::1"],
    }
    assert plan["fence"]["peers"] == {"ipv4": [], "ipv6": []}
    assert plan["router"]["control_sources"] == addresses(plan["fence"]["callers"])


def test_how_ansible_reaches_a_host_that_has_a_fleet_address_makes_nobody_a_caller():
    fleet = lab()
    fleet.hosts["rack1-04"] |= {"fleet_address": "2001:db8::4"}
    fleet.hosts["rack1-05"] |= {"fleet_address": "198.18.50.5", "ansible_host": "192.0.2.99"}  # a bastion
    assert fleet.plan()["fence"]["callers"] == {
        "ipv4": ["198.18.40.3", "198.18.50.5"],
        "ipv6": ["2001:db8::4"],
    }


@pytest.mark.parametrize(
    ("controllers", "refused"),
    [
        (["0.0.0.0/1", "128.0.0.0/1"], ["0.0.0.0/1", "128.0.0.0/1"]),
        (["10.0.0.0/8", "fc00::/7"], ["fc00::/7"]),
        (["10.0.0.0/8", "fd00::/8"], []),
    ],
)
def test_no_network_of_controllers_is_wider_than_a_fleets_own(controllers, refused):
    _, problems = lab().everywhere(fleet_controllers=controllers).judge()
    assert [problem["value"] for problem in problems if problem["rule"] == "controllers"] == refused


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (["10.0.0.0/8", "10.1.0.0/16", "10.255.255.255"], ["10.0.0.0/8"]),
        (["10.0.0.5", "10.0.0.4"], ["10.0.0.4", "10.0.0.5"]),
        (["10.0.0.0/31", "10.0.0.0", "10.0.0.2"], ["10.0.0.0/31", "10.0.0.2"]),
        (["2001:db8::/32", "2001:db8::1", "10.0.0.0/9"], ["10.0.0.0/9", "2001:db8::/32"]),
        (["0.0.0.0/0", "255.255.255.255", "::/0", "::1"], ["0.0.0.0/0", "::/0"]),
        (["9.0.0.0/8", "10.0.0.1"], ["9.0.0.0/8", "10.0.0.1"]),
    ],
)
def test_no_source_is_within_another(written, kept):
    assert fence.without_nested(written) == kept
    assert fence.without_nested(reversed(written)) == kept


def test_hosts_of_others_reach_side_channels_alone():
    fleet = lab().everywhere(
        fleet_external_engines={
            "theirs": EXTERNAL,
            "named": EXTERNAL | {"url": "http://d.example.com:8000"},
            "v6": EXTERNAL | {"url": "http://[2001:db8::9]:8000"},
        }
    )
    plan = fleet.plan()
    assert plan["fence"]["peers"] == {"ipv4": ["198.18.77.1"], "ipv6": ["2001:db8::9"]}
    assert "198.18.77.1" not in addresses(plan["fence"]["callers"])
    assert [problem["rule"] for problem in plan["warnings"]] == ["external-name"]
    assert plan["hosts"]["rack1-04"]["fence"] == {"ports": [5600, 8000], "side_channel_ports": [5600]}


def test_every_fixed_port_of_an_engine_is_fenced_and_nothing_else():
    fleet = gpu(prefill=["p1"], decode=["d1", "d2"], registry=["r"], router=["r"])
    fleet.pool("decode", gpus=16, data_parallel_size=4).everywhere(fleet_socket_ifname="eth0")
    plan = fleet.plan()
    [decode] = [engine for engine in plan["engines"] if engine["role"] == "decode"]
    fixed = decode["fixed_ports"]
    on_head = plan["hosts"]["d1"]["fence"]
    assert on_head["side_channel_ports"] == [5600, 5601]
    assert on_head["ports"] == sorted(
        [
            5600,
            5601,
            fixed["http"],
            fixed["link"],
            *filter(None, [fixed["data_parallel_rpc"], fixed["master"]]),
        ]
    )
    assert plan["hosts"]["d2"]["fence"] == {"ports": [5602, 5603], "side_channel_ports": [5602, 5603]}
    assert plan["hosts"]["r"]["fence"] == {"ports": [30010], "side_channel_ports": []}


@pytest.mark.parametrize("recipe", RECIPES)
def test_whoever_the_fleet_needs_to_dial_may(recipe):
    plan = plan_of(recipe)
    allowed = [ipaddress.ip_network(source) for source in addresses(plan["fence"]["callers"])]
    for source, _ in reach.dials(plan):
        dialing = ipaddress.ip_address(plan["hosts"][source]["address"])
        assert any(dialing in network for network in allowed), source


def a_fence(ports, channels, callers, peers=()):
    return {
        "ports": ports,
        "side_channel_ports": channels,
        "callers": {"ipv4": callers, "ipv6": []},
        "peers": {"ipv4": list(peers), "ipv6": ["2001:db8::/64"]},
    }


def test_a_fence_that_is_widened_keeps_what_is_fenced_and_who_may_connect():
    before = a_fence([5600, 8000], [5600], ["10.0.0.1", "10.0.0.2"], ["10.1.0.1"])
    wanted = a_fence([5600, 9000], [5600], ["10.0.0.0/31", "10.0.0.3"])
    both = a_fence([5600, 8000, 9000], [5600], ["10.0.0.0/31", "10.0.0.2", "10.0.0.3"], ["10.1.0.1"])
    assert fence.union(wanted, before) == fence.union(before, wanted) == both
    assert fence.union(both, both) == both


def test_peers_are_kept_from_a_side_channel_that_becomes_another_port():
    both = fence.union(a_fence([5600, 8000], [8000], []), a_fence([8000, 9000], [9000], []))
    assert (both["ports"], both["side_channel_ports"]) == ([5600, 8000, 9000], [9000])


@pytest.mark.parametrize("value", ["1", "2", " 1"])
def test_an_engine_in_dev_mode_needs_the_fence(value):
    def needing(fleet):
        return {
            member["engine"]
            for host in fleet.plan()["hosts"].values()
            for member in host["members"]
            if member["fenced_ports"]
        }

    both = {"prefill-rack1-04-0", "decode-rack1-05-0"}
    assert needing(lab()) == set()
    assert needing(lab().pool("prefill", env={"VLLM_SERVER_DEV_MODE": "0"})) == set()
    assert needing(lab().pool("prefill", env={"VLLM_SERVER_DEV_MODE": value})) == {"prefill-rack1-04-0"}
    assert needing(lab().everywhere(fleet_profile="rl")) == both
    reason = {"dev-mode-fence": "a firewall of the site does this"}
    without = lab().everywhere(fleet_profile="rl", fleet_fence=False, fleet_rule_overrides=reason)
    assert needing(without) == set()


def test_without_a_fence_a_plan_says_so():
    plan = lab().everywhere(fleet_fence=False).plan()
    assert plan["fence"] is None
    assert plan["router"]["control_sources"] == ["198.18.40.1", "198.18.40.2", "198.18.40.3"]


@pytest.mark.parametrize("recipe", ["rl-rollouts"])
def test_an_engine_in_dev_mode_needs_every_port_of_its_own_fenced(recipe):
    plan = plan_of(recipe)
    for host in plan["hosts"].values():
        own = {port for member in host["members"] for port in member["fenced_ports"]}
        assert own <= set(host["fence"]["ports"])
        for member in host["members"]:
            assert {member["http_port"], *member["side_channel_ports"]} - {None} <= set(
                member["fenced_ports"]
            )


CHAIN = """table inet vllm_fleet {
	chain input {
		type filter hook input priority filter; policy accept;
		tcp dport { 5600, 8000, 9000 } ip saddr 192.0.2.1 accept
%s	}
}
"""


@pytest.mark.parametrize(
    ("rejecting", "missing"),
    [
        ("\t\ttcp dport { 5600, 8000 } reject with tcp reset\n", None),
        ("\t\ttcp dport { 5600, 18000 } reject with tcp reset\n", 8000),
        ("\t\ttcp dport 8000 reject with tcp reset\n", 5600),
        ("", 5600),
        (None, 5600),
    ],
)
def test_an_engine_in_dev_mode_does_not_start_where_a_port_of_its_is_not_fenced(tmp_path, rejecting, missing):
    text = (ROOT / "tests/unit/golden/recipes/rl-rollouts/prefill-rack1-01-0/vllm-engine.service").read_text()
    [before_start] = re.findall(
        r"^ExecStartPre=(/bin/sh -c 'rules=.*?)\nExecStart=", text, re.DOTALL | re.MULTILINE
    )
    nft = tmp_path / "nft"
    nft.write_text(
        "#!/bin/sh\n" + ("exit 1\n" if rejecting is None else f"cat <<'END'\n{CHAIN % rejecting}END\n")
    )
    nft.chmod(0o755)
    # As systemd reads it.
    line = before_start.replace("\\\n", " ").replace("$$", "$").replace("/usr/sbin/nft", str(nft))
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=10, check=False)
    if missing is None:
        assert (done.returncode, done.stdout) == (0, "")
    else:
        assert done.returncode == 1
        assert f"no fence is in force for port {missing}." in done.stdout
        assert "Run playbooks/site.yml" in done.stdout
