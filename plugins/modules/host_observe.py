#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: host_observe
short_description: Look at a host and tell what was seen, without judging it
description:
  - Runs a fixed set of commands, each with a time limit, and reads a fixed set of files, for the host check.
    It decides nothing; the Python package C(vllm_fleet.host_check) does, on the workstation.
  - Changes nothing on the host but O(cache), the hashes of the model's files, so that they are read once.
    In check mode not even that, and no container is started.
options:
  accelerator:
    description: Whether to look at GPUs, C(cuda), or not.
    type: str
    choices: [cpu, cuda]
    required: true
  model:
    description: Folder of the model; none for a host without engines.
    type: str
  hash:
    description:
      - What the model's hash is made of. C(sampled) reads of each file its beginning (of safetensors the
        whole header), its end and 16 blocks in between, 1.2 MB for each file; C(full) reads all of it.
    type: str
    choices: [none, sampled, full]
    default: sampled
  hash_seconds:
    description: Give up hashing after so many seconds.
    type: float
    default: 120
  cache:
    description: File that keeps the hash of each of the model's files, by its size, time and inode.
    type: path
    default: /var/lib/vllm-fleet/model-hashes.json
  devices:
    description: Device nodes, or folders of them, to look at besides those that are always looked at.
    type: list
    elements: str
    default: []
  folders:
    description: Folders whose file systems' free space is told, besides the model's and docker's.
    type: list
    elements: str
    default: []
  container:
    description: What to look at from inside a container, with the options of the engines.
    type: dict
    suboptions:
      image:
        description: Image to start it from, by default the host's newest engine image. Nothing is pulled.
        type: str
        default: ""
      devices:
        description: C(--device) of docker.
        type: list
        elements: str
        default: []
      ulimits:
        description: C(--ulimit) of docker.
        type: list
        elements: str
        default: []
      shm_size:
        description: C(--shm-size) of docker.
        type: str
        required: true
  sent:
    description: The workstation's clock when it asked, in seconds since 1970.
    type: float
    required: true
"""

EXAMPLES = r"""
- name: Look at the host
  host_observe:
    accelerator: cuda
    model: /srv/models/Qwen3-32B
    sent: "{{ now().timestamp() }}"
  register: __seen
"""

RETURN = r"""
observed:
  description:
    - C(commands), id -> C(rc), C(stdout), C(stderr), C(timed_out), C(missing), C(cut).
    - C(files), path -> text; C(devices), path -> C(major), C(minor), C(mode) or null; C(disks), folder ->
      C(free), C(total) in bytes; C(processes), pid -> C(cgroup); C(clock), C(host) and C(sent) in seconds.
    - C(model) and C(container), null where nothing was asked.
  returned: always
  type: dict
"""

import hashlib
import json
import os
import re
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

SCHEMA = 1
SECONDS = 10.0  # one command may take this long; nvidia-imex-ctl hangs on a sick node
OF_GPUS_SECONDS = 30.0  # a driver without persistence mode initializes each GPU first
MAX_TEXT = 400_000
COMMANDS = {
    "architecture": ["uname", "-m"],
    "kernel": ["uname", "-r"],
    "page_size": ["getconf", "PAGESIZE"],
    "systemd": ["systemctl", "--version"],
    "addresses": ["ip", "-j", "address"],
    "sockets": ["ss", "-Hltnp"],
    "clock": ["timedatectl", "show"],
    "nft": ["nft", "--json", "list", "tables"],
    "docker": ["docker", "info", "--format", "{{json .}}"],
    "docker_unit": ["systemctl", "show", "docker", "--property=ActiveState,LimitMEMLOCK,LimitNOFILE"],
    # `table` for its heading: an output that is never empty tells none from nothing.
    "containers": ["docker", "ps", "--no-trunc", "--format", "table {{.ID}} {{.Names}} {{.Image}}"],
    "images": [
        *("docker", "image", "ls", "--no-trunc", "--filter", "label=vllm-fleet.content"),
        *("--format", "table {{.ID}}"),
    ],
}
OF_GPUS = {
    "nvidia_smi": ["nvidia-smi", "-q"],
    "gpu_list": ["nvidia-smi", "-L"],
    "nvlink": ["nvidia-smi", "nvlink", "-s"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "gpu_processes": ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv"],
    "kernel_log": ["journalctl", "--dmesg", "--boot", "--no-pager", "--lines=200", "--grep=NVRM: Xid"],
    "imex_service": ["systemctl", "show", "nvidia-imex", "--property=LoadState,ActiveState,SubState"],
    "imex_version": ["nvidia-imex", "--version"],
    "imex_domain": ["nvidia-imex-ctl", "-N"],
    "cdi": ["nvidia-ctk", "cdi", "list"],
    "toolkit": ["nvidia-ctk", "--version"],
}
FILES = [
    "/etc/os-release",
    "/proc/meminfo",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/devices/system/node/node*/meminfo",
]
FILES_OF_GPUS = [
    "/proc/devices",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/proc/sys/kernel/numa_balancing",
    "/etc/nvidia-imex/config.cfg",
    "/etc/nvidia-imex/nodes_config.cfg",
    "/etc/cdi/*",
    "/run/cdi/*",
    "/sys/class/infiniband/*/ports/*/*e",  # state, phys_state, rate
    "/sys/class/infiniband/*/ports/*/link_layer",
]
DEVICES_OF_GPUS = ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs*"]

INDEX = "model.safetensors.index.json"
HASHED = (".json", ".safetensors", ".model", ".jinja", ".txt", ".tiktoken", ".py")
WHOLE = 1 << 20
BLOCK = 1 << 16
BLOCKS = 16
MAX_HEADER = 100 << 20  # as safetensors itself has it

INSIDE = r"""
import ctypes, json, os, resource, sys
def device(path):
    try:
        number = os.stat(path).st_rdev
    except OSError:
        return None
    return [os.major(number), os.minor(number)]
def gpus():
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    count = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value if code == 0 else "CUDA error %d" % code
shm = os.statvfs("/dev/shm")
print(json.dumps({
    "gpus": gpus(),
    "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "shm": shm.f_blocks * shm.f_frsize,
    "devices": {path: device(path) for path in sys.argv[1:]},
}))
"""


def run(argv: list[str], seconds: float) -> dict[str, Any]:
    """Run a command in the C locale. It is killed when its time is over."""
    environment = {**os.environ, "LC_ALL": "C", "LANGUAGE": "C"}
    result: dict[str, Any] = {"rc": None, "stdout": "", "stderr": ""}
    try:
        done = subprocess.run(  # noqa: S603  one of the fixed commands
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {**result, "timed_out": True}
    except OSError as error:
        return {**result, "missing": isinstance(error, FileNotFoundError), "stderr": str(error)}
    stdout, stderr = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    result.update(rc=done.returncode, stdout=stdout[:MAX_TEXT], stderr=stderr[:2000])
    if len(stdout) > MAX_TEXT:
        result["cut"] = True
    if argv[0] == "journalctl" and done.returncode == 1 and "-- No entries --" in stdout:
        result["rc"] = 0  # --grep says so where nothing matches
    return result


def read(pattern: str) -> dict[str, str]:
    found = {}
    for path in sorted(Path("/").glob(pattern[1:])):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                found[str(path)] = file.read(MAX_TEXT)
        except OSError:
            continue  # a folder, or a port's file that its driver does not answer
    return found


def nodes(path: str) -> list[str]:
    """The device nodes in a folder, which docker gives to a container together, or the one of this path."""
    return sorted(map(str, Path(path).iterdir())) if Path(path).is_dir() else [path]


def device(path: str) -> dict[str, int] | None:
    try:
        seen = Path(path).stat()
    except OSError:
        return None
    if not stat.S_ISCHR(seen.st_mode):
        return None
    major, minor = os.major(seen.st_rdev), os.minor(seen.st_rdev)
    return {"major": major, "minor": minor, "mode": stat.S_IMODE(seen.st_mode)}


def disk(folder: str) -> dict[str, Any]:
    """The file system that a folder is on, or will be on."""
    try:
        place = next(place for place in (Path(folder), *Path(folder).parents) if place.exists())
        seen = os.statvfs(place)
    except OSError as error:
        return {"error": str(error)}
    return {"free": seen.f_bavail * seen.f_frsize, "total": seen.f_blocks * seen.f_frsize}


def processes(outputs: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """What systemd and docker know the processes by that listen or use a GPU."""
    pids = re.findall(r"pid=(\d+)", outputs["sockets"]["stdout"])
    pids += re.findall(r"^GPU-\S+, (\d+),", outputs.get("gpu_processes", {}).get("stdout", ""), re.MULTILINE)
    found = {}
    for pid in dict.fromkeys(pids):
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        # Of several hierarchies (cgroup v1) the one that is systemd's.
        found[pid] = {"cgroup": next((line for line in lines if ":name=systemd:" in line), lines[-1])}
    return found


class Model:
    """The files of a model's folder, and their hashes."""

    def __init__(self, folder: str, params: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.kind: str = params["hash"]
        self.cache_file = Path(params["cache"])
        self.deadline = time.monotonic() + params["hash_seconds"]
        self.cache = self._read_cache()
        self.new: dict[str, Any] = {}

    def seen(self) -> dict[str, Any]:
        try:
            names = sorted(path.name for path in self.folder.iterdir() if path.is_file())
        except OSError as error:
            return {"error": f"{self.folder}: {error.strerror}"}
        files = {name: self._file(name) for name in names if name.endswith(HASHED)}
        seen: dict[str, Any] = {"files": files, "index": None, "hash": None, "config": "config.json" in files}
        if INDEX in files:
            seen["index"] = self._index()
        if self.kind != "none" and not any("error" in file for file in files.values()):
            seen["hash"] = self._hash(files)
        return seen

    def save(self) -> None:
        """Keep the hashes for the next time. Without them it only takes longer."""
        if self.new == self.cache:
            return
        try:
            self.cache_file.parent.mkdir(parents=True, exist_ok=True)
            partial = self.cache_file.with_suffix(".new")
            partial.write_text(json.dumps(self.new, sort_keys=True), encoding="utf-8")
            partial.replace(self.cache_file)
        except OSError:
            return

    def _read_cache(self) -> dict[str, Any]:
        try:
            cache = json.loads(self.cache_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return cache if isinstance(cache, dict) else {}

    def _file(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            size = path.stat().st_size
            if not name.endswith(".safetensors"):
                return {"size": size}
            return {"size": size, "implied": self._implied(path)}
        except (OSError, ValueError) as error:
            return {"error": str(error)}

    def _implied(self, path: Path) -> int:
        """The size that a safetensors file says it has, from its header."""
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MAX_HEADER:
                raise ValueError("its first 8 bytes are not the length of a safetensors header")
            text = file.read(length)
        try:
            tensors = [value for key, value in json.loads(text).items() if key != "__metadata__"]
            return 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise ValueError("its safetensors header cannot be read, or is cut off") from None

    def _index(self) -> dict[str, Any]:
        path = self.folder / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            total = index.get("metadata", {}).get("total_size")
            return {"files": sorted(set(index["weight_map"].values())), "total_size": total}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            return {"error": f"{path} cannot be read: {error}"}

    def _hash(self, files: dict[str, Any]) -> str | None:
        whole = hashlib.sha256(self.kind.encode())
        for name in files:
            try:
                one = self._hash_of(self.folder / name)
            except OSError:
                return None
            if one is None:
                return None
            whole.update(f"{name} {files[name]['size']} {one}\n".encode())
        return whole.hexdigest()

    def _hash_of(self, path: Path) -> str | None:
        """The hash of a file: known from its size, time and inode, or read now. None: no time is left."""
        seen = path.stat()
        key = [self.kind, seen.st_size, seen.st_mtime_ns, seen.st_ino]
        known = self.cache.get(str(path))
        if isinstance(known, dict) and known.get("key") == key and isinstance(known.get("hash"), str):
            self.new[str(path)] = known
            return str(known["hash"])
        one = hashlib.sha256()
        with path.open("rb") as file:
            for start, length in self._ranges(file, seen.st_size):
                if time.monotonic() > self.deadline:
                    return None
                file.seek(start)
                one.update(file.read(length))
        self.new[str(path)] = {"key": key, "hash": one.hexdigest()}
        return one.hexdigest()

    def _ranges(self, file: Any, size: int) -> list[tuple[int, int]]:
        if self.kind == "full" or size <= WHOLE:
            return [(start, WHOLE) for start in range(0, size, WHOLE)]
        header = int.from_bytes(file.read(8), "little") if file.name.endswith(".safetensors") else 0
        first = 8 + header if header <= MAX_HEADER else BLOCK
        step = (size - first) // BLOCKS
        blocks = [(first + number * step, BLOCK) for number in range(BLOCKS)]
        return [(0, first), *blocks, (size - BLOCK, BLOCK)]


def inside(spec: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
    """What a container with the options of the engines sees."""
    known = images["stdout"].split()[2:]  # without the heading, IMAGE ID
    image = spec["image"] or (known[0] if known else "")
    if not image:
        return {"image": None}
    there = run(["docker", "image", "inspect", "--format", "{{.Id}}", image], SECONDS)
    if there["rc"] != 0:
        return {"image": None}
    options = [f"--device={name}" for name in spec["devices"]]
    options += [f"--ulimit={name}" for name in spec["ulimits"]]
    paths = [path for name in spec["devices"] if name.startswith("/dev/") for path in nodes(name)]
    command = [
        *("docker", "run", "--rm", "--pull=never", "--network=none", "--log-driver=none"),
        *(f"--shm-size={spec['shm_size']}", *options, "--entrypoint=python3", image, "-c", INSIDE, *paths),
    ]
    return {"image": there["stdout"].strip(), "ran": run(command, 2 * OF_GPUS_SECONDS)}


def observe(module: AnsibleModule) -> dict[str, Any]:
    params: dict[str, Any] = module.params
    clock = {"host": time.time(), "sent": params["sent"]}
    cuda = params["accelerator"] == "cuda"
    commands = {**COMMANDS, **(OF_GPUS if cuda else {})}
    with ThreadPoolExecutor(8) as pool:
        running = {
            name: pool.submit(run, argv, OF_GPUS_SECONDS if argv[0] == "nvidia-smi" else SECONDS)
            for name, argv in commands.items()
        }
        outputs = {name: one.result() for name, one in running.items()}
    patterns = FILES + (FILES_OF_GPUS if cuda else [])
    devices = [path for name in params["devices"] for path in nodes(name)]
    if cuda:
        devices += [str(path) for pattern in DEVICES_OF_GPUS for path in Path("/").glob(pattern[1:])]
    folders = params["folders"] + ([params["model"]] if params["model"] else [])
    root = re.search(r'"DockerRootDir":"([^"]+)"', outputs["docker"]["stdout"])
    if root:
        folders.append(root[1])
    seen: dict[str, Any] = {
        "schema": SCHEMA,
        "clock": clock,
        "commands": outputs,
        "files": {path: text for pattern in patterns for path, text in read(pattern).items()},
        "devices": {path: device(path) for path in dict.fromkeys(devices)},
        "disks": {folder: disk(folder) for folder in dict.fromkeys(folders)},
        "processes": processes(outputs),
        "model": None,
        "container": None,
    }
    if params["model"]:
        model = Model(params["model"], params)
        seen["model"] = model.seen()
        if not module.check_mode and params["hash"] != "none":
            model.save()
    if params["container"] and not module.check_mode:
        seen["container"] = inside(params["container"], outputs["images"])
    return seen


def main() -> None:
    container = {
        "image": {"type": "str", "default": ""},
        "devices": {"type": "list", "elements": "str", "default": []},
        "ulimits": {"type": "list", "elements": "str", "default": []},
        "shm_size": {"type": "str", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "accelerator": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "model": {"type": "str"},
            "hash": {"type": "str", "choices": ["none", "sampled", "full"], "default": "sampled"},
            "hash_seconds": {"type": "float", "default": 120},
            "cache": {"type": "path", "default": "/var/lib/vllm-fleet/model-hashes.json"},
            "devices": {"type": "list", "elements": "str", "default": []},
            "folders": {"type": "list", "elements": "str", "default": []},
            "container": {"type": "dict", "options": container},
            "sent": {"type": "float", "required": True},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, observed=observe(module))


if __name__ == "__main__":
    main()
