"""Callback: how long each phase of a playbook took, and how much of it was the engines' own start."""

from __future__ import annotations

DOCUMENTATION = r"""
name: phase_times
type: aggregate
short_description: How long each phase took
description:
  - Prints, after the recap, the seconds of each imported playbook with more than one play behind it, the seconds its hosts
    spent waiting for engines to start (module C(engine_ready)) and the seconds of image transfer (skopeo copy, docker pull).
  - A phase is the playbook file that a play comes from.
requirements: [enabled in configuration (C(callbacks_enabled = phase_times))]
"""

import time
from pathlib import Path

from ansible.plugins.callback import CallbackBase


class CallbackModule(CallbackBase):
    """Adds up wall-clock seconds by phase."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "phase_times"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self):
        super().__init__()
        self.phases = {}
        self.phase = None
        self.task_started = 0.0
        self.began = time.monotonic()

    def v2_playbook_on_play_start(self, play):
        """A play of another file begins another phase."""
        self._close()
        path = getattr(play, "_origin", None) and play._origin.path  # noqa: SLF001  the only place that knows the file
        self.phase = Path(path).stem if path else play.get_name()
        self.phases.setdefault(self.phase, {"seconds": 0.0, "engines": 0.0, "images": 0.0})

    def v2_playbook_on_task_start(self, task, is_conditional):  # noqa: ARG002  Ansible's signature
        """Remember when the task began; its slowest host counts."""
        self.task_started = time.monotonic()

    def v2_runner_on_ok(self, result):
        """Note the seconds of waiting and of image transfer inside a phase."""
        self._note(result)

    def v2_runner_on_failed(self, result, ignore_errors=False):  # noqa: ARG002, FBT002  Ansible's signature
        """A task that failed took its time as well."""
        self._note(result)

    def v2_playbook_on_stats(self, stats):  # noqa: ARG002  Ansible's signature
        """Print the table."""
        self._close()
        self._display.banner("PHASES")
        lines = [f"{'phase':<12}{'seconds':>9}{'of it engines starting':>25}{'of it image transfer':>23}"]
        lines += [
            f"{name:<12}{phase['seconds']:>9.1f}{phase['engines']:>25.1f}{phase['images']:>23.1f}"
            for name, phase in self.phases.items()
        ]
        sums = {key: sum(phase[key] for phase in self.phases.values()) for key in ("seconds", "engines", "images")}
        lines.append(f"{'all':<12}{sums['seconds']:>9.1f}{sums['engines']:>25.1f}{sums['images']:>23.1f}")
        lines.append(f"{'beyond both':<12}{sums['seconds'] - sums['engines'] - sums['images']:>9.1f}")
        for line in lines:
            self._display.display(line)

    def _note(self, result):
        kind = self._kind(result.task)
        if kind and self.phase:
            # Hosts run a task at the same time: what counts is the last one to end.
            phase = self.phases[self.phase]
            phase[kind + " task"] = (result.task._uuid, time.monotonic() - self.task_started)  # noqa: SLF001
            self._settle(phase, kind)

    @staticmethod
    def _settle(phase, kind):
        uuid, seconds = phase.pop(kind + " task")
        last_uuid, last = phase.get(kind + " last", (None, 0.0))
        phase[kind] += seconds - (last if uuid == last_uuid else 0.0)
        phase[kind + " last"] = (uuid, seconds)

    @staticmethod
    def _kind(task):
        if task.action == "engine_ready":
            return "engines"
        if task.action == "ansible.builtin.command" and {"skopeo", "pull"} & set(task.args.get("argv") or []):
            return "images"
        return None

    def _close(self):
        now = time.monotonic()
        if self.phase:
            self.phases[self.phase]["seconds"] += now - self.began
        self.began = now
