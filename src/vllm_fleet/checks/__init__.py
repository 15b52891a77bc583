"""What must hold between values of an inventory.

Linear in hosts: engines that are alike in what a check looks at are looked at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm_fleet.checks.access import check_access
from vllm_fleet.checks.engines import check_arguments, check_environment, check_mapping, check_settings
from vllm_fleet.checks.hosts import (
    check_addresses,
    check_interfaces,
    check_names,
    check_numa_nodes,
    check_ports,
    check_racks,
)
from vllm_fleet.checks.models import check_model, gpu_memory
from vllm_fleet.checks.pairs import check_pairs, check_tensor_parallel
from vllm_fleet.checks.topology import check_external, check_router, check_topology
from vllm_fleet.inventory import Fleet
from vllm_fleet.placement import Engine
from vllm_fleet.settings import nvlink

__all__ = ["check_all", "check_topology"]


def check_all(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """Judge what needs more than one value; problems go to `fleet.problems`."""
    check_addresses(fleet)
    check_names(fleet, engines)
    check_ports(fleet, engines)
    check_external(fleet, engines)
    check_router(fleet)
    check_access(fleet, engines)
    check_arguments(fleet)
    check_numa_nodes(fleet)
    check_mapping(fleet, engines)
    kinds, links = list(_kinds(fleet, engines)), nvlink(fleet, engines)
    for engine in kinds:
        check_settings(fleet, engine, links)
        check_environment(fleet, engine, links)
        check_model(fleet, engine)
    check_interfaces(fleet, engines)
    check_racks(fleet, engines)
    check_tensor_parallel(fleet, engines)
    check_pairs(fleet, kinds)


def _kinds(fleet: Fleet, engines: Iterable[Engine]) -> Iterator[Engine]:
    """One engine for all that have the same pool, shape, arguments, environment and memory."""
    seen: set[tuple[Any, ...]] = set()
    for engine in engines:
        key = engine.pool, engine.shape, id(engine.args), id(engine.env), gpu_memory(fleet, engine)
        if key not in seen:
            seen.add(key)
            yield engine
