"""What tests of the host check share."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from host_records import recordings

from vllm_fleet.loading import load
from vllm_fleet.planning import plan as make_plan

ROOT = Path(__file__).parents[3]


@cache
def plan_of(inventory: str, *extra: str) -> dict[str, Any]:
    loaded = load([str(ROOT / "inventory" / inventory)], list(extra), [])
    plan, problems = make_plan(loaded.hosts, loaded.groups)
    assert plan is not None, problems
    return plan


@pytest.fixture
def plan() -> dict[str, Any]:
    """Two GB200 trays, a prefill and a decode engine."""
    return plan_of("gb200-two-trays")


@pytest.fixture
def records(plan: dict[str, Any]) -> dict[str, Any]:
    """Healthy recordings of them, to be changed."""
    return copy.deepcopy(_healthy())


@cache
def _healthy() -> dict[str, Any]:
    return recordings(plan_of("gb200-two-trays"))
