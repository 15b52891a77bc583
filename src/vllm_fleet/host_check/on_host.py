"""The checks of one host. Each says what it saw; what it could not read it leaves to `UnreadableError`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fleet.host_check import checks, reach, reading
from vllm_fleet.host_check.checks import Check, Level
from vllm_fleet.host_check.judging import (
    ALWAYS,
    CDI_HOSTS,
    CHANNEL_HOSTS,
    ENGINES,
    FABRIC,
    FENCED,
    GPU_HOSTS,
    LOCKED,
    NODES,
    NVLINK,
    RDMA,
    Found,
    Host,
    on_host,
    right,
    skipped,
    told,
)
from vllm_fleet.host_check.reading import UnreadableError
from vllm_fleet.host_check.scope import CHANNEL, container_devices, device_nodes

GIB = 2**30
ARCHITECTURES = {"arm64-cu13": "aarch64", "amd64-cu13": "x86_64"}
OLDEST_DRIVER = "580.65.06"
OLDEST_DOCKER = "25"
OLDEST_TOOLKIT = "1.18"
IMAGE_BYTES = {"cuda": 30 * GIB, "cpu": 8 * GIB}
"""Layers while they are pulled, and unpacked."""
FEWEST_FILES = 65536
HELD_MIB = 1024
"""A driver's own share of a GPU without a process is less."""
LINKS = {"H100": 18, "H200": 18, "B200": 18, "GB200": 18, "B300": 18, "GB300": 18}
COHERENT = ("GB200", "GB300", "GH200")
HARDWARE_XIDS = frozenset({46, 48, 62, 64, 74, 79, 94, 95, 110, 119, 120, 137, 140, *range(144, 151)})
UNCORRECTABLE = ("SRAM Uncorrectable Parity", "SRAM Uncorrectable SEC-DED", "DRAM Uncorrectable")
ZEROS = "00000000-0000-0000-0000-000000000000"
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def wrong(check: Check, seen: str, remedy: str | None = None) -> Found:
    """It does not hold."""
    return Found(seen, check.level, remedy)


def each(check: Check, faults: Iterable[str], fine: str) -> Found:
    """Right where there is no fault, else wrong with all of them."""
    seen = list(faults)
    return wrong(check, "; ".join(seen)) if seen else right(fine)


# --- every host -----------------------------------------------------------------------------------


@on_host(checks.ADDRESS, ALWAYS)
def address(host: Host) -> Found:
    """The planned address is among the host's."""
    own, planned = reading.addresses(host.seen.output("addresses")), host.planned["address"]
    if planned in own:
        return right(planned)
    return wrong(checks.ADDRESS, f"it has {', '.join(sorted(own))} and not {planned}")


@on_host(checks.ARCHITECTURE, ENGINES)
def architecture(host: Host) -> Found:
    """Uname -m is what the image's variant is made for; the CPU image is built for the builder's."""
    machine = host.seen.output("architecture").strip()
    variant = host.plan["image"]["variant"]
    wanted = ARCHITECTURES.get(variant)
    if wanted == machine or (wanted is None and machine in ARCHITECTURES.values()):
        return right(machine)
    return wrong(
        checks.ARCHITECTURE, f"it is {machine}; the image {variant} is for {wanted or 'x86_64 or aarch64'}"
    )


@on_host(checks.SYSTEMD, ALWAYS)
def systemd(host: Host) -> Found:
    """Its version, and what the host runs."""
    version = host.seen.output("systemd").splitlines()[0]
    if not version.startswith("systemd "):
        raise UnreadableError(f"`systemctl --version` printed {version[:80]!r}")
    release = reading.properties(host.seen.file("/etc/os-release")).get("PRETTY_NAME", "").strip('"')
    return right(
        f"{version.partition('(')[0].strip()}, {release}, kernel {host.seen.output('kernel').strip()}"
    )


@on_host(checks.CLOCK, ALWAYS)
def clock(host: Host) -> Found:
    """What the kernel knows about it, whichever program sets it."""
    synchronized = reading.property_of(host.seen.output("clock"), "NTPSynchronized")
    return right("synchronized") if synchronized == "yes" else wrong(checks.CLOCK, "not synchronized")


@on_host(checks.PORTS, ALWAYS)
def ports(host: Host) -> Found:
    """Who listens on the ports that the plan gives to this host."""
    sockets = reading.sockets(host.seen.output("sockets"))
    own, taken = 0, []
    for planned in reach.listeners(host.plan, host.name):
        for socket in sockets:
            if socket.port != planned.port or not socket.covers(planned.address):
                continue
            units = {host.unit_of(pid) for pid in socket.pids}
            if units == {planned.unit}:
                own += 1
            else:
                who = f"{', '.join(sorted(set(socket.names))) or 'an unknown program'}"
                where = ", ".join(sorted(filter(None, units))) or "no unit"
                pids = ", ".join(map(str, socket.pids)) or "unknown"
                taken.append(
                    f"port {planned.port} ({planned.purpose}) is taken by {who} (pid {pids}, {where})"
                )
    fine = f"{own} of the fleet's own, the others free"
    return each(checks.PORTS, dict.fromkeys(taken), fine)


@on_host(checks.NFTABLES, FENCED)
def nftables(host: Host) -> Found:
    """The tables that are there, of whomever."""
    if host.seen.missing("nft"):
        return told("there is no nft yet; playbooks/fence.yml installs it")
    tables = reading.nft_tables(host.seen.output("nft"))
    return right(f"tables: {', '.join(tables) or 'none'}")


# --- hosts with engines ---------------------------------------------------------------------------


@on_host(checks.DOCKER_ENGINE, ENGINES)
def docker(host: Host) -> Found:
    """Its version, and for GPUs that it knows CDI."""
    if to_come := host.docker_to_come:
        return told(to_come)
    info = reading.docker_info(host.seen.output("docker"))
    version = info["ServerVersion"]
    number = re.match(r"\d+(\.\d+)*", version)
    if not number:
        raise UnreadableError(f"docker's version is {version!r}")
    if host.plan["accelerator"] != "cuda":
        return right(version)
    if reading.version_of(number[0]) < reading.version_of(OLDEST_DOCKER):
        return wrong(checks.DOCKER_ENGINE, f"version {version} does not know CDI devices")
    if not info.get("CDISpecDirs"):
        remedy = 'Set {"features": {"cdi": true}} in /etc/docker/daemon.json and restart docker.'
        return wrong(checks.DOCKER_ENGINE, f"version {version} has CDI switched off", remedy)
    return right(f"{version}, CDI in {', '.join(map(str, info['CDISpecDirs']))}")


@on_host(checks.IMAGE_SPACE, ENGINES)
def image_space(host: Host) -> Found:
    """Room for a pull, unless an engine image is there."""
    if host.docker_to_come:
        root = "/var/lib/docker"
    else:
        if len(host.seen.output("images").splitlines()) > 1:
            return right("an engine image is there")
        root = str(reading.docker_info(host.seen.output("docker")).get("DockerRootDir"))
    return _room(checks.IMAGE_SPACE, host, root, IMAGE_BYTES[host.plan["accelerator"]])


def _room(check: Check, host: Host, folder: str, needed: int) -> Found:
    free = host.seen.number("disks", folder, "free")
    seen = f"{free / GIB:.1f} GiB are free at {folder}"
    return right(seen) if free >= needed else wrong(check, f"{seen}, {needed / GIB:.1f} GiB are needed")


@on_host(checks.SHARED_MEMORY, ENGINES)
def shared_memory(host: Host) -> Found:
    """The engines' /dev/shm together against the memory."""
    total = reading.memory_bytes(host.seen.file("/proc/meminfo"))
    wanted = sum(docker_bytes(member["container_options"]["shm_size"]) for member in host.members)
    seen = f"{wanted / GIB:.1f} GiB of shared memory, {total / GIB:.1f} GiB of memory"
    return right(seen) if wanted < total else wrong(checks.SHARED_MEMORY, seen)


def docker_bytes(size: str) -> int:
    """A size as docker takes it: 16g."""
    units = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
    digits = size.rstrip("bkmgBKMG")
    return int(digits) * units[size[len(digits) :].lower()]


@on_host(checks.OPEN_FILES, ENGINES)
def open_files(host: Host) -> Found:
    """Docker's limit, which containers inherit."""
    if to_come := host.docker_to_come:
        return told(to_come)
    files = reading.limit(reading.property_of(host.seen.output("docker_unit"), "LimitNOFILE"))
    seen = f"docker may open {'any number of' if files == float('inf') else int(files)} files"
    return right(seen) if files >= FEWEST_FILES else wrong(checks.OPEN_FILES, seen)


@on_host(checks.MODEL_FILES, ENGINES)
def model_files(host: Host) -> Found:
    """config.json, and every file of weights with the size that its header gives."""
    files, index = _model(host), host.seen.part("model", "index")
    faults = [] if "config.json" in files else ["config.json is missing"]
    weights = {name: file for name, file in files.items() if name.endswith(".safetensors")}
    for name, file in files.items():
        if "error" in file:
            faults.append(f"{name}: {file['error']}")
        elif name in weights and file.get("size") != file.get("implied"):
            faults.append(f"{name} has {file.get('size')} bytes, its header says {file.get('implied')}")
    if index is not None:
        wanted, error = _index(index)
        faults += [error] if error else [f"{name} is missing" for name in wanted if name not in weights]
    elif not weights:
        return told("no safetensors files; weights of other formats are not looked at")
    return each(checks.MODEL_FILES, faults, f"{len(weights)} files of weights, complete")


def _index(index: Any) -> tuple[list[str], str]:
    """The files that model.safetensors.index.json names; or why it could not be read on the host."""
    if isinstance(index, Mapping) and "error" in index:
        return [], str(index["error"])
    names = index.get("files") if isinstance(index, Mapping) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnreadableError("model.index of the observation is not what the module tells")
    return names, ""


def _model(host: Host) -> Mapping[str, Mapping[str, Any]]:
    if "error" in host.seen.mapping("model"):
        raise UnreadableError(str(host.seen.part("model", "error")))
    files = host.seen.mapping("model", "files")
    if not all(isinstance(file, Mapping) for file in files.values()):
        raise UnreadableError("model.files of the observation is not what the module tells")
    return files


@on_host(checks.MODEL_SPACE, ENGINES)
def model_space(host: Host) -> Found:
    """What the index says the weights have, less what is there."""
    if "error" in host.seen.mapping("model"):
        return skipped("the model's folder could not be read")
    index, folder = host.seen.part("model", "index"), host.plan["model"]["path"]
    total = index.get("total_size") if isinstance(index, Mapping) else None
    if not isinstance(total, int):
        return skipped("no index says how large the weights are")
    there = sum(
        file["size"]
        for name, file in _model(host).items()
        if name.endswith(".safetensors") and isinstance(file.get("size"), int)
    )
    return _room(checks.MODEL_SPACE, host, folder, max(total - there, 0))


@on_host(checks.MODEL_HASH, ENGINES)
def model_hash(host: Host) -> Found:
    """The hash that hosts are compared by."""
    if "error" in host.seen.mapping("model"):
        return skipped("the model's folder could not be read")
    value = host.seen.part("model", "hash")
    if not isinstance(value, str):
        return wrong(checks.MODEL_HASH, "not hashed: a file could not be read, or time ran out")
    return right(value[:16])


# --- GPUs and their driver ------------------------------------------------------------------------


@on_host(checks.DRIVER, GPU_HOSTS)
def driver(host: Host) -> Found:
    """The version of the loaded modules."""
    version = host.driver.version
    if reading.version_of(version) >= reading.version_of(OLDEST_DRIVER):
        return right(version)
    return wrong(checks.DRIVER, f"the driver is {version}")


@on_host(checks.OPEN_MODULES, GPU_HOSTS)
def open_modules(host: Host) -> Found:
    """What /proc/driver/nvidia/version calls them."""
    if host.driver.open_modules:
        return right("open kernel modules")
    return wrong(checks.OPEN_MODULES, "the proprietary kernel modules are loaded")


@on_host(checks.DRIVER_LOADED, GPU_HOSTS)
def driver_loaded(host: Host) -> Found:
    """The tools and the modules are of one version; where they are not, nvidia-smi may not even start."""
    said = host.seen.said("nvidia_smi")
    if "Driver/library version mismatch" in said:
        return wrong(
            checks.DRIVER_LOADED, f"{host.driver.version} is loaded; nvidia-smi: {' '.join(said.split())}"
        )
    if host.smi.driver == host.driver.version:
        return right(host.smi.driver)
    return wrong(checks.DRIVER_LOADED, f"{host.driver.version} is loaded, {host.smi.driver} is installed")


@on_host(checks.GPU_COUNT, GPU_HOSTS)
def gpu_count(host: Host) -> Found:
    """What nvidia-smi lists against what the inventory says."""
    listed, wanted = len(reading.gpu_list(host.seen.output("gpu_list"))), host.planned["gpus"]
    seen = f"{listed} GPUs"
    return (
        right(seen) if listed == wanted else wrong(checks.GPU_COUNT, f"{seen}, the inventory says {wanted}")
    )


@on_host(checks.GPU_MODEL, GPU_HOSTS)
def gpu_model(host: Host) -> Found:
    """One product name."""
    models = sorted({gpu.value("Product Name") for gpu in host.gpus})
    return right(models[0]) if len(models) == 1 else wrong(checks.GPU_MODEL, f"it has {' and '.join(models)}")


@on_host(checks.MIG, GPU_HOSTS)
def mig(host: Host) -> Found:
    """MIG mode now; N/A is a GPU without it."""
    modes = [(gpu, gpu.value("MIG Mode", "Current")) for gpu in host.gpus]
    faults = [f"{gpu.name}: MIG is {mode}" for gpu, mode in modes if mode not in ("Disabled", "N/A")]
    return each(checks.MIG, faults, "off")


@on_host(checks.PERSISTENCE, GPU_HOSTS)
def persistence(host: Host) -> Found:
    """On every GPU."""
    modes = [(gpu, gpu.value("Persistence Mode")) for gpu in host.gpus]
    return each(checks.PERSISTENCE, [f"{g.name}: {mode}" for g, mode in modes if mode != "Enabled"], "on")


@on_host(checks.GPU_MEMORY, GPU_HOSTS)
def gpu_memory(host: Host) -> Found:
    """Memory in use on GPUs without a process."""
    faults = []
    for gpu in host.gpus:
        used, pids = gpu.mebibytes("FB Memory Usage", "Used"), _pids(gpu)
        if used > HELD_MIB and not pids:
            faults.append(f"{gpu.name}: {used} MiB are in use, and no process is listed")
    return each(checks.GPU_MEMORY, faults, "none")


def _pids(gpu: reading.Section) -> list[str]:
    _, none, below = gpu.only("Processes")
    pids = below.all("Process ID")
    if none != "None" and not pids:
        raise UnreadableError(f"{gpu.name} does not say which processes use it")
    return pids


@on_host(checks.GPU_PROCESSES, GPU_HOSTS)
def gpu_processes(host: Host) -> Found:
    """Processes on planned GPUs that are not in the containers of this host's members."""
    uuids = reading.gpu_list(host.seen.output("gpu_list"))
    planned = {uuids[number] for number in host.gpu_ids if number < len(uuids)}
    own = {member["unit"] for member in host.members}
    faults = [
        f"GPU {uuids.index(one.gpu)}: {one.name} (pid {one.pid}, {host.unit_of(one.pid) or 'no unit'})"
        for one in reading.gpu_processes(host.seen.output("gpu_processes"))
        if one.gpu in planned and host.unit_of(one.pid) not in own
    ]
    return each(checks.GPU_PROCESSES, faults, "none but the fleet's own")


@on_host(checks.ECC, GPU_HOSTS)
def ecc(host: Host) -> Found:
    """Errors since the driver was loaded, and repairs that wait."""
    faults = []
    for gpu in host.gpus:
        if (mode := gpu.value("ECC Mode", "Current")) != "Enabled":
            faults.append(f"{gpu.name}: ECC is {mode}")
        counts = [(key, gpu.count("ECC Errors", "Volatile", key)) for key in UNCORRECTABLE]
        faults += [f"{gpu.name}: {count} {key}" for key, count in counts if count]
        rows = gpu.section("Remapped Rows")
        repairs = [("a row waits for its remapping", rows.value("Pending"))]
        repairs += [("a row could not be remapped", rows.value("Remapping Failure Occurred"))]
        faults += [f"{gpu.name}: {what}" for what, answer in repairs if answer not in ("No", "N/A")]
    return each(checks.ECC, faults, "no uncorrectable errors, no repairs waiting")


@on_host(checks.GPU_RECOVERY, GPU_HOSTS)
def gpu_recovery(host: Host) -> Found:
    """What the driver says each GPU needs."""
    actions = [(gpu, gpu.value("GPU Recovery Action")) for gpu in host.gpus]
    faults = [f"{gpu.name}: {action}" for gpu, action in actions if action not in ("None", "N/A")]
    return each(checks.GPU_RECOVERY, faults, "none")


@on_host(checks.XID_ERRORS, GPU_HOSTS)
def xid(host: Host) -> Found:
    """Hardware's Xids fail; others (an application's) are told."""
    found = reading.xids(host.seen.output("kernel_log"))
    hardware = [line for number, line in found if number in HARDWARE_XIDS]
    if hardware:
        return wrong(checks.XID_ERRORS, f"{len(hardware)} in the kernel's log, the last: {hardware[-1]}")
    numbers = ", ".join(map(str, sorted({number for number, _ in found})))
    return told(f"only Xids that applications cause: {numbers}") if found else right("none")


@on_host(checks.NUMA, GPU_HOSTS)
def numa(host: Host) -> Found:
    """NUMA nodes with memory and without CPUs."""
    nodes = reading.numa_nodes(host.seen)
    bare = [node for node in nodes if not node.cpus and node.mebibytes]
    seen = ", ".join(f"node {node.number} ({node.mebibytes / 1024:.0f} GiB)" for node in bare)
    return (
        wrong(checks.NUMA, f"without CPUs: {seen}") if bare else right(f"{len(nodes)} nodes, each with CPUs")
    )


def _coherent(host: Host) -> bool:
    return any(model in host.gpus[0].value("Product Name") for model in COHERENT)


@on_host(checks.NUMA_BALANCING, GPU_HOSTS)
def numa_balancing(host: Host) -> Found:
    """The kernel's setting."""
    if not _coherent(host):
        return skipped("its GPUs' memory is not coherent with the host's")
    path = "/proc/sys/kernel/numa_balancing"
    value = reading.whole_number(host.seen.file(path), path)
    return right("off") if value == 0 else wrong(checks.NUMA_BALANCING, f"kernel.numa_balancing is {value}")


@on_host(checks.PAGE_SIZE, GPU_HOSTS)
def page_size(host: Host) -> Found:
    """64 KiB on Grace; elsewhere it is only told."""
    size = reading.whole_number(host.seen.output("page_size"), "the page size")
    if not _coherent(host):
        return skipped(f"it is no Grace host ({size} bytes)")
    seen = f"{size} bytes"
    return right(seen) if size == 65536 else wrong(checks.PAGE_SIZE, seen)


# --- NVLink and IMEX ------------------------------------------------------------------------------


@on_host(checks.FABRIC_STATE, NVLINK)
def fabric_state(host: Host) -> Found:
    """State Completed and Status Success; GPUs without NVSwitch have no state."""
    states = [(gpu, gpu.value("Fabric", "State"), gpu.value("Fabric", "Status")) for gpu in host.gpus]
    faults = [
        f"{gpu.name}: State {state}, Status {status}"
        for gpu, state, status in states
        if (state, status) != ("Completed", "Success")
    ]
    return each(checks.FABRIC_STATE, faults, "Completed, Success")


@on_host(checks.FABRIC_HEALTH, NVLINK)
def fabric_health(host: Host) -> Found:
    """The summary, and the bandwidth behind it."""
    faults, known = [], False
    for gpu in host.gpus:
        summary = gpu.value("Fabric", "Health", "Summary")
        bandwidth = gpu.value("Fabric", "Health", "Bandwidth")
        unhealthy = gpu.value("Fabric", "Health", "Route Unhealthy")
        known |= summary != "N/A"
        if (
            summary not in ("Healthy", "N/A")
            or bandwidth not in ("Full", "N/A")
            or unhealthy not in ("False", "N/A")
        ):
            faults.append(f"{gpu.name}: {summary}, bandwidth {bandwidth}, route unhealthy {unhealthy}")
    if faults or known:
        return each(checks.FABRIC_HEALTH, faults, "Healthy")
    return told("the driver tells no health of this fabric")


def fabric_of(host: Host) -> set[tuple[str, int]]:
    """ClusterUUID and CliqueId of its GPUs."""
    found = set()
    for gpu in host.gpus:
        uuid = gpu.value("Fabric", "ClusterUUID").lower()
        if not UUID.fullmatch(uuid):
            raise UnreadableError(f"{gpu.name}: ClusterUUID is {uuid!r}")
        found.add((uuid, reading.whole_number(gpu.value("Fabric", "CliqueId"), f"{gpu.name}: CliqueId")))
    return found


@on_host(checks.FABRIC_CLUSTER, FABRIC)
def fabric_cluster(host: Host) -> Found:
    """A ClusterUUID that is not zeros, the same for all GPUs."""
    if host.gpus and any(gpu.value("Fabric", "State") != "Completed" for gpu in host.gpus):
        return skipped("its GPUs have not joined the fabric")
    found = fabric_of(host)
    shown = ", ".join(f"{uuid} clique {clique}" for uuid, clique in sorted(found))
    if len(found) == 1 and ZEROS not in shown:
        return right(shown)
    return wrong(checks.FABRIC_CLUSTER, f"ClusterUUID {shown}")


@on_host(checks.NVLINKS, NVLINK)
def nvlinks(host: Host) -> Found:
    """As many as the model has, each with a speed."""
    # Of a machine without NVLink it prints nothing, and ends well.
    links = reading.links(host.seen.output("nvlink", may_be_empty=True))
    if not links:
        remedy = "Take hosts whose GPUs have NVLink, or see `GPUs without NVLink` in docs/cuda-engines.md."
        seen = "nvidia-smi shows no NVLink; by default UCX then reads KV over TCP"
        return wrong(checks.NVLINKS, seen, remedy)
    if len(links) != len(host.gpus):
        raise UnreadableError(
            f"`nvidia-smi nvlink -s` shows {len(links)} GPUs, nvidia-smi -q {len(host.gpus)}"
        )
    known = [count for model, count in LINKS.items() if model in host.gpus[0].value("Product Name").split()]
    wanted = known[0] if known else max(map(len, links))
    faults = []
    for number, states in enumerate(links):
        up = sum(1 for state in states if re.fullmatch(r"\d+(\.\d+)? GB/s", state))
        if up < max(wanted, 1):
            faults.append(f"GPU {number}: {up} of {wanted} links are up")
    return each(checks.NVLINKS, faults, f"{wanted} on each GPU")


@on_host(checks.NVLINK_PEERS, NVLINK)
def nvlink_peers(host: Host) -> Found:
    """NV in every cell of the topology's table."""
    if len(host.gpus) == 1:
        return skipped("it has one GPU")
    table = reading.topology(host.seen.output("topology"))
    if len(table) != len(host.gpus) * (len(host.gpus) - 1):
        raise UnreadableError("`nvidia-smi topo -m` does not show every GPU")
    faults = [f"GPU {a} to {b}: {how}" for (a, b), how in table.items() if a < b and not how.startswith("NV")]
    return each(checks.NVLINK_PEERS, faults, "NVLink between all")


@on_host(checks.IMEX_SERVICE, FABRIC)
def imex_service(host: Host) -> Found:
    """Systemd's word."""
    shown = host.seen.output("imex_service")
    states = [reading.property_of(shown, name) for name in ("LoadState", "ActiveState", "SubState")]
    if states[1] == "active":
        return right("active")
    return wrong(
        checks.IMEX_SERVICE, "there is no nvidia-imex" if states[0] == "not-found" else "/".join(states[1:])
    )


@on_host(checks.IMEX_VERSION, FABRIC)
def imex_version(host: Host) -> Found:
    """Its version and the driver's."""
    version = reading.imex_version(host.seen.output("imex_version"))
    if version == host.driver.version:
        return right(version)
    return wrong(checks.IMEX_VERSION, f"nvidia-imex is {version}, the driver {host.driver.version}")


NODES_FILE = "/etc/nvidia-imex/nodes_config.cfg"


@on_host(checks.IMEX_NODES, FABRIC)
def imex_nodes(host: Host) -> Found:
    """One of the host's addresses is in the list."""
    listed = reading.imex_nodes(host.seen.file(NODES_FILE))
    own = reading.addresses(host.seen.output("addresses"))
    if own & set(listed):
        return right(f"{len(listed)} nodes, this one among them")
    return wrong(
        checks.IMEX_NODES, f"{NODES_FILE} lists {', '.join(listed[:4])}, none of which this host has"
    )


@on_host(checks.IMEX_DOMAIN, FABRIC)
def imex_domain(host: Host) -> Found:
    """What the daemon says of its domain, if it is there to be asked."""
    if reading.properties(host.seen.output("imex_service")).get("ActiveState") != "active":
        return skipped("nvidia-imex does not run")
    domain = reading.imex_domain(host.seen.output("imex_domain"))
    faults = [] if domain.state == "UP" else [f"the domain is {domain.state}"]
    faults += [f"{node.address} is {node.state}" for node in domain.nodes if node.state != "READY"]
    versions = sorted({node.version for node in domain.nodes})
    if len(versions) > 1:
        faults.append(f"its nodes run {' and '.join(versions)}")
    if domain.broken:
        a, b, letter = domain.broken[0]
        more = f", and {len(domain.broken) - 1} more" if len(domain.broken) > 1 else ""
        faults.append(f"{domain.nodes[a].address} to {domain.nodes[b].address} is {letter}{more}")
    return each(checks.IMEX_DOMAIN, faults, f"UP, {len(domain.nodes)} nodes")


@on_host(checks.IMEX_CHANNEL, CHANNEL_HOSTS)
def imex_channel(host: Host) -> Found:
    """A character device with the driver's major number."""
    device = host.seen.mapping("devices").get(CHANNEL)
    if device is None:
        return wrong(checks.IMEX_CHANNEL, f"{CHANNEL} is missing, or no character device")
    major = reading.major_of(host.seen.file("/proc/devices"), "nvidia-caps-imex-channels")
    there = host.seen.number("devices", CHANNEL, "major")
    if there == major:
        return right(f"channel0, major {major}")
    seen = f"channel0 has major {there:.0f}, the driver has {major}"
    return wrong(checks.IMEX_CHANNEL, seen, f"Remove {CHANNEL} and have it made anew: nvidia-modprobe -c 0.")


# --- containers -----------------------------------------------------------------------------------


def cdi_names(host: Host) -> list[str]:
    """The CDI devices that the plan gives to containers on a host."""
    return [name for name in container_devices(host.members) if name.startswith("nvidia.com/gpu=")]


@on_host(checks.CDI_DEVICES, CDI_HOSTS)
def cdi_devices(host: Host) -> Found:
    """The names that `nvidia-ctk cdi list` knows."""
    known = reading.cdi_gpus(host.seen.output("cdi"))
    missing = [name for name in cdi_names(host) if name not in known]
    return each(
        checks.CDI_DEVICES, [f"CDI does not know {name}" for name in missing], f"{len(known)} devices"
    )


@on_host(checks.CDI_FRESH, CDI_HOSTS)
def cdi_fresh(host: Host) -> Found:
    """The version in the names of the libraries that it mounts."""
    drivers, loaded = reading.cdi_drivers(host.seen.files(r"(/etc|/run)/cdi/.*")), host.driver.version
    if drivers == {loaded}:
        return right(loaded)
    return wrong(
        checks.CDI_FRESH, f"the specification is of driver {', '.join(sorted(drivers))}, {loaded} is loaded"
    )


@on_host(checks.TOOLKIT, CDI_HOSTS)
def toolkit(host: Host) -> Found:
    """Its version."""
    text = host.seen.output("toolkit")
    match = re.search(r"version (\d+(?:\.\d+)+)", text)
    if not match:
        raise UnreadableError(f"`nvidia-ctk --version` printed {text.splitlines()[0][:80]!r}")
    if reading.version_of(match[1]) >= reading.version_of(OLDEST_TOOLKIT):
        return right(match[1])
    return wrong(checks.TOOLKIT, f"version {match[1]}")


def _inside(host: Host) -> Mapping[str, Any] | str:
    """What a container saw, or why none was asked."""
    seen = host.seen.part("container")
    if seen is None:
        return "no container was started"
    if not isinstance(seen, Mapping) or seen.get("image") is None:
        return "the engine image is not on the host yet"
    ran = reading.Observation({"commands": {"the container": seen.get("ran")}})
    told_ = reading.json_of(ran.output("the container"), "what the container saw")
    if not isinstance(told_, Mapping):
        raise UnreadableError("the container told nothing")
    return told_


@on_host(checks.CONTAINER_GPUS, CDI_HOSTS)
def container_gpus(host: Host) -> Found:
    """CuDeviceGetCount with the devices of all members."""
    seen = _inside(host)
    if isinstance(seen, str):
        return skipped(seen)
    count, wanted = seen.get("gpus"), len(cdi_names(host))
    if count == wanted:
        return right(f"{count} GPUs")
    return wrong(checks.CONTAINER_GPUS, f"CUDA in a container sees {count!r}, {wanted} GPUs are planned")


@on_host(checks.CONTAINER_DEVICES, NODES)
def container_devices_(host: Host) -> Found:
    """The device nodes that members get by path, with the numbers that they have on the host."""
    seen = _inside(host)
    if isinstance(seen, str):
        return skipped(seen)
    inside, outside = seen.get("devices"), host.seen.mapping("devices")
    if not isinstance(inside, Mapping):
        raise UnreadableError("the container told no devices")
    faults = []
    planned = device_nodes(host.members)
    below = [path for path in outside if path.startswith(tuple(f"{folder}/" for folder in planned))]
    for path in [*(path for path in planned if path in outside), *below] or planned:
        there, here = inside.get(path), outside.get(path)
        if there is None:
            faults.append(f"{path} is not in the container")
        elif isinstance(here, Mapping) and there != [here.get("major"), here.get("minor")]:
            faults.append(
                f"{path} is {there} in the container and [{here.get('major')}, {here.get('minor')}] outside"
            )
    return each(checks.CONTAINER_DEVICES, faults, "all there")


@on_host(checks.CONTAINER_MEMLOCK, LOCKED)
def container_memlock(host: Host) -> Found:
    """RLIMIT_MEMLOCK; -1 is none."""
    seen = _inside(host)
    if isinstance(seen, str):
        return skipped(seen)
    value = seen.get("memlock")
    return (
        right("unlimited") if value == -1 else wrong(checks.CONTAINER_MEMLOCK, f"limited to {value!r} bytes")
    )


@on_host(checks.CONTAINER_SHM, CDI_HOSTS)
def container_shm(host: Host) -> Found:
    """The size of the first member's."""
    seen = _inside(host)
    if isinstance(seen, str):
        return skipped(seen)
    wanted, size = docker_bytes(host.members[0]["container_options"]["shm_size"]), seen.get("shm")
    return (
        right(f"{size} bytes")
        if size == wanted
        else wrong(checks.CONTAINER_SHM, f"{size!r} bytes, planned {wanted}")
    )


# --- RDMA -----------------------------------------------------------------------------------------


@on_host(checks.RDMA_PORTS, RDMA)
def rdma_ports(host: Host) -> Found:
    """State and physical state of every port; one that is up is enough, the others are named."""
    found = reading.rdma_ports(host.seen)
    up = {
        name: f"{name} {port.get('link_layer', '')} {port.get('rate', '')}"
        for name, port in found.items()
        if port.get("state") == "4: ACTIVE" and port.get("phys_state") == "5: LinkUp"
    }
    if not found:
        return wrong(checks.RDMA_PORTS, "it has no RDMA device")
    down = [f"{name} {port.get('state', 'tells no state')}" for name, port in found.items() if name not in up]
    if not up:
        return wrong(checks.RDMA_PORTS, "no port is up: " + ", ".join(down))
    seen = ", ".join(up.values())
    return Found(f"{seen}; not up: {', '.join(down)}", Level.WARN) if down else right(seen)


@on_host(checks.RDMA_DEVICES, RDMA)
def rdma_devices(host: Host) -> Found:
    """The nodes that programs open."""
    there = {path for path, device in host.seen.mapping("devices").items() if device}
    faults = [] if "/dev/infiniband/rdma_cm" in there else ["/dev/infiniband/rdma_cm is missing"]
    if not any(path.startswith("/dev/infiniband/uverbs") for path in there):
        faults.append("there is no /dev/infiniband/uverbs*")
    return each(checks.RDMA_DEVICES, faults, "rdma_cm and uverbs")
