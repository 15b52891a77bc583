#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: engine_ready
short_description: Wait until vLLM engines answer, and fail at once when one of them dies
description:
  - An engine is ready when its unit runs, C(/health) answers 200, C(/v1/models) lists the served name and one
    token has been generated. A headless member of an engine over several hosts has no HTTP; it is ready when
    its container has run for O(alive) seconds, and the engine's head is the judge of the engine.
  - One that a trainer has paused (C(/is_paused), in dev mode) generates nothing; it is ready without, and a
    warning says so.
  - A unit that failed, stopped or was restarted by systemd fails the module at once, with the last lines of
    its log; only an engine that is slow has the whole of O(timeout).
  - Returns after O(slice) seconds whether ready or not, so that a play can look at other hosts in between;
    call it again with what it returned. A generation under way at that moment is waited for.
  - Changes nothing on the host, so it runs in check mode too.
options:
  engines:
    description: The engines to wait for.
    type: list
    elements: dict
    required: true
    suboptions:
      engine:
        description: Its name.
        type: str
        required: true
      unit:
        description: Its systemd unit on this host.
        type: str
        required: true
      url:
        description: Its URL, without a path; none for a headless member.
        type: str
      container:
        description: Its container, which a headless member is judged by.
        type: str
      served_name:
        description: The name it serves the model under.
        type: str
        required: true
  timeout:
    description: Seconds the engines may take altogether, over all calls.
    type: float
    default: 1200
  started:
    description: Seconds that earlier calls have used, RV(waited) of the last one.
    type: float
    default: 0
  slice:
    description: Return after this many seconds, ready or not.
    type: float
    default: 30
  restarts:
    description:
      - C(NRestarts) of each unit when its start began, RV(restarts) of the last call. A unit missing here is
        taken as it is found.
    type: dict
    default: {}
  ready_engines:
    description: Engines that earlier calls found ready; their units are still watched.
    type: list
    elements: str
    default: []
  probe_timeout:
    description: Seconds one generated token may take.
    type: float
    default: 60
  alive:
    description: Seconds that the container of a headless member must have run.
    type: float
    default: 15
"""

EXAMPLES = r"""
- name: Wait for the engines of this host
  engine_ready:
    engines:
      - engine: prefill-rack1-04-0
        unit: vllm-engine-prefill-rack1-04-0.service
        url: http://10.0.0.4:8000
        served_name: qwen3-30b-a3b
    started: "{{ __wait.waited | default(0) }}"
    restarts: "{{ __wait.restarts | default({}) }}"
    ready_engines: "{{ __wait.ready_engines | default([]) }}"
"""

RETURN = r"""
ready:
  description: Whether every engine is ready.
  returned: success
  type: bool
restarts:
  description: The baseline of C(NRestarts) for each unit, for the next call.
  returned: always
  type: dict
ready_engines:
  description: The engines that are ready, for the next call.
  returned: always
  type: list
  elements: str
waited:
  description: Seconds used by this call and those before.
  returned: always
  type: float
engines:
  description:
    - For each engine C(engine), C(ready), C(state) (its unit's) and C(seconds) until it was ready, or so far.
  returned: always
  type: list
  elements: dict
summary:
  description: One line for progress.
  returned: always
  type: str
"""

import threading
import time
from calendar import timegm
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fleet_http import HttpError, fetch, fetch_json
from ansible.module_utils.fleet_unit import UnitError, UnitState, journal_tail, unit_state

QUICK = 5.0
PAUSE = 0.5


class Watched:
    """An engine, its unit as last seen, and the probe that may be under way."""

    def __init__(self, spec: dict[str, Any], module: AnsibleModule, *, ready: bool) -> None:
        self.engine: str = spec["engine"]
        self.unit: str = spec["unit"]
        self.url: str | None = spec["url"]
        self.container: str | None = spec["container"]
        self.served_name: str = spec["served_name"]
        self.ready = ready
        self.paused = False
        self.seen = "not probed yet"
        self.seconds: float | None = None
        self.state: UnitState | None = None
        self._module = module
        self._thread: threading.Thread | None = None

    @property
    def probing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def probe_when_due(self) -> None:
        if self.ready or self.probing or not (self.state and self.state.running):
            return
        if self.url is None:
            self._look_at_container()
            return
        # A thread, because a first token may take a minute and the units are watched meanwhile.
        self._thread = threading.Thread(target=self._probe, daemon=True)
        self._thread.start()

    def _container_seconds(self) -> float | None:
        """Since when its container runs: docker knows, so nothing is to be remembered between two slices."""
        command = ["docker", "inspect", "--format", "{{.State.Running}} {{.State.StartedAt}}", self.container]
        code, out, _ = self._module.run_command(command)
        running, _, started = out.strip().partition(" ")
        if code != 0 or running != "true":
            return None
        # 2026-01-31T23:59:59.123456789Z: more digits than Python reads.
        return time.time() - timegm(time.strptime(started[:19], "%Y-%m-%dT%H:%M:%S"))

    def _look_at_container(self) -> None:
        seconds = self._container_seconds()
        if seconds is None:
            self.seen = "its container does not run; it waits for the other members of its engine"
            return
        self.ready = seconds >= self._module.params["alive"]
        self.seen = f"its container has run for {seconds:.0f} s"

    def _probe(self) -> None:
        try:
            fetch(f"{self.url}/health", timeout=QUICK).expect_ok()
            self._serves_the_model()
            self.paused = self._is_paused()
            if not self.paused:
                self._generates_a_token()
            self.ready = True
            self.seen = "ready"
        except HttpError as fault:
            self.seen = str(fault)
            if self.container and self._container_seconds() is None:
                self.seen += (
                    "; its container does not run, it starts or waits for the other members of its engine"
                )

    def _serves_the_model(self) -> None:
        models = fetch_json(f"{self.url}/v1/models", timeout=QUICK).get("data")
        names = [m.get("id") for m in models if isinstance(m, dict)] if isinstance(models, list) else []
        if self.served_name not in names:
            raise HttpError(f"{self.url}/v1/models lists {names}, not the served name {self.served_name!r}")

    def _is_paused(self) -> bool:
        answer = fetch(f"{self.url}/is_paused", timeout=QUICK)
        return answer.status == 200 and answer.json().get("is_paused") is True

    def _generates_a_token(self) -> None:
        url = f"{self.url}/v1/completions"
        payload = {"model": self.served_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        answer = fetch_json(url, payload, self._module.params["probe_timeout"])
        usage = answer.get("usage")
        if not isinstance(usage, dict) or not usage.get("completion_tokens"):
            raise HttpError(f"{url} answered 200 but generated no token")


class Wait:
    """The engines of one host, until they are ready, one of them dies, or the slice is over."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, Any] = module.params
        self.began = time.monotonic()
        self.restarts = {unit: int(count) for unit, count in self.params["restarts"].items()}
        self.watched = [
            Watched(spec, module, ready=spec["engine"] in self.params["ready_engines"])
            for spec in self.params["engines"]
        ]

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def waited(self) -> float:
        return float(self.params["started"]) + self.elapsed

    def run(self) -> NoReturn:
        while True:
            for one in self.watched:
                self._look_at_unit(one)
            if all(one.ready for one in self.watched):
                for one in self.watched:
                    if one.paused:
                        self.module.warn(
                            f"Engine {one.engine} is paused, so it was not asked to generate. "
                            "`vllm-fleet rollout resume` has it go on; then run playbooks/prove.yml."
                        )
                self.module.exit_json(ready=True, **self._outcome())
            if self.waited >= self.params["timeout"]:
                self._too_late()
            if self.elapsed < self.params["slice"]:
                for one in self.watched:
                    one.probe_when_due()
            elif not any(one.probing for one in self.watched):
                self.module.exit_json(ready=False, **self._outcome())
            time.sleep(PAUSE)

    def _look_at_unit(self, one: Watched) -> None:
        try:
            one.state = unit_state(self.module.run_command, one.unit)
        except UnitError as error:
            self._fail(f"Engine {one.engine}: {error}")
        before = self.restarts.setdefault(one.unit, one.state.restarts)
        trouble = one.state.fault(before)
        if trouble:
            self._fail(
                f"Engine {one.engine}: its unit {one.unit} {trouble}. It will not get ready by waiting: mend "
                "what its log says, then run the playbook again. The log ends with:\n"
                + journal_tail(self.module.run_command, one.unit, one.state.restarts - before)
            )
        if one.ready and one.seconds is None:
            one.seconds = self.waited

    def _too_late(self) -> NoReturn:
        late = [f"{one.engine} ({one.unit} {one.state}): {one.seen}" for one in self.watched if not one.ready]
        logs = [
            f"The log of {one.unit} ends with:\n{journal_tail(self.module.run_command, one.unit)}"
            for one in self.watched
            if not one.ready
        ]
        self._fail(
            f"Not ready after {self.waited:.0f} s (the time-out is {self.params['timeout']:g} s): "
            f"{'; '.join(late)}. The units run without restarts, so the engines are slow or stuck: mend what "
            "their logs say, or allow more time.\n" + "\n".join(logs)
        )

    def _fail(self, message: str) -> NoReturn:
        self.module.fail_json(msg=message, **self._outcome())

    def _outcome(self) -> dict[str, Any]:
        waiting = [f"{one.engine} ({one.state}: {one.seen})" for one in self.watched if not one.ready]
        ready = len(self.watched) - len(waiting)
        summary = f"{ready} of {len(self.watched)} engines ready after {self.waited:.0f} s"
        return {
            "changed": False,
            "restarts": self.restarts,
            "ready_engines": [one.engine for one in self.watched if one.ready],
            "waited": round(self.waited, 1),
            "engines": [
                {
                    "engine": one.engine,
                    "ready": one.ready,
                    "state": str(one.state),
                    "seconds": round(self.waited if one.seconds is None else one.seconds, 1),
                }
                for one in self.watched
            ],
            "summary": summary + (f"; waiting for {', '.join(waiting)}" if waiting else ""),
        }


def main() -> None:
    engine = {key: {"type": "str", "required": True} for key in ("engine", "unit", "served_name")}
    engine |= {key: {"type": "str"} for key in ("url", "container")}
    module = AnsibleModule(
        argument_spec={
            "engines": {"type": "list", "elements": "dict", "required": True, "options": engine},
            "timeout": {"type": "float", "default": 1200},
            "started": {"type": "float", "default": 0},
            "slice": {"type": "float", "default": 30},
            "restarts": {"type": "dict", "default": {}},
            "ready_engines": {"type": "list", "elements": "str", "default": []},
            "probe_timeout": {"type": "float", "default": 60},
            "alive": {"type": "float", "default": 15},
        },
        supports_check_mode=True,
    )
    Wait(module).run()


if __name__ == "__main__":
    main()
