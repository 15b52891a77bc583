"""Measures `vllm-fleet validate` on generated inventories: wall seconds with start-up, and how they grow.

Run it with the Python of the environment that has vllm-fleet: `python benchmarks/validate.py [HOSTS ...]`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

SIZES = [250, 500, 1000, 2000]
RUNS = 3


def write_inventory(folder: Path, hosts: int) -> Path:
    """Half prefill, half decode trays in racks of 18, with an override here and there and host variables."""
    names = [f"rack{i // 18:03}-{i % 18:02}" for i in range(hosts)]
    described = {
        name: {"ansible_host": f"10.{i // 62500}.{i // 250 % 250}.{i % 250 + 1}"}
        for i, name in enumerate(names)
    }
    for name in names[::50]:
        described[name]["fleet_net_device"] = "{{ 'eth' ~ 1 }}"
    half = hosts // 2
    pools = {
        role: {"role": role, "hosts": role, "gpus": 2, "engines_per_host": 2, "args": {"max_num_seqs": 512}}
        for role in ("prefill", "decode")
    }
    shared = {
        "fleet_model": {"path": "/srv/models/m", "served_name": "m"},
        "fleet_accelerator": "cuda",
        "fleet_kv_transport": "nvlink",
        "fleet_gpus_per_host": 4,
        "fleet_pools": pools,
    }
    children = {
        "prefill": {"hosts": {name: described[name] for name in names[:half]}},
        "decode": {"hosts": {name: described[name] for name in names[half:]}},
        "router": {"hosts": {"gate": {"ansible_host": "10.250.0.1"}}},
    }
    inventory = folder / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"all": {"children": children}}, sort_keys=False))
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "all.yml").write_text(yaml.safe_dump(shared, sort_keys=False))
    return inventory


def measure(inventory: Path) -> float:
    """The best wall time of a few runs in seconds: the others say what else the machine did."""
    command = [str(Path(sys.executable).with_name("vllm-fleet")), "validate", "-i", str(inventory)]
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print a row for each size: hosts, seconds, milliseconds a host."""
    print(f"{'hosts':>6} {'seconds':>8} {'ms/host':>8}")
    for hosts in [int(size) for size in sys.argv[1:]] or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(write_inventory(Path(folder), hosts))
        print(f"{hosts:>6} {seconds:>8.2f} {1000 * seconds / hosts:>8.2f}")


if __name__ == "__main__":
    main()
