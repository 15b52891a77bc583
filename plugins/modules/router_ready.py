#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: router_ready
short_description: Check that a vllm-router serves exactly the declared engines, or that the front answers
description:
  - Waits for C(/readiness) to count every declared engine healthy, compares C(/workers) with the lists, and
    asks for one completion. A unit that failed or was restarted fails the module at once, with the last lines
    of its log.
  - With O(front) only asks for one completion and one chat completion, and warns of a certificate that ends
    within 30 days. HTTP 200 alone does not count. A front that says 503 is asked again, because the router
    finds an engine that has just come back only when it looks at it next.
  - Changes nothing on the host, so it runs in check mode too.
options:
  url:
    description: The router's or the front's URL, without a path.
    type: str
    required: true
  served_name:
    description: The name the fleet serves the model under.
    type: str
    required: true
  unit:
    description: The router's systemd unit on this host. Unset, only HTTP is looked at.
    type: str
  front:
    description: Whether the URL is the fleet's front rather than a router.
    type: bool
    default: false
  key_file:
    description: File on this host with the key that the front asks for. Unset, none is sent.
    type: path
  ca:
    description: PEM file on this host by which a certificate is judged. Unset, by what the host trusts.
    type: path
  mode:
    description: C(pd) for prefill and decode engines, C(mixed) for ordinary ones. Required unless O(front).
    type: str
    choices: [pd, mixed]
  prefill:
    description: URLs of the prefill engines.
    type: list
    elements: str
    default: []
  decode:
    description: URLs of the decode engines.
    type: list
    elements: str
    default: []
  workers:
    description: URLs of the engines in C(mixed) mode.
    type: list
    elements: str
    default: []
  ranks:
    description:
      - URL -> data-parallel size, of the engines that have more than one rank. vllm-router 0.1.17 lists such
        an engine as one worker URL@RANK for each, whatever its flags say; one worker URL is right too.
    type: dict
    default: {}
  timeout:
    description: Seconds until the router must be ready, or the front no longer answer 503.
    type: float
    default: 60
  request_timeout:
    description: Seconds a completion may take. The first chat of an engine takes long.
    type: float
    default: 60
"""

EXAMPLES = r"""
- name: Check the candidate
  router_ready:
    unit: vllm-router@b.service
    url: http://127.0.0.1:30001
    mode: pd
    prefill: ["http://10.0.0.4:8000"]
    decode: ["http://10.0.0.5:8000"]
    served_name: qwen3-30b-a3b

- name: Check the front
  router_ready:
    front: true
    url: http://10.0.0.3:8080
    served_name: qwen3-30b-a3b
"""

RETURN = r"""
readiness:
  description: What C(/readiness) said; empty for the front.
  returned: success
  type: dict
workers:
  description: The engines the router knows, each with C(url), C(role) and C(healthy); empty for the front.
  returned: success
  type: list
  elements: dict
answers:
  description: The text of each completion asked for, by path.
  returned: success
  type: dict
waited:
  description: Seconds until the router was ready.
  returned: success
  type: float
"""

import socket
import ssl
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fleet_http import HttpError, fetch, fetch_json
from ansible.module_utils.fleet_unit import UnitError, journal_tail, unit_state

QUICK = 5.0
PAUSE = 0.5
UNAVAILABLE = 503
CERTIFICATE_DAYS = 30  # of notice
WORKERS_ADVICE = (
    "The router's list is fixed when it starts: start one with the declared engines, and check that each of "
    "them is ready first"
)


def expected_workers(params: dict[str, Any]) -> dict[str, str]:
    """The role each URL should have, in the router's own words."""
    if params["mode"] == "mixed":
        return dict.fromkeys(params["workers"], "regular")
    return {url: role for role in ("prefill", "decode") for url in params[role]}


def with_ranks(expected: dict[str, str], ranks: dict[str, Any]) -> dict[str, str]:
    """The same with a worker URL@RANK for each data-parallel rank, as the router makes them in pd mode."""
    return {
        f"{url}@{rank}" if ranks.get(url) else url: role
        for url, role in expected.items()
        for rank in range(int(ranks.get(url, 1)))
    }


def short_of(readiness: dict[str, Any], expected: dict[str, str], mode: str) -> str | None:
    """What /readiness still lacks, in a few words; None when it counts every engine."""
    if mode == "mixed":
        counts = {"regular": (readiness.get("healthy_workers"), readiness.get("total_workers"))}
    else:
        parts = {role: readiness.get(role) for role in ("prefill", "decode")}
        counts = {
            role: (part.get("healthy"), part.get("total")) if isinstance(part, dict) else (None, None)
            for role, part in parts.items()
        }
    wanted = {role: list(expected.values()).count(role) for role in counts}
    short = [
        f"{healthy} of {total} {role} engines healthy where {wanted[role]} are declared"
        for role, (healthy, total) in counts.items()
        if (healthy, total) != (wanted[role], wanted[role])
    ]
    return ", ".join(short) or None


def compare_workers(seen: list[dict[str, Any]], expected: dict[str, str]) -> list[str]:
    """Every difference between the engines the router knows and those declared."""
    roles = {worker["url"]: worker["role"] for worker in seen}
    problems = [f"{url} ({role}) is missing" for url, role in sorted(expected.items()) if url not in roles]
    problems += [
        f"{url} ({role}) is not declared" for url, role in sorted(roles.items()) if url not in expected
    ]
    problems += [
        f"{url} is {roles[url]} instead of {role}"
        for url, role in sorted(expected.items())
        if url in roles and roles[url] != role
    ]
    return problems + sorted(f"{worker['url']} is unhealthy" for worker in seen if not worker["healthy"])


def known_workers(url: str) -> list[dict[str, Any]]:
    answer = fetch_json(f"{url}/workers", timeout=QUICK)
    try:
        return [
            {"url": str(w["url"]), "role": w["worker_type"], "healthy": bool(w["is_healthy"])}
            for w in answer["workers"]
        ]
    except (KeyError, TypeError):
        raise HttpError(
            f"{url}/workers answered without a usable list of workers: {str(answer)[:300]}"
        ) from None


def generate(url: str, path: str, params: dict[str, Any]) -> str:
    """One short answer through the router; its text."""
    chat = path.endswith("/chat/completions")
    prompt = {"messages": [{"role": "user", "content": "Say hello."}]} if chat else {"prompt": "Hello"}
    payload = {"model": params["served_name"], "max_tokens": 8, "temperature": 0, **prompt}
    headers = {"Authorization": f"Bearer {params['key']}"} if params["key"] else None
    answer = fetch_json(url + path, payload, params["request_timeout"], headers, params["ca"])
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        finish_reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError):
        raise HttpError(f"{url}{path} answered 200 without a choice: {str(answer)[:300]}") from None
    if finish_reason == "error" or not text:
        raise HttpError(f"{url}{path} answered 200 but no text (finish_reason {finish_reason!r})")
    return str(text)


def certificate_end(url: str, ca: str | None) -> float:
    """When the certificate behind an https URL ends, in seconds since the epoch.

    Raises:
        OSError: it cannot be had, or not be believed.

    """
    parts = urlsplit(url)
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection((str(parts.hostname), parts.port or 443), QUICK) as plain,
        context.wrap_socket(plain, server_hostname=parts.hostname) as encrypted,
    ):
        return float(ssl.cert_time_to_seconds(str((encrypted.getpeercert() or {})["notAfter"])))


def read_key(module: AnsibleModule) -> str:
    """The key for the front; empty where it asks for none."""
    path: str | None = module.params["key_file"]
    if path is None:
        return ""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        module.fail_json(
            msg=f"The front's key cannot be read from {path}: {error.strerror}. Run playbooks/router.yml"
        )
    module.no_log_values.add(key)
    return key


class Check:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, Any] = module.params
        self.url: str = self.params["url"]
        self.unit: str | None = self.params["unit"]
        self.restarts: int | None = None
        self.restarted = 0

    def fail(self, message: str) -> NoReturn:
        log = ""
        if self.unit:
            tail = journal_tail(self.module.run_command, self.unit, self.restarted)
            log = f" The log of {self.unit} ends with:\n{tail}"
        self.module.fail_json(msg=f"{message}.{log}")

    def watch_unit(self) -> None:
        if not self.unit:
            return
        try:
            state = unit_state(self.module.run_command, self.unit)
        except UnitError as fault:
            self.module.fail_json(msg=str(fault))
        if self.restarts is None:
            self.restarts = state.restarts
        self.restarted = state.restarts - self.restarts
        trouble = state.fault(self.restarts)
        if trouble:
            self.fail(
                f"The router's unit {self.unit} {trouble}. Waiting will not help: mend what its log says"
            )

    def wait_ready(self, *alternatives: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Its readiness, and which of the expected sets of workers that counts; the first one is named."""
        deadline = time.monotonic() + self.params["timeout"]
        while True:
            self.watch_unit()
            try:
                answer = fetch(f"{self.url}/readiness", timeout=QUICK)
                readiness = answer.json()
                short = [short_of(readiness, expected, self.params["mode"]) for expected in alternatives]
                if answer.status == 200 and None in short:
                    return readiness, alternatives[short.index(None)]
                seen = f"{answer.url} answered {answer.status}: {short[0] or answer.excerpt}"
            except HttpError as fault:
                seen = str(fault)
            if time.monotonic() >= deadline:
                self.fail(
                    f"The router is not ready after {self.params['timeout']:g} s: {seen}. It opens its port "
                    "only once every engine answered /health: check the engines it names"
                )
            time.sleep(PAUSE)

    def warn_of_certificate(self) -> None:
        """Say so if the front's certificate ends soon."""
        if not self.url.startswith("https:"):
            return
        try:
            end = certificate_end(self.url, self.params["ca"])
        except OSError as error:
            self.fail(f"The certificate of {self.url} cannot be looked at: {error}")
        days = (end - time.time()) / 86400
        if days < CERTIFICATE_DAYS:
            date = time.strftime("%Y-%m-%d", time.gmtime(end))
            self.module.warn(
                f"The front's certificate ends on {date}, in {days:.0f} days. Put a new one where "
                "fleet_tls_certificate says and run playbooks/router.yml"
            )

    def generate(self, paths: list[str]) -> dict[str, str]:
        what = "front" if self.params["front"] else "router"
        deadline = time.monotonic() + (self.params["timeout"] if self.params["front"] else 0)
        while True:
            try:
                return {path: generate(self.url, path, self.params) for path in paths}
            except HttpError as fault:
                if fault.status != UNAVAILABLE or time.monotonic() >= deadline:
                    self.fail(
                        f"No answer came through the {what}: {fault}. Run the proof (playbooks/prove.yml) to "
                        "see which engine it is"
                    )
            time.sleep(PAUSE)


def main() -> None:
    urls = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "served_name": {"type": "str", "required": True},
            "unit": {"type": "str"},
            "front": {"type": "bool", "default": False},
            "key_file": {"type": "path", "no_log": False},
            "ca": {"type": "path"},
            "mode": {"type": "str", "choices": ["pd", "mixed"]},
            "prefill": urls,
            "decode": urls,
            "workers": urls,
            "ranks": {"type": "dict", "default": {}},
            "timeout": {"type": "float", "default": 60},
            "request_timeout": {"type": "float", "default": 60},
        },
        required_if=[
            ("front", False, ("mode",)),
            ("mode", "pd", ("prefill", "decode")),
            ("mode", "mixed", ("workers",)),
        ],
        supports_check_mode=True,
    )
    module.params["key"] = read_key(module)
    check = Check(module)
    began = time.monotonic()
    if module.params["front"]:
        answers = check.generate(["/v1/completions", "/v1/chat/completions"])
        check.warn_of_certificate()
        module.exit_json(changed=False, readiness={}, workers=[], answers=answers, waited=0.0)

    expected = expected_workers(module.params)
    readiness, expected = check.wait_ready(with_ranks(expected, module.params["ranks"]), expected)
    waited = round(time.monotonic() - began, 1)
    try:
        workers = known_workers(check.url)
    except HttpError as fault:
        check.fail(str(fault))
    problems = compare_workers(workers, expected)
    if problems:
        check.fail(
            f"The router at {check.url} does not serve the declared engines: {'; '.join(problems)}. "
            + WORKERS_ADVICE
        )
    answers = check.generate(["/v1/completions"])
    check.watch_unit()
    module.exit_json(changed=False, readiness=readiness, workers=workers, answers=answers, waited=waited)


if __name__ == "__main__":
    main()
