"""What is wrong with an inventory, in one shape everywhere: rule, place, value, what is wrong, remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

try:
    # ansible-core >= 2.19 tags every loaded value with the file and line it came from. The tag is not public
    # API, so a core without it costs the file:line in a message and nothing else.
    from ansible._internal._datatag._tags import Origin, VaultedValue
except ImportError:  # pragma: no cover
    Origin = VaultedValue = None

type Path = tuple[str | int, ...]
"""Where a value sits: the variable's name, then keys and list indexes."""

HIDDEN = "(hidden)"
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)($|_)", re.IGNORECASE
)
SHOWN_CHARACTERS = 120


class Severity(StrEnum):
    """Whether a problem refuses the inventory. Overridden: it would, had the operator not said why not."""

    ERROR = "error"
    WARNING = "warning"
    OVERRIDDEN = "overridden"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold. The source says where that is known from."""

    id: str
    sentence: str
    reason: str
    source: str
    remedy: str
    severity: Severity = Severity.ERROR
    overridable: bool = False
    """Whether fleet_rule_overrides may name it: there is a plan without it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a problem is: its hosts and group, the variable, and the `file:line` that set it if known."""

    hosts: tuple[str, ...] = ()
    group: str | None = None
    path: Path = ()
    origin: str | None = None

    @property
    def variable(self) -> str:
        """The path in the form an operator reads: `fleet_pools.decode.args.port`."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that does not hold somewhere. `value` is what the inventory says there, as plain data."""

    rule: Rule
    place: Place
    what: str
    remedy: str
    value: Any = None
    severity: Severity = Severity.ERROR
    reason: str | None = None
    """The operator's words for an override."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON. `override` is the operator's reason where the severity is `overridden`, else null."""
        return {
            "rule": self.rule.id,
            "sentence": self.rule.sentence,
            "severity": self.severity.value,
            "hosts": list(self.place.hosts),
            "group": self.place.group,
            "variable": self.place.variable or None,
            "origin": self.place.origin,
            "value": self.value,
            "what": self.what,
            "remedy": self.remedy,
            "override": self.reason,
        }


@dataclass(slots=True)
class Problems:
    """Collects problems. The same problem on many hosts is one problem that names them all."""

    overrides: dict[str, str] = field(default_factory=dict)
    """Rule id -> why it may be broken here."""
    _found: dict[tuple[Any, ...], tuple[Problem, dict[str, None]]] = field(default_factory=dict)

    def add(
        self,
        rule: Rule,
        what: str,
        *,
        path: Path = (),
        value: Any = None,
        host: str | None = None,
        group: str | None = None,
        source: Any = None,
        origin: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Report that `rule` does not hold.

        `what` is the fact, `remedy` replaces the rule's general one. `source` is the variable's value as
        Ansible loaded it: it knows where it was set, unless `origin` says so, and whether it is secret.
        """
        origin = origin or origin_at(source, path[1:])
        value = HIDDEN if value is not None and is_secret(source, path) else plain(value)
        reason = self.overrides.get(rule.id) if rule.overridable else None
        severity = Severity.OVERRIDDEN if reason else rule.severity
        problem = Problem(
            rule, Place((), group, path, origin), what, remedy or rule.remedy, value, severity, reason
        )
        key = (rule.id, group, path, origin, what, repr(value))
        hosts = self._found.setdefault(key, (problem, {}))[1]
        if host is not None:
            hosts[host] = None

    def all(self) -> list[Problem]:
        """Every problem in the order found."""
        return [
            replace(problem, place=replace(problem.place, hosts=tuple(hosts)))
            for problem, hosts in self._found.values()
        ]

    @property
    def errors(self) -> list[Problem]:
        """Those that refuse the inventory."""
        return [problem for problem in self.all() if problem.severity is Severity.ERROR]

    @property
    def warnings(self) -> list[Problem]:
        """Those that only deserve a look, and those that the operator overrode."""
        return [problem for problem in self.all() if problem.severity is not Severity.ERROR]


def origin(value: Any) -> str | None:
    """`file:line` of a value that Ansible loaded, or None for a value without a tag."""
    if Origin is None:
        return None
    tag = value if isinstance(value, Origin) else Origin.get_tag(value)
    if tag is None:
        return None
    place = tag.path or tag.description
    return f"{place}:{tag.line_num}" if tag.line_num else str(place)


def origin_at(value: Any, path: Path) -> str | None:
    """Origin of what is at `path` inside `value`, else of the nearest container around it that has one."""
    return next(filter(None, map(origin, reversed(_along(value, path)))), None)


def is_secret(source: Any, path: Path) -> bool:
    """Whether what is at `path` must not be printed: vaulted values, and environment, which holds tokens."""
    return is_vaulted(source, path[1:]) or "env" in path[1:-1]


def is_vaulted(source: Any, path: Path) -> bool:
    """Whether what is at `path` inside `source`, or what holds it, was encrypted in the inventory."""
    return VaultedValue is not None and any(map(VaultedValue.is_tagged_on, _along(source, path)))


def _along(value: Any, path: Path) -> list[Any]:
    """The values on the way from `value` to what is at `path`, each after its key, as far as the way goes."""
    found = [value]
    for step in path:
        if isinstance(value, Mapping) and step in value:
            found.append(next(key for key in value if key == step))
            value = value[step]
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            break
        found.append(value)
    return found


def plain(value: Any) -> Any:
    """Copy a value, tagged by Ansible or not, into plain JSON-like objects; other types become their text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}  # JSON's keys are text
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    return str(value)


def shown(value: Any) -> str:
    """A value as it appears in a sentence: short, on one line."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def text_of(problems: Iterable[Mapping[str, Any]]) -> str:
    """Problems, as `Problem.as_dict` gives them, for a person: a paragraph each, an empty string for none."""
    return "\n".join(map(_paragraph, problems))


def _paragraph(problem: Mapping[str, Any]) -> str:
    hosts = problem["hosts"]
    named = ", ".join([*hosts[:3], *([f"{len(hosts) - 3} more"] if len(hosts) > 3 else [])])
    place = [
        f"host{'s' * (len(hosts) > 1)} {named}" if hosts else "",
        f"group {problem['group']}" if problem["group"] else "",
        problem["variable"] or "",
        f"({problem['origin']})" if problem["origin"] else "",
    ]
    lines = [
        f"{problem['severity'].upper()} {problem['rule']}: {' '.join(filter(None, place)) or 'inventory'}"
    ]
    if problem["value"] is not None:
        lines.append(f"  value:  {shown(problem['value'])}")
    lines += [
        f"  wrong:  {problem['what']}",
        f"  rule:   {problem['sentence']}",
    ]
    if problem["override"]:
        lines.append(f"  accepted because: {shown(problem['override'])}")
    else:
        lines.append(f"  remedy: {problem['remedy']}")
    return "\n".join(lines)
