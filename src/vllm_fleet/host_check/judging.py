"""What judging functions are given and give, and the conditions under which checks apply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from vllm_fleet.host_check import reading
from vllm_fleet.host_check.checks import Check, Level
from vllm_fleet.host_check.reading import Observation, Section, UnreadableError
from vllm_fleet.host_check.scope import (
    CHANNEL,
    container_devices,
    device_nodes,
    fabric_hosts,
    planned_gpus,
)


class Found(NamedTuple):
    """What a check came to: what was seen, its level, and a remedy that fits better than the check's own."""

    seen: str
    level: Level
    remedy: str | None = None


def right(seen: str) -> Found:
    """It holds."""
    return Found(seen, Level.PASS)


def told(seen: str) -> Found:
    """It need not hold yet, or cannot be decided; worth a line."""
    return Found(seen, Level.INFO)


def skipped(why: str) -> Found:
    """It does not apply here after all."""
    return Found(why, Level.NOT_APPLICABLE)


class Host:
    """A host of the plan and what was seen on it."""

    def __init__(self, plan: Mapping[str, Any], name: str, recorded: Mapping[str, Any]) -> None:
        self.plan = plan
        self.name = name
        self.planned: Mapping[str, Any] = plan["hosts"][name]
        self.members: list[Mapping[str, Any]] = self.planned["members"]
        self.seen = Observation(recorded.get("observed"))
        self.listeners: Any = recorded.get("listeners")
        self.dials: Any = recorded.get("dials")

    @property
    def gpu_ids(self) -> list[int]:
        """The GPUs that the plan gives away."""
        return planned_gpus(self.members)

    @cached_property
    def smi(self) -> reading.Gpus:
        """`nvidia-smi -q`."""
        return reading.gpus(self.seen.output("nvidia_smi"))

    @property
    def gpus(self) -> list[Section]:
        """Its sections; a host without any was not read."""
        if not self.smi.sections:
            raise UnreadableError("nvidia-smi -q shows no GPU")
        return self.smi.sections

    @property
    def driver(self) -> reading.Driver:
        """The loaded driver."""
        return reading.driver(self.seen.file("/proc/driver/nvidia/version"))

    @property
    def docker_to_come(self) -> str:
        """Why there is no docker engine to be asked yet, which the role engine_host changes; else empty."""
        if self.seen.missing("docker"):
            return "there is no docker yet; playbooks/hosts.yml installs it"
        if self.seen.mapping("commands", "docker").get("rc") == 0:
            return ""
        state = reading.property_of(self.seen.output("docker_unit"), "ActiveState")
        return "docker does not run yet; playbooks/hosts.yml starts it" if state == "inactive" else ""

    def unit_of(self, pid: int) -> str:
        """The unit that runs a process, also in a container of the fleet; else its container, or nothing."""
        process = self.seen.mapping("processes").get(str(pid))
        cgroup = str(process.get("cgroup", "")) if isinstance(process, Mapping) else ""
        kind, owner = reading.owner_of(cgroup)
        if kind == "container":
            name, _ = self.containers.get(owner, ("", ""))
            return f"{name}.service" if re.fullmatch(r"vllm-engine-.+|pd-relay", name) else name
        return owner

    @cached_property
    def containers(self) -> dict[str, tuple[str, str]]:
        """The running containers."""
        if self.docker_to_come:
            return {}
        return reading.containers(self.seen.output("containers"))


@dataclass(frozen=True, slots=True)
class Condition:
    """Hosts that a check applies to. `otherwise` says of the others why it does not."""

    where: str
    otherwise: str
    holds: Callable[[Host], bool]


def _cuda(host: Host) -> bool:
    return host.plan["accelerator"] == "cuda" and bool(host.members)


ALWAYS = Condition("all hosts", "", lambda _: True)
ENGINES = Condition("hosts with engines", "no engine is planned there", lambda host: bool(host.members))
FENCED = Condition(
    "hosts with ports that are fenced",
    "no port is fenced there",
    lambda host: host.plan["fence"] is not None and bool(host.planned["fence"]["ports"]),
)
GPU_HOSTS = Condition("hosts with CUDA engines", "no CUDA engine is planned there", _cuda)
NVLINK = Condition(
    "hosts with CUDA engines, transport nvlink",
    "the transport is not nvlink, or no CUDA engine is planned there",
    lambda host: _cuda(host) and host.plan["kv_transport"] == "nvlink",
)
FABRIC = Condition(
    "hosts whose GPUs reach each other's memory over NVLink",
    "no GPU there reaches the memory of another host over NVLink",
    lambda host: host.name in fabric_hosts(host.plan),
)
CHANNEL_HOSTS = Condition(
    "hosts whose engines get the IMEX channel",
    "no engine there gets the IMEX channel",
    lambda host: CHANNEL in container_devices(host.members),
)
CDI_HOSTS = Condition(
    "hosts whose engines get CDI devices",
    "no engine there gets a CDI device",
    lambda host: any(name.startswith("nvidia.com/gpu=") for name in container_devices(host.members)),
)
RDMA = Condition(
    "hosts with engines, transport rdma",
    "the transport is not rdma, or no engine is planned there",
    lambda host: host.plan["kv_transport"] == "rdma" and bool(host.members),
)
NODES = Condition(
    "hosts whose engines get device nodes",
    "no engine there gets a device node",
    lambda host: bool(device_nodes(host.members)),
)
LOCKED = Condition(
    "hosts whose engines lock memory",
    "no engine there locks memory",
    lambda host: any("memlock" in limit for m in host.members for limit in m["container_options"]["ulimits"]),
)


@dataclass(frozen=True, slots=True)
class OnHost:
    """A check of one host."""

    check: Check
    condition: Condition
    judge: Callable[[Host], Found]


@dataclass(frozen=True, slots=True)
class Between:
    """A check that compares hosts. It gives its findings itself, each with the hosts that it is about."""

    check: Check
    condition: Condition
    judge: Callable[[list[Host]], list[tuple[list[str], Found]]]


ON_HOST: list[OnHost] = []
BETWEEN: list[Between] = []


def on_host(
    check: Check, condition: Condition
) -> Callable[[Callable[[Host], Found]], Callable[[Host], Found]]:
    """Make a function the judge of a check on one host."""

    def register(judge: Callable[[Host], Found]) -> Callable[[Host], Found]:
        ON_HOST.append(OnHost(check, condition, judge))
        return judge

    return register


type BetweenJudge = Callable[[list[Host]], list[tuple[list[str], Found]]]


def between(check: Check, condition: Condition) -> Callable[[BetweenJudge], BetweenJudge]:
    """Make a function the judge of a check over the hosts that the condition holds for."""

    def register(judge: BetweenJudge) -> BetweenJudge:
        BETWEEN.append(Between(check, condition, judge))
        return judge

    return register
