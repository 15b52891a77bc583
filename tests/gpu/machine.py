"""A fleet on one machine with GPUs, without docker, systemd and Ansible: what `pack.py` rendered, as plain processes.

Each member gets exactly the environment and the arguments that its container would get. What differs is said in
`DIFFERS`, so that a report can say it too.
"""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import re
import shlex
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu.phases import phases
from vllm_fleet.fleet_metrics import parse, total

ROOT = Path(__file__).parents[2]
DIFFERS = (
    "members are processes of one machine, not containers: they share its PID namespace and see all its devices",
    "a member whose environment names no GPUs is told those that its container would be given",
    "the front is not there; its control port is a stand-in that counts no requests",
)
PLACES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME")
"""Where the machine has what a container's image has."""
SETTINGS = (
    "VLLM_USE_FLASHINFER_SAMPLER",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)
"""What the machine itself may need to be set, and no container is given: reports say it."""
CAUSES = ("ValueError: ", "RuntimeError: ")
"""Of an engine that cannot start; that its core did not start is a RuntimeError, and says nothing."""
CACHE = "/var/cache/vllm"
"""A member's own folder in its container."""
CHANNEL = Path("/dev/nvidia-caps-imex-channels/channel0")
DEVICES = Path("/proc/devices")
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFFLAGS = 0x8916, 0x891C, 0x8914
ALIAS = b"lo:1"


class SkipError(Exception):
    """This machine lacks what a scenario needs; the text says what."""


def kept() -> dict[str, str]:
    """The variables of this process that each member gets besides its own."""
    return {key: os.environ[key] for key in (*PLACES, *SETTINGS) if key in os.environ}


def fetch(url: str, body: Any = None, timeout: float = 120, headers: dict[str, str] | None = None) -> Any:
    """The JSON of an answer, or its text where it is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | (headers or {}))
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text


def gpus() -> list[str]:
    """The names of the machine's GPUs; none where nvidia-smi is not there."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.check_output(command, text=True).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def memory_used() -> list[int]:
    """MiB used on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).split()]


@contextmanager
def address(ours: str) -> Iterator[None]:
    """The machine has an address of the inventory, on its loopback interface, if it had it not before; as root."""
    with socket.socket() as probe:
        try:
            probe.bind((ours, 0))
        except OSError:
            pass
        else:
            yield
            return

    def set_alias(number: int, value: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, number, struct.pack("16s16s8x", ALIAS, value))

    def of_family(text: str) -> bytes:
        return struct.pack("H2x4s", socket.AF_INET, socket.inet_aton(text))

    # One address and not its network, which would be local as a whole.
    set_alias(SIOCSIFADDR, of_family(ours))
    set_alias(SIOCSIFNETMASK, of_family("255.255.255.255"))
    try:
        yield
    finally:
        set_alias(SIOCSIFFLAGS, b"")  # an alias that is not up is none


@contextmanager
def imex_channel(*, there: bool | None) -> Iterator[None]:
    """The IMEX channel's device node is there or not (None: as it is), as the host check says; afterwards as before; as root."""
    was = CHANNEL.stat() if CHANNEL.exists() else None
    if there is None or there == bool(was):
        yield
        return
    if was:
        mode, device = was.st_mode, was.st_rdev
    else:
        devices = DEVICES.read_text()
        major = re.search(r"^\s*(\d+) nvidia-caps-imex-channels$", devices, re.MULTILINE)
        if not major:
            raise SkipError(
                "it needs an IMEX channel, and this machine's driver has no nvidia-caps-imex-channels"
            )
        mode, device = stat.S_IFCHR | 0o666, os.makedev(int(major[1]), 0)

    def place(*, here: bool) -> None:
        if here:
            CHANNEL.parent.mkdir(parents=True, exist_ok=True)
            os.mknod(CHANNEL, mode, device)
            CHANNEL.chmod(stat.S_IMODE(mode))
        else:
            CHANNEL.unlink()

    place(here=there)
    try:
        yield
    finally:
        place(here=bool(was))


def run_module(name: str, params: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
    """One of the project's modules, as Ansible would run it on the host; what it returns."""
    program = (
        "import json, sys, ansible.module_utils\n"
        "from ansible.module_utils.testing import patch_module_args\n"
        "ansible.module_utils.__path__.append(sys.argv[1] + '/module_utils')\n"
        "sys.path.append(sys.argv[1] + '/modules')\n"
        "with patch_module_args(json.loads(sys.argv[3])):\n"
        "    __import__(sys.argv[2]).main()\n"
    )
    words = [sys.executable, "-c", program, str(ROOT / "plugins"), name, json.dumps(params)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        raise RuntimeError(
            f"{name} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}"
        ) from None


class Machine:
    """The members of a plan as processes of this machine.

    Args:
        pack: the folder of one variant that pack.py wrote.
        logs: where their output goes.

    """

    def __init__(self, pack: Path, logs: Path) -> None:
        self.pack, self.logs = pack, logs
        self.plan: dict[str, Any] = json.loads((pack / "plan.json").read_text())
        (self.host,) = self.plan["hosts"]
        self.members = {member["name"]: member for member in self.plan["hosts"][self.host]["members"]}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.begun: dict[str, float] = {}
        self.before: dict[str, int] = {}
        self.state: dict[str, dict[str, str]] = {}
        self.router_url = f"http://127.0.0.1:{self.plan['router']['slots']['a']['port']}"
        logs.mkdir(parents=True, exist_ok=True)

    def of(self, role: str) -> list[str]:
        """The names of a role's engines."""
        return [name for name, member in self.members.items() if member["role"] == role]

    def url(self, name: str) -> str:
        """Where a head answers."""
        return str(self.members[name]["url"])

    def start(self, *names: str) -> dict[str, dict[str, Any]]:
        """Start members as their units would, and wait until they generate; how long that and its phases took.

        Those that share a GPU start one after the other: each plans with the memory that it finds free.
        """
        devices = [device for name in names for device in self.members[name]["devices"]]
        if len(set(devices)) < len(devices):
            return {name: self.start(name)[name] for name in names}
        for name in names:
            self._start(name)
        took: dict[str, dict[str, Any]] = {}
        while len(took) < len(names):
            for name in names:
                if name not in took and self._generates(name):
                    begin, ready = self.begun[name], time.time()
                    log = self.lines(name)
                    took[name] = {
                        "seconds": round(ready - begin, 1),
                        "phases": phases(log, begin, ready),
                        **self.state[name],
                    }
            time.sleep(0.2)
        return {name: took[name] for name in names}

    def _start(self, name: str) -> None:
        folder = self.pack / "members" / name
        unit = (folder / "vllm-engine.service").read_text().replace("\\\n", " ").replace("$$", "$")
        command = re.search(r"-c '(exec vllm serve .*?)'", unit, re.DOTALL)
        cache = re.search(rf"--volume=(\S+):{CACHE}(?=\s)", unit)
        if not command or not cache:
            raise RuntimeError(f"the unit of {name} runs no vllm serve, or has no {CACHE}")
        environment = kept()
        for line in (folder / "engine.env").read_text().splitlines():
            if line and not line.startswith("#"):
                key, _, value = line.partition("=")
                environment[key] = re.sub(rf"^{CACHE}(?=/|$)", cache[1], value)
        # A container sees the devices it is given, and no others.
        environment.setdefault(
            "CUDA_VISIBLE_DEVICES", ",".join(re.findall(r"--device=nvidia.com/gpu=(\d+)", unit))
        )
        Path(cache[1]).mkdir(parents=True, exist_ok=True)
        eager = re.search(r"^enforce-eager: true$", (folder / "engine.yaml").read_text(), re.MULTILINE)
        self.state[name] = {
            "computes": "eager" if eager else "CUDA graphs",
            "cache": "warm" if any(Path(cache[1]).iterdir()) else "cold",
        }
        vllm = f"exec {shlex.quote(sys.executable)} -m vllm.entrypoints.cli.main"
        words = command[1].replace("/etc/vllm-fleet/engine.yaml", shlex.quote(str(folder / "engine.yaml")))
        self._spawn(name, ["/bin/sh", "-c", words.replace("exec vllm", vllm, 1)], environment)

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.begun[name] = time.time()
        path = self.logs / f"{name}.log"
        self.before[name] = path.stat().st_size if path.exists() else 0
        with path.open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _generates(self, name: str, seconds: float = 300) -> bool:
        if self.running[name].poll() is not None:
            raise RuntimeError(f"{name} ended with {self.running[name].returncode}: {self.cause(name)}")
        if time.time() - self.begun[name] > seconds:
            raise RuntimeError(f"{name} does not generate after {seconds} s: {self.cause(name)}")
        try:
            self.generate(self.url(name), [3, 4, 5], 1)
        except OSError:
            return False
        return True

    def start_router(self) -> float:
        """Start the router as its unit would; seconds until it is ready."""
        argv = json.loads((self.pack / "router.json").read_text())
        begin = time.monotonic()
        self._spawn("router", [sys.executable, "-m", "vllm_router.launch_router", *argv[1:]], kept())
        self.wait_for_router()
        return round(time.monotonic() - begin, 1)

    def wait_for_router(self, seconds: float = 90) -> None:
        """Wait until the router has a healthy engine of each role."""
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            try:
                fetch(f"{self.router_url}/readiness", timeout=2)
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise RuntimeError(f"the router is not ready after {seconds} s: {self.cause('router')}")

    def complete(
        self,
        url: str,
        tokens: list[int],
        count: int,
        timeout: float = 120,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> Any:
        """The first choice of a greedy completion of a prompt of token ids."""
        body = {
            "model": self.plan["model"]["served_name"],
            "prompt": tokens,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        return fetch(f"{url}/v1/completions", body, timeout, headers)["choices"][0]

    def generate(self, url: str, tokens: list[int], count: int, timeout: float = 120) -> list[int]:
        """The tokens of one."""
        return list(self.complete(url, tokens, count, timeout)["token_ids"])

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of a counter over its labels; 0 where it has not counted yet."""
        return total(parse(fetch(f"{self.url(name)}/metrics", timeout=30)), metric, **labels) or 0.0

    def lines(self, name: str) -> list[str]:
        """A member's log since it was started last."""
        log = (self.logs / f"{name}.log").read_bytes()[self.before[name] :]
        return log.decode(errors="replace").splitlines()

    def kv_tokens(self, name: str) -> int:
        """Tokens that a member's KV pool holds, as it said at its start."""
        said = re.search(r"GPU KV cache size: ([\d,]+) tokens", "\n".join(self.lines(name)))
        if not said:
            raise RuntimeError(f"{name} did not say the size of its KV pool")
        return int(said[1].replace(",", ""))

    def cause(self, name: str) -> str:
        """Of the errors that it ends with the one that says why, else its last line; all of it is in the log's file."""
        said = [line.strip() for line in self.lines(name) if line.strip()]
        return next(
            (line for kind in CAUSES for line in reversed(said) if line.startswith(kind)), "".join(said[-1:])
        )

    def stop(self, name: str) -> None:
        """End a member and all that it started, and wait until it is gone."""
        process = self.running.pop(name)
        for number, seconds in ((signal.SIGTERM, 40), (signal.SIGKILL, 10)):
            try:
                os.killpg(process.pid, number)
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        for _ in range(100):  # its workers, which hold the GPU
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            time.sleep(0.1)

    def stop_all(self) -> None:
        """End all."""
        for name in list(self.running):
            self.stop(name)


class ControlPort:
    """Stand-in for the front's control port: remembers whether admission is open, and counts no requests."""

    def __init__(self, port: int) -> None:
        state = {"admission": "open"}

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                state["admission"] = "closed" if self.path == "/admission/close" else "open"
                self.do_GET()

            def do_GET(self) -> None:
                body = json.dumps({**state, "in_flight": 0}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: object) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Free the port."""
        self.server.shutdown()
        self.server.server_close()
