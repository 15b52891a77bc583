"""Every fault is found by its check, on its hosts, and by no other; healthy hosts pass all that applies."""

from __future__ import annotations

from collections import defaultdict

import pytest
from host_faults import (
    FAULTS,
    HELD,
    OTHERS,
    RDMA_TABLE,
    TABLE,
    USED,
    VERSION,
    D,
    Fault,
    P,
    R,
    both,
    command,
    file,
    stranger,
)
from host_records import CHANNEL, linux, plan_of, recordings, text

from vllm_fleet.host_check import reading
from vllm_fleet.host_check.checks import BY_ID, Level
from vllm_fleet.host_check.judging import BETWEEN, ON_HOST
from vllm_fleet.host_check.report import judge, table

BAD = (Level.FAIL, Level.WARN)


def found(plan, records, *levels):
    """Check -> hosts, of the findings at these levels."""
    hosts = defaultdict(set)
    for finding in judge(plan, records, {}):
        if finding.level in (levels or BAD):
            hosts[finding.check.id].update(finding.hosts)
    return {check: sorted(names) for check, names in hosts.items()}


def levels(plan, records, check):
    return {host: f.level for f in judge(plan, records, {}) if f.check.id == check for host in f.hosts}


def test_healthy_hosts_pass_all_that_applies(plan, records):
    findings = judge(plan, records, {})
    assert {f.level for f in findings} == {Level.PASS, Level.NOT_APPLICABLE}
    passed = {f.check.id for f in findings if f.level is Level.PASS}
    assert set(BY_ID) - passed == {"rdma-ports", "rdma-devices", "same-image"}


def test_healthy_rdma_hosts_pass(records):
    plan = plan_of("gb200-two-trays", "fleet_kv_transport=rdma")
    assert found(plan, recordings(plan)) == {}
    assert found(plan, recordings(plan), Level.PASS).keys() >= {"rdma-ports", "rdma-devices"}


def judged(fault: Fault, plan, records):
    fault.change(records)
    findings = [f for f in judge(plan, records, {}) if f.level in BAD]
    assert found(plan, records) == {check: sorted(hosts) for check, hosts in fault.found.items()}
    assert {f.level.value for f in findings} == {fault.level} | {
        BY_ID[f.check.id].level.value for f in findings
    }
    shown = " ".join(" ".join(table(judge(plan, records, {}))).split())
    assert fault.seen in shown
    for finding in findings:
        assert finding.check.id in shown
        assert finding.remedy in shown


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_found_by_its_check_and_no_other(fault, plan, records):
    judged(fault, plan, records)


@pytest.mark.parametrize("fault", RDMA_TABLE, ids=lambda fault: fault.what)
def test_a_fault_of_rdma_is_found(fault):
    plan = plan_of("gb200-two-trays", "fleet_kv_transport=rdma")
    judged(fault, plan, recordings(plan))


def test_every_check_has_a_fault_that_it_finds():
    assert {check for fault in (*TABLE, *OTHERS, *RDMA_TABLE) for check in fault.found} == set(BY_ID)


def test_every_check_has_one_judge():
    judged = [one.check.id for one in (*ON_HOST, *BETWEEN)]
    assert sorted([*judged, "answers"]) == sorted(BY_ID)


# --- what is no fault -----------------------------------------------------------------------------


def test_hosts_that_build_for_themselves_have_images_of_their_own():
    plan = plan_of("gb200-two-trays", "fleet_image_source=build")
    records = recordings(plan)
    [fault] = [fault for fault in FAULTS if fault.what == "engines run different images"]
    fault.change(records)
    assert set(levels(plan, records, "same-image").values()) == {Level.NOT_APPLICABLE}


def engine_runs(host: str, engine: str, port: int):
    """The fleet's own engine listens on its ports and uses its GPUs."""
    container, line = "a" * 64, f'LISTEN 0 5 192.0.2.101:{port} 0.0.0.0:* users:(("python3",pid=77,fd=3))\n'

    def change(records):
        seen = records[host]["observed"]
        seen["commands"]["containers"]["stdout"] += f"{container} vllm-engine-{engine} sha256:{'1' * 64}\n"
        seen["commands"]["sockets"]["stdout"] += line
        seen["commands"]["gpu_processes"]["stdout"] += (
            "GPU-00000000-0000-0000-0000-000000000000, 77, VLLM::Worker\n"
        )
        seen["processes"]["77"] = {"cgroup": f"0::/system.slice/docker-{container}.scope"}
        for one in records[host]["listeners"]:
            one["outcome"] = "left to its unit"

    return change


def test_the_fleets_own_engine_may_have_its_ports_and_gpus(plan, records):
    engine_runs(P, "prefill-rack1-01-0", 8000)(records)
    assert found(plan, records) == {}
    assert levels(plan, records, "ports")[P] is Level.PASS


def test_the_fleets_own_relay_may_have_its_port(plan, records):
    address, container = plan["hosts"][P]["address"], "b" * 64
    plan = {**plan, "relay": {"port": 30020, "urls": {P: f"http://{address}:30020"}}}
    seen = records[P]["observed"]
    seen["commands"]["sockets"]["stdout"] += (
        f'LISTEN 0 5 {address}:30020 0.0.0.0:* users:(("python3",pid=78,fd=3))\n'
    )
    seen["processes"]["78"] = {"cgroup": f"0::/system.slice/docker-{container}.scope"}
    for name, level in (("pd-relay", Level.PASS), ("pd-relay-of-somebody", Level.FAIL)):
        seen["commands"]["containers"]["stdout"] += f"{container} {name} sha256:{'1' * 64}\n"
        assert levels(plan, records, "ports")[P] is level


PROCESSES = "    Processes                                          : None\n"


def test_memory_that_a_process_uses_is_not_a_dead_peers(plan, records):
    below = "    Processes\n        Process ID                        : 77\n            Type                          : C\n"
    both(command("nvidia_smi", USED, HELD, P), command("nvidia_smi", PROCESSES, below, P))(records)
    assert found(plan, records) == {}


def test_without_a_list_of_processes_memory_is_not_judged(plan, records):
    command("nvidia_smi", PROCESSES, PROCESSES.replace("None", "N/A"), P)(records)
    assert found(plan, records) == {"gpu-memory": [P]}


def test_an_engine_that_the_inventory_no_longer_has_may_not(plan, records):
    engine_runs(P, "old-rack1-01-0", 8000)(records)
    assert found(plan, records) == {"ports": [P], "gpu-processes": [P]}


def test_an_engine_that_starts_is_told_and_not_judged(plan, records):
    for one in records[P]["listeners"]:
        one["outcome"] = "left to its unit"
    for source in (D, R):
        for dial in records[source]["dials"]:
            if dial["address"] == "192.0.2.101":
                dial |= {"outcome": "refused", "greeting": None}
    del records[D]["dials"][-1]["greeting"]  # IMEX, which is there
    records[D]["dials"][-1]["outcome"] = "connected"
    assert found(plan, records) == {}
    assert found(plan, records, Level.INFO) == {"reachable": [P]}


def test_the_port_of_another_address_is_free(plan, records):
    line = 'LISTEN 0 5 127.0.0.1:8000 0.0.0.0:* users:(("other",pid=9,fd=3))\n'
    records[P]["observed"]["commands"]["sockets"]["stdout"] += line
    assert found(plan, records) == {}


def test_a_taken_port_is_not_told_again_as_unreachable(plan, records):
    stranger(P, 8000)(records)
    records[P]["listeners"][0]["outcome"] = "taken"
    assert found(plan, records) == {"ports": [P]}


def test_xids_of_applications_are_only_told(plan, records):
    line = "Nov 30 h kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=1, MMU Fault\n"
    command("kernel_log", "-- No entries --\n", line, P)(records)
    assert found(plan, records) == {}
    assert found(plan, records, Level.INFO) == {"xid": [P]}


MISSING = {"rc": None, "stdout": "", "stderr": "", "missing": True}
STOPPED = {"rc": 1, "stdout": "", "stderr": "Cannot connect to the Docker daemon"}


@pytest.mark.parametrize(("ran", "state"), [(MISSING, "inactive"), (STOPPED, "inactive")])
def test_a_host_without_docker_is_told(plan, records, ran, state):
    seen = records[P]["observed"]
    for name in ("docker", "containers", "images"):
        seen["commands"][name] = ran
    command("docker_unit", "ActiveState=active", f"ActiveState={state}", P)(records)
    seen["container"] = {"image": None}
    assert found(plan, records) == {}
    assert found(plan, records, Level.INFO) == {"docker": [P], "open-files": [P]}


def test_a_host_without_nft_is_told(plan, records):
    records[P]["observed"]["commands"]["nft"] = MISSING
    assert found(plan, records) == {}
    assert found(plan, records, Level.INFO) == {"nftables": [P]}


def test_a_docker_that_failed_is_no_docker_to_come(plan, records):
    records[P]["observed"]["commands"]["docker"] = STOPPED
    command("docker_unit", "ActiveState=active", "ActiveState=failed", P)(records)
    assert found(plan, records, Level.FAIL).keys() == {"docker", "image-space"}


def test_without_an_image_nothing_is_said_about_containers(plan, records):
    records[P]["observed"]["container"] = {"image": None}
    assert levels(plan, records, "container-gpus")[P] is Level.NOT_APPLICABLE
    assert found(plan, records) == {}


def test_the_odd_one_out_is_named_where_most_agree():
    plan = plan_of("gb200-wide-ep")
    records = recordings(plan)
    every = "".join(f"{host['address']}\n" for host in plan["hosts"].values() if host["members"])
    domain = imex_domain([host["address"] for host in plan["hosts"].values() if host["members"]])
    for host in records.values():
        host["observed"]["files"]["/etc/nvidia-imex/nodes_config.cfg"] = every
        if "imex_domain" in host["observed"]["commands"]:
            host["observed"]["commands"]["imex_domain"]["stdout"] = domain
    assert found(plan, records) == {}
    both(command("nvidia_smi", ": 32766", ": 9", "rack1-01"))(records)
    file("/etc/nvidia-imex/nodes_config.cfg", "192.0.2.117\n", "", "rack1-05")(records)
    assert found(plan, records) == {"same-fabric": ["rack1-01"], "same-imex-nodes": ["rack1-05"]}


def imex_domain(addresses):
    nodes = "".join(
        f"Node #{n}   - {a}     - READY                - Version: 580.105\n" for n, a in enumerate(addresses)
    )
    links = "".join(
        f"       {n}        " + "   ".join("C" * len(addresses)) + "\n" for n in range(len(addresses))
    )
    return f"Nodes:\n{nodes}\n Nodes From\\To  0\n{links}\nDomain State: UP\n"


def test_hosts_that_could_not_be_read_are_not_called_equal(plan, records):
    command("nvidia_smi", "ClusterUUID", "Cluster", D)(records)
    assert levels(plan, records, "same-fabric") == {D: Level.NOT_APPLICABLE, R: Level.NOT_APPLICABLE}
    assert found(plan, records) == {"fabric-cluster": [D]}


# --- a real host ----------------------------------------------------------------------------------


def test_a_real_h200_host_is_judged_as_what_it_is():
    """Two H200 with NVLink between them only: no multi-node fabric, no IMEX, no docker, two GPUs instead of eight."""
    plan = plan_of("h200-8gpu")
    records = recordings(plan)
    host = text("h200/host.txt")
    seen = records["gpu-01"]["observed"]
    version = "\n".join(line for line in host.splitlines() if line.startswith(("NVRM", "GCC"))) + "\n"
    seen["files"]["/proc/driver/nvidia/version"] = version
    # The recording begins below the heading.
    seen["files"]["/proc/devices"] = (
        "Character devices:\n" + host[host.index("195 nvidia\n") : host.index("index, name")]
    )
    seen["devices"] = {CHANNEL: None}
    seen["container"] = {"image": None}
    for name, path in {
        "nvidia_smi": "nvidia-smi-q",
        "gpu_list": "nvidia-smi-L",
        "nvlink": "nvlink",
        "topology": "topo",
    }.items():
        seen["commands"][name]["stdout"] = text(f"h200/{path}.txt")
    seen["commands"]["architecture"]["stdout"] = "x86_64\n"
    seen["commands"]["page_size"]["stdout"] = "4096\n"
    for name in ("cdi", "toolkit"):
        seen["commands"][name] = {"rc": None, "stdout": "", "stderr": "", "missing": True}
    del seen["files"]["/run/cdi/nvidia.yaml"]
    bad = found(plan, records)
    channel = {"imex-channel"} if levels(plan, records, "imex-channel")["gpu-01"] is Level.FAIL else set()
    assert bool(channel) == any(
        CHANNEL in m["container_options"]["devices"] for m in plan["hosts"]["gpu-01"]["members"]
    )
    assert set(bad) == {"gpu-count", "cdi-devices", "cdi-fresh", "toolkit"} | channel
    passed = found(plan, records, Level.PASS)
    for check in (
        "driver",
        "open-modules",
        "driver-loaded",
        "nvlinks",
        "nvlink-peers",
        "fabric-state",
        "ecc",
        "gpu-memory",
    ):
        assert passed[check] == ["gpu-01"], check
    assert levels(plan, records, "fabric-cluster")["gpu-01"] is Level.NOT_APPLICABLE
    assert levels(plan, records, "fabric-health")["gpu-01"] is Level.INFO


def test_loopback_is_no_address_of_a_host():
    assert reading.addresses(linux("192.0.2.10")["commands"]["addresses"]["stdout"]) == {"192.0.2.10"}


def test_other_drivers_are_only_a_warning_where_no_memory_is_shared_between_hosts():
    plan = plan_of("gb200-two-trays", "fleet_kv_transport=rdma")
    records = recordings(plan)
    both(file(VERSION, "580.105.08", "580.95.05", D), command("nvidia_smi", "580.105.08", "580.95.05", D))(
        records
    )
    file("/run/cdi/nvidia.yaml", "580.105.08", "580.95.05", D)(records)
    assert found(plan, records, Level.WARN) == {"same-driver": [D]}
    assert found(plan, records, Level.FAIL) == {}
