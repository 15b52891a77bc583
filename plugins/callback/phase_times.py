"""Callback: how long each phase of a playbook took, and how much of it was the engines' own start."""

from __future__ import annotations

DOCUMENTATION = r"""
name: phase_times
type: aggregate
short_description: How long each phase took
description:
  - Prints a table after the recap. A phase is the playbook file that a play comes from; each has its seconds,
    those of them in which engines were starting, and those spent moving images (C(skopeo copy),
    C(docker pull), and copying and loading their archives).
  - Engines are starting from their units' start until the module C(engine_ready) finds them ready, whatever
    else is done meanwhile. Where none had to be started, only the module's own seconds count.
  - Hosts that work at the same time count once, with the slowest.
  - Right with the strategy C(linear), in which a task ends on all hosts before the next one starts.
requirements:
  - enabled in configuration (C(callbacks_enabled = phase_times))
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase


@dataclass
class Phase:
    """Seconds of one phase."""

    seconds: float = 0.0
    engines: float = 0.0
    images: float = 0.0


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible is not typed
    """Adds up wall-clock seconds by phase."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "phase_times"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Phase] = {}
        self.phase = Phase()  # what is before the first play has no line
        self.phase_began = self.task_began = self.task_ended = time.monotonic()
        self.kind: str | None = None
        self.engines_began: float | None = None  # where they were started and are not ready yet
        self.not_ready = False

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """A play belongs to the phase of its file, which other plays may have begun already."""
        self._end_phase()
        name = Path(play.get_path().rpartition(":")[0]).stem or play.get_name()
        self.phase = self.phases.setdefault(name, Phase())

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:  # noqa: ARG002, FBT001  Ansible's signature
        """A task starts on all hosts, so the one before has ended on all of them."""
        self._end_task()
        self.kind = kind_of(task)

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """A handler is a task like any other."""
        self.v2_playbook_on_task_start(task, is_conditional=False)

    def v2_runner_on_ok(self, result: Any, **_: Any) -> None:
        """The last host to end decides how long the task took."""
        self.task_ended = time.monotonic()
        if self.kind == "start" and result.is_changed():
            self.engines_began = self.task_ended
        elif self.kind == "engines" and not result.result.get("ready", True):
            self.not_ready = True

    def v2_runner_on_failed(self, result: Any, **_: Any) -> None:  # noqa: ARG002  Ansible's signature
        """A task that failed took time too."""
        self.task_ended = time.monotonic()

    v2_runner_on_unreachable = v2_runner_on_failed

    def v2_playbook_on_stats(self, stats: Any) -> None:  # noqa: ARG002  Ansible's signature
        """Print the table."""
        self._end_phase()
        self._display.banner("PHASES")
        for line in table(self.phases):
            self._display.display(line)

    def _end_task(self) -> None:
        if self.kind == "engines":
            self.phase.engines += self.task_ended - (self.engines_began or self.task_began)
            self.engines_began = self.task_ended if self.engines_began and self.not_ready else None
            self.not_ready = False
        elif self.kind == "images":
            self.phase.images += self.task_ended - self.task_began
        self.kind = None
        self.task_began = self.task_ended = time.monotonic()

    def _end_phase(self) -> None:
        self._end_task()
        now = time.monotonic()
        self.phase.seconds += now - self.phase_began
        self.phase_began = now


def kind_of(task: Any) -> str | None:
    """The part of a phase's time that a task belongs to, if it is told apart; C(start) begins C(engines)."""
    action = task.action.rpartition(".")[2]
    if action == "engine_ready":
        return "engines"
    if action == "systemd_service" and role_of(task) == "vllm_engine":
        return "start" if task.args.get("state") == "restarted" else None
    if action == "command":
        words = " ".join(map(str, task.args.get("argv", ())))
        return "images" if re.search(r"\bskopeo\b|^docker pull|docker load", words) else None
    copies_archive = action in {"copy", "fetch"} and role_of(task) == "container_image"
    return "images" if copies_archive and "archive" in task.args.get("src", "") else None


def role_of(task: Any) -> str | None:
    """The name of the task's role."""
    return task._role.get_name() if task._role else None  # noqa: SLF001  Ansible has no other way


def table(phases: dict[str, Phase]) -> list[str]:
    """The lines to print."""
    total = Phase(
        sum(phase.seconds for phase in phases.values()),
        sum(phase.engines for phase in phases.values()),
        sum(phase.images for phase in phases.values()),
    )
    width = max(len(name) for name in (*phases, "beyond both"))
    return [
        f"{'phase':<{width}}{'seconds':>9}{'of it engines starting':>24}{'of it image transfer':>22}",
        *(
            f"{name:<{width}}{phase.seconds:>9.1f}{phase.engines:>24.1f}{phase.images:>22.1f}"
            for name, phase in [*phases.items(), ("all", total)]
        ),
        f"{'beyond both':<{width}}{total.seconds - total.engines - total.images:>9.1f}",
    ]
