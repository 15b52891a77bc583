"""Every kind of bad input is refused by its rule, at its place, with its value, and beside all other problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fleets import Fleet, gpu, lab

from vllm_fleet.rules import RULES


def on(host: str, **variables: Any) -> Callable[[Fleet], Any]:
    return lambda fleet: fleet.hosts[host].update(variables)


def everywhere(**variables: Any) -> Callable[[Fleet], Any]:
    return lambda fleet: fleet.everywhere(**variables)


def pool(name: str, **keys: Any) -> Callable[[Fleet], Any]:
    return lambda fleet: fleet.pool(name, **keys)


def group(name: str, *hosts: str) -> Callable[[Fleet], Any]:
    return lambda fleet: fleet.groups.update({name: list(hosts)})


def without(variable: str, host: str | None = None) -> Callable[[Fleet], Any]:
    def change(fleet: Fleet) -> None:
        for name, variables in fleet.hosts.items():
            if host in (None, name):
                del variables[variable]

    return change


P, D, R = "rack1-04", "rack1-05", "rack1-router"
MIXED = {"role": "mixed", "hosts": "prefill", "gpus": 1}
SIZES = {"tensor_parallel_size": 2}

# what, change, rule, variable, value, hosts
# fmt: off
CASES: list[tuple[Callable[[Fleet], Any], str, str | None, Any, list[str] | None]] = [
    (on(P, fleet_prot=1), "unknown-variable", "fleet_prot", 1, [P]),
    (pool("decode", gpu=4), "unknown-key", "fleet_pools.decode.gpu", 4, []),
    (everywhere(fleet_model={"path": "/m", "served_name": "m", "x": 1}), "unknown-key", "fleet_model.x", 1, []),
    (everywhere(fleet_router_slots={"c": {}}), "unknown-key", "fleet_router_slots.c", {}, []),
    (on(D, fleet_pool_overrides={"decode": {"role": "x"}}), "unknown-key", "fleet_pool_overrides.decode.role", "x", [D]),
    (without("fleet_kv_transport"), "missing", "fleet_kv_transport", None, []),
    (without("fleet_model"), "missing", "fleet_model", None, []),
    (without("fleet_pools"), "missing", "fleet_pools", None, []),
    (without("fleet_gpus_per_host", P), "missing", "fleet_gpus_per_host", None, [P]),
    (pool("decode", gpus=None), "missing", "fleet_pools.decode.gpus", None, []),
    (pool("decode", role=None), "missing", "fleet_pools.decode.role", None, []),
    (everywhere(fleet_accelerator="rocm"), "wrong-value", "fleet_accelerator", "rocm", []),
    (everywhere(fleet_pools="prefill"), "wrong-value", "fleet_pools", "prefill", []),
    (everywhere(fleet_start_timeout="soon"), "wrong-value", "fleet_start_timeout", "soon", []),
    (everywhere(fleet_start_timeout=True), "wrong-value", "fleet_start_timeout", True, []),
    (everywhere(fleet_kv_floor_gbps=float("inf")), "wrong-value", "fleet_kv_floor_gbps", float("inf"), []),
    (everywhere(fleet_proof_tokens=0), "wrong-value", "fleet_proof_tokens", 0, []),
    (everywhere(fleet_model={"path": "/m", "served_name": "a b"}), "wrong-value", "fleet_model.served_name", "a b", []),
    (on(P, fleet_gpus_per_host="many"), "wrong-value", "fleet_gpus_per_host", "many", [P]),
    (on(P, fleet_net_device="eth0; x"), "wrong-value", "fleet_net_device", "eth0; x", [P]),
    (pool("decode", role="decoder"), "wrong-value", "fleet_pools.decode.role", "decoder", []),
    (pool("decode", args={"max_num_seqs": None}), "wrong-value", "fleet_pools.decode.args.max_num_seqs", None, []),
    (pool("decode", args={"Max Seqs": 1}), "wrong-value", "fleet_pools.decode.args.Max Seqs", "Max Seqs", []),
    (pool("decode", env={"A": True}), "wrong-value", "fleet_pools.decode.env.A", "(hidden)", []),
    (pool("decode", env={"A": "x\ny"}), "wrong-value", "fleet_pools.decode.env.A", "(hidden)", []),
    (pool("decode", env={"A=B": "x"}), "wrong-value", "fleet_pools.decode.env.A=B", "(hidden)", []),
    (on(D, fleet_start_timeout=7), "differs-between-hosts", "fleet_start_timeout", None, None),
    (
        on(D, fleet_model={"path": "/srv/models/other", "served_name": "tiny"}),
        "differs-between-hosts", "fleet_model.path", "/srv/models/other", [D],
    ),
    (without("fleet_kv_transport", D), "differs-between-hosts", "fleet_kv_transport", None, [D]),
    *(
        (pool("decode", args={name: 1}), "owned-argument", f"fleet_pools.decode.args.{name}", 1, [])
        for name in (
            "model", "served-model-name", "host", "port", "tensor_parallel_size", "tensor-parallel-size", "tp",
            "pipeline_parallel_size", "data-parallel-size", "data_parallel_rpc_port", "kv_transfer_config", "config",
            "kv-transfer-config.kv_role", "device_ids", "headless", "nnodes", "node_rank", "master_addr",
            "master_port", "enable_expert_parallel",
        )
    ),
    (
        on(D, fleet_pool_overrides={"decode": {"args": {"port": 1}}}),
        "owned-argument", "fleet_pool_overrides.decode.args.port", 1, [D],
    ),
    (
        pool("decode", args={"max-num-seqs": 1, "max_num_seqs": 2}),
        "repeated-argument", "fleet_pools.decode.args.max_num_seqs", 2, [],
    ),
    (pool("decode", args={"api-key": "k"}), "refused-argument", "fleet_pools.decode.args.api-key", "k", []),
    (pool("decode", args={"disable_log_stats": True}), "refused-argument", "fleet_pools.decode.args.disable_log_stats", True, []),
    (pool("decode", env={"VLLM_API_KEY": "k"}), "refused-argument", "fleet_pools.decode.env.VLLM_API_KEY", "(hidden)", []),
    (
        everywhere(fleet_router_args={"log-level": "info", "log_level": "debug"}),
        "repeated-argument", "fleet_router_args.log_level", "debug", [],
    ),
    (
        everywhere(fleet_router_args={"policy": "random\nExecStartPre=+/bin/true"}),
        "wrong-value", "fleet_router_args.policy", "random\nExecStartPre=+/bin/true", [],
    ),
    (
        everywhere(fleet_model={"path": "/srv/50%h", "served_name": "tiny"}),
        "model-path", "fleet_model.path", "/srv/50%h", [],
    ),
    (pool("decode", env={"UCX_TLS": "rc"}), "owned-environment", "fleet_pools.decode.env.UCX_TLS", "(hidden)", []),
    (everywhere(fleet_router_args={"port": 1}), "owned-router-argument", "fleet_router_args.port", 1, []),
    (everywhere(fleet_router_args={"worker-urls": "x"}), "owned-router-argument", "fleet_router_args.worker-urls", "x", []),
    (everywhere(fleet_pools={}), "no-pools", "fleet_pools", None, []),
    (pool("decode", hosts="decoders"), "unknown-group", "fleet_pools.decode.hosts", "decoders", []),
    (group("decode"), "empty-group", "fleet_pools.decode.hosts", "decode", []),
    (
        everywhere(fleet_pools={"prefill": {"role": "prefill", "hosts": "prefill", "gpus": 1}}),
        "prefill-and-decode", "fleet_pools", None, [],
    ),
    (
        everywhere(fleet_pools={"decode": {"role": "decode", "hosts": "decode", "gpus": 1}}),
        "prefill-and-decode", "fleet_pools", None, [],
    ),
    (pool("extra", **MIXED), "mixed-alone", "fleet_pools", None, []),
    (group("router"), "one-router", None, None, []),
    (lambda fleet: fleet.groups.pop("router"), "one-router", None, None, []),
    (group("router", R, P), "one-router", None, [R, P], []),
    (group("registry", R, P), "one-registry", None, [R, P], []),
    (group("registry"), "one-registry", None, None, []),
    *(
        (group(name, R), "reserved-group", None, None, [])
        for name in ("fleet_engines", "fleet_router", "fleet_registry", "fleet_image_builder")
    ),
    (on(D, fleet_pool_overrides={"decoed": SIZES}), "unknown-pool", "fleet_pool_overrides.decoed", SIZES, [D]),
    (on(D, fleet_pool_overrides={"prefill": SIZES}), "host-not-in-pool", "fleet_pool_overrides.prefill", None, [D]),
    (pool("prefill", gpus=3, pipeline_parallel_size=2), "gpus-divide", "fleet_pools.prefill.gpus", 3, []),
    (
        on(P, fleet_pool_overrides={"prefill": {"gpus": 3, "pipeline_parallel_size": 2}}),
        "gpus-divide", "fleet_pool_overrides.prefill.gpus", 3, [P],
    ),
    (
        pool("decode", gpus=2, tensor_parallel_size=1),
        "tensor-parallel-agrees", "fleet_pools.decode.tensor_parallel_size", 1, [],
    ),
    (
        on(D, fleet_pool_overrides={"decode": {"gpus": 2, "tensor_parallel_size": 1}}),
        "tensor-parallel-agrees", "fleet_pool_overrides.decode.tensor_parallel_size", 1, [D],
    ),
    (pool("decode", engines_per_host=3), "gpus-of-host", "fleet_gpus_per_host", 2, [D]),
    (pool("decode", gpus=4), "engine-on-one-host", "fleet_pools.decode.gpus", 4, [D]),
    (
        on(D, fleet_pool_overrides={"decode": {"tensor_parallel_size": 4}}),
        "engine-on-one-host", "fleet_pool_overrides.decode.tensor_parallel_size", 4, [D],
    ),
    (pool("decode", gpus=2, data_parallel_size=2), "no-data-parallel", "fleet_pools.decode.data_parallel_size", 2, []),
    (
        pool("decode", enable_expert_parallel=True),
        "no-data-parallel", "fleet_pools.decode.enable_expert_parallel", True, [],
    ),
    (
        pool("decode", gpus=2, pipeline_parallel_size=2),
        "decode-pipeline", "fleet_pools.decode.pipeline_parallel_size", 2, [],
    ),
    (everywhere(fleet_kv_transport="rdma"), "transport-needs-gpu", "fleet_kv_transport", "rdma", []),
    (without("ansible_host", P), "address-missing", "fleet_address", None, [P]),
    (on(P, ansible_host="prefill.example"), "address-missing", "ansible_host", "prefill.example", [P]),
    (on(P, fleet_address="prefill.example"), "address-literal", "fleet_address", "prefill.example", [P]),
    (on(P, fleet_address="127.0.0.1"), "address-reachable", "fleet_address", "127.0.0.1", [P]),
    (on(P, fleet_address="::1"), "address-reachable", "fleet_address", "::1", [P]),
    (on(P, fleet_address="::ffff:127.0.0.1"), "address-reachable", "fleet_address", "::ffff:127.0.0.1", [P]),
    (on(P, fleet_address="0.0.0.0"), "address-reachable", "fleet_address", "0.0.0.0", [P]),
    (on(P, fleet_address="224.0.0.1"), "address-reachable", "fleet_address", "224.0.0.1", [P]),
    (on(P, fleet_address="fe80::1"), "address-reachable", "fleet_address", "fe80::1", [P]),
    (on(P, ansible_host="127.0.0.1"), "address-reachable", "ansible_host", "127.0.0.1", [P]),
    (on(D, ansible_host="198.18.40.1"), "address-unique", "ansible_host", "198.18.40.1", [D]),
    (everywhere(fleet_http_port_base=32760, fleet_pools={
        "prefill": {"role": "prefill", "hosts": "prefill", "gpus": 1},
        "decode": {"role": "decode", "hosts": "decode", "gpus": 1, "engines_per_host": 2},
    }), "port-range", "fleet_http_port_base", 32776, [D]),
    (everywhere(fleet_registry_port=80), "port-range", "fleet_registry_port", 80, [R]),
    (everywhere(fleet_front_port=30001), "port-collision", "fleet_router_slots.a.port", 30001, [R]),
    (everywhere(fleet_registry_port=29001), "port-collision", "fleet_registry_port", 29001, [R]),
    (
        lambda fleet: fleet.everywhere(fleet_front_port=8000).groups.update(router=[P]),
        "port-collision", "fleet_front_port", 8000, [P],
    ),
    (everywhere(fleet_side_channel_port_base=8000), "port-collision", "fleet_side_channel_port_base", 8000, [P, D]),
    (everywhere(fleet_model={"path": "models/m", "served_name": "m"}), "model-path", "fleet_model.path", "models/m", []),
    (everywhere(fleet_model={"path": "/m/../n", "served_name": "m"}), "model-path", "fleet_model.path", "/m/../n", []),
    (everywhere(fleet_model={"path": "/a:b", "served_name": "m"}), "model-path", "fleet_model.path", "/a:b", []),
]
# fmt: on


@pytest.mark.parametrize(("change", "rule", "variable", "value", "hosts"), CASES)
def test_bad_input_is_refused_by_its_rule(change, rule, variable, value, hosts):
    fleet = lab()
    change(fleet)
    plan, problems = fleet.judge()
    assert plan is None
    found = [problem for problem in problems if problem["rule"] == rule and problem["variable"] == variable]
    assert found, problems
    if hosts is not None:
        assert (found[0]["value"], found[0]["hosts"]) == (value, hosts)
    assert all(problem["what"] and problem["remedy"] for problem in problems)
    errors = {problem["rule"] for problem in problems if problem["severity"] == "error"}
    assert errors == {rule}, "a mistake must not be reported as others"


def test_every_problem_is_reported_at_once():
    fleet = lab()
    changes = [
        on(P, fleet_prot=1, fleet_address="127.0.0.1", fleet_gpus_per_host="x"),
        on(D, fleet_start_timeout=7, fleet_pool_overrides={"decoed": SIZES}),
        everywhere(fleet_kv_transport="rdma", fleet_front_port=30001, fleet_registry_port=80),
        everywhere(fleet_router_args={"host": "x"}),
        pool("prefill", gpus=3, tensor_parallel_size=2, args={"port": 1}),
        pool("decode", gpus=2, pipeline_parallel_size=2, env={"UCX_TLS": "x"}, hosts="decode"),
        pool("bad", role="mixed", hosts="nobody", gpus=1, gpu=1),
        group("registry", R, P),
    ]
    for change in changes:
        change(fleet)
    assert {problem["rule"] for problem in fleet.judge()[1]} >= {
        "unknown-variable", "address-reachable", "wrong-value", "differs-between-hosts", "unknown-pool",
        "transport-needs-gpu", "port-collision", "port-range", "owned-router-argument", "tensor-parallel-agrees",
        "owned-argument", "decode-pipeline", "owned-environment", "mixed-alone", "unknown-key", "one-registry",
    }  # fmt: skip


def test_the_rules_of_names():
    for host in ("fd00::4", "a b", "-a", "ä", "a@b", "a/b"):
        plan, problems = lab(prefill=[host], decode=[D]).judge()
        assert plan is None
        assert [(p["rule"], p["hosts"]) for p in problems] == [("engine-name", [host])]
    for name in ("pre fill", "prefill@", ""):
        fleet = lab()
        for variables in fleet.hosts.values():
            variables["fleet_pools"][name] = variables["fleet_pools"].pop("prefill")
        assert [(p["rule"], p["variable"]) for p in fleet.judge()[1]] == [
            ("engine-name", f"fleet_pools.{name}")
        ]
    plan, problems = lab(prefill=["h" * 175], decode=[D]).judge()
    assert [(p["rule"], p["value"]) for p in problems] == [("engine-name", f"prefill-{'h' * 175}-0")]


def test_two_engines_of_one_name_are_refused():
    fleet = lab(prefill=["b-c"], decode=["c", D]).everywhere(
        fleet_pools={
            "a": {"role": "prefill", "hosts": "prefill", "gpus": 1},
            "a-b": {"role": "decode", "hosts": "decode", "gpus": 1},
        }
    )
    (problem,) = fleet.judge()[1]
    assert (problem["rule"], problem["value"]) == ("engine-name-unique", "a-b-c-0")
    assert (problem["hosts"], problem["variable"]) == (["c"], "fleet_pools.a-b")


def test_a_stride_below_the_ranks_is_refused():
    fleet = gpu().pool("decode", data_parallel_size=4).everywhere(fleet_port_stride=2)
    found = {p["rule"]: p for p in fleet.judge()[1]}
    assert found["port-stride"]["variable"] == "fleet_port_stride"
    assert found["port-stride"]["value"] == 2


def test_tensor_parallel_sizes_must_divide_each_other():
    fleet = gpu().pool("prefill", gpus=3).pool("decode", gpus=2)
    (problem,) = fleet.judge()[1]
    assert (problem["rule"], problem["variable"]) == (
        "tensor-parallel-ratio", "fleet_pools.decode.tensor_parallel_size",
    )  # fmt: skip


def test_different_tensor_parallel_sizes_are_a_warning_and_in_the_plan():
    plan, problems = gpu().pool("prefill", gpus=2).judge()
    assert [(p["rule"], p["severity"]) for p in problems] == [("tensor-parallel-equal", "warning")]
    assert plan["warnings"] == problems


def test_a_misspelt_name_brings_the_right_one():
    fleet = lab()
    on(P, fleet_kv_transprot="tcp")(fleet)
    pool("decode", tensor_parallel=1)(fleet)
    remedies = {p["remedy"] for p in fleet.judge()[1]}
    assert remedies == {"Did you mean fleet_kv_transport?", "Did you mean tensor_parallel_size?"}


def test_a_problem_of_many_hosts_is_one_problem():
    hosts = [f"h{i}" for i in range(50)]
    fleet = lab(prefill=hosts, decode=[D])
    for host in hosts:
        fleet.hosts[host]["fleet_gpus_per_hots"] = 1
    (problem,) = fleet.judge()[1]
    assert problem["hosts"] == sorted(hosts)


def test_hosts_with_different_values_are_different_problems():
    fleet = lab()
    fleet.hosts[P]["fleet_address"] = "one.example"
    fleet.hosts[D]["fleet_address"] = "two.example"
    assert {(p["value"], *p["hosts"]) for p in fleet.judge()[1]} == {("one.example", P), ("two.example", D)}


def test_values_that_are_written_as_text_are_cast():
    fleet = lab().everywhere(fleet_gpus_per_host="2", fleet_port_stride="16", fleet_kv_floor_gbps="0.5")
    fleet.hosts[P]["fleet_port_stride"] = 16
    plan = fleet.pool("decode", gpus="1", enable_expert_parallel="false").plan()
    assert plan["kv_floor_gbps"] == 0.5


def test_no_secret_is_printed():
    fleet = lab().pool("decode", env={"TOKEN": "s3cret", "UCX_TLS": "s3cret", "X": {"y": "s3cret"}})
    fleet.hosts[D]["fleet_pools"]["decode"]["env"]["TOKEN"] = "other s3cret"
    _, problems = fleet.judge()
    assert {p["rule"] for p in problems} == {"owned-environment", "wrong-value", "differs-between-hosts"}
    assert "s3cret" not in repr(problems)


def test_every_rule_says_all_it_should():
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert all((rule.sentence, rule.reason, rule.source, rule.remedy)), rule.id
