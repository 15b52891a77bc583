#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: engine_identity
short_description: Compare what running vLLM engines are with what was planned
description:
  - An engine of the fleet is known by its container. Its image and its environment are what C(docker inspect)
    tells, which nothing can change while the container lives. Its arguments are those of the process
    C(vllm serve) itself, from C(/proc), and of the file that its C(--config) names, read through the root of
    that process. The unit and the file on the host would not tell what runs, as either may have been replaced
    since the start. A file that was written in place after the start is a difference by itself.
  - An engine with a URL is asked for C(/version) and C(/v1/models) too, and with O(engines[].server_info) for
    C(/server_info).
  - An engine without a container is somebody else's (external). Of what C(/server_info) does not tell,
    C(/metrics) gives the data-parallel size, the block size, the cache's type and whether NIXL is there. The
    other values are then named as not visible, which is no difference.
  - All engines are looked at before the module fails with every difference, both sides in each. An engine
    that does not run or does not answer is a difference.
  - Run as root, for the C(/proc) of another user's process. Changes nothing, so it runs in check mode too.
options:
  engines:
    description: The members of engines on this host, and external engines. They are all looked at at once.
    type: list
    elements: dict
    required: true
    suboptions:
      engine:
        description: The engine's name.
        type: str
        required: true
      member:
        description: The member's name, where it is not the engine's.
        type: str
      url:
        description: Its URL, without a path. A headless member has none.
        type: str
      container:
        description: Its container on this host. Unset, the engine is external.
        type: str
      unit:
        description: Its systemd unit, for messages.
        type: str
      image_id:
        description: The id of the image it should run.
        type: str
      expected:
        description:
          - What it should be, by name. Null or absent, a value is not compared.
          - C(model), C(served_name), C(tensor_parallel_size), C(pipeline_parallel_size),
            C(data_parallel_size), C(data_parallel_size_local), C(nnodes) (the number of hosts),
            C(enable_expert_parallel), C(kv_role), C(max_model_len), C(block_size), C(kv_cache_dtype) and
            C(version) (vLLM's) are compared wherever they are visible.
          - Any other name is an argument of vLLM, with underscores, and compared with the process.
        type: dict
        required: true
      args:
        description:
          - All arguments it should have besides those in O(engines[].expected), with underscores or dashes.
            An argument that the process has and neither of the two names is then a difference.
          - Unset, only what is expected is compared.
        type: dict
      env:
        description:
          - Variables it should have. Both sides are shown, so leave out those that may be secrets; variables
            that are not named here are not looked at.
        type: dict
        default: {}
      server_info:
        description:
          - Whether to ask for C(/server_info), which only dev mode has.
          - An engine of the fleet must then answer it; that an external one does not is no difference.
        type: bool
        default: false
  timeout:
    description: Seconds that each question may take. The first C(/server_info) of an engine takes several.
    type: float
    default: 30
"""

EXAMPLES = r"""
- name: Compare the engines of this host with the plan
  engine_identity:
    engines:
      - engine: decode-rack1-05-0
        url: http://10.0.0.5:8000
        container: vllm-engine-decode-rack1-05-0
        unit: vllm-engine-decode-rack1-05-0.service
        image_id: sha256:0f7d1d1a9a9e
        expected: {model: /srv/models/x, served_name: x, tensor_parallel_size: 4, nnodes: 1}
        args: "{{ member.args }}"
        env: {VLLM_NIXL_SIDE_CHANNEL_HOST: 10.0.0.5}

- name: Compare an engine that somebody else runs
  engine_identity:
    engines:
      - engine: elsewhere
        url: http://10.0.9.1:8000
        expected: {model: /srv/models/x, served_name: x, tensor_parallel_size: 8}
        server_info: true
"""

RETURN = r"""
engines:
  description: What was seen of each engine, in the order of O(engines).
  returned: always
  type: list
  elements: dict
  contains:
    engine:
      description: The engine's name.
      type: str
    member:
      description: The member's name.
      type: str
    seen:
      description: The expected values as seen, and always C(image_id) and C(version) where visible.
      type: dict
    differences:
      description: One sentence each, with both sides and where the running one is from.
      type: list
      elements: str
    notes:
      description: One sentence for each thing that could not be looked at and is no difference.
      type: list
      elements: str
"""

import json
import time
from calendar import timegm
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fleet_http import HttpError, fetch, fetch_json
from ansible.module_utils.fleet_identity import (
    FROM_THE_MODEL,
    IdentityError,
    Sighting,
    command_line,
    compare,
    config_file,
    flat,
    from_arguments,
    from_metrics,
    from_models,
    from_server_info,
    parallel_sizes,
    unplanned,
    unset,
)
from ansible.module_utils.fleet_metrics import MetricsError, parse

PROC = Path("/proc")
AT_ONCE = 64
NO_ARGUMENTS = ("image_id", "version")


class Engine:
    """One engine, or one member of it: what is seen of it, and where that is not what was planned."""

    def __init__(self, spec: dict[str, Any], container: dict[str, Any] | None, timeout: float) -> None:
        self.name: str = spec["member"] or spec["engine"]
        self.external = not spec["container"]
        self.differences: list[str] = []
        self._spec = spec
        self._container = container
        self._timeout = timeout
        expected = {**spec["expected"], "image_id": spec["image_id"]}
        self._expected = {name: value for name, value in expected.items() if value is not None}
        self._args = flat(spec["args"] or {})
        self._sightings: list[Sighting] = []
        self._notes: list[str] = []

    def look(self) -> Engine:
        if (self.external or self._look_at_container()) and self._spec["url"]:
            self._ask(self._spec["url"])
        planned = {**self._spec["env"], **self._args, **self._expected}
        self.differences += compare(planned, self._sightings)
        return self

    @property
    def outcome(self) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for sighting in self._sightings:
            if sighting.name in self._expected or sighting.name in NO_ARGUMENTS:
                seen.setdefault(sighting.name, sighting.value)
        hidden = sorted(self._expected.keys() - seen.keys())
        return {
            "engine": self._spec["engine"],
            "member": self.name,
            "seen": seen,
            "differences": self.differences,
            "notes": self._notes + ([f"Not visible: {', '.join(hidden)}."] if hidden else []),
        }

    # --- the container

    def _look_at_container(self) -> bool:
        """Whether it runs. Then its image, arguments and environment have been seen."""
        name, unit = self._spec["container"], self._spec["unit"]
        where = f"; see journalctl -u {unit}" if unit else ""
        if self._container is None:
            self.differences.append(f"its container {name} is not on this host{where}")
            return False
        state = self._container["State"]
        if state["Status"] != "running":
            self.differences.append(f"its container {name} is {state['Status']}, not running{where}")
            return False
        self._sightings.append(Sighting("image_id", self._container["Image"], "docker inspect"))
        try:
            self._see_arguments(int(state["Pid"]), state["StartedAt"])
        except IdentityError as fault:
            self.differences.append(f"{fault}{where}")
        except OSError as error:
            self.differences.append(
                f"its process cannot be read; it has just ended, or this is not run as root ({error}){where}"
            )
        self._see_environment(self._container["Config"]["Env"] or [])
        return True

    def _see_arguments(self, first_pid: int, started_at: str) -> None:
        pid, argv = serving_process(first_pid)
        line = command_line(argv)
        config = str(line.pop("config", ""))
        seen = from_arguments(line, read_config(pid, config, started_at) if config else {}, f"its {config}")
        planned = {**self._args, **self._expected}
        if self._spec["args"] is not None:
            self.differences += unplanned({**planned, **self._spec["expected"]}, seen)
        seen.update({sighting.name: sighting for sighting in parallel_sizes(seen)})
        elsewhere = {*NO_ARGUMENTS, *FROM_THE_MODEL} - self._args.keys()
        self._sightings += seen.values()
        self._sightings += unset([name for name in planned if name not in elsewhere], seen)

    def _see_environment(self, entries: list[str]) -> None:
        environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        for name in self._spec["env"]:
            # TENSOR_PARALLEL_SIZE is the size by another name: one sentence then tells of both.
            known_as = name.lower() if name.lower() in self._expected else name
            self._sightings.append(Sighting(known_as, environment.get(name), "its environment"))

    # --- HTTP

    def _ask(self, url: str) -> None:
        try:
            version = fetch_json(f"{url}/version", timeout=self._timeout).get("version")
            self._see([Sighting("version", version, "/version")])
            models = fetch_json(f"{url}/v1/models", timeout=self._timeout)
            self._see(from_models(models, self._expected.get("served_name")))
        except HttpError as fault:
            self.differences.append(str(fault))
            return
        except IdentityError as fault:
            self.differences.append(f"{url}/v1/models says nothing: {fault}")
        if self._spec["server_info"]:
            self._ask_server_info(f"{url}/server_info?config_format=json")
        if self.external and self._expected.keys() - {sighting.name for sighting in self._sightings}:
            self._ask_metrics(f"{url}/metrics")

    def _ask_server_info(self, page: str) -> None:
        try:
            answer = fetch(page, timeout=self._timeout)
            if answer.status not in (403, 404):
                self._see(from_server_info(answer.expect_ok().json()))
                return
            what = f"{page} answered {answer.status}: dev mode is off"
        except HttpError as fault:
            what = str(fault)
        except IdentityError as fault:
            what = f"{page} says nothing: {fault}"
        if self.external:
            self._notes.append(f"{what}.")
        else:
            self.differences.append(f"the plan has dev mode on, but {what}")

    def _ask_metrics(self, page: str) -> None:
        """See what /metrics tells of the values that no other page did."""
        known = {sighting.name for sighting in self._sightings}
        try:
            samples = parse(fetch(page, timeout=self._timeout).expect_ok().body.decode())
            self._see([sighting for sighting in from_metrics(samples) if sighting.name not in known])
        except (HttpError, IdentityError, MetricsError, UnicodeDecodeError) as fault:
            self._notes.append(f"{page} says nothing: {fault}.")

    def _see(self, sightings: list[Sighting]) -> None:
        """Keep what is expected: what vLLM made of the other arguments need not be what it was given."""
        self._sightings += [s for s in sightings if s.name in self._expected or s.name == "version"]


def serving_process(pid: int) -> tuple[int, list[str]]:
    """Id and words of a container's `vllm serve`: its first process, or the child of docker's init."""
    children = (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    for candidate in (pid, *map(int, children)):
        text = (PROC / str(candidate) / "cmdline").read_bytes().decode("utf-8", "replace")
        words = text.rstrip("\0").split("\0")
        if "serve" in words:
            return candidate, words
    raise IdentityError("its container runs no `vllm serve`")


def read_config(pid: int, config: str, started_at: str) -> dict[str, Any]:
    """The arguments in the file that a process was started with."""
    path = PROC / str(pid) / "root" / config.lstrip("/")
    if path.stat().st_mtime > seconds(started_at):
        raise IdentityError(
            f"its {config} was written after the container's start ({started_at}), so nothing tells what it "
            "was started with"
        )
    try:
        arguments: dict[str, Any] = config_file(path.read_text())
    except IdentityError as fault:
        raise IdentityError(f"its {config} cannot be read: {fault}") from None
    return arguments


def seconds(started_at: str) -> float:
    """Docker's time, like 2038-01-19T03:14:07.123456789Z, in seconds since the epoch."""
    whole, _, fraction = started_at.rstrip("Z").partition(".")
    return timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")


def inspect(module: AnsibleModule, names: list[str]) -> dict[str, dict[str, Any]]:
    """What docker knows of these containers, by name; one that does not exist is left out."""
    if not names:
        return {}
    code, out, err = module.run_command(["docker", "inspect", "--type", "container", *names])
    # Without a daemon the answer is an empty list too; only the words beside it differ.
    if code and "no such" not in err.lower():
        module.fail_json(
            msg=f"docker inspect tells nothing about the engines of this host: {(err or out).strip()[:300]}. "
            "Check that docker runs, and that this user may ask it"
        )
    return {container["Name"].lstrip("/"): container for container in json.loads(out)}


def advice(engines: list[Engine]) -> str:
    wrong = {engine.external for engine in engines if engine.differences}
    parts = []
    if False in wrong:
        # The role compares the label of the container, which is still right after a change by hand.
        parts.append(
            "Run playbooks/site.yml, which starts the fleet's engines as planned. One that it leaves as it "
            "is was changed by hand: restart its unit, then run the playbook again."
        )
    if True in wrong:
        parts.append(
            "External engines are never touched: correct the inventory, or the engine where it is run."
        )
    return " ".join(parts)


def main() -> None:
    engine = {
        "engine": {"type": "str", "required": True},
        "member": {"type": "str"},
        "url": {"type": "str"},
        "container": {"type": "str"},
        "unit": {"type": "str"},
        "image_id": {"type": "str"},
        "expected": {"type": "dict", "required": True},
        "args": {"type": "dict"},
        "env": {"type": "dict", "default": {}},
        "server_info": {"type": "bool", "default": False},
    }
    module = AnsibleModule(
        argument_spec={
            "engines": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": engine,
                "required_one_of": [("url", "container")],
            },
            "timeout": {"type": "float", "default": 30},
        },
        supports_check_mode=True,
    )
    specs = module.params["engines"]
    containers = inspect(module, [spec["container"] for spec in specs if spec["container"]])
    engines = [Engine(spec, containers.get(spec["container"]), module.params["timeout"]) for spec in specs]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        engines = list(pool.map(Engine.look, engines))
    outcome: dict[str, Any] = {"changed": False, "engines": [engine.outcome for engine in engines]}
    differences = [f"{one.name}: {difference}" for one in engines for difference in one.differences]
    if differences:
        lines = "\n".join(f"- {difference}" for difference in differences)
        module.fail_json(
            msg=f"What runs is not what was planned, so no router gets it:\n{lines}\n{advice(engines)}",
            **outcome,
        )
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
