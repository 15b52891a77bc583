"""Measures `plan` on fleets of engines over two hosts each, from resolved variables: seconds, memory, growth.

Run it with the Python of the environment that has vllm-fleet: `python benchmarks/plan.py [ENGINES ...]`.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from typing import Any

from vllm_fleet.planning import plan

SIZES = [1250, 2500, 5000, 10000]
RUNS = 3


def fleet(engines: int) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Half prefill, half decode engines of DP 8 over two trays, as Ansible gives them."""
    names = [f"rack{i // 18:04}-{i % 18:02}" for i in range(2 * engines)]
    shape = {"gpus": 8, "data_parallel_size": 8, "args": {"max_num_seqs": 512}}
    shared: dict[str, Any] = {
        "fleet_model": {"path": "/srv/models/m", "served_name": "m"},
        "fleet_accelerator": "cuda",
        "fleet_kv_transport": "nvlink",
        "fleet_gpus_per_host": 4,
        "fleet_socket_ifname": "eth0",
        "fleet_pools": {role: {"role": role, "hosts": role, **shape} for role in ("prefill", "decode")},
    }
    hosts = {
        name: shared | {"ansible_host": f"10.{i // 62500}.{i // 250 % 250}.{i % 250 + 1}"}
        for i, name in enumerate([*names, "gate"])
    }
    groups = {"prefill": names[:engines], "decode": names[engines:], "router": ["gate"], "registry": ["gate"]}
    return hosts, groups


def measure(engines: int) -> tuple[float, float]:
    """The best seconds of a few runs, and the highest resident MB of this process."""
    hosts, groups = fleet(engines)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        result, problems = plan(hosts, groups)
        times.append(time.perf_counter() - start)
        if result is None or len(result["engines"]) != engines:
            sys.exit(f"not the fleet that was meant: {problems[:3]}")
    return min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print a row for each size: engines, hosts, seconds, microseconds an engine, MB."""
    print(f"{'engines':>8} {'hosts':>7} {'seconds':>8} {'us/engine':>10} {'MB':>6}")
    # A process for each size, so that the memory is its own.
    with multiprocessing.Pool(1, maxtasksperchild=1) as pool:
        for engines in [int(size) for size in sys.argv[1:]] or SIZES:
            seconds, memory = pool.apply(measure, (engines,))
            each = 1e6 * seconds / engines
            print(f"{engines:>8} {2 * engines:>7} {seconds:>8.2f} {each:>10.0f} {memory:>6.0f}")


if __name__ == "__main__":
    main()
