"""Whether the GPUs of an engine are free before it is started, and who may hold what is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEPARATOR = "processes"
"""The line between the two answers of nvidia-smi."""
GPU_FIELDS, PROCESS_FIELDS = 4, 4
MOST_PEERS = 8
PEER_ROLES = {"prefill": "decode", "decode": "prefill"}


class UnreadableError(ValueError):
    """nvidia-smi's answer is not what it is documented to be; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU. `used` is None where the driver does not tell."""

    pid: str
    used: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, its memory in MiB, and the processes that nvidia-smi lists on it."""

    index: int
    used: int
    total: int
    processes: tuple[Process, ...]


def read(answer: str) -> dict[int, Gpu]:
    """GPUs by index.

    Args:
        answer: what nvidia-smi prints with `--query-gpu=index,uuid,memory.used,memory.total`, a line
            `processes`, and what it prints with `--query-compute-apps=gpu_uuid,pid,used_memory,process_name`;
            both with `--format=csv,noheader,nounits`.

    Raises:
        UnreadableError: it is something else.

    """
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if SEPARATOR not in lines:
        raise UnreadableError(_quoted(answer))
    middle = lines.index(SEPARATOR)
    processes: dict[str, list[Process]] = {}
    for line in lines[middle + 1 :]:
        # A process's name comes last, because it may hold commas.
        fields = [field.strip() for field in line.split(",", PROCESS_FIELDS - 1)]
        if len(fields) != PROCESS_FIELDS or not fields[0].startswith("GPU-") or not fields[1].isdecimal():
            raise UnreadableError(_quoted(line))
        uuid, pid, used, name = fields
        processes.setdefault(uuid, []).append(Process(pid, int(used) if used.isdecimal() else None, name))
    gpus: dict[int, Gpu] = {}
    for line in lines[:middle]:
        fields = [field.strip() for field in line.split(",")]
        # Where the driver does not tell a GPU's memory ([N/A]), nobody knows that it is free.
        if len(fields) != GPU_FIELDS or not all(fields[field].isdecimal() for field in (0, 2, 3)):
            raise UnreadableError(_quoted(line))
        index, uuid, used, total = fields
        gpus[int(index)] = Gpu(int(index), int(used), int(total), tuple(processes.pop(uuid, ())))
    if not gpus or processes:
        raise UnreadableError(_quoted(answer))
    return gpus


def _quoted(text: str) -> str:
    """The beginning of what could not be read, on one line."""
    return f'"{" ".join(text.split())[:200]}"' if text.strip() else "nothing"


def judge(plan: Mapping[str, Any], member: str, result: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Whether a member's GPUs are free, whether waiting may help, and the text of a refusal.

    Args:
        plan: the plan.
        member: the member's name.
        result: `rc`, `stdout` and `stderr` of the commands that `read` names.
        limit: MiB that may be in use on each GPU.

    Raises:
        KeyError: the plan has no such member.

    """
    host, mine = _member(plan, member)
    try:
        gpus = read(_answer(result))
    except UnreadableError as error:
        text = (
            f"{member}: what is in use of its GPUs on {host} could not be read; nvidia-smi said {error}. Run "
            "nvidia-smi there. When it answers, run this again."
        )
        return {"free": False, "wait": False, "text": text}
    if missing := [device for device in mine["devices"] if device not in gpus]:
        text = (
            f"{member}: {host} has no GPU {_listed(missing)}; nvidia-smi lists {_listed(sorted(gpus))}. "
            "Look for one that fell off (dmesg, Xid), or correct fleet_gpus_per_host."
        )
        return {"free": False, "wait": False, "text": text}
    used = [gpus[device] for device in mine["devices"] if gpus[device].used > limit]
    lines = [f"GPU {gpu.index}: {gpu.used} of {gpu.total} MiB, {_holders(gpu)}" for gpu in used]
    if any(gpu.processes for gpu in used):
        lines.append("Stop the processes (systemctl status PID tells the unit) and run this again.")
    if any(_unexplained(gpu) > limit for gpu in used):
        lines += _peers(plan, mine)
    text = f"{member}: on {host} more than {limit} MiB are in use:\n  " + "\n  ".join(lines) if used else ""
    return {"free": not used, "wait": bool(used), "text": text}


def _answer(result: Mapping[str, Any]) -> str:
    if result.get("rc") != 0:
        words = " ".join(str(result.get(key) or "") for key in ("stderr", "stdout", "msg"))
        raise UnreadableError(f"{_quoted(words)} (exit status {result.get('rc')})")
    return str(result.get("stdout") or "")


def _member(plan: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any]]:
    for host, part in plan["hosts"].items():
        for member in part["members"]:
            if member["name"] == name:
                return host, member
    raise KeyError(name)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _holders(gpu: Gpu) -> str:
    if not gpu.processes:
        return "and no process is listed"
    listed = [
        f"{process.name} (PID {process.pid}, {'?' if process.used is None else process.used} MiB)"
        for process in gpu.processes
    ]
    return f"by {', '.join(listed)}"


def _unexplained(gpu: Gpu) -> int:
    """MiB that no listed process accounts for; 0 where one of them may account for anything."""
    known = [process.used for process in gpu.processes if process.used is not None]
    return gpu.used - sum(known) if len(known) == len(gpu.processes) else 0


def _peers(plan: Mapping[str, Any], member: Mapping[str, Any]) -> list[str]:
    """Who may have memory mapped that belongs to no process any more, and what to do about it."""
    role = PEER_ROLES.get(member["role"])
    if role is None or plan["kv_transport"] != "nvlink":
        return [
            "The rest no process accounts for: look for containers of others, then reset the GPU or the host."
        ]
    peers = [engine for engine in plan["engines"] if engine["role"] == role]
    names = [f"{peer['name']}{' (of somebody else)' if peer['external'] else ''}" for peer in peers]
    if len(names) > MOST_PEERS:
        names[MOST_PEERS:] = [f"{len(names) - MOST_PEERS} more"]
    holds = f"a {role} that still maps a dead {member['role']}'s memory holds it, also from another host"
    return [
        f"The rest no process accounts for: {holds}. The {role}s: {', '.join(names)}.",
        "They let go when they end, and not before, whatever fleet_kv_mapping is.",
        "Stop them (systemctl stop 'vllm-engine-NAME*' on their hosts) and run this again; it starts them.",
    ]
