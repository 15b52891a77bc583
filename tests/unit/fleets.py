"""Fleets for the tests, as `plan` takes them: hosts with their variables, and groups."""

from __future__ import annotations

import copy
from typing import Any

from vllm_fleet.planning import plan

type Variables = dict[str, dict[str, Any]]
type Groups = dict[str, list[str]]


class Fleet:
    """An inventory that a test changes before it is judged."""

    def __init__(self, hosts: Variables, groups: Groups) -> None:
        self.hosts = hosts
        self.groups = groups

    def everywhere(self, **variables: Any) -> Fleet:
        """Set variables on all hosts, as group_vars/all.yml does."""
        for host in self.hosts.values():
            host.update(copy.deepcopy(variables))
        return self

    def pool(self, name: str, **keys: Any) -> Fleet:
        """Change keys of a pool; None removes one."""
        for host in self.hosts.values():
            pool = host["fleet_pools"].setdefault(name, {})
            pool.update(copy.deepcopy(keys))
            for key in [key for key, value in pool.items() if value is None]:
                del pool[key]
        return self

    def judge(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """The plan or None, and the problems as JSON."""
        result, problems = plan(self.hosts, self.groups)
        return result, [problem.as_dict() for problem in problems]

    def plan(self) -> dict[str, Any]:
        """The plan of a fleet that must be right."""
        result, problems = self.judge()
        assert result is not None, problems
        return result


def lab(**groups: list[str]) -> Fleet:
    """One prefill and one decode engine on CPUs, as in inventory/lab."""
    groups = groups or {"prefill": ["rack1-04"], "decode": ["rack1-05"]}
    groups = {"router": ["rack1-router"], "registry": ["rack1-router"]} | groups
    names = sorted({host for members in groups.values() for host in members})
    shared = {
        "fleet_model": {"path": "/srv/models/tiny", "served_name": "tiny"},
        "fleet_accelerator": "cpu",
        "fleet_kv_transport": "tcp",
        "fleet_gpus_per_host": 2,
        "fleet_pools": {
            "prefill": {"role": "prefill", "hosts": "prefill", "gpus": 1},
            "decode": {"role": "decode", "hosts": "decode", "gpus": 1},
        },
    }
    hosts = {
        name: copy.deepcopy(shared) | {"ansible_host": f"198.18.{40 + i // 250}.{i % 250 + 1}"}
        for i, name in enumerate(names)
    }
    return Fleet(hosts, {"all": names} | groups)


def gpu(**groups: list[str]) -> Fleet:
    """The same on hosts with 8 GPUs, one prefill and one decode engine of 4 GPUs."""
    fleet = lab(**groups).everywhere(
        fleet_accelerator="cuda", fleet_kv_transport="nvlink", fleet_gpus_per_host=8
    )
    return fleet.pool("prefill", gpus=4).pool("decode", gpus=4)
