#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: host_reach
short_description: Open listeners for a short time, and find out which of other hosts' are reached
description:
  - With O(state=listening) a process of its own opens O(listeners), greets whoever connects with the name of
    the host, and ends after O(seconds). A listener whose unit runs is left to that unit.
  - With O(state=dialed) connects to O(dials), all at once, and tells what came of each.
  - With O(state=closed) ends the process at once.
  - Nothing is written. In check mode the listeners are opened as well; they are gone when the check ends.
options:
  state:
    description: What to do.
    type: str
    choices: [listening, dialed, closed]
    required: true
  name:
    description: The name of this host, for the greeting.
    type: str
    default: ""
  listeners:
    description: What to open, C(address) and C(port), and the C(unit) that has it when the fleet runs.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Address to bind.
        type: str
        required: true
      port:
        description: TCP port.
        type: int
        required: true
      unit:
        description: systemd unit that the port belongs to.
        type: str
        default: ""
  dials:
    description: What to connect to, C(address) and C(port).
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Address, or the name of a host.
        type: str
        required: true
      port:
        description: TCP port.
        type: int
        required: true
  seconds:
    description: How long the listeners stay.
    type: float
    default: 60
  timeout:
    description: Seconds that one connection may take.
    type: float
    default: 3
"""

EXAMPLES = r"""
- name: Open what others will dial
  host_reach:
    state: listening
    name: "{{ inventory_hostname }}"
    listeners:
      - {address: 10.0.0.4, port: 8000, unit: vllm-engine-prefill-rack1-04-0.service}

- name: Dial it
  host_reach:
    state: dialed
    dials:
      - {address: 10.0.0.4, port: 8000}
"""

RETURN = r"""
listeners:
  description: O(listeners) with C(outcome), C(listening), C(left to its unit), or why it could not be opened.
  returned: for O(state=listening)
  type: list
  elements: dict
dials:
  description:
    - O(dials) with C(outcome), C(connected) or why not, and C(greeting), the name of the host that answered
      where one of this module's listeners did.
  returned: for O(state=dialed)
  type: list
  elements: dict
held:
  description:
    - Whether ports were opened that belong to units, which could not start now. The others may be left to
      their end.
  returned: for O(state=listening)
  type: bool
"""

import errno
import os
import selectors
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

GREETING = "vllm-fleet host check "
CONTROL = "\0vllm-fleet-host-check"  # abstract: it is gone with the process that has it
GREETING_SECONDS = 0.3
WORDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route to the host, or rejected",
    errno.ENETUNREACH: "no route to the network",
    errno.EADDRINUSE: "taken",
    errno.EADDRNOTAVAIL: "the host does not have that address",
}


def why(error: OSError) -> str:
    if isinstance(error, socket.timeout):
        return "no answer"
    return WORDS.get(error.errno or 0, error.strerror or str(error))


def running(units: list[str]) -> set[str]:
    """Those of the units that run, or are about to."""
    if not units:
        return set()
    command = ["systemctl", "show", "--property=Id,ActiveState", *units]
    quiet = subprocess.DEVNULL
    found: set[str] = set()
    try:
        done = subprocess.run(  # noqa: S603  names of units in the plan
            command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return set(units)  # nobody knows: better not to take a port that a unit may want
    for paragraph in done.stdout.split("\n\n"):
        words = dict(line.split("=", 1) for line in paragraph.splitlines() if "=" in line)
        if words.get("ActiveState") not in ("inactive", "failed", None):
            found.add(words.get("Id", ""))
    return found


def listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Not held by connections of an engine that has just ended.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def close() -> None:
    """End the process of an earlier call, if there is one, and wait until its ports are free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.settimeout(5)
        try:
            control.connect(CONTROL)
            control.recv(1)  # nothing comes: it ends with the process
        except OSError:
            return


def listen(params: dict[str, Any]) -> dict[str, Any]:
    close()
    left = running([spec["unit"] for spec in params["listeners"] if spec["unit"]])
    opened, told, held = [], [], False
    for spec in params["listeners"]:
        outcome = "left to its unit"
        if spec["unit"] not in left:
            try:
                opened.append(listener(spec["address"], spec["port"]))
                outcome, held = "listening", held or bool(spec["unit"])
            except OSError as error:
                outcome = why(error)
        told.append({**spec, "outcome": outcome})
    if opened:
        serve_apart(opened, params)
    return {"listeners": told, "held": held}


def serve_apart(opened: list[socket.socket], params: dict[str, Any]) -> None:
    """Hand the listeners to a process that outlives this one."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    control.bind(CONTROL)
    control.listen(1)
    if os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # or ssh would wait for it
        os.dup2(nothing, stream)
    try:
        serve(opened, control, f"{GREETING}{params['name']}\n".encode(), params["seconds"])
        for sock in opened:  # before the control socket, whose end says that the ports are free
            sock.close()
    finally:
        os._exit(0)  # without the cleaning up that is its parent's


def serve(opened: list[socket.socket], control: socket.socket, greeting: bytes, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for sock in (*opened, control):
            sock.setblocking(False)  # noqa: FBT003  the function takes it by position only
            selector.register(sock, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is control:
                    return
                try:
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    connection.send(greeting)
                    connection.close()
                except OSError:
                    continue


def dial(address: str, port: int, timeout: float) -> dict[str, Any]:
    try:
        with socket.create_connection((address, port), timeout) as connection:
            connection.settimeout(GREETING_SECONDS)
            try:
                said = connection.recv(300).decode("utf-8", "replace")
            except OSError:
                said = ""
    except OSError as error:
        return {"outcome": why(error), "greeting": None}
    greeted = said.startswith(GREETING)
    return {"outcome": "connected", "greeting": said[len(GREETING) :].strip() if greeted else None}


def dial_all(params: dict[str, Any]) -> dict[str, Any]:
    dials, timeout = params["dials"], params["timeout"]
    with ThreadPoolExecutor(64) as pool:
        outcomes = list(pool.map(lambda spec: dial(spec["address"], spec["port"], timeout), dials))
    return {"dials": [{**spec, **outcome} for spec, outcome in zip(dials, outcomes)]}  # noqa: B905  3.9


def main() -> None:
    address = {"type": "str", "required": True}
    port = {"type": "int", "required": True}
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["listening", "dialed", "closed"], "required": True},
            "name": {"type": "str", "default": ""},
            "listeners": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"address": address, "port": port, "unit": {"type": "str", "default": ""}},
            },
            "dials": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"address": address, "port": port},
            },
            "seconds": {"type": "float", "default": 60},
            "timeout": {"type": "float", "default": 3},
        },
        supports_check_mode=True,
    )
    state = module.params["state"]
    result: dict[str, Any] = {}
    if state == "listening":
        result = listen(module.params)
    elif state == "dialed":
        result = dial_all(module.params)
    else:
        close()
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
