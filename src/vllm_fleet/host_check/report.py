"""All checks over all hosts: findings as data, and as text for a person."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fleet.host_check import between, checks, on_host
from vllm_fleet.host_check.checks import BY_ID, Check, Level
from vllm_fleet.host_check.judging import BETWEEN, ON_HOST, Found, Host
from vllm_fleet.host_check.reach import questions as reach_questions
from vllm_fleet.host_check.reading import UnreadableError
from vllm_fleet.host_check.scope import container_devices, device_nodes

__all__ = [
    "AcceptError",
    "accepted",
    "between",
    "judge",
    "on_host",
    "questions",
    "table",
]  # importing them registers

SHOWN = (Level.FAIL, Level.WARN, Level.ACCEPTED, Level.INFO)
SHORTEST_REASON = 10
SHOWN_HOSTS = 4


class AcceptError(Exception):
    """host_check_accept is wrong; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to on some hosts. `reason` is the operator's where it is accepted."""

    check: Check
    hosts: tuple[str, ...]
    level: Level
    seen: str
    remedy: str
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "check": self.check.id,
            "sentence": self.check.sentence,
            "level": self.level.value,
            "hosts": list(self.hosts),
            "seen": self.seen,
            "remedy": self.remedy,
            "accepted": self.reason,
        }


def accepted(accept: Any) -> dict[str, str]:
    """Check id -> why its failure is accepted.

    Raises:
        AcceptError: it is no mapping of known ids to reasons; all that is wrong is told.

    """
    if not isinstance(accept, Mapping):
        raise AcceptError(f"host_check_accept is no mapping of check ids to reasons: {accept!r}")
    wrong = [
        f"{name!r} is no check (`vllm-fleet checks` lists them)"
        if name not in BY_ID
        else f"{name}: the reason must be text of {SHORTEST_REASON} characters or more"
        for name, reason in accept.items()
        if name not in BY_ID or not isinstance(reason, str) or len(reason.strip()) < SHORTEST_REASON
    ]
    if wrong:
        raise AcceptError(f"host_check_accept: {'; '.join(wrong)}")
    return {str(name): str(reason).strip() for name, reason in accept.items()}


def questions(plan: Mapping[str, Any], host: str) -> dict[str, Any]:
    """What the modules host_observe and host_reach are asked on a host.

    Raises:
        KeyError: the plan has no such host.

    """
    members = plan["hosts"][host]["members"]
    container = None
    if members and container_devices(members):
        limits = (limit for member in members for limit in member["container_options"]["ulimits"])
        container = {
            "devices": container_devices(members),
            "ulimits": list(dict.fromkeys(limits)),
            "shm_size": members[0]["container_options"]["shm_size"],
        }
    return {
        "observe": {
            "accelerator": plan["accelerator"] if members else "cpu",
            "model": plan["model"]["path"] if members else None,
            "devices": device_nodes(members),
            "folders": ["/var/lib/docker"] if members else [],
            "container": container,
        },
        "reach": reach_questions(plan, host),
    }


def judge(plan: Mapping[str, Any], recorded: Mapping[str, Any], accept: Mapping[str, str]) -> list[Finding]:
    """Every check on every host of the plan, in the checks' order.

    Args:
        plan: the plan.
        recorded: host -> what was recorded there, `observed`, `listeners` and `dials`, or the JSON of that;
            or `failed`, why it could not be seen.
        accept: what `accepted` gave.

    """
    hosts, findings = [], []
    for name in plan["hosts"]:
        what, why = _recording(recorded.get(name))
        if why:
            findings.append(Finding(checks.ANSWERS, (name,), Level.FAIL, why, checks.ANSWERS.remedy))
        else:
            hosts.append(Host(plan, name, what))
    findings += _grouped(checks.ANSWERS, [((host.name,), Found("seen", Level.PASS)) for host in hosts])
    for one in ON_HOST:
        judged: list[tuple[tuple[str, ...], Found]] = []
        for host in hosts:
            if one.condition.holds(host):
                judged.append(((host.name,), _read(one.check, lambda: one.judge(host))))  # noqa: B023  called at once
            else:
                judged.append(((host.name,), Found(one.condition.otherwise, Level.NOT_APPLICABLE)))
        findings += _grouped(one.check, judged)
    for pair in BETWEEN:
        wanted = [host for host in hosts if pair.condition.holds(host)]
        others = tuple(host.name for host in hosts if host not in wanted)
        judged = [(tuple(names), found) for names, found in (pair.judge(wanted) if wanted else [])]
        if others:
            judged.append((others, Found(pair.condition.otherwise, Level.NOT_APPLICABLE)))
        findings += _grouped(pair.check, judged)
    return [_accept(finding, accept) for finding in findings]


def _recording(what: Any) -> tuple[Mapping[str, Any], str]:
    """What was recorded on a host; or why it was not."""
    if isinstance(what, str):
        try:
            what = json.loads(what)
        except (ValueError, RecursionError):
            return {}, f"could not read its recording: {what[:200] or 'it is empty'}"
    if isinstance(what, Mapping) and isinstance(what.get("failed"), str):
        return {}, what["failed"]
    if not isinstance(what, Mapping) or not isinstance(what.get("observed"), Mapping):
        return {}, "there is no recording of this host"
    if what["observed"].get("schema") != 1:
        return {}, "could not read its recording: it is of another version of vllm-fleet"
    return what, ""


def _read(check: Check, judge_it: Callable[[], Found]) -> Found:
    """A verdict; what cannot be read is never one that passes."""
    try:
        return judge_it()
    except UnreadableError as error:
        return Found(f"could not read: {error}", check.level)


def _grouped(check: Check, judged: Iterable[tuple[tuple[str, ...], Found]]) -> list[Finding]:
    """One finding for all hosts where the same was seen."""
    groups: dict[Found, dict[str, None]] = {}
    for names, found in judged:
        groups.setdefault(found, {}).update(dict.fromkeys(names))
    return [
        Finding(check, tuple(names), found.level, found.seen, found.remedy or check.remedy)
        for found, names in groups.items()
    ]


def _accept(finding: Finding, accept: Mapping[str, str]) -> Finding:
    reason = accept.get(finding.check.id)
    if reason is None or finding.level not in (Level.FAIL, Level.WARN):
        return finding
    return Finding(finding.check, finding.hosts, Level.ACCEPTED, finding.seen, finding.remedy, reason)


# --- showing --------------------------------------------------------------------------------------


def failed(findings: Iterable[Finding]) -> bool:
    """Whether something fails that was not accepted."""
    return any(finding.level is Level.FAIL for finding in findings)


def document(findings: list[Finding]) -> dict[str, Any]:
    """All findings as plain JSON: what is wrong, what passes and what does not apply."""
    return {
        "schema": 1,
        "ok": not failed(findings),
        "findings": [finding.as_dict() for finding in findings],
    }


def table(findings: list[Finding]) -> list[str]:
    """What deserves a look, worst first, and what to do; then counts, and which checks do not apply."""
    shown = [finding for level in SHOWN for finding in findings if finding.level is level]
    rows = [(one.level.value.upper(), one.check.id, _names(one.hosts), one.seen) for one in shown]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = []
    for one, row in zip(shown, rows, strict=True):
        head = "  ".join(word.ljust(width) for word, width in zip(row[:3], widths, strict=True))
        lines.append(f"{head}  {one.seen}")
        indent = " " * (widths[0] + 2)
        if one.level in (Level.FAIL, Level.WARN):
            lines.append(f"{indent}what to do: {one.remedy}")
        elif one.reason:
            lines.append(f"{indent}accepted because: {one.reason}")
    return [*lines, *([""] if lines else []), *_summary(findings)]


def _summary(findings: list[Finding]) -> list[str]:
    counts = Counter[Level]()
    for finding in findings:
        counts[finding.level] += len(finding.hosts)
    hosts = len({host for finding in findings for host in finding.hosts})
    told = ", ".join(f"{counts[level]} {level.value}" for level in Level if counts[level])
    lines = [f"{len(BY_ID)} checks, {hosts} host{'' if hosts == 1 else 's'}: {told}."]
    anywhere = {finding.check.id for finding in findings if finding.level is not Level.NOT_APPLICABLE}
    why = {one.check.id: one.seen for one in reversed(findings) if one.check.id not in anywhere}
    reasons: dict[str, list[str]] = {}
    for name in filter(why.__contains__, BY_ID):
        reasons.setdefault(why[name], []).append(name)
    return lines + [
        f"Do not apply, because {reason}: {', '.join(names)}." for reason, names in reasons.items()
    ]


def _names(hosts: tuple[str, ...]) -> str:
    rest = len(hosts) - SHOWN_HOSTS
    return ", ".join(hosts) if rest <= 0 else f"{', '.join(hosts[:SHOWN_HOSTS])} and {rest} more"


INTRODUCTION = """\
# Checks of the hosts

Made by `vllm-fleet checks --markdown`; a test compares the two. How to run them:
[../host-check.md](../host-check.md).

A check that fails stops `site.yml` before anything is changed; a warning does not. What cannot be read never
passes: it has the level of the check."""


def markdown() -> str:
    """The reference of all checks. A check's heading is its id, and so its anchor."""
    where = {one.check.id: one.condition.where for one in ON_HOST}
    where |= {one.check.id: f"{one.condition.where}, compared" for one in BETWEEN}
    kinds: dict[str, list[str]] = {}
    parts = []
    for check in BY_ID.values():
        kinds.setdefault(check.level.value.capitalize(), []).append(f"[{check.id}](#{check.id})")
        facts = (
            f"- {check.level.value.capitalize()}, on {where.get(check.id, 'all hosts')}\n"
            f"- Why: {check.reason}\n- Known from: {check.source}\n- What to do: {check.remedy}"
        )
        parts += [f"## {check.id}", check.sentence, facts]
    index = [f"{kind}: {', '.join(links)}." for kind, links in kinds.items()]
    return "\n\n".join([INTRODUCTION, *index, *parts]) + "\n"
