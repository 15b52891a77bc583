"""What every role keeps: arguments equal defaults, names have the role's prefix, and no file is left unused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet.inventory import ROLE_VARIABLES

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
FLOW = ("block", "rescue", "always")
ROLE_ACTIONS = ("ansible.builtin.import_role", "ansible.builtin.include_role")
TASKS_ACTIONS = ("ansible.builtin.import_tasks", "ansible.builtin.include_tasks")

each_role = pytest.mark.parametrize("role", ROLES)


@cache
def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.exists() else None


def folder(role: str) -> Path:
    return ROOT / "roles" / role


def files(role: str, kind: str) -> set[str]:
    """Names without suffix of the YAML files in a folder of the role."""
    return {path.stem for path in (folder(role) / kind).glob("*.yml")}


def tasks_in(path: Path) -> Iterator[dict[str, Any]]:
    """Every task of a file, with those in blocks; of a playbook, those of its plays."""
    pending = list(read(path) or [])
    while pending:
        task = pending.pop()
        yield task
        for part in (*FLOW, "tasks", "pre_tasks", "post_tasks", "handlers"):
            pending += task.get(part, [])


def tasks_of(role: str) -> Iterator[dict[str, Any]]:
    for kind in ("tasks", "handlers"):
        for path in sorted((folder(role) / kind).glob("*.yml")):
            yield from tasks_in(path)


def texts(node: Any) -> Iterator[str]:
    """Every text in a YAML document."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for part in node.values() if isinstance(node, dict) else node:
            yield from texts(part)


# In a block scalar Ansible prints the `\\n` of a Jinja string as it is; in double quotes YAML has made it an end of line.
@pytest.mark.parametrize("kind", ["playbooks", "roles/*/tasks", "roles/*/handlers", "roles/*/vars"])
def test_no_message_prints_a_backslash_for_an_end_of_line(kind):
    for path in ROOT.glob(f"{kind}/*.yml"):
        wrong = [text for text in texts(read(path)) if re.search(r"\{\{[^}]*\\n", text)]
        assert wrong == [], path


def test_another_builder_gets_what_the_workstation_has_for_building():
    [install] = [
        task for task in tasks_in(folder("container_image") / "tasks/builder.yml") if "package" in str(task)
    ]
    needed = set(
        re.findall(r"\b(debootstrap|debian-archive-keyring)\b", (ROOT / "scripts/setup").read_text())
    )
    assert needed == {"debootstrap", "debian-archive-keyring"}
    assert needed <= set(install["ansible.builtin.package"]["name"])


def test_set_up_installs_what_tests_of_the_front_run_and_never_skip():
    program = re.search(r'which\("(\w+)"', (ROOT / "tests/support/haproxy_program.py").read_text())
    assert program is not None
    assert f"need {program[1]} {program[1]}\n" in (ROOT / "scripts/setup").read_text()
    tests = [path.read_text() for path in ROOT.glob("tests/unit/modules/test_*.py")]
    users = [text for text in tests if "haproxy_program()" in text]
    assert len(users) == 2
    assert not any("skip" in text for text in users)


def role_uses() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Role, entry point and variables of each use of a role in a playbook or another role."""
    users = [*ROOT.glob("playbooks/*.yml"), *ROOT.glob("roles/*/tasks/*.yml")]
    for task in (task for path in users for task in tasks_in(path)):
        for use in (task[action] for action in ROLE_ACTIONS if action in task):
            yield use["name"], use.get("tasks_from", "main").removesuffix(".yml"), task.get("vars", {})


def spec(role: str) -> dict[str, Any]:
    return read(folder(role) / "meta" / "argument_specs.yml")["argument_specs"]


def defaults(role: str) -> dict[str, Any]:
    return read(folder(role) / "defaults" / "main.yml") or {}


def included(role: str, path: Path) -> set[str]:
    """The task files that a task file includes."""
    words = [task[action] for task in tasks_in(path) for action in TASKS_ACTIONS if action in task]
    return {(word if isinstance(word, str) else word["file"]).removesuffix(".yml") for word in words}


# --- Arguments ----------------------------------------------------------------------------------------------------


@each_role
def test_defaults_are_the_options_with_their_defaults(role):
    options = spec(role)["main"].get("options", {})
    assert {name: option.get("default", "(none)") for name, option in options.items()} == defaults(role)


@each_role
def test_other_entry_points_take_options_of_main(role):
    main = spec(role)["main"].get("options", {})
    for name, entry in spec(role).items():
        assert entry.get("options", {}).items() <= main.items() or entry.get("options") == main, name


@each_role
def test_entry_points_are_main_and_what_is_used_from_outside(role):
    used = {"main"} | {entry for name, entry, _ in role_uses() if name == role}
    assert set(spec(role)) == used
    assert used <= files(role, "tasks")


def test_a_role_is_only_given_what_it_takes():
    given = {
        (role, name)
        for role, _, variables in role_uses()
        for name in variables
        if name.startswith(role) and name not in defaults(role)
    }
    made = {
        (role, name) for role in ROLES for name in facts_of(role)
    }  # a playbook hands on what another host made
    assert given - made == set()


@each_role
def test_every_role_is_used(role):
    assert role in {name for name, *_ in role_uses()}


# --- Names ----------------------------------------------------------------------------------------------------------


def facts_of(role: str) -> set[str]:
    facts = (task.get("ansible.builtin.set_fact", {}) for task in tasks_of(role))
    return {name for fact in facts for name in fact if name != "cacheable"}


@each_role
def test_public_variables_begin_with_the_role(role):
    assert [name for name in defaults(role) if not name.startswith(f"{role}_")] == []


@each_role
def test_what_a_role_makes_begins_with_the_role_or_is_private(role):
    made = facts_of(role) | {task["register"] for task in tasks_of(role) if "register" in task}
    made |= {
        name for kind in files(role, "vars") for name in read(folder(role) / "vars" / f"{kind}.yml") or {}
    }
    allowed = re.compile(rf"{role}_|__{role}(_|$)")
    assert sorted(name for name in made if not allowed.match(name)) == []


@each_role
def test_variables_of_one_task_are_private_or_ansibles(role):
    names = {
        name
        for task in tasks_of(role)
        if not task.keys() & set(ROLE_ACTIONS)
        for name in task.get("vars", {})
    }
    assert sorted(name for name in names if not name.startswith((f"{role}_", "__", "ansible_"))) == []


def test_the_inventory_model_knows_the_variables_of_the_role_with_its_prefix():
    public = {fact for fact in facts_of("fleet_front") if not fact.startswith("__")}
    assert defaults("fleet_front").keys() | public == ROLE_VARIABLES
    assert [role for role in ROLES if role.startswith("fleet_")] == ["fleet_front"]


# --- Files ----------------------------------------------------------------------------------------------------------


@each_role
def test_every_task_file_is_used(role):
    reached: set[str] = set()
    pending = set(spec(role))
    while pending:
        name = pending.pop()
        reached.add(name)
        pending |= included(role, folder(role) / "tasks" / f"{name}.yml") - reached
    assert files(role, "tasks") == reached


@each_role
def test_handlers_are_those_that_are_notified(role):
    notified: set[str] = set()
    for task in tasks_of(role):
        words = task.get("notify", [])
        notified |= {words} if isinstance(words, str) else set(words)
    handlers = read(folder(role) / "handlers" / "main.yml") or []
    assert notified == {handler.get("listen", handler["name"]) for handler in handlers}


def everything_a_role_says(role: str) -> str:
    return "".join(path.read_text() for path in folder(role).rglob("*.yml"))


def test_templates_are_those_that_roles_use():
    shared = {path.name for path in (ROOT / "templates").iterdir()}
    own = {path.name for path in ROOT.glob("roles/*/templates/*")}
    named = {name for role in ROLES for name in re.findall(r"[\w@.-]+\.j2", everything_a_role_says(role))}
    assert named == shared | own


@each_role
def test_a_role_uses_its_own_files(role):
    own = [
        path
        for kind in ("files", "templates")
        for path in (folder(role) / kind).glob("*")
        if path.suffix != ".in" and path.name != "__pycache__"
    ]
    assert [path.name for path in own if path.name not in everything_a_role_says(role)] == []


def test_what_sends_an_image_to_many_hosts_at_once_is_throttled():
    sends = {"Pull the image by its digest", "Copy the archive"}
    throttled = {
        task["name"]: task.get("throttle") for task in tasks_of("container_image") if task["name"] in sends
    }
    assert throttled == dict.fromkeys(sends, "{{ container_image_pull_throttle }}")
