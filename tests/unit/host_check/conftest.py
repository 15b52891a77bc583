"""What tests of the host check share."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from host_records import plan_of, recordings


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
