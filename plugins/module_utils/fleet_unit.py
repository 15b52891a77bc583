"""What systemd and the journal say about a unit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RunCommand = Callable[[list[str]], "tuple[int, str, str]"]

PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "NRestarts",
    "Result",
    "ExecMainStatus",
    "ActiveEnterTimestampMonotonic",
)
TAIL_LINES = 20
CAUSE_LINES = 5
SEARCH_LINES = 400
TAIL_BYTES = 6000
_CAUSE = re.compile(r"\b[A-Za-z_.]*(Error|Exception)\b: |\bKilled\b|out of memory", re.IGNORECASE)


# The start that a line belongs to: of the unit's processes, and of systemd where it writes about the unit.
_INVOCATION = ("_SYSTEMD_INVOCATION_ID", "INVOCATION_ID")


class UnitError(Exception):
    """systemd gave no usable answer."""


@dataclass(frozen=True)
class UnitState:
    unit: str
    load: str
    active: str
    sub: str
    restarts: int
    result: str
    exit_status: str

    @property
    def running(self) -> bool:
        return self.active == "active" and self.sub == "running"

    @property
    def stopped(self) -> str | None:
        """Why the unit is not on its way to running; None while it runs or starts."""
        if self.load == "not-found":
            return "does not exist on this host"
        if self.sub == "auto-restart":
            return f"died and is about to be started again ({self._exit})"
        if self.active in ("failed", "inactive"):
            return f"is {self.active} ({self._exit})"
        return None

    @property
    def _exit(self) -> str:
        return f"result {self.result}, exit status {self.exit_status}"

    def fault(self, baseline: int) -> str | None:
        """What is wrong, given how many restarts had been counted before."""
        if self.stopped:
            return self.stopped
        if self.restarts > baseline:
            return f"was restarted by systemd (NRestarts {baseline} -> {self.restarts}, last {self._exit})"
        return None

    def __str__(self) -> str:
        return f"{self.active}/{self.sub}"


def unit_state(run_command: RunCommand, unit: str) -> UnitState:
    code, out, err = run_command(["systemctl", "show", "-p", ",".join(PROPERTIES), unit])
    values = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    if code != 0 or "ActiveState" not in values:
        seen = (err or out).strip() or f"exit status {code}"
        raise UnitError(f"systemctl show {unit} gave no state: {seen[:300]}")
    return UnitState(
        unit=unit,
        load=values.get("LoadState", ""),
        active=values["ActiveState"],
        sub=values.get("SubState", ""),
        restarts=int(values.get("NRestarts") or 0),
        result=values.get("Result", ""),
        exit_status=values.get("ExecMainStatus", ""),
    )


def journal_tail(run_command: RunCommand, unit: str, restarts: int = 0) -> str:
    """The last lines of the unit's log, with the errors that stand further up put before them.

    Of its last start and as many before it as `restarts`: what an earlier deployment died of misleads.
    """
    fields = f"--output-fields=MESSAGE,{','.join(_INVOCATION)}"
    code, out, err = run_command(
        ["journalctl", "-u", unit, "-n", str(SEARCH_LINES), "--no-pager", "-o", "json", fields, "-q"]
    )
    if code != 0:
        return f"(journalctl -u {unit} failed: {err.strip()[:200]})"
    lines = _lines_of_last_starts([json.loads(entry) for entry in out.splitlines()], restarts + 1)
    if not lines:
        return f"(the journal has nothing from {unit})"
    tail = lines[-TAIL_LINES:]
    # vLLM ends with "see root cause above"; the cause stands hundreds of lines higher.
    causes = [line for line in lines[:-TAIL_LINES] if _CAUSE.search(line)][-CAUSE_LINES:]
    text = "\n".join([*causes, "[...]", *tail] if causes else tail)
    return text if len(text) <= TAIL_BYTES else "[...] " + text[-TAIL_BYTES:]


def _lines_of_last_starts(entries: list[dict[str, Any]], starts: int) -> list[str]:
    """The lines of the last starts; all lines where none says which start it is of."""
    last = [start for start in dict.fromkeys(map(_start_of, entries)) if start][-starts:]
    chosen = [entry for entry in entries if not last or _start_of(entry) in last]
    return [line for entry in chosen for line in _text(entry.get("MESSAGE")).splitlines()]


def _start_of(entry: dict[str, Any]) -> str | None:
    return next((entry[key] for key in _INVOCATION if key in entry), None)


def _text(message: Any) -> str:
    """The text of a message, which is a list of bytes where it has colours."""
    return bytes(message).decode("utf-8", "replace") if isinstance(message, list) else message or ""
