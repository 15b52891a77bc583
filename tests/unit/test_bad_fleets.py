"""Every rule has a fleet that it refuses, tests/bad_fleets/RULE[-VARIANT].yml, and accepts once one thing is put right.

Wrong lines say what is right: `KEY: VALUE  # right: VALUE` or `# right: (no such line)`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_fleet import arguments
from vllm_fleet.cli import app
from vllm_fleet.problems import Problems
from vllm_fleet.rules import BY_ID

FOLDER = Path(__file__).parents[1] / "bad_fleets"
FILES = sorted(FOLDER.glob("*.yml"))
MARK = re.compile(r"(?P<key>[^:]+:) .*?\s+# right: (?P<right>.+)")
NO_LINE = "(no such line)"
UNSHOWN = {"arguments-not-recorded": "the arguments of both of the image's variants are on record"}
"""Rules that no inventory can break in this version; they have tests of their own here."""
NEEDED_TO_GO_ON = {
    "inventory-unreadable": "there are no hosts to judge",
    "value-unreadable": "the value is missing, and that is a problem of its own",
}
"""Rules that cannot be taken away: what they refuse, nothing else could take."""


def rule_of(file: Path) -> str:
    """The longest id that the file's name begins with."""
    return max((rule for rule in BY_ID if f"{file.stem}-".startswith(f"{rule}-")), key=len)


def put_right(text: str) -> str:
    """A bad fleet with its marked lines as they should be."""
    lines, marks = [], 0
    for line in text.splitlines():
        mark = MARK.fullmatch(line)
        marks += mark is not None
        if not mark:
            lines.append(line)
        elif mark["right"] != NO_LINE:
            lines.append(f"{mark['key']} {mark['right']}")
    assert marks, "no line is marked"
    assert "# right:" not in "\n".join(lines), "a mark was not understood"
    return "\n".join(lines) + "\n"


def judge(command: str, inventory: Path) -> dict[str, Any]:
    """What `vllm-fleet COMMAND --json` says, and its exit status."""
    result = CliRunner().invoke(app, [command, "-i", str(inventory), "--json"])
    assert isinstance(result.exception, SystemExit | None), result.output
    return json.loads(result.stdout) | {"exit": result.exit_code}


def found(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(problem["rule"], problem["severity"]) for problem in document["problems"]}


def errors(document: dict[str, Any]) -> set[str]:
    return {rule for rule, severity in found(document) if severity == "error"}


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def bad(request) -> Path:
    return request.param


@pytest.fixture
def right(bad, tmp_path) -> Path:
    (tmp_path / "hosts.yml").write_text(put_right(bad.read_text()))
    return tmp_path / "hosts.yml"


def test_a_bad_fleet_is_refused_by_its_rule_alone(bad):
    rule = BY_ID[rule_of(bad)]
    document = judge("validate", bad)
    if rule.severity == "error":
        assert (errors(document), document["exit"]) == ({rule.id}, 1)
    else:
        assert (found(document), document["exit"]) == ({(rule.id, "warning")}, 0)
    for problem in document["problems"]:
        assert problem["what"]
        assert problem["remedy"]
        assert problem["hosts"] or problem["group"] or problem["variable"] or problem["origin"]


def test_the_nearest_right_fleet_has_a_plan_and_no_problem(right):
    document = judge("plan", right)
    assert (document["problems"], document["exit"]) == ([], 0)
    assert document["plan"]["engines"]


def test_with_the_rule_taken_away_the_bad_fleet_is_accepted(bad, monkeypatch):
    taken, add = rule_of(bad), Problems.add
    if taken in NEEDED_TO_GO_ON:
        pytest.skip(NEEDED_TO_GO_ON[taken])
    monkeypatch.setattr(
        Problems, "add", lambda self, rule, *args, **more: rule.id == taken or add(self, rule, *args, **more)
    )
    document = judge("validate", bad)
    assert (errors(document), document["exit"]) == (set(), 0)
    assert taken not in {rule for rule, _ in found(document)}


@pytest.mark.parametrize("rule", BY_ID)
def test_every_rule_has_a_bad_fleet(rule):
    assert (rule in {rule_of(file) for file in FILES}) != (rule in UNSHOWN)


def test_a_version_that_is_not_on_record_is_a_warning(monkeypatch):
    monkeypatch.setattr(arguments, "record", lambda version: None)
    document = judge("validate", FOLDER.parents[1] / "inventory/lab")
    assert (found(document), document["exit"]) == ({("arguments-not-recorded", "warning")}, 0)


def test_marks_are_applied_to_values_and_lines():
    text = "a:\n  b: {c: 1}  # right: {c: 2}\n  d:  # right: 3\n  e: 1  # right: (no such line)\n"
    assert put_right(text) == "a:\n  b: {c: 2}\n  d: 3\n"
    with pytest.raises(AssertionError, match="not understood"):
        put_right(f"{text}  - f  # right: g\n")
    with pytest.raises(AssertionError, match="no line"):
        put_right("a: 1\n")
