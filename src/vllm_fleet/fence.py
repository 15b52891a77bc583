"""Who may connect to what."""

from __future__ import annotations

from vllm_fleet import placement
from vllm_fleet.inventory import Fleet


def callers(fleet: Fleet) -> list[str]:
    """Addresses and networks that may control the fleet: its hosts and `fleet_controllers`, sorted."""
    return sorted({str(placement.address(fleet, host)) for host in fleet.hosts} | set(fleet.vars.controllers))
