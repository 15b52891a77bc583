"""Registrations: what is recorded, and how it is compared with the plan."""

from __future__ import annotations

import pytest
from fleets import lab

from vllm_fleet.registration import compare_registrations, registration, stale_engines

P, D = "prefill-rack1-04-0", "decode-rack1-05-0"


@pytest.fixture
def plan():
    return lab().plan()


@pytest.fixture
def facts(plan):
    return {
        "rack1-04": {
            "vllm_engine_p": registration(plan, P, {"rack1-04": "sha256:1"}),
            "other": {"engine": "diesel"},
            "text": "x",
        },
        "rack1-05": {"vllm_engine_d": registration(plan, D, {"rack1-05": "sha256:1"})},
        "rack1-router": {},
    }


def test_a_registration_is_what_was_planned_and_the_image(plan):
    assert registration(plan, P, {"rack1-04": "sha256:1", "rack1-05": "sha256:2"}) == {
        "schema": 1,
        "engine": P,
        "pool": "prefill",
        "role": "prefill",
        "url": "http://198.18.40.1:8000",
        "hosts": ["rack1-04"],
        "model": "/srv/models/tiny",
        "served_name": "tiny",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "image_ids": {"rack1-04": "sha256:1"},
        "fingerprint": plan["hosts"]["rack1-04"]["members"][0]["fingerprint"],
    }


def test_registered_as_declared_is_no_problem(plan, facts):
    assert compare_registrations(plan, facts) == []
    assert stale_engines(plan, facts) == []


def test_declared_but_not_registered(plan, facts):
    del facts["rack1-05"]
    assert compare_registrations(plan, facts) == [f"{D} is declared but not registered on rack1-05."]


def test_registered_on_another_host_is_not_registered_and_stale(plan, facts):
    facts["rack1-04"] |= facts.pop("rack1-05")
    assert len(compare_registrations(plan, facts)) == 1
    assert stale_engines(plan, facts) == [{"host": "rack1-04", "engine": D}]


@pytest.mark.parametrize("field", [
    "pool", "role", "url", "model", "served_name", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "fingerprint",
])  # fmt: skip
def test_a_difference_in_any_planned_field_is_named_with_both_values(plan, facts, field):
    planned = facts["rack1-05"]["vllm_engine_d"][field]
    facts["rack1-05"]["vllm_engine_d"][field] = "other"
    (problem,) = compare_registrations(plan, facts)
    assert D in problem
    assert f"{field} is registered as 'other' and declared as {planned!r}" in problem


def test_registered_but_not_declared_is_stale_and_no_problem(plan, facts):
    facts["rack1-router"]["old"] = facts["rack1-04"]["vllm_engine_p"] | {"engine": "gone-0"}
    assert compare_registrations(plan, facts) == []
    assert stale_engines(plan, facts) == [{"host": "rack1-router", "engine": "gone-0"}]
