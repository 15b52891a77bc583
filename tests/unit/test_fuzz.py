"""Whatever an inventory says: problems or a plan, never an exception."""

from __future__ import annotations

import json

from fleets import Fleet, lab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_fleet.inventory import KNOWN, FleetVars, HostVars, Pool
from vllm_fleet.problems import text_of

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
    | st.sampled_from(["", "0", "-1", "prefill", "decode", "::1", "10.0.0.1", "{{ x }}", "~", 2**70, 1e400])
)  # fmt: skip
KEYS = st.text(max_size=6) | st.sampled_from(
    [*Pool.model_fields, "prefill", "decode", "a", "b", "path", 1, True]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
POOLS = st.dictionaries(
    st.sampled_from(["prefill", "decode", "x"]) | st.text(max_size=4),
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["prefill", "decode", "mixed"]),
            "hosts": st.sampled_from(["prefill", "all"]),
        },
        optional={
            **{
                name: st.integers(-1, 5) | SCALARS
                for name in ("gpus", "tensor_parallel_size", "engines_per_host")
            },
            **{name: st.integers(1, 3) for name in ("pipeline_parallel_size", "data_parallel_size")},
            **{name: st.dictionaries(KEYS, SCALARS, max_size=3) for name in ("args", "env")},
        },
    ),
    max_size=3,
)
NAMES = st.sampled_from([*sorted(KNOWN), "ansible_host", "fleet_x"])
QUIET = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def judge(fleet: Fleet) -> None:
    plan, problems = fleet.judge()
    text_of(problems)
    json.dumps(problems)
    assert (plan is None) == any(problem["severity"] == "error" for problem in problems)
    if plan is not None:
        json.dumps(plan, allow_nan=False)


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from(["rack1-04", "rack1-router", None]))
@QUIET
def test_any_value_of_any_variable(variables, host):
    fleet = lab()
    for name in [host] if host else fleet.hosts:
        fleet.hosts[name].update(variables)
    judge(fleet)


@given(POOLS, st.dictionaries(st.sampled_from(["prefill", "decode", "x"]), VALUES, max_size=2))
@QUIET
def test_any_pools_and_overrides(pools, overrides):
    fleet = lab().everywhere(fleet_pools=pools)
    fleet.hosts["rack1-04"]["fleet_pool_overrides"] = overrides
    judge(fleet)


@given(st.dictionaries(st.sampled_from(["prefill", "decode", "router", "registry", "x"]), st.lists(
    st.sampled_from(["rack1-04", "rack1-05", "rack1-router", "unheard"]) | st.text(max_size=5), max_size=3, unique=True,
)))  # fmt: skip
@QUIET
def test_any_groups(groups):
    fleet = lab()
    fleet.groups.update(groups)
    judge(fleet)


def test_every_variable_is_of_the_fleet_or_of_a_host():
    assert not FleetVars.model_fields.keys() & HostVars.model_fields.keys()
