"""What was observed on a host, and reading the output of its programs.

Nothing here trusts its input: a recording may be cut off, edited or of another program. Whatever does not say
clearly what is asked for raises `UnreadableError`, and nothing else.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SCHEMA = 1


class UnreadableError(Exception):
    """An observation that does not say what is asked for; the text says what is wrong with it."""


class Observation:
    """What the module host_observe saw on a host."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def part(self, *path: str) -> Any:
        """What is at a path of keys."""
        value = self._data
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                raise UnreadableError(f"the observation has no {'.'.join(path)}")
            value = value[key]
        return value

    def mapping(self, *path: str) -> Mapping[str, Any]:
        """A mapping at a path of keys."""
        value = self.part(*path)
        if not isinstance(value, Mapping):
            raise UnreadableError(f"{'.'.join(path)} of the observation is no mapping")
        return value

    def number(self, *path: str) -> float:
        """A number at a path of keys."""
        return _number(self.part(*path), ".".join(path))

    def missing(self, command: str) -> bool:
        """Whether the program of a command is not on the host."""
        return self.mapping("commands", command).get("missing") is True

    def said(self, command: str) -> str:
        """All that a command printed, whatever its exit status; empty where it could not be run."""
        ran = self.mapping("commands", command)
        return "\n".join(str(ran.get(stream) or "").strip() for stream in ("stdout", "stderr")).strip()

    def output(self, command: str, *, may_be_empty: bool = False) -> str:
        """What a command that ended well printed, to its end."""
        ran = self.mapping("commands", command)
        stdout = ran.get("stdout")
        if ran.get("missing"):
            raise UnreadableError(f"`{command}`: the host has no such program")
        if ran.get("timed_out"):
            raise UnreadableError(f"`{command}` did not answer in time")
        if ran.get("rc") != 0:
            said = " ".join(self.said(command).split())[:200]
            raise UnreadableError(f"`{command}` ended with {ran.get('rc')}: {said or 'no output'}")
        if may_be_empty and stdout == "":
            return ""
        if not isinstance(stdout, str) or not stdout.strip():
            raise UnreadableError(f"`{command}` printed nothing")
        if ran.get("cut") or not stdout.endswith("\n"):
            raise UnreadableError(f"the output of `{command}` is cut off")
        return stdout

    def file(self, path: str) -> str:
        """The text of a file."""
        text = self.mapping("files").get(path)
        if not isinstance(text, str):
            raise UnreadableError(f"there is no {path}")
        return text

    def files(self, pattern: str) -> dict[str, str]:
        """The files whose whole path matches a pattern, in order."""
        found = sorted(self.mapping("files").items())
        return {path: text for path, text in found if re.fullmatch(pattern, path) and isinstance(text, str)}


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableError(f"{what} is no number")
    return value


def _found(pattern: str, text: str, what: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if not match:
        raise UnreadableError(what)
    return match[1]


def _below(heading: str, text: str, command: str) -> list[str]:
    """The lines below a heading, which must be the first line."""
    lines = text.splitlines()
    if lines[:1] != [heading]:
        raise UnreadableError(f"`{command}` begins with {''.join(lines[:1])[:80]!r}")
    return lines[1:]


def json_of(text: str, what: str) -> Any:
    """The JSON in a text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableError(f"{what} is not JSON") from None


def version_of(text: str) -> tuple[int, ...]:
    """580.65.06 as numbers, which compare."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})*", text):
        raise UnreadableError(f"{text!r} is no version")
    return tuple(map(int, text.split(".")))


# --- nvidia-smi -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Section:
    """A heading of `nvidia-smi -q` and what is indented below it."""

    name: str
    entries: list[tuple[str, str | None, Section]] = field(default_factory=list)

    def value(self, *path: str) -> str:
        """The value at a path of headings."""
        section = self
        for heading in path[:-1]:
            section = section.section(heading)
        value = section.only(path[-1])[1]
        if not value:
            raise UnreadableError(f"{self.name} has no value for {' / '.join(path)}")
        return value

    def section(self, heading: str) -> Section:
        """What is below a heading."""
        return self.only(heading)[2]

    def all(self, key: str) -> list[str]:
        """Every value of a key, at any depth."""
        return [
            value
            for name, text, below in self.entries
            for value in ([text] if name == key and text else below.all(key))
        ]

    def mebibytes(self, *path: str) -> int:
        """A value in MiB."""
        value = self.value(*path)
        if not (match := re.fullmatch(r"(\d{1,12}) MiB", value)):
            raise UnreadableError(f"{self.name}: {' / '.join(path)} is {value!r}")
        return int(match[1])

    def count(self, *path: str) -> int:
        """A value that is a number of something; N/A is none."""
        value = self.value(*path)
        if value == "N/A":
            return 0
        if not re.fullmatch(r"\d{1,18}", value):
            raise UnreadableError(f"{self.name}: {' / '.join(path)} is {value!r}")
        return int(value)

    def only(self, heading: str) -> tuple[str, str | None, Section]:
        """The one entry with a heading: heading, value, what is below it."""
        found = [entry for entry in self.entries if entry[0] == heading]
        if len(found) != 1:
            raise UnreadableError(f"{self.name} has {'no' if not found else 'more than one'} {heading}")
        return found[0]


class Gpus(NamedTuple):
    """`nvidia-smi -q`: the driver's version and a section for each GPU, in the order of their ids."""

    driver: str
    sections: list[Section]


def gpus(text: str) -> Gpus:
    """Read `nvidia-smi -q`."""
    top = Section("nvidia-smi -q")
    open_sections = [(-1, top)]
    for line in text.splitlines():
        if not (match := re.match(r"( *)(\S.*?)\s*(?: : ?(.*?))?\s*$", line)) or match[2].startswith("="):
            continue
        depth = len(match[1])
        while open_sections[-1][0] >= depth:
            open_sections.pop()
        number = len([name for name, *_ in top.entries if name.startswith("GPU ")])
        section = Section(f"GPU {number}" if depth == 0 and match[2].startswith("GPU ") else match[2])
        open_sections[-1][1].entries.append((match[2], match[3], section))
        open_sections.append((depth, section))
    sections = [section for name, _, section in top.entries if name.startswith("GPU ")]
    attached = top.count("Attached GPUs")
    if attached != len(sections):
        raise UnreadableError(
            f"nvidia-smi -q says {attached} GPUs are attached and describes {len(sections)}"
        )
    return Gpus(top.value("Driver Version"), sections)


def gpu_list(text: str) -> list[str]:
    """The UUIDs that `nvidia-smi -L` lists."""
    found: list[str] = []
    for line in text.splitlines():
        match = re.fullmatch(r"GPU (\d+): .+ \(UUID: (GPU-[0-9a-f-]{36})\)", line.strip())
        if not match or int(match[1]) != len(found):
            raise UnreadableError(f"`nvidia-smi -L` printed {line[:80]!r}")
        found.append(match[2])
    return found


def links(text: str) -> list[list[str]]:
    """`nvidia-smi nvlink -s`: for each GPU the state of each of its links, a speed or <inactive>."""
    found: list[list[str]] = []
    for line in filter(str.strip, text.splitlines()):
        if match := re.match(r"GPU (\d+): .*\(UUID: ", line):
            found.append([])
            right = int(match[1]) == len(found) - 1
        elif match := re.fullmatch(r"\s+Link (\d+): (.*\S)\s*", line):
            right = bool(found) and int(match[1]) == len(found[-1])
            if right:
                found[-1].append(match[2])
        else:
            right = False
        if not right:
            raise UnreadableError(
                f"`nvidia-smi nvlink -s` printed {line.strip()[:80]!r} where it does not belong"
            )
    return found


def topology(text: str) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m`: how each pair of GPUs is connected (NV18, SYS, ...)."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    columns = [word for word in lines[0].split("\t") if re.fullmatch(r" *GPU\d+ *", word)] if lines else []
    rows = [line.split("\t") for line in lines[1:] if re.match(r"GPU\d+\t", line)]
    count = len(columns)
    if not count or len(rows) != count or any(len(row) <= count for row in rows):
        raise UnreadableError("`nvidia-smi topo -m` shows no table of its GPUs")
    return {
        (a, b): rows[a][b + 1].strip() for a in range(count) for b in range(count) if a != b
    }  # fmt: skip


class GpuProcess(NamedTuple):
    """A process that uses a GPU."""

    gpu: str
    pid: int
    name: str


def gpu_processes(text: str) -> list[GpuProcess]:
    """Read `nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name --format=csv` (with its heading)."""
    found = []
    for line in _below("gpu_uuid, pid, process_name", text, "gpu_processes"):
        if not (match := re.fullmatch(r"(GPU-[0-9a-f-]{36}), (\d+), (.*)", line)):
            raise UnreadableError(f"`gpu_processes` has the line {line[:80]!r}")
        found.append(GpuProcess(match[1], int(match[2]), match[3]))
    return found


def xids(text: str) -> list[tuple[int, str]]:
    """The Xid errors in the kernel's log: number and line."""
    lines = [line for line in text.splitlines() if "NVRM: Xid" in line]
    if not lines and "-- No entries --" not in text:
        raise UnreadableError("the kernel's log holds neither Xid errors nor the note that it holds none")
    found = []
    for line in lines:
        if not (match := re.search(r"NVRM: Xid \(.*?\): (\d{1,4})\b", line)):
            raise UnreadableError(f"the kernel's log has the line {line.strip()[:120]!r}")
        found.append((int(match[1]), line.strip()))
    return found


# --- the driver's files ---------------------------------------------------------------------------


class Driver(NamedTuple):
    """/proc/driver/nvidia/version."""

    version: str
    open_modules: bool


def driver(text: str) -> Driver:
    """Read /proc/driver/nvidia/version."""
    line = _found(r"^(NVRM version:.*)$", text, "/proc/driver/nvidia/version has no NVRM version")
    version = _found(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", line, f"no driver version in {line!r}")
    return Driver(version, "Open Kernel Module" in line)


def major_of(devices: str, name: str) -> int:
    """The major number of a character device in /proc/devices."""
    if not devices.startswith("Character devices:"):
        raise UnreadableError("/proc/devices does not begin with its character devices")
    return int(_found(rf"^\s*(\d{{1,9}}) {re.escape(name)}$", devices, f"/proc/devices has no {name}"))


# --- IMEX -----------------------------------------------------------------------------------------


class ImexNode(NamedTuple):
    """A node as `nvidia-imex-ctl -N` shows it."""

    address: str
    state: str
    version: str


class ImexDomain(NamedTuple):
    """`nvidia-imex-ctl -N`. `broken` are the links that are not C: (from, to, letter), by number of node."""

    state: str
    nodes: list[ImexNode]
    broken: list[tuple[int, int, str]]


def imex_domain(text: str) -> ImexDomain:
    """Read `nvidia-imex-ctl -N`. As text: its form is documented, that of its JSON is not."""
    state = _found(r"^Domain State: (\w+)\s*$", text, "nvidia-imex-ctl -N does not tell the domain's state")
    rows = re.findall(r"^Node #(\d+)\s+- (\S+)\s+- (\S.*?)\s*(?:- Version: (\S+))?\s*$", text, re.MULTILINE)
    table = text.partition("Nodes From\\To")[2].splitlines()[1:]
    links_of = [line.split() for line in table if re.match(r"\s*\d+\s", line)]
    count = len(rows)
    right = [int(row[0]) for row in rows] == list(range(count)) == [int(line[0]) for line in links_of]
    if not count or not right or any(len(line) != count + 1 for line in links_of):
        raise UnreadableError("nvidia-imex-ctl -N does not show each node and its connections")
    broken = [
        (a, b, letter)
        for a, line in enumerate(links_of)
        for b, letter in enumerate(line[1:])
        if letter != "C"
    ]
    return ImexDomain(state, [ImexNode(row[1], row[2], row[3]) for row in rows], broken)


def imex_version(text: str) -> str:
    """Read `nvidia-imex --version`."""
    return _found(r"IMEX version is: (\d+(?:\.\d+)+)\s*$", text, "nvidia-imex --version tells no version")


def imex_nodes(text: str) -> list[str]:
    """The addresses in nodes_config.cfg."""
    words = [line.split("#")[0].strip() for line in text.splitlines()]
    try:
        found = [str(ipaddress.ip_address(word)) for word in words if word]
    except ValueError as error:
        raise UnreadableError(f"nodes_config.cfg: {error}") from None
    if not found:
        raise UnreadableError("nodes_config.cfg lists no address")
    return found


# --- docker and CDI -------------------------------------------------------------------------------


def cdi_gpus(text: str) -> set[str]:
    """The devices nvidia.com/gpu=... that `nvidia-ctk cdi list` knows."""
    found = {line.strip() for line in text.splitlines()}
    if any(not re.fullmatch(r"[\w.-]+/[\w.-]+=[\w.:-]+", name) for name in found):
        raise UnreadableError("`nvidia-ctk cdi list` printed something else than names of devices")
    return {name for name in found if name.startswith("nvidia.com/gpu=")}


def cdi_drivers(specifications: Mapping[str, str]) -> set[str]:
    """The driver versions in the names of the libraries that CDI specifications mount."""
    found = {
        version
        for text in specifications.values()
        if "nvidia.com/gpu" in text
        for version in re.findall(r"\.so\.(\d{3}\.\d+(?:\.\d+)?)\b", text)
    }
    if not found:
        raise UnreadableError("no CDI specification of nvidia.com/gpu names the driver's libraries")
    return found


def nft_tables(text: str) -> list[str]:
    """The tables in `nft --json list tables`, as `FAMILY NAME`.

    Raises:
        UnreadableError: it is something else.

    """
    listed = json_of(text, "`nft --json list tables`")
    try:
        found = [one["table"] for one in listed["nftables"] if "table" in one]
        return [f"{table['family']} {table['name']}" for table in found]
    except (KeyError, TypeError):
        raise UnreadableError(f"`nft --json list tables` printed {text[:80]!r}") from None


def docker_info(text: str) -> Mapping[str, Any]:
    """Read `docker info --format '{{json .}}'`."""
    info = json_of(text, "`docker info`")
    if not isinstance(info, Mapping) or not isinstance(info.get("ServerVersion"), str):
        errors = info.get("ServerErrors") if isinstance(info, Mapping) else None
        raise UnreadableError(
            f"`docker info` tells no version of the engine{f': {errors}' if errors else ''}"
        )
    return info


def containers(text: str) -> dict[str, tuple[str, str]]:
    """Id -> name and image of each running container; the text begins with a heading of its own."""
    found = {}
    for line in _below("CONTAINER ID NAMES IMAGE", text, "containers"):
        if not (match := re.fullmatch(r"([0-9a-f]{64}) (\S+) (\S+)", line)):
            raise UnreadableError(f"`containers` has the line {line[:80]!r}")
        found[match[1]] = (match[2], match[3])
    return found


# --- the host -------------------------------------------------------------------------------------


class Socket(NamedTuple):
    """A listening TCP socket and the processes that have it."""

    address: str
    port: int
    pids: tuple[int, ...]
    names: tuple[str, ...]

    def covers(self, address: str) -> bool:
        """Whether a program could not listen on this address and the same port."""
        return self.address in (address, "*", "0.0.0.0", "::")  # noqa: S104  compared, not bound


def sockets(text: str) -> list[Socket]:
    """Read `ss -Hltnp`. A host that was reached over the network has at least one."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"LISTEN\s+\d+\s+\d+\s+(\S+):(\d{1,5})\s+\S+:\*\s*(users:\(.*\))?\s*", line)
        if not match:
            raise UnreadableError(f"`ss -ltnp` printed {line[:80]!r}")
        address = match[1].strip("[]").partition("%")[0].strip("[]")
        users = re.findall(r'\("([^"]*)",pid=(\d+)', match[3] or "")
        found.append(
            Socket(
                address, int(match[2]), tuple(int(pid) for _, pid in users), tuple(name for name, _ in users)
            )
        )
    return found


def addresses(text: str) -> set[str]:
    """The host's own addresses, from `ip -j address`; not those that every host has (loopback)."""
    found = set()
    interfaces = json_of(text, "`ip -j address`")
    for interface in interfaces if isinstance(interfaces, list) else []:
        infos = interface.get("addr_info") if isinstance(interface, Mapping) else None
        for info in infos if isinstance(infos, list) else []:
            if (
                isinstance(info, Mapping)
                and isinstance(info.get("local"), str)
                and info.get("scope") != "host"
            ):
                found.add(info["local"])
    if not found:
        raise UnreadableError("`ip -j address` tells no address")
    return found


def properties(text: str) -> dict[str, str]:
    """NAME=VALUE lines, as systemctl show and timedatectl show print them."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def property_of(text: str, name: str) -> str:
    """One of them."""
    found = properties(text)
    if name not in found:
        raise UnreadableError(f"{name} is not told")
    return found[name]


def limit(text: str) -> float:
    """A limit of systemd: a number, or infinity."""
    if text == "infinity":
        return float("inf")
    if not re.fullmatch(r"\d{1,20}", text):
        raise UnreadableError(f"{text!r} is no limit")
    return int(text)


def whole_number(text: str, what: str) -> int:
    """A number and nothing else."""
    if not re.fullmatch(r"\d{1,18}", text.strip()):
        raise UnreadableError(f"{what} is {text.strip()[:80]!r}")
    return int(text)


def memory_bytes(meminfo: str) -> int:
    """MemTotal of /proc/meminfo."""
    return 1024 * int(_found(r"^MemTotal:\s+(\d{1,15}) kB$", meminfo, "/proc/meminfo has no MemTotal"))


class NumaNode(NamedTuple):
    """A NUMA node of /sys/devices/system/node."""

    number: int
    cpus: str
    mebibytes: int


def numa_nodes(observation: Observation) -> list[NumaNode]:
    """The NUMA nodes. Each has a list of CPUs, which may be empty, and its memory."""
    root = "/sys/devices/system/node/node"
    found = []
    for path, cpus in observation.files(rf"{root}\d+/cpulist").items():
        number = int(path.removeprefix(root).partition("/")[0])
        text = observation.file(f"{root}{number}/meminfo")
        kib = _found(rf"^Node {number} MemTotal:\s+(\d{{1,15}}) kB$", text, f"node {number} tells no memory")
        found.append(NumaNode(number, cpus.strip(), int(kib) // 1024))
    if not found:
        raise UnreadableError("/sys/devices/system/node shows no NUMA node")
    return sorted(found)


def rdma_ports(observation: Observation) -> dict[str, dict[str, str]]:
    """DEVICE/PORT -> its files in /sys/class/infiniband, which need no tool: state, phys_state, rate, ..."""
    found: dict[str, dict[str, str]] = {}
    for path, text in observation.files(r"/sys/class/infiniband/[^/]+/ports/\d+/\w+").items():
        parts = path.split("/")
        found.setdefault(f"{parts[4]}/{parts[6]}", {})[parts[7]] = text.strip()
    return found


def owner_of(cgroup: str) -> tuple[str, str]:
    """What a process belongs to by the path of its cgroup: ("unit", name), ("container", id) or ("", "").

    The innermost counts: hosts of the lab are containers themselves.
    """
    found = re.findall(r"docker[/-]([0-9a-f]{64})|([\w@.\\:-]+\.(?:service|scope))(?=/|\s|$)", cgroup)
    if not found:
        return "", ""
    container, unit = found[-1]
    return ("container", container) if container else ("unit", unit)
