"""Engines over hosts: ranks, GPUs, ports and addresses, by example and for every fleet."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fleets import Fleet, gpu, lab
from hypothesis import given, settings
from hypothesis import strategies as st

A, B = "rack1-05", "rack1-06"


def two_hosts(**pool: Any) -> Fleet:
    """A decode engine over two hosts of the lab."""
    fleet = lab(prefill=["rack1-04"], decode=[A, B]).everywhere(fleet_socket_ifname="eth0")
    return fleet.pool("decode", **{"gpus": 2, "nnodes": 2, **pool})


def members(plan: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    """The engine's members in rank order."""
    found = [m for host in plan["hosts"].values() for m in host["members"] if m["engine"] == engine]
    return sorted(found, key=lambda member: member["rank"])


def test_data_parallel_ranks_over_two_hosts():
    plan = two_hosts(data_parallel_size=2).plan()
    engine = plan["engines"][1]
    assert (engine["name"], engine["hosts"], engine["head"]) == (f"decode-{A}-0", [A, B], A)
    assert (engine["tensor_parallel_size"], engine["data_parallel_size"], engine["nnodes"]) == (1, 2, 2)
    head, headless = members(plan, engine["name"])
    address = plan["hosts"][A]["address"]
    meeting = {
        "data_parallel_size_local": 1,
        "data_parallel_address": address,
        "data_parallel_rpc_port": 20000,
    }
    assert {key: head["args"].get(key) for key in meeting} == meeting
    assert {key: headless["args"].get(key) for key in meeting} == meeting
    assert headless["args"]["headless"] is True
    assert headless["args"]["data_parallel_start_rank"] == 1
    # On the head a start rank would switch on hybrid load balancing.
    assert not {"headless", "data_parallel_start_rank", "nnodes"} & head["args"].keys()
    assert (head["name"], headless["name"]) == (engine["name"], f"{engine['name']}.1")
    assert (head["url"], headless["url"]) == (engine["url"], None)
    # vLLM adds the global rank to the same base on every host.
    for member, port in ((head, 5600), (headless, 5601)):
        assert member["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
        assert member["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == member["address"]
        assert member["side_channel_ports"] == [port]
        assert member["env"]["GLOO_SOCKET_IFNAME"] == member["env"]["NCCL_SOCKET_IFNAME"] == "eth0"
        assert member["env"]["DATA_PARALLEL_SIZE"] == "2"
    assert plan["router"]["decode"] == [engine["url"]]


def test_one_rank_over_two_hosts():
    fleet = two_hosts()
    pools = {"serve": {"role": "mixed", "hosts": "decode", "gpus": 2, "nnodes": 2}}
    plan = fleet.everywhere(fleet_pools=pools).plan()
    (engine,) = plan["engines"]
    head, headless = members(plan, engine["name"])
    address = plan["hosts"][A]["address"]
    for rank, member in enumerate((head, headless)):
        meeting = {"nnodes": 2, "node_rank": rank, "master_addr": address, "master_port": 20001}
        assert {key: member["args"][key] for key in meeting} == meeting
        assert member["env"]["TENSOR_PARALLEL_SIZE"] == "2"
        assert not any(key.startswith("data_parallel") for key in member["args"])
    assert "headless" not in head["args"]
    assert headless["args"]["headless"] is True
    assert headless["data_parallel_ranks"] == [0]


def test_members_know_each_other_and_share_a_fingerprint():
    plan = two_hosts(data_parallel_size=2).plan()
    engine = plan["engines"][1]
    head, headless = members(plan, engine["name"])
    assert head["link"] == headless["link"] == {
        "port": 20002,
        "head_address": plan["hosts"][A]["address"],
        "members": [
            {"name": m["name"], "host": host, "address": plan["hosts"][host]["address"]}
            for m, host in ((head, A), (headless, B))
        ],
    }  # fmt: skip
    assert plan["engines"][0]["fixed_ports"]["link"] is None
    assert head["fingerprint"] == headless["fingerprint"]
    changed = two_hosts(data_parallel_size=2)
    changed.hosts[B]["fleet_net_device"] = "eth1"
    assert members(changed.plan(), engine["name"])[0]["fingerprint"] != head["fingerprint"]


def test_the_fixed_ports_of_an_engine_are_those_of_its_heads_host():
    plan = two_hosts(data_parallel_size=2).plan()
    uses = {host: {use["port"]: use["purpose"] for use in plan["hosts"][host]["ports"]} for host in (A, B)}
    name = f"decode-{A}-0"
    assert uses[A] == {
        5600: f"NIXL side channel of {name}",
        8000: f"HTTP of {name}",
        20000: f"data-parallel RPC of {name}",
        20002: f"link of the members of {name}",
    }
    assert uses[B] == {5601: f"NIXL side channel of {name}.1"}
    assert members(plan, name)[0]["meeting_ports"] == [20000, 20002]
    assert members(plan, name)[1]["meeting_ports"] == []


def test_an_engine_takes_the_fewest_hosts_its_gpus_fit_on():
    hosts = [f"h{i}" for i in range(4)]
    fleet = gpu(prefill=["p"], decode=hosts).everywhere(fleet_gpus_per_host=4, fleet_socket_ifname="eth0")
    plan = fleet.pool("decode", gpus=8, data_parallel_size=8).plan()
    assert [e["hosts"] for e in plan["engines"]] == [["p"], ["h0", "h1"], ["h2", "h3"]]
    assert [m["data_parallel_ranks"] for m in members(plan, "decode-h2-0")] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_engine_has_the_same_gpus_on_each_of_its_hosts():
    fleet = gpu(prefill=["a"], decode=["a", "b"]).everywhere(fleet_socket_ifname="eth0")
    plan = fleet.pool("decode", gpus=4, nnodes=2, data_parallel_size=4).plan()
    assert [m["devices"] for m in members(plan, "decode-a-4")] == [[4, 5], [4, 5]]
    assert [m["devices"] for m in members(plan, "prefill-a-0")] == [[0, 1, 2, 3]]


def test_between_hosts_nccl_is_told_whether_there_is_nvlink():
    fleet = gpu(prefill=["p"], decode=["a", "b"]).everywhere(fleet_socket_ifname="eth0")
    fleet.pool("decode", gpus=16, data_parallel_size=16)
    for transport, said in (("nvlink", "1"), ("rdma", "0")):
        plan = fleet.everywhere(fleet_kv_transport=transport).plan()
        one, *two = (m for e in plan["engines"] for m in members(plan, e["name"]))
        assert [m["env"].get("NCCL_MNNVL_ENABLE") for m in (one, *two)] == [None, said, said]


def test_an_ordinary_engine_over_trays_has_the_imex_channel():
    pools = {"serve": {"role": "mixed", "hosts": "decode", "gpus": 16}}
    fleet = gpu(prefill=["p"], decode=["a", "b"]).everywhere(fleet_socket_ifname="eth0", fleet_pools=pools)
    for member in members(fleet.plan(), "serve-a-0"):
        assert "/dev/nvidia-caps-imex-channels/channel0" in member["container_options"]["devices"]


def test_the_servers_of_a_head_are_few():
    for ranks, servers in ((2, 2), (16, 4)):
        fleet = two_hosts(gpus=ranks, data_parallel_size=ranks).everywhere(fleet_gpus_per_host=8)
        head, headless = members(fleet.plan(), f"decode-{A}-0")
        assert head["args"]["api_server_count"] == servers
        assert "api_server_count" not in headless["args"]
    assert "api_server_count" not in members(lab().plan(), "decode-rack1-05-0")[0]["args"]


def test_expert_parallel_and_the_servers_of_the_head():
    fleet = gpu(prefill=["p"], decode=["a", "b"]).everywhere(fleet_socket_ifname="eth0")
    fleet.pool("decode", gpus=16, data_parallel_size=16, enable_expert_parallel=True)
    fleet.pool("decode", args={"api-server-count": 3})
    head, headless = members(fleet.plan(), "decode-a-0")
    assert head["args"]["enable_expert_parallel"] is headless["args"]["enable_expert_parallel"] is True
    assert head["args"]["api_server_count"] == 3
    assert "api_server_count" not in headless["args"], "--headless refuses it"


def test_external_engines_are_routed_to_and_nothing_else():
    other = {"role": "decode", "url": "http://10.9.9.9:8000", "tensor_parallel_size": 1}
    plan = lab().everywhere(fleet_external_engines={"theirs": other}).plan()
    engine = plan["engines"][-1]
    assert (engine["name"], engine["external"], engine["head"], engine["members"]) == (
        "theirs",
        True,
        None,
        [],
    )
    assert plan["router"]["decode"] == ["http://198.18.40.2:8000", "http://10.9.9.9:8000"]
    assert all(m["engine"] != "theirs" for host in plan["hosts"].values() for m in host["members"])


# --- for every fleet ------------------------------------------------------------------------------


@st.composite
def fleets(draw) -> Fleet:
    """Right fleets: engines of one or several hosts, several pools and engines a host, overrides."""
    trays = [f"t{i}" for i in range(draw(st.integers(2, 8)))]
    span = draw(st.sampled_from([1, 2, 4]))
    wide = trays[: len(trays) // span * span] or trays[:1]
    span = span if len(wide) >= span else 1
    single = draw(st.lists(st.sampled_from(trays), min_size=1, unique=True))
    fleet = gpu(prefill=single, decode=wide).everywhere(fleet_gpus_per_host=32, fleet_socket_ifname="eth0")
    local = draw(st.sampled_from([1, 2]))
    shape = draw(st.sampled_from(["dp", "tp"]))
    tp = 1 if shape == "dp" else span * local
    sizes = {"gpus": span * local, "nnodes": span}
    if shape == "dp" and span * local > 1:
        sizes["data_parallel_size"] = span * local
    pools = {
        "prefill": {"role": "prefill", "hosts": "prefill", "gpus": draw(st.sampled_from([1, tp]))},
        "decode": {"role": "decode", "hosts": "decode", **sizes},
    }
    for pool in pools.values():
        pool["engines_per_host"] = draw(st.integers(1, 2))
    order = draw(st.permutations(sorted(pools)))
    return fleet.everywhere(fleet_pools={name: pools[name] for name in order}, fleet_port_stride=16)


@given(fleets())
@settings(max_examples=80, deadline=None)
def test_no_listener_meets_another_and_every_gpu_has_one_engine(fleet):
    plan = fleet.plan()
    for host in plan["hosts"].values():
        devices = [device for member in host["members"] for device in member["devices"]]
        assert len(devices) == len(set(devices))
        assert all(0 <= device < 32 for device in devices)
        ports = [use["port"] for use in host["ports"]]
        assert len(ports) == len(set(ports))
        assert all(1024 <= port < 32768 for port in ports)
        bound = [
            port
            for m in host["members"]
            for port in (m["http_port"], *m["side_channel_ports"], *m["meeting_ports"])
            if port is not None
        ]
        assert sorted(bound) == sorted(set(bound) & set(ports))


@given(fleets())
@settings(max_examples=80, deadline=None)
def test_ranks_are_counted_from_0_without_a_gap(fleet):
    plan = fleet.plan()
    for engine in plan["engines"]:
        own = members(plan, engine["name"])
        assert [m["rank"] for m in own] == list(range(engine["nnodes"]))
        assert [m["name"] for m in own] == engine["members"]
        assert [m["address"] for m in own] == [plan["hosts"][h]["address"] for h in engine["hosts"]]
        assert sum(len(m["devices"]) for m in own) == engine["gpus"]
        ranks = [rank for m in own for rank in m["data_parallel_ranks"]]
        wanted = range(engine["data_parallel_size"]) if engine["data_parallel_size"] > 1 else [0] * len(own)
        assert ranks == list(wanted)


@given(fleets(), st.data())
@settings(max_examples=80, deadline=None)
def test_a_host_more_or_less_changes_no_engine_on_other_hosts(fleet, data):
    # With nvlink the second host does: test_planning.py.
    before = fleet.everywhere(fleet_kv_transport="rdma").plan()
    changed = copy.deepcopy(fleet)
    pool = data.draw(st.sampled_from(["prefill", "decode"]))
    group = changed.groups[pool]
    if data.draw(st.booleans()):
        changed.hosts["new"] = copy.deepcopy(changed.hosts["rack1-router"]) | {"ansible_host": "198.18.99.1"}
        group.insert(data.draw(st.integers(0, len(group))), "new")
        touched = {"new"}
    else:
        touched = {group.pop(data.draw(st.integers(0, len(group) - 1)))}
    after, problems = changed.judge()
    if after is None:  # the group no longer makes whole engines, or is empty
        assert {p["rule"] for p in problems if p["severity"] == "error"} <= {
            "hosts-for-engine",
            "empty-group",
        }
        return

    def untouched(plan):
        engines = [e for e in plan["engines"] if not touched & set(e["hosts"])]
        return engines, [members(plan, engine["name"]) for engine in engines]

    assert untouched(after) == untouched(before)


@given(fleets(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_groups_and_variables_changes_nothing_and_that_of_hosts_is_kept(fleet, random):
    before = fleet.plan()
    for host, variables in fleet.hosts.items():
        names = list(variables)
        random.shuffle(names)
        fleet.hosts[host] = {name: variables[name] for name in names}
    groups = list(fleet.groups)
    random.shuffle(groups)
    fleet.groups = {name: fleet.groups[name] for name in groups}
    assert fleet.plan() == before
    heads = [engine["head"] for engine in before["engines"] if engine["role"] == "prefill"]
    assert list(dict.fromkeys(heads)) == fleet.groups["prefill"]


@pytest.mark.parametrize("engines", [1, 2])
def test_an_override_of_the_head_shapes_the_engine(engines):
    fleet = gpu(prefill=["p"], decode=["a", "b", "c"]).everywhere(fleet_socket_ifname="eth0")
    fleet.hosts["a"]["fleet_pool_overrides"] = {"decode": {"nnodes": 2, "engines_per_host": engines}}
    plan = fleet.pool("decode", gpus=2, engines_per_host=1).plan()
    spread = [e["hosts"] for e in plan["engines"] if e["role"] == "decode"]
    assert spread == [["a", "b"]] * engines + [["c"]]


def test_a_members_journal_says_what_it_is():
    plan = two_hosts(data_parallel_size=2).plan()
    name, address = f"decode-{A}-0", plan["hosts"][B]["address"]
    assert members(plan, name)[1]["topology"] == (
        f"engine={name} role=decode host={B} rank=1/2 gpus=0-0 tp=1 pp=1 dp=2 ep=no "
        f"url={plan['engines'][1]['url']} side_channel={address}:5601"
    )
