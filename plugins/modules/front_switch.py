#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: front_switch
short_description: Let haproxy send new requests to one server of a backend, and drain the others
description:
  - Makes the server ready first and checks that haproxy would use it; only then drains every other server of
    the backend and waits until their requests have ended. No request is refused or cut.
  - Nothing to switch means C(changed=false); requests left on drained servers are waited for even so.
  - The state is haproxy's run-time state; the caller keeps it in the configuration as well.
  - Without O(slot) nothing is switched, and RV(serving) tells which server takes requests now, or would if
    haproxy ran.
options:
  socket:
    description: Path of haproxy's admin socket (C(stats socket PATH level admin)).
    type: path
    required: true
  backend:
    description: The backend.
    type: str
    required: true
  config:
    description: haproxy's configuration. Only read, and only without O(slot).
    type: path
    default: /etc/haproxy/haproxy.cfg
  slot:
    description: The server that takes new requests from now on. Unset, nothing is switched.
    type: str
  wait:
    description: Whether to wait for the requests on the other servers.
    type: bool
    default: true
  drain_timeout:
    description: The most seconds to wait for them. Reaching it is no failure, see RV(drained).
    type: float
    default: 1800
  ready_timeout:
    description: Seconds until haproxy's own checks must call the server up.
    type: float
    default: 15
"""

EXAMPLES = r"""
- name: Send new requests to the candidate
  front_switch:
    socket: /run/haproxy/admin.sock
    backend: vllm_router
    slot: b
    drain_timeout: 1830
"""

RETURN = r"""
serving:
  description:
    - The server that takes new requests. Where no haproxy listens on the socket, the one that takes them by
      O(config), if that is the fleet's. Empty for none.
  returned: when O(slot) is unset
  type: str
ours:
  description: Whether O(config) is the fleet's.
  returned: when O(slot) is unset
  type: bool
drained:
  description: Whether no other server of the backend has a request left.
  returned: success
  type: bool
sessions:
  description: The requests left on each other server.
  returned: success
  type: dict
most_sessions:
  description: The most requests seen on the other servers at one time while waiting.
  returned: success
  type: int
waited:
  description: Seconds spent waiting for them.
  returned: success
  type: float
before:
  description: The status of each server before, in haproxy's words.
  returned: success
  type: dict
after:
  description: The status of each server afterwards.
  returned: success
  type: dict
"""

import csv
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

QUICK = 5.0
PAUSE = 0.25


class SocketError(Exception):
    """haproxy's socket gave nothing usable."""


# srv_admin_state: maintenance or drain, forced or inherited.
NOT_READY = 0x01 | 0x02 | 0x08 | 0x10 | 0x20


@dataclass(frozen=True)
class Server:
    status: str
    check: str
    sessions: int
    ready: bool  # whether an administrator lets it take requests; it may be down all the same

    @property
    def up(self) -> bool:
        """Whether requests will reach it: its last check was good, or it is not checked at all."""
        # Out of maintenance a server counts as UP until its first check says otherwise.
        return self.status == "no check" or (self.status.startswith("UP") and self.check.endswith("OK"))


class Haproxy:
    def __init__(self, path: str, backend: str) -> None:
        self.path, self.backend = path, backend

    def command(self, text: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(QUICK)
                connection.connect(self.path)
                connection.sendall(f"{text}\n".encode())
                parts = []
                while part := connection.recv(65536):
                    parts.append(part)
        except OSError as error:
            raise SocketError(f"haproxy's socket {self.path} did not take '{text}': {error}") from None
        return b"".join(parts).decode("utf-8", "replace")

    def listens(self) -> bool:
        """Whether a haproxy is there at all."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            return not connection.connect_ex(self.path)

    def servers(self) -> dict[str, Server]:
        admin = {row["srv_name"]: int(row["srv_admin_state"]) for row in self._states()}
        return {
            row["svname"]: Server(
                row["status"], row["check_status"], int(row["scur"]), not admin[row["svname"]] & NOT_READY
            )
            for row in self._table(
                f"show stat {self.backend} 4 -1", ("svname", "status", "check_status", "scur")
            )
        }

    def _states(self) -> list[dict[str, str]]:
        # Its first line is the format's version.
        question = f"show servers state {self.backend}"
        return self._table(question, ("srv_name", "srv_admin_state"), skip=1, delimiter=" ")

    def _table(
        self, question: str, columns: tuple[str, ...], skip: int = 0, delimiter: str = ","
    ) -> list[dict[str, str]]:
        page = self.command(question)
        lines = [line for line in page.splitlines()[skip:] if line.strip()]
        rows = list(csv.DictReader([line.lstrip("# ") for line in lines], delimiter=delimiter))
        if any(row.get(column) is None for row in rows for column in columns):
            raise SocketError(
                f"haproxy's socket {self.path} answered '{question}' with: {page.strip()[:200]}"
            )
        return rows

    def set_state(self, server: str, state: str) -> None:
        answer = self.command(f"set server {self.backend}/{server} state {state}").strip()
        if answer:
            raise SocketError(f"haproxy refused to set {self.backend}/{server} to {state}: {answer[:200]}")


class Switch:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, Any] = module.params
        self.slot: str = self.params["slot"]
        self.haproxy = Haproxy(self.params["socket"], self.params["backend"])
        self.before = self.haproxy.servers()

    def run(self) -> NoReturn:
        if self.slot not in self.before:
            self.module.fail_json(
                msg=f"haproxy's backend {self.haproxy.backend} has no server {self.slot!r}, only "
                f"{sorted(self.before) or 'none'}: check the backend's name, and that haproxy runs with the "
                "fleet's configuration"
            )
        to_drain = [name for name, server in self.before.items() if name != self.slot and server.ready]
        changed = bool(to_drain) or not self.before[self.slot].ready
        if changed and not self.module.check_mode:
            self._make_ready()
            for name in to_drain:
                self.haproxy.set_state(name, "drain")
        began = time.monotonic()
        most = self._wait_until_drained() if not self.module.check_mode else 0
        after = self.haproxy.servers()
        sessions = self._sessions(after)
        self.module.exit_json(
            changed=changed,
            drained=not any(sessions.values()),
            sessions=sessions,
            most_sessions=max(most, sum(sessions.values())),
            waited=round(time.monotonic() - began, 1),
            before={name: server.status for name, server in self.before.items()},
            after={name: server.status for name, server in after.items()},
        )

    def _make_ready(self) -> None:
        was_ready = self.before[self.slot].ready
        if not was_ready:
            self.haproxy.set_state(self.slot, "ready")
        deadline = time.monotonic() + self.params["ready_timeout"]
        while not (server := self.haproxy.servers()[self.slot]).up:
            if time.monotonic() >= deadline:
                if not was_ready:
                    self.haproxy.set_state(self.slot, "drain")
                self.module.fail_json(
                    msg=f"haproxy calls {self.haproxy.backend}/{self.slot} {server.status!r} "
                    f"{self.params['ready_timeout']:g} s after it was made ready, so nothing was switched: "
                    "the other servers keep their requests. Check that the router behind it answers "
                    "haproxy's health check"
                )
            time.sleep(PAUSE)

    def _wait_until_drained(self) -> int:
        """Wait as long as the task allows; the most requests seen on the other servers."""
        deadline = time.monotonic() + (self.params["drain_timeout"] if self.params["wait"] else 0)
        most = 0
        while left := sum(self._sessions(self.haproxy.servers()).values()):
            most = max(most, left)
            if time.monotonic() >= deadline:
                break
            time.sleep(PAUSE)
        return most

    def _sessions(self, servers: dict[str, Server]) -> dict[str, int]:
        return {name: server.sessions for name, server in servers.items() if name != self.slot}


def look(haproxy: Haproxy, config: Path) -> dict[str, Any]:
    """The first server that takes requests, or ""; and whether haproxy's configuration is the fleet's."""
    text = config.read_text(errors="replace") if config.exists() else ""
    ours = re.search("^# Of vllm-fleet", text, re.MULTILINE) is not None
    try:
        ready = [name for name, server in haproxy.servers().items() if server.ready]
    except SocketError:
        if haproxy.listens():
            raise
        # The others are "disabled".
        ready = re.findall(r"^ *server (\S+) \S+$", text, re.MULTILINE) if ours else []
    return {"serving": next(iter(ready), ""), "ours": ours}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "socket": {"type": "path", "required": True},
            "backend": {"type": "str", "required": True},
            "config": {"type": "path", "default": "/etc/haproxy/haproxy.cfg"},
            "slot": {"type": "str"},
            "wait": {"type": "bool", "default": True},
            "drain_timeout": {"type": "float", "default": 1800},
            "ready_timeout": {"type": "float", "default": 15},
        },
        supports_check_mode=True,
    )
    try:
        if module.params["slot"] is None:
            haproxy = Haproxy(module.params["socket"], module.params["backend"])
            module.exit_json(changed=False, **look(haproxy, Path(module.params["config"])))
        Switch(module).run()
    except SocketError as fault:
        module.fail_json(msg=f"{fault}. Is haproxy running, and may this user use its socket?")


if __name__ == "__main__":
    main()
