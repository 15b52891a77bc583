"""Reading programs' output: the real one is understood, and no cut, deletion or nonsense passes or raises anything else."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any

import pytest
from host_faults import FAULTS
from host_records import plan_of, recordings, text
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fleet.host_check import reading
from vllm_fleet.host_check.checks import Level
from vllm_fleet.host_check.reading import Observation, UnreadableError
from vllm_fleet.host_check.report import judge, table

HOST = "rack1-01"


# --- real output ----------------------------------------------------------------------------------


def test_nvidia_smi_of_a_real_host():
    seen = reading.gpus(text("h200/nvidia-smi-q.txt"))
    assert seen.driver == "580.159.04"
    assert [gpu.value("Product Name") for gpu in seen.sections] == ["NVIDIA H200"] * 2
    last = seen.sections[1]
    assert last.mebibytes("FB Memory Usage", "Total") == 143771
    assert last.value("Fabric", "Health", "Summary") == "N/A"
    assert last.value("MIG Mode", "Current") == "Disabled"
    assert last.count("ECC Errors", "Aggregate", "SRAM Uncorrectable Parity") == 0


def test_links_topology_and_list_of_a_real_host():
    links = reading.links(text("h200/nvlink.txt"))
    assert [len(states) for states in links] == [18, 18]
    assert reading.topology(text("h200/topo.txt")) == {(0, 1): "NV18", (1, 0): "NV18"}
    assert len(reading.gpu_list(text("h200/nvidia-smi-L.txt"))) == 2


def test_the_driver_of_a_real_host():
    driver = reading.driver(text("h200/host.txt"))
    assert driver == ("580.159.04", True)
    assert reading.version_of("580.65.06") < reading.version_of("580.159.04") < reading.version_of("1000.1")


def test_gpus_that_run_into_each_other_are_not_one():
    """Without the line between them a value would be that of either."""
    merged = (
        text("h200/nvidia-smi-q.txt").replace("GPU 00000000:00:07.0\n", "").replace(": 2\nGPU", ": 1\nGPU")
    )
    [gpu] = reading.gpus(merged).sections
    with pytest.raises(UnreadableError, match="more than one Product Name"):
        gpu.value("Product Name")


def test_a_link_that_is_missing_in_between_is_noticed():
    with pytest.raises(UnreadableError, match="Link 6"):
        reading.links(text("h200/nvlink.txt").replace("\t Link 5: 26.562 GB/s\n", "", 1))


def test_processes_below_their_heading():
    block = text("h200/nvidia-smi-q.txt").replace(
        "    Processes                                          : None\n",
        "    Processes\n        GPU instance ID                   : N/A\n        Process ID                        : 7\n"
        "            Type                          : C\n        Process ID                        : 8\n",
    )
    assert reading.gpus(block).sections[0].section("Processes").all("Process ID") == ["7", "8"]


@pytest.mark.parametrize(
    ("line", "address", "port", "pids"),
    [
        ('LISTEN 0 128 [::]:22 [::]:* users:(("sshd",pid=98,fd=4))', "::", 22, (98,)),
        ("LISTEN 0 4096 127.0.0.53%lo:53 0.0.0.0:*", "127.0.0.53", 53, ()),
        ('LISTEN 0 5 *:8000 *:* users:(("a b",pid=1,fd=3),("c",pid=2,fd=3))', "*", 8000, (1, 2)),
        ("LISTEN 0 5 [fe80::1%eth0]:80 [::]:*    ", "fe80::1", 80, ()),
        (
            "LISTEN 0      4096      127.0.0.11:42483      0.0.0.0:*                                             ",
            "127.0.0.11",
            42483,
            (),
        ),
    ],
)
def test_sockets(line, address, port, pids):
    [socket] = reading.sockets(line + "\n")
    assert (socket.address, socket.port, socket.pids) == (address, port, pids)


@pytest.mark.parametrize(
    ("cgroup", "owner"),
    [
        ("0::/system.slice/docker-registry.service", ("unit", "docker-registry.service")),
        (f"0::/system.slice/docker-{'a' * 64}.scope", ("container", "a" * 64)),
        (f"9:name=systemd:/docker/{'b' * 64}/docker/{'a' * 64}", ("container", "a" * 64)),
        (rf"9:name=systemd:/docker/{'b' * 64}/system.slice/system-vllm\x2drouter.slice/vllm-router@a.service", ("unit", "vllm-router@a.service")),
        (f"9:name=systemd:/docker/{'b' * 64}", ("container", "b" * 64)),
        ("0::/", ("", "")),
    ],
)  # fmt: skip
def test_whose_a_process_is(cgroup, owner):
    assert reading.owner_of(cgroup) == owner


# --- wrong output ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran", "says"),
    [
        ({"rc": None, "stdout": "", "stderr": "", "missing": True}, "no such program"),
        ({"rc": None, "stdout": "x\n", "stderr": "", "timed_out": True}, "did not answer in time"),
        ({"rc": 9, "stdout": "", "stderr": "Driver not loaded\n"}, "ended with 9: Driver not loaded"),
        ({"rc": 0, "stdout": " \n", "stderr": ""}, "printed nothing"),
        ({"rc": 0, "stdout": "half a li", "stderr": ""}, "is cut off"),
        ({"rc": 0, "stdout": "x\n", "stderr": "", "cut": True}, "is cut off"),
        ({}, "ended with None"),
        (None, "is no mapping"),
        ("x", "is no mapping"),
    ],
)
def test_output_that_is_not_there_says_why(ran, says):
    with pytest.raises(UnreadableError, match=says):
        Observation({"commands": {"one": ran}}).output("one")


FOREIGN = [
    "Befehl nicht gefunden: Das Programm ist nicht installiert\n",
    "共有ライブラリを開けません\nGPU が見つかりません\n",
    "{}\n",
    "[]\n",
    "null\n",
    "\x00\x01\x02\n",
    "\n\n\n-\n",
    "9" * 500 + "\n",
    "[" * 5000 + "\n",
    "Attached GPUs : 99999999999999999999\n",
    "GPU 0\nGPU 1\nGPU 2\n",
]


@cache
def healthy() -> dict[str, Any]:
    return recordings(plan_of("gb200-two-trays"))


def passes(records: dict[str, Any]) -> set[str]:
    """Checks that pass on the host, or that compare it and pass."""
    findings = judge(plan_of("gb200-two-trays"), records, {})
    assert table(findings)
    return {finding.check.id for finding in findings if finding.level is Level.PASS and HOST in finding.hosts}


COMMANDS = sorted(healthy()[HOST]["observed"]["commands"])
FILES = sorted(healthy()[HOST]["observed"]["files"])
# What a check on a host reads; with none of it the check cannot pass.
READS = {
    "architecture": {"architecture"}, "addresses": {"address", "imex-nodes"}, "sockets": {"ports"}, "clock": {"clock"}, "nft": {"nftables"},
    "kernel": {"systemd"}, "systemd": {"systemd"}, "page_size": {"page-size"}, "docker": {"docker", "image-space"},
    "docker_unit": {"open-files"}, "nvidia_smi": {"fabric-state", "fabric-health", "fabric-cluster", "same-fabric", "gpu-memory", "ecc", "mig", "gpu-recovery",
    "persistence", "gpu-model", "driver-loaded", "nvlinks", "nvlink-peers", "numa-balancing", "page-size", "same-gpu"},
    "gpu_list": {"gpu-count", "gpu-processes"}, "nvlink": {"nvlinks"}, "topology": {"nvlink-peers"}, "gpu_processes": {"gpu-processes"},
    "kernel_log": {"xid"}, "imex_service": {"imex-service", "imex-domain"}, "imex_version": {"imex-version"}, "imex_domain": {"imex-domain"},
    "cdi": {"cdi-devices"}, "toolkit": {"toolkit"},
}  # fmt: skip


@pytest.mark.parametrize("foreign", FOREIGN, ids=range(len(FOREIGN)))
@pytest.mark.parametrize("name", READS)
def test_foreign_output_never_passes(name, foreign):
    if name == "kernel":  # is only shown
        return
    records = copy.deepcopy(healthy())
    records[HOST]["observed"]["commands"][name]["stdout"] = foreign
    assert not READS[name] & passes(records)


@pytest.mark.parametrize("name", READS)
def test_a_program_that_fails_never_passes(name):
    for ran in (
        {"rc": 1, "stdout": "", "stderr": "no"},
        {"rc": 0, "stdout": "", "stderr": ""},
        {"timed_out": True},
        None,
        7,
    ):
        records = copy.deepcopy(healthy())
        records[HOST]["observed"]["commands"][name] = ran
        assert not READS[name] & passes(records)


@pytest.mark.parametrize("path", FILES)
def test_foreign_files_raise_nothing(path):
    for foreign in (*FOREIGN[:3], "", None, 5):
        records = copy.deepcopy(healthy())
        records[HOST]["observed"]["files"][path] = foreign
        passes(records)


# --- fuzzing: a fault is never hidden by what is missing ------------------------------------------

# Whose output has one part for each of several things, so that what is missing could be what was wrong.
CUTTABLE = ("nvidia_smi", "nvlink", "topology", "imex_domain", "gpu_list", "cdi", "docker", "imex_version")


def fuzzable():
    for fault in FAULTS:
        records = copy.deepcopy(healthy())
        fault.change(records)
        if not isinstance(records.get(HOST), dict) or HOST not in {
            host for hosts in fault.found.values() for host in hosts
        }:
            continue
        for name in CUTTABLE:
            old, new = (one[HOST]["observed"]["commands"][name].get("stdout") for one in (healthy(), records))
            if old != new and new:
                yield pytest.param(fault, name, id=f"{fault.what} ({name})")


def broken(fault, name, change):
    """Judge the fault with that output changed: none of the checks that find it may pass."""
    records = copy.deepcopy(healthy())
    fault.change(records)
    one = records[HOST]["observed"]["commands"][name]
    one["stdout"] = change(one["stdout"])
    checks = {check for check, hosts in fault.found.items() if HOST in hosts}
    assert not checks & passes(records), one["stdout"][-300:]


@pytest.mark.parametrize(("fault", "name"), list(fuzzable()))
def test_a_fault_is_not_hidden_by_a_cut_anywhere(fault, name):
    @settings(max_examples=6, deadline=None)
    @given(st.floats(0, 1))
    def cut(where):
        broken(fault, name, lambda output: output[: int(where * len(output))])

    cut()


@pytest.mark.parametrize(("fault", "name"), list(fuzzable()))
def test_a_fault_is_not_hidden_by_a_cut_between_lines(fault, name):
    @settings(max_examples=6, deadline=None)
    @given(st.floats(0, 1))
    def cut(where):
        def change(output):
            lines = output.splitlines(keepends=True)
            return "".join(lines[: int(where * (len(lines) - 1))])

        broken(fault, name, change)

    cut()


@pytest.mark.parametrize(("fault", "name"), list(fuzzable()))
def test_a_fault_is_not_hidden_by_lines_that_are_missing(fault, name):
    @settings(max_examples=6, deadline=None)
    @given(st.randoms(use_true_random=False), st.integers(1, 6))
    def delete(chance: random.Random, count):
        def change(output):
            lines = output.splitlines(keepends=True)
            for _ in range(min(count, len(lines))):
                del lines[chance.randrange(len(lines))]
            return "".join(lines)

        broken(fault, name, change)

    delete()


@pytest.mark.parametrize("real", ["nvidia-smi-q", "nvlink", "topo", "nvidia-smi-L"])
def test_real_output_may_be_cut_at_any_byte(real):
    read = {
        "nvidia-smi-q": reading.gpus,
        "nvlink": reading.links,
        "topo": reading.topology,
        "nvidia-smi-L": reading.gpu_list,
    }[real]
    output = text(f"h200/{real}.txt")
    for end in range(0, len(output), 1 if len(output) < 2000 else 37):
        try:
            found = read(output[:end])
        except UnreadableError:
            continue
        if real == "nvidia-smi-q":
            for gpu in found.sections:
                try:
                    gpu.mebibytes("FB Memory Usage", "Used")
                except UnreadableError:
                    continue


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_read_or_unreadable(words):
    for read in (
        reading.gpus, reading.links, reading.topology, reading.gpu_list, reading.gpu_processes, reading.xids, reading.driver,
        reading.imex_domain, reading.imex_version, reading.imex_nodes, reading.cdi_gpus, reading.docker_info, reading.containers,
        reading.sockets, reading.addresses, reading.limit, reading.memory_bytes, reading.version_of,
    ):  # fmt: skip
        try:
            read(words)
        except UnreadableError:
            continue


def places(value: Any, path: tuple[str | int, ...] = ()):
    """Every place in a recording."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("other", [None, 5, [1], {"x": 1}], ids=repr)
def test_a_recording_with_anything_anywhere_is_judged(other):
    """Nothing raises, and what is judged by it does not pass for being odd: see the tests above."""
    for *path, last in places(healthy()[HOST]):
        if path[:2] == ["observed", "commands"] and last != "stdout":
            continue  # Observation.output looks at these, and is tested above
        records = dict(healthy())
        records[HOST] = place = json.loads(healthy_text())
        for key in path:
            place = place[key]
        place[last] = other
        judge(plan_of("gb200-two-trays"), records, {})


@cache
def healthy_text() -> str:
    return json.dumps(healthy()[HOST])
