"""What running engines are compared with."""

from __future__ import annotations

import pytest
from fleets import lab

from vllm_fleet.identity import expected_external, expected_members
from vllm_fleet.registration import registration

P, D = "rack1-04", "rack1-05"


def test_a_member_is_expected_as_planned():
    plan = lab().plan()
    facts = {P: {"x": registration(plan, f"prefill-{P}-0", {P: "sha256:1"})}}
    (spec,) = expected_members(plan, P, facts)
    (member,) = plan["hosts"][P]["members"]
    for key in ("engine", "url", "unit", "container", "args"):
        assert spec[key] == member[key]
    assert (spec["member"], spec["image_id"], spec["server_info"]) == (member["name"], "sha256:1", False)
    assert spec["expected"] == {
        "model": "/srv/models/tiny",
        "served_name": "tiny",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "nnodes": 1,
        "enable_expert_parallel": False,
        "kv_role": "kv_producer",
        "version": "0.32.0",
    }


def test_the_operators_own_variables_are_not_shown():
    fleet = lab().pool("prefill", env={"HF_HOME": "secret", "VLLM_SERVER_DEV_MODE": "1"})
    (spec,) = expected_members(fleet.plan(), P, {})
    assert "HF_HOME" not in spec["env"]
    assert spec["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert spec["image_id"] is None, "it is not registered"
    assert spec["server_info"] is True


def test_a_headless_member_has_no_url_and_the_engines_sizes():
    fleet = lab(prefill=[P], decode=[D, "rack1-06"]).everywhere(fleet_socket_ifname="eth0")
    plan = fleet.pool(
        "decode", gpus=2, nnodes=2, data_parallel_size=2, env={"VLLM_SERVER_DEV_MODE": "1"}
    ).plan()
    facts = {D: {"x": registration(plan, f"decode-{D}-0", {D: "sha256:1", "rack1-06": "sha256:2"})}}
    (spec,) = expected_members(plan, "rack1-06", facts)
    assert spec["image_id"] == "sha256:2", "its head's host knows; it was built on its own"
    assert (spec["engine"], spec["member"]) == (f"decode-{D}-0", f"decode-{D}-0.1")
    assert (spec["url"], spec["server_info"]) == (None, False)
    assert (spec["expected"]["data_parallel_size"], spec["expected"]["nnodes"]) == (2, 2)
    assert spec["expected"]["kv_role"] == "kv_consumer"
    with pytest.raises(KeyError):
        expected_members(plan, "elsewhere", {})


def test_an_engine_of_others_is_expected_as_the_inventory_says():
    other = {
        "role": "decode",
        "url": "http://10.9.9.9:8000",
        "tensor_parallel_size": 1,
        "max_model_len": 4096,
    }
    plan = lab().everywhere(fleet_external_engines={"theirs": other}).plan()
    assert expected_external(plan) == [
        {
            "engine": "theirs",
            "url": "http://10.9.9.9:8000",
            "expected": {
                "model": "/srv/models/tiny",
                "served_name": "tiny",
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "max_model_len": 4096,
            },
            "server_info": True,
        }
    ]
    assert expected_external(lab().plan()) == []
