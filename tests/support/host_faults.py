"""One fault each in healthy recordings of the hosts of inventory/gb200-two-trays, and the checks that must find it.

The first part is the table of failures that the host check was written for, row by row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from host_records import CHANNEL, GIB, ran

P, D, R = "rack1-01", "rack1-02", "gate-01"  # prefill, decode, router and registry
NODES = "/etc/nvidia-imex/nodes_config.cfg"
VERSION = "/proc/driver/nvidia/version"

type Records = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """What is wrong, what finds it (check -> hosts), and what it says it saw."""

    what: str
    change: Callable[[Records], Any]
    found: dict[str, list[str]]
    seen: str
    level: str = "fail"


def command(name: str, old: str, new: str, *hosts: str, count: int = -1) -> Callable[[Records], None]:
    """Replace a part of what a command printed; it must be there."""

    def change(records: Records) -> None:
        for host in hosts:
            one = records[host]["observed"]["commands"][name]
            assert old in one["stdout"], (name, old)
            one["stdout"] = one["stdout"].replace(old, new, count)

    return change


def ends(name: str, rc: int, stderr: str, host: str, **more: Any) -> Callable[[Records], None]:
    """A command that fails."""
    return lambda records: records[host]["observed"]["commands"].update({name: ran("", rc, stderr) | more})


def file(path: str, old: str, new: str, *hosts: str) -> Callable[[Records], None]:
    """Replace a part of a file."""

    def change(records: Records) -> None:
        for host in hosts:
            files = records[host]["observed"]["files"]
            assert old in files[path], (path, old)
            files[path] = files[path].replace(old, new)

    return change


def seen(*path: str, value: Any, host: str = P) -> Callable[[Records], None]:
    """Set a part of the observation."""

    def change(records: Records) -> None:
        place = records[host]["observed"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def both(*changes: Callable[[Records], Any]) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        for one in changes:
            one(records)

    return change


def last_gpu(old: str, new: str, host: str = P) -> Callable[[Records], None]:
    """Change a value of the last GPU: what is cut off in front of it must not pass."""

    def change(records: Records) -> None:
        one = records[host]["observed"]["commands"]["nvidia_smi"]
        head, _, tail = one["stdout"].rpartition(old)
        assert head, old
        one["stdout"] = head + new + tail

    return change


def inside(host: str = P, **values: Any) -> Callable[[Records], None]:
    """What the container told."""

    def change(records: Records) -> None:
        one = records[host]["observed"]["container"]["ran"]
        one["stdout"] = json.dumps(json.loads(one["stdout"]) | values) + "\n"

    return change


def without(host: str, *path: str) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        place = records[host]["observed"]
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def undialed(source: str, port: int, outcome: str = "no answer", **more: Any) -> Callable[[Records], None]:
    """A connection that does not come about."""

    def change(records: Records) -> None:
        [dial] = [
            one for one in records[source]["dials"] if one["port"] == port and more.items() <= one.items()
        ]
        dial |= {"outcome": outcome, "greeting": None}

    return change


def stranger(
    host: str, port: int, cgroup: str = "0::/user.slice/user-1000.slice/session-3.scope"
) -> Callable[[Records], None]:
    """Somebody else's program on a port."""
    line = f'LISTEN 0 5 *:{port} *:* users:(("nc",pid=4242,fd=3))\n'

    def change(records: Records) -> None:
        records[host]["observed"]["commands"]["sockets"]["stdout"] += line
        records[host]["observed"]["processes"]["4242"] = {"cgroup": cgroup}

    return change


COMPLETED = "State                                          : Completed\n        Status                                         : Success"
IN_PROGRESS = "State                                          : In Progress\n        Status                                         : N/A"
USED = "Reserved                                       : 616 MiB\n        Used                                           : 0 MiB"
HELD = "Reserved                                       : 616 MiB\n        Used                                           : 68710 MiB"
XID = "Nov 30 03:00:00 h kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.\n"
OOM = "Nov 30 03:00:00 h kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=1, MMU Fault.\n"
UUID, OTHER_UUID = "5e21f2a6-6d1c-4b36-9e0b-3a52b6a6d1f4", "11111111-6d1c-4b36-9e0b-3a52b6a6d1f4"
ZEROS = "00000000-0000-0000-0000-000000000000"
BARE = "/sys/devices/system/node/node2"

# fmt: off
TABLE = [
    Fault("a GPU is not in the fabric", last_gpu(COMPLETED, IN_PROGRESS), {"fabric-state": [P]}, "GPU 3: State In Progress, Status N/A"),
    Fault("a GPU failed to join it", last_gpu("Status                                         : Success", "Status                                         : Failure"),
          {"fabric-state": [P]}, "GPU 3: State Completed, Status Failure"),
    Fault("trays in different racks", command("nvidia_smi", UUID, OTHER_UUID, D), {"same-fabric": [D]}, OTHER_UUID),
    Fault("trays in different partitions", command("nvidia_smi", ": 32766", ": 17", D), {"same-fabric": [D]}, "clique 17"),
    Fault("a host without multi-node NVLink", command("nvidia_smi", UUID, ZEROS, P), {"fabric-cluster": [P]}, ZEROS),
    Fault("GPUs of one host in two partitions", last_gpu(": 32766", ": 17"), {"fabric-cluster": [P]}, "clique 17"),
    Fault("IMEX is down", command("imex_service", "ActiveState=active\nSubState=running", "ActiveState=failed\nSubState=failed", D),
          {"imex-service": [D]}, "failed/failed"),
    Fault("IMEX is not installed", command("imex_service", "LoadState=loaded\nActiveState=active\nSubState=running", "LoadState=not-found\nActiveState=inactive\nSubState=dead", D),
          {"imex-service": [D]}, "there is no nvidia-imex"),
    Fault("the IMEX domain is degraded", command("imex_domain", "State: UP", "State: DEGRADED", P), {"imex-domain": [P]}, "the domain is DEGRADED"),
    Fault("an IMEX node is not reached", command("imex_domain", "       1        C   C", "       1        I   C", P), {"imex-domain": [P]}, "192.0.2.102 to 192.0.2.101 is I"),
    Fault("an IMEX node is not ready", command("imex_domain", "192.0.2.102     - READY  ", "192.0.2.102     - UNAVAILABLE", P), {"imex-domain": [P]}, "192.0.2.102 is UNAVAILABLE"),
    Fault("IMEX nodes of two versions", command("imex_domain", "Version: 580.105", "Version: 580.95", P, count=1), {"imex-domain": [P]}, "580.105 and 580.95"),
    Fault("nvidia-imex-ctl hangs", ends("imex_domain", 0, "", P, timed_out=True), {"imex-domain": [P]}, "`imex_domain` did not answer in time"),
    Fault("node lists differ", file(NODES, "192.0.2.102\n", "192.0.2.102\n192.0.2.103\n", D), {"same-imex-nodes": [D]}, "192.0.2.103"),
    Fault("a host is not in its own node list", file(NODES, "192.0.2.101\n", "", P, D), {"imex-nodes": [P], "same-imex-nodes": [D]}, "192.0.2.102"),
    Fault("a node list of loopback addresses", file(NODES, "192.0.2.101\n192.0.2.102\n", "127.0.0.1\n", P, D),
          {"imex-nodes": [P, D], "same-imex-nodes": [P, D]}, "lists 127.0.0.1, none of which this host has"),
    Fault("IMEX and driver differ", command("imex_version", "580.105.08", "580.95.05", P), {"imex-version": [P]}, "nvidia-imex is 580.95.05, the driver 580.105.08"),
    Fault("the channel is missing", seen("devices", CHANNEL, value=None), {"imex-channel": [P]}, "is missing"),
    Fault("the channel has a stale major number", both(seen("devices", CHANNEL, "major", value=511), inside(devices={CHANNEL: [511, 0]})),
          {"imex-channel": [P]}, "channel0 has major 511, the driver has 234"),
    Fault("the channel is not in the container", inside(devices={CHANNEL: None}), {"container-devices": [P]}, f"{CHANNEL} is not in the container"),
    Fault("the container has another device there", inside(devices={CHANNEL: [1, 3]}), {"container-devices": [P]}, "is [1, 3] in the container and [234, 0] outside"),
    Fault("a GPU fell off the bus", command("gpu_list", "GPU 3: NVIDIA GB200 (UUID: GPU-00000003-0000-0000-0000-000000000000)\n", "", P), {"gpu-count": [P]}, "3 GPUs, the inventory says 4"),
    Fault("a hardware Xid", command("kernel_log", "-- No entries --\n", OOM + XID, P), {"xid": [P]}, "79, pid=1, GPU has fallen off the bus"),
    Fault("the driver is too old", both(file(VERSION, "580.105.08", "575.57.08", P, D), command("nvidia_smi", "580.105.08", "575.57.08", P, D),
                                        command("imex_version", "580.105.08", "575.57.08", P, D), file("/run/cdi/nvidia.yaml", "580.105.08", "575.57.08", P, D)),
          {"driver": [P, D]}, "the driver is 575.57.08"),
    Fault("the CDI specification is stale", file("/run/cdi/nvidia.yaml", "580.105.08", "580.95.05", D), {"cdi-fresh": [D]}, "driver 580.95.05, 580.105.08 is loaded"),
    Fault("CDI lacks a GPU", command("cdi", "nvidia.com/gpu=2\n", "", P), {"cdi-devices": [P]}, "CDI does not know nvidia.com/gpu=2"),
    Fault("memlock is limited", inside(memlock=8388608), {"container-memlock": [P]}, "limited to 8388608 bytes"),
    Fault("an NVLink is down", lambda records: records[P]["observed"]["commands"]["nvlink"].update(
              stdout="<inactive>".join(records[P]["observed"]["commands"]["nvlink"]["stdout"].rsplit("50 GB/s", 1))),
          {"nvlinks": [P]}, "GPU 3: 17 of 18 links are up"),
    Fault("a link that is not even listed", command("nvlink", "\t Link 17: 50 GB/s\n", "", P), {"nvlinks": [P]}, "GPU 0: 17 of 18 links are up"),
    Fault("a machine without NVLink, of which nvidia-smi prints nothing", seen("commands", "nvlink", "stdout", value=""), {"nvlinks": [P]}, "nvidia-smi shows no NVLink"),
    Fault("the fabric is degraded", last_gpu("Bandwidth                                  : Full", "Bandwidth                                  : Degraded"),
          {"fabric-health": [P]}, "GPU 3: Healthy, bandwidth Degraded"),
    Fault("the fabric is unhealthy", last_gpu("Summary                                    : Healthy", "Summary                                    : Unhealthy"),
          {"fabric-health": [P]}, "GPU 3: Unhealthy"),
    Fault("a dead peer's memory is still mapped", last_gpu(USED, HELD), {"gpu-memory": [P]}, "GPU 3: 68710 MiB are in use, and no process is listed"),
    Fault("GPU memory shows as NUMA nodes", both(seen("files", f"{BARE}/cpulist", value="\n"), seen("files", f"{BARE}/meminfo", value="Node 2 MemTotal: 193986560 kB\n")),
          {"numa": [P]}, "without CPUs: node 2 (185 GiB)", "warn"),
]
"""Facts of the project, table of failures and host checks. Its last row, a NIC that is down, needs transport rdma."""

RDMA_TABLE = [
    Fault("the NIC is down", file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE", "1: DOWN", P), {"rdma-ports": [P]}, "no port is up: mlx5_0/1 1: DOWN"),
    Fault("there is no NIC", lambda records: [records[P]["observed"]["files"].pop(path) for path in list(records[P]["observed"]["files"]) if "infiniband" in path],
          {"rdma-ports": [P]}, "no RDMA device"),
    Fault("no rdma_cm", seen("devices", "/dev/infiniband/rdma_cm", value=None), {"rdma-devices": [P]}, "rdma_cm is missing"),
    Fault("no uverbs", seen("devices", "/dev/infiniband/uverbs0", value=None), {"rdma-devices": [P]}, "no /dev/infiniband/uverbs"),
]

OTHERS = [
    Fault("a host does not answer", lambda records: records.update({R: {"failed": "Failed to connect to the host via ssh"}}), {"answers": [R]}, "Failed to connect"),
    Fault("a host is not recorded", lambda records: records.pop(D), {"answers": [D]}, "there is no recording"),
    Fault("a recording that is cut off", lambda records: records.update({R: json.dumps(records[R])[:-100]}), {"answers": [R]}, "could not read its recording"),
    Fault("a recording of another version", seen("schema", value=2, host=R), {"answers": [R]}, "another version"),
    Fault("another address", command("addresses", "192.0.2.10\"", "192.0.2.99\"", R), {"address": [R]}, "and not 192.0.2.10"),
    Fault("another architecture", command("architecture", "aarch64", "x86_64", P), {"architecture": [P]}, "it is x86_64; the image arm64-cu13 is for aarch64"),
    Fault("no systemd", ends("systemd", None, "", R, missing=True), {"systemd": [R]}, "no such program"),
    Fault("a clock that nobody sets", command("clock", "NTPSynchronized=yes", "NTPSynchronized=no", P), {"clock": [P]}, "not synchronized", "warn"),
    Fault("clocks that differ", seen("clock", "host", value=1042.0), {"same-clock": [P]}, "42 s ahead of the others", "warn"),
    Fault("the port of an engine is taken", stranger(P, 8000), {"ports": [P]}, "port 8000 (HTTP of prefill-rack1-01-0) is taken by nc (pid 4242, session-3.scope)"),
    Fault("the port of a router is taken", stranger(R, 30001, "0::/system.slice/other.service"), {"ports": [R]}, "port 30001 (router a) is taken by nc (pid 4242, other.service)"),
    Fault("a kernel without nftables", ends("nft", 1, "Error: Could not process rule: Operation not supported", R), {"nftables": [R]}, "Operation not supported"),
    Fault("docker is too old", command("docker", "28.5.1", "24.0.7", P), {"docker": [P]}, "version 24.0.7 does not know CDI devices"),
    Fault("docker has no CDI", command("docker", '"CDISpecDirs": ["/etc/cdi", "/run/cdi"]', '"CDISpecDirs": []', P), {"docker": [P]}, "CDI switched off"),
    Fault("docker's disk is full", seen("disks", "/var/lib/docker", "free", value=5 * GIB), {"image-space": [P]}, "5.0 GiB are free at /var/lib/docker, 30.0 GiB are needed"),
    Fault("little memory", file("/proc/meminfo", "993280000", "8000000", P), {"shared-memory": [P]}, "16.0 GiB of shared memory, 7.6 GiB of memory"),
    Fault("few open files", command("docker_unit", "LimitNOFILE=infinity", "LimitNOFILE=1024", P), {"open-files": [P]}, "docker may open 1024 files", "warn"),
    Fault("no config.json", without(P, "model", "files", "config.json"), {"model-files": [P]}, "config.json is missing"),
    Fault("a file of weights is missing", without(P, "model", "files", "model-00002-of-00002.safetensors"), {"model-files": [P]}, "model-00002-of-00002.safetensors is missing"),
    Fault("a file of weights is truncated", seen("model", "files", "model-00002-of-00002.safetensors", "size", value=31 * GIB), {"model-files": [P]},
          "model-00002-of-00002.safetensors has 33285996544 bytes, its header says 34359738368"),
    Fault("a file of weights is none", seen("model", "files", "model-00002-of-00002.safetensors", value={"error": "its safetensors header cannot be read, or is cut off"}),
          {"model-files": [P]}, "model-00002-of-00002.safetensors: its safetensors header cannot be read"),
    Fault("the index cannot be read", seen("model", "index", value={"error": "model.safetensors.index.json cannot be read"}), {"model-files": [P]}, "model.safetensors.index.json cannot be read"),
    Fault("the disk has no room for missing weights", both(without(P, "model", "files", "model-00002-of-00002.safetensors"), seen("disks", "/srv/models/Qwen3-32B", "free", value=GIB)),
          {"model-files": [P], "model-space": [P]}, "1.0 GiB are free at /srv/models/Qwen3-32B, 32.0 GiB are needed"),
    Fault("no model", seen("model", value={"error": "/srv/models/Qwen3-32B: No such file or directory"}),
          {"model-files": [P]}, "No such file or directory"),
    Fault("the model is not hashed", seen("model", "hash", value=None), {"model-hash": [P]}, "time ran out", "warn"),
    Fault("other weights", seen("model", "hash", value="cd" * 32, host=D), {"same-model": [D]}, "hash cdcdcdcdcdcdcdcd; on rack1-01: hash abababababababab"),
    Fault("proprietary modules", file(VERSION, "Open Kernel Module for aarch64", "aarch64 Kernel Module", P), {"open-modules": [P]}, "proprietary"),
    Fault("updated without a reboot", file(VERSION, "580.105.08", "580.95.05", P),
          {"driver-loaded": [P], "imex-version": [P], "cdi-fresh": [P], "same-driver": [D]}, "580.95.05 is loaded, 580.105.08 is installed"),
    Fault("GPUs of two models", last_gpu("NVIDIA GB200", "NVIDIA B200"), {"gpu-model": [P], "same-gpu": [D]}, "NVIDIA B200 and NVIDIA GB200"),
    Fault("MIG is on", last_gpu("MIG Mode\n        Current                                        : Disabled", "MIG Mode\n        Current                                        : Enabled"),
          {"mig": [P]}, "GPU 3: MIG is Enabled"),
    Fault("no persistence mode", last_gpu("Persistence Mode                                   : Enabled", "Persistence Mode                                   : Disabled"),
          {"persistence": [P]}, "GPU 3: Disabled", "warn"),
    Fault("somebody else's process", command("gpu_processes", "process_name\n", "process_name\nGPU-00000002-0000-0000-0000-000000000000, 5151, python3\n", P),
          {"gpu-processes": [P]}, "GPU 2: python3 (pid 5151, no unit)"),
    Fault("a memory error", last_gpu("DRAM Uncorrectable                         : 0\n        Aggregate", "DRAM Uncorrectable                         : 2\n        Aggregate"), {"ecc": [P]}, "GPU 3: 2 DRAM Uncorrectable"),
    Fault("a row waits for its repair", last_gpu("Pending                                        : No\n        Remapping", "Pending                                        : Yes\n        Remapping"), {"ecc": [P]}, "GPU 3: a row waits"),
    Fault("ECC is off", last_gpu("ECC Mode\n        Current                                        : Enabled", "ECC Mode\n        Current                                        : Disabled"), {"ecc": [P]}, "GPU 3: ECC is Disabled"),
    Fault("a GPU wants a reset", last_gpu("GPU Recovery Action                                : None", "GPU Recovery Action                                : Reset"), {"gpu-recovery": [P]}, "GPU 3: Reset"),
    Fault("NUMA balancing is on", file("/proc/sys/kernel/numa_balancing", "0", "1", P), {"numa-balancing": [P]}, "kernel.numa_balancing is 1", "warn"),
    Fault("a kernel with small pages", command("page_size", "65536", "4096", P), {"page-size": [P]}, "4096 bytes", "warn"),
    Fault("GPUs without NVLink between them", command("topology", "NV18", "SYS", P), {"nvlink-peers": [P]}, "GPU 0 to 1: SYS"),
    Fault("an old toolkit", command("toolkit", "1.18.1", "1.17.8", P), {"toolkit": [P]}, "version 1.17.8", "warn"),
    Fault("a container without CUDA", inside(gpus="CUDA error 100"), {"container-gpus": [P]}, "CUDA in a container sees 'CUDA error 100', 4 GPUs are planned"),
    Fault("a small /dev/shm", inside(shm=64 << 20), {"container-shm": [P]}, "67108864 bytes, planned 17179869184"),
    Fault("engines run different images", both(*(
              command("containers", "IMAGE\n", f"IMAGE\n{str(n) * 64} vllm-engine-{role}-{host}-0 sha256:{str(n) * 64}\n", host)
              for n, (role, host) in enumerate({"prefill": P, "decode": D}.items(), 1))),
          {"same-image": [P, D]}, "sha256:111111111111 on rack1-01; sha256:222222222222 on rack1-02", "warn"),
    Fault("a firewall before an engine", undialed(R, 8000, address="192.0.2.101"), {"reachable": [R]}, "HTTP of prefill-rack1-01-0 (rack1-01, 192.0.2.101:8000): no answer"),
    Fault("a firewall before a side channel", undialed(D, 5600, "refused"), {"reachable": [D]}, "NIXL side channel of prefill-rack1-01-0 (rack1-01, 192.0.2.101:5600): refused"),
    Fault("a firewall before the registry", undialed(P, 5000), {"reachable": [P]}, "registry (gate-01, 192.0.2.10:5000): no answer"),
    Fault("another host has the address", lambda records: [one.update(greeting="rack7-01") for one in records[D]["dials"] if one["port"] == 5600],
          {"reachable": [D]}, "host rack7-01 answers there"),
    Fault("nothing is known of dialing", lambda records: records[D].update(dials=None), {"reachable": [D]}, "could not read"),
    Fault("nothing is known of listening, and dialing failed", both(lambda records: records[P].update(listeners=None), undialed(D, 5600)), {"reachable": [P]}, "could not read"),
]
# fmt: on
FAULTS = [*TABLE, *OTHERS]
