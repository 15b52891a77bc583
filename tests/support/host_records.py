"""Recordings of healthy hosts, for tests to break.

GB200 hosts are written from documented formats (tests/unit/host_check/data/gb200/README.md): there is none here. The
H200 host is a real one, as far as it was recorded.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from vllm_fleet.host_check import reach
from vllm_fleet.loading import load
from vllm_fleet.planning import plan as make_plan

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "unit" / "host_check" / "data"
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
GIB = 2**30
IMAGE = "sha256:" + "1" * 64


@cache
def plan_of(inventory: str, *extra: str) -> dict[str, Any]:
    """The plan of a recipe in inventory/."""
    loaded = load([str(ROOT / "inventory" / inventory)], list(extra), [])
    plan, problems = make_plan(loaded.hosts, loaded.groups)
    assert plan is not None, problems
    return plan


def text(name: str) -> str:
    return (DATA / name).read_text()


def ran(stdout: str, rc: int = 0, stderr: str = "") -> dict[str, Any]:
    """A command as the module host_observe tells it."""
    return {"rc": rc, "stdout": stdout, "stderr": stderr}


def gpu_uuid(number: int) -> str:
    return f"GPU-0000000{number}-0000-0000-0000-000000000000"


def linux(address: str, machine: str = "x86_64") -> dict[str, Any]:
    """What any Linux host shows, one without engines."""
    interfaces = [
        {
            "ifname": "lo",
            "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8, "scope": "host"}],
        },
        {
            "ifname": "eth0",
            "addr_info": [{"family": "inet", "local": address, "prefixlen": 24, "scope": "global"}],
        },
    ]
    docker = {
        "ServerVersion": "28.5.1",
        "DockerRootDir": "/var/lib/docker",
        "CDISpecDirs": ["/etc/cdi", "/run/cdi"],
    }
    node = "/sys/devices/system/node/node0"
    return {
        "schema": 1,
        "clock": {"host": 1000.4, "sent": 1000.0},
        "commands": {
            "architecture": ran(f"{machine}\n"),
            "kernel": ran("6.8.0-1042-nvidia-64k\n"),
            "page_size": ran("65536\n"),
            "systemd": ran("systemd 255 (255.4-1ubuntu8)\n+PAM +AUDIT\n"),
            "addresses": ran(json.dumps(interfaces) + "\n"),
            "sockets": ran('LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=1000,fd=3))\n'),
            "clock": ran("Timezone=Etc/UTC\nNTP=yes\nNTPSynchronized=yes\n"),
            "nft": ran('{"nftables": [{"metainfo": {"version": "1.0.9"}}, {"table": {"family": "ip", "name": "nat"}}]}\n'),
            "docker": ran(json.dumps(docker) + "\n"),
            "docker_unit": ran("ActiveState=active\nLimitMEMLOCK=infinity\nLimitNOFILE=infinity\n"),
            "containers": ran("CONTAINER ID NAMES IMAGE\n"),
            "images": ran("IMAGE ID\n"),
        },
        "files": {
            "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\n',
            "/proc/meminfo": "MemTotal:       993280000 kB\nMemFree:        900000000 kB\n",
            f"{node}/cpulist": "0-71\n",
            f"{node}/meminfo": "Node 0 MemTotal:       496640000 kB\n",
        },
        "devices": {},
        "disks": {"/var/lib/docker": {"free": 800 * GIB, "total": 1000 * GIB}},
        "processes": {"1000": {"cgroup": "0::/system.slice/ssh.service\n"}},
        "model": None,
        "container": None,
    }  # fmt: skip


def gb200(address: str, model_path: str) -> dict[str, Any]:
    """A GB200 tray with a model and without an engine running. Written by hand: see the module's docstring."""
    seen = linux(address, "aarch64")
    gpus = range(4)
    blocks = (
        text("gb200/gpu.txt")
        .replace("{bus}", f"0000000{n}:01:00.0")
        .replace("{uuid}", gpu_uuid(n))
        .replace("{number}", str(n))
        for n in gpus
    )
    names = [f"GPU {n}: NVIDIA GB200 (UUID: {gpu_uuid(n)})\n" for n in gpus]
    link = "".join(f"\t Link {n}: 50 GB/s\n" for n in range(18))
    seen["commands"] |= {
        "nvidia_smi": ran(text("gb200/nvidia-smi-head.txt") + "\n".join(blocks)),
        "gpu_list": ran("".join(names)),
        "nvlink": ran("".join(name + link for name in names)),
        "topology": ran(text("gb200/topology.txt")),
        "gpu_processes": ran("gpu_uuid, pid, process_name\n"),
        "kernel_log": ran("-- No entries --\n"),
        "imex_service": ran("LoadState=loaded\nActiveState=active\nSubState=running\n"),
        "imex_version": ran("IMEX version is: 580.105.08\n"),
        "imex_domain": ran(text("gb200/imex-domain.txt")),
        "cdi": ran("".join(f"nvidia.com/gpu={n}\n" for n in (*gpus, "all"))),
        "toolkit": ran("NVIDIA Container Toolkit CLI version 1.18.1\ncommit: 0123456\n"),
    }
    node = "/sys/devices/system/node/node1"
    seen["files"] |= {
        f"{node}/cpulist": "72-143\n",
        f"{node}/meminfo": "Node 1 MemTotal:       496640000 kB\n",
        "/proc/devices": text("gb200/proc-devices.txt"),
        "/proc/driver/nvidia/version": text("gb200/proc-driver-nvidia-version.txt"),
        "/proc/driver/nvidia/params": 'CoherentGPUMemoryMode: "driver"\n',
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/etc/nvidia-imex/nodes_config.cfg": "192.0.2.101\n192.0.2.102\n",
        "/run/cdi/nvidia.yaml": text("gb200/cdi-specification.txt"),
        "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "/sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp\n",
        "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    }
    number = {"major": 234, "minor": 0, "mode": 0o666}
    seen["devices"] = {
        CHANNEL: dict(number),
        "/dev/infiniband/rdma_cm": {"major": 10, "minor": 58, "mode": 0o666},
        "/dev/infiniband/uverbs0": {"major": 231, "minor": 192, "mode": 0o666},
    }
    inside = {
        "gpus": 4,
        "memlock": -1,
        "nofile": 1048576,
        "shm": 16 * GIB,
        "devices": {path: [node["major"], node["minor"]] for path, node in seen["devices"].items()},
    }
    seen["container"] = {"image": IMAGE, "ran": ran(json.dumps(inside) + "\n")}
    return seen | model(model_path)


def model(path: str) -> dict[str, Any]:
    """A complete model with two files of weights."""
    weights = {f"model-0000{n}-of-00002.safetensors": {"size": 32 * GIB, "implied": 32 * GIB} for n in (1, 2)}
    return {
        "model": {
            "files": {"config.json": {"size": 700}, "tokenizer.json": {"size": 9000}} | weights,
            "index": {"files": sorted(weights), "total_size": 64 * GIB},
            "config": True,
            "hash": "ab" * 32,
        },
        "disks": {"/var/lib/docker": {"free": 800 * GIB, "total": 1000 * GIB}, path: {"free": 500 * GIB, "total": 1000 * GIB}},
    }  # fmt: skip


def reached(plan: dict[str, Any], host: str) -> dict[str, Any]:
    """What host_reach tells where nothing of the fleet runs and no firewall is in the way."""
    asked = reach.questions(plan, host)
    names = {planned["address"]: name for name, planned in plan["hosts"].items()}
    return {
        "listeners": [one | {"outcome": "listening"} for one in asked["listeners"]],
        "dials": [
            one
            | {
                "outcome": "connected",
                "greeting": None if one["port"] == reach.IMEX_PORT else names.get(one["address"]),
            }
            for one in asked["dials"]
        ],
    }


def recordings(plan: dict[str, Any]) -> dict[str, Any]:
    """A healthy recording of each host of a plan: GB200 trays where engines are, or plain hosts for CPU engines."""
    found = {}
    for host, planned in plan["hosts"].items():
        address = planned["address"]
        seen = linux(address)
        if planned["members"]:
            path = plan["model"]["path"]
            seen = gb200(address, path) if plan["accelerator"] == "cuda" else seen | model(path)
        found[host] = {"observed": seen} | reached(plan, host)
    return copy.deepcopy(found)
