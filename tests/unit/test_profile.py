"""`fleet_profile: rl`, from the inventory to what engines and router are started with."""

from __future__ import annotations

import pytest
from fleets import gpu, lab
from test_routing import flags

from vllm_fleet.routing import router_arguments

ATTACHABLE = {"enable_scale_out": True, "weight_transfer_config": {"backend": "nccl"}}


def members(fleet):
    return [member for host in fleet.plan()["hosts"].values() for member in host["members"]]


def rl(fleet, **variables):
    return fleet.everywhere(fleet_profile="rl", **variables)


def rules_of(fleet):
    return [problem["rule"] for problem in fleet.judge()[1]]


def test_engines_of_a_serving_fleet_have_nothing_of_it():
    for member in members(gpu()):
        assert "VLLM_SERVER_DEV_MODE" not in member["env"]
        assert not {*ATTACHABLE, "enable_sleep_mode"} & member["args"].keys()


@pytest.mark.parametrize(("fleet", "sleeps"), [(lab, False), (gpu, True)])
def test_a_trainer_can_attach_to_every_member(fleet, sleeps):
    for member in members(rl(fleet())):
        assert member["env"]["VLLM_SERVER_DEV_MODE"] == "1"
        assert {name: member["args"][name] for name in ATTACHABLE} == ATTACHABLE
        assert member["args"]["kv_transfer_config"]["kv_role"] in ("kv_producer", "kv_consumer")
        # vLLM for CPUs refuses the flag.
        assert member["args"].get("enable_sleep_mode", False) is sleeps


def test_every_engine_has_one_api_server():
    """A call to abort reaches the requests of the server that took it, and of no other."""
    wide = rl(gpu(prefill=["p"], decode=["a"])).pool("decode", gpus=4, data_parallel_size=4)
    [decode] = [member for member in members(wide) if member["role"] == "decode"]
    assert decode["args"]["api_server_count"] == 1


@pytest.mark.parametrize(("count", "rules"), [(2, ["one-api-server"]), (1, []), ("1", [])])
def test_more_api_servers_are_refused_unless_there_is_a_reason(count, rules):
    fleet = rl(gpu()).pool("decode", args={"api-server-count": count})
    assert rules_of(fleet) == rules
    if rules:
        fleet.everywhere(fleet_rule_overrides={"one-api-server": "nothing is ever aborted here"})
        assert members(fleet)[-1]["args"]["api_server_count"] == count
    assert rules_of(gpu().pool("decode", args={"api-server-count": count})) == []


def test_headless_members_are_attachable_too():
    wide = rl(gpu(prefill=["p"], decode=["a", "b"]), fleet_socket_ifname="eth0")
    wide.pool("decode", gpus=16, data_parallel_size=16)
    head, headless = (member for member in members(wide) if member["role"] == "decode")
    assert (headless["head"], headless["env"]["VLLM_SERVER_DEV_MODE"]) == (False, "1")
    assert headless["args"]["weight_transfer_config"] == head["args"]["weight_transfer_config"]


@pytest.mark.parametrize(
    ("args", "written"),
    [
        ({"weight_transfer_config": {"backend": "ipc"}}, {"weight_transfer_config": {"backend": "ipc"}}),
        ({"weight-transfer-config.backend": "ipc"}, {"weight_transfer_config": {"backend": "ipc"}}),
        ({"enable-scale-out": False}, {"no_enable_scale_out": True}),
        ({"enable_sleep_mode": False}, {"no_enable_sleep_mode": True}),
    ],
)
def test_a_pools_own_arguments_win(args, written):
    member = members(rl(gpu()).pool("decode", args=args))[-1]
    assert {name: member["args"][name] for name in written} == written
    switched_off = {name.removeprefix("no_") for name in written if name.startswith("no_")}
    assert not switched_off & member["args"].keys()


def test_an_override_of_a_host_wins_over_the_profile():
    fleet = rl(lab(prefill=["a"], decode=["b", "c"]))
    fleet.hosts["c"]["fleet_pool_overrides"] = {
        "decode": {"args": {"weight_transfer_config": {"backend": "ipc"}}}
    }
    backends = [member["args"]["weight_transfer_config"]["backend"] for member in members(fleet)]
    assert backends == ["nccl", "nccl", "ipc"]


def test_dev_mode_is_the_profiles_to_set():
    assert rules_of(rl(lab()).pool("decode", env={"VLLM_SERVER_DEV_MODE": "0"})) == ["owned-environment"]
    assert rules_of(rl(lab()).pool("decode", env={"VLLM_SERVER_DEV_MODE": "1"})) == []


def test_memory_of_a_sleeping_prefill_is_let_go_unless_the_operator_says_otherwise():
    assert rl(gpu()).plan()["kv_mapping"] == "per_transfer"
    assert {member["env"]["UCX_CUDA_IPC_CACHE"] for member in members(rl(gpu()))} == {"n"}
    assert gpu().plan()["kv_mapping"] == "cached"
    assert "sleep-mapping" in rules_of(rl(gpu(), fleet_kv_mapping="cached"))


def test_the_router_waits_for_long_generations_and_takes_a_busy_engine_for_alive():
    serving, rollouts = (router_arguments(fleet.plan(), "a") for fleet in (lab(), rl(lab())))
    assert flags(serving, "--request-timeout-secs") == ["1800"]
    assert flags(rollouts, "--request-timeout-secs") == ["14400"]
    assert flags(rollouts, "--health-check-timeout-secs") == ["30"]
    assert flags(rollouts, "--health-check-interval-secs") == ["10"]
    assert ("--disable-circuit-breaker" in serving, "--disable-circuit-breaker" in rollouts) == (False, True)


def test_the_operators_own_values_win_over_the_profiles():
    fleet = rl(lab(), fleet_request_timeout=60, fleet_router_args={"health_check_interval_secs": 1})
    argv = router_arguments(fleet.plan(), "a")
    assert flags(argv, "--request-timeout-secs") == ["60"]
    assert flags(argv, "--health-check-interval-secs") == ["1"]


@pytest.mark.parametrize(
    ("written", "planned"),
    [
        (["192.0.2.9", "198.51.100.0/24"], ["192.0.2.9", "198.51.100.0/24"]),
        (["192.0.2.9/32"], ["192.0.2.9"]),
        (["2001:db8::/64", "2001:DB8::1"], ["2001:db8::/64", "2001:db8::1"]),
    ],
)
def test_controllers_are_addresses_and_networks(written, planned):
    assert lab().everywhere(fleet_controllers=written).plan()["controllers"] == sorted(planned)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("trainer-01", "it is neither"),
        ("192.0.2.9/24", "it has host bits set"),
        (10, "it is neither"),
        ("", "it is neither"),
    ],
)
def test_a_controller_that_is_neither_is_refused(written, said):
    plan, problems = lab().everywhere(fleet_controllers=[written]).judge()
    assert (plan, [problem["rule"] for problem in problems]) == (None, ["wrong-value"])
    assert said in problems[0]["what"]
