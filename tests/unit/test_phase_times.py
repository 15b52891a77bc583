"""The callback phase_times, in real runs of ansible-playbook on localhost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from by_path import load

ROOT = Path(__file__).parents[2]
phase_times = load(ROOT / "plugins" / "callback" / "phase_times.py")

# Stand-ins with a known duration for what the callback tells apart.
ENGINE_READY = """#!/usr/bin/python
import time
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"seconds": {"type": "float"}, "ready": {"type": "bool", "default": True}})
time.sleep(module.params["seconds"])
module.exit_json(ready=module.params["ready"])
"""
SYSTEMD_SERVICE = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"state": {}, "changes": {"type": "bool"}})
module.exit_json(changed=module.params["changes"])
"""
SKOPEO = "#!/bin/sh\nsleep 0.5\n"

FILES = {
    "site.yml": """
- {name: Validate, import_playbook: validate.yml}
- {name: Engines, import_playbook: engines.yml}
- {name: Images, import_playbook: images.yml}
- {name: Validate, import_playbook: validate.yml}
""",
    "validate.yml": """
- hosts: fast
  gather_facts: false
  tasks: [{ansible.builtin.command: {argv: [sleep, "0.3"]}}]
""",
    "engines.yml": """
- name: A play whose name is not the phase
  hosts: all
  gather_facts: false
  tasks: [{ansible.builtin.include_tasks: wait.yml}]
""",
    "wait.yml": """
- engine_ready: {seconds: "{{ seconds }}"}
- ansible.builtin.set_fact: {rounds: "{{ rounds | default(0) | int + 1 }}"}
- ansible.builtin.include_tasks: wait.yml
  when: rounds | int < 2
""",
    "images.yml": """
- hosts: fast
  gather_facts: false
  tasks:
    - ansible.builtin.command: {argv: [skopeo, copy, here, there]}
      notify: Restart
  handlers:
    - name: Restart
      ansible.builtin.command: {argv: [sleep, "0.4"]}
- hosts: fast
  gather_facts: false
  tasks: [{ansible.builtin.command: {argv: [docker, image, ls]}, when: false}]
""",
    # 0.5 s and another slice between the units' start and ready; 0.5 s more that are not engines starting.
    "starting.yml": """
- hosts: slow1
  gather_facts: false
  tasks:
    - import_role: {name: vllm_engine}
      vars: {changes: true}
- hosts: fast
  gather_facts: false
  tasks: [{ansible.builtin.command: {argv: [sleep, "0.5"]}}]
- hosts: slow1
  gather_facts: false
  tasks:
    - engine_ready: {seconds: 0.1, ready: false}
    - ansible.builtin.command: {argv: [sleep, "0.5"]}
    - engine_ready: {seconds: 0.1}
    - ansible.builtin.command: {argv: [sleep, "0.5"]}
    - engine_ready: {seconds: 0.1}
""",
    "running.yml": """
- hosts: fast
  gather_facts: false
  tasks:
    - import_role: {name: vllm_engine}
      vars: {changes: false}
    - systemd_service: {state: restarted, changes: true}
    - ansible.builtin.command: {argv: [sleep, "0.5"]}
    - engine_ready: {seconds: 0.1, ready: false}
    - ansible.builtin.command: {argv: [sleep, "0.5"]}
    - engine_ready: {seconds: 0.1}
""",
    "roles/vllm_engine/tasks/main.yml": """
- systemd_service: {state: restarted, changes: "{{ changes }}"}
""",
    "failing.yml": """
- hosts: fast
  gather_facts: false
  tasks: [{ansible.builtin.command: {argv: [skopeo, --fail]}, failed_when: true}]
""",
    "hosts": """
[all]
fast seconds=0.1
slow[1:3] seconds=0.6
[all:vars]
ansible_connection=local
ansible_python_interpreter={python}
""",
    "library/engine_ready.py": ENGINE_READY,
    "library/systemd_service.py": SYSTEMD_SERVICE,
    "bin/skopeo": SKOPEO,
}


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Run a playbook; its output after the recap, as phase -> the numbers of its line."""
    folder = tmp_path_factory.mktemp("phases")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{python}", sys.executable))
        path.chmod(0o755 if path.parent.name == "bin" else 0o644)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE")},
        "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "plugins" / "callback"),
        "ANSIBLE_CALLBACKS_ENABLED": "phase_times",
        "ANSIBLE_LIBRARY": "library",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }

    def run(playbook: str) -> dict[str, list[float]]:
        command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts", playbook]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        _, recap, after = done.stdout.partition("PLAY RECAP")
        assert recap, done.stdout + done.stderr
        assert "phase_times" not in done.stderr  # Ansible only warns of a callback that breaks
        _, table, lines = after.partition("PHASES")
        assert table, after
        rows = re.findall(r"^(\S.*?) {2,}([\d. ]+)$", lines, re.MULTILINE)
        return {name: [float(number) for number in numbers.split()] for name, numbers in rows}

    return run


def test_phases_are_the_playbook_files_in_the_order_they_begin(play):
    table = play("site.yml")
    assert list(table) == ["validate", "engines", "images", "all", "beyond both"]

    seconds, engines, images = table["validate"]
    assert seconds >= 0.6  # it is imported twice
    assert (engines, images) == (0, 0)

    seconds, engines, images = table["engines"]
    assert (
        1.2 <= engines <= seconds
    )  # both rounds, and not the sum over hosts, which takes longer than the phase
    assert images == 0

    seconds, engines, images = table["images"]
    assert 0.5 <= images <= seconds - 0.3  # the handler after it is no image transfer
    assert engines == 0

    parts = [table[name] for name in ("validate", "engines", "images")]
    assert table["all"] == pytest.approx([sum(column) for column in zip(*parts, strict=True)], abs=0.2)
    assert table["beyond both"] == pytest.approx(
        [table["all"][0] - table["all"][1] - table["all"][2]], abs=0.2
    )


def test_what_is_done_while_engines_start_counts_as_their_start(play):
    seconds, engines, _ = play("starting.yml")["starting"]
    assert 1.3 <= engines <= seconds - 0.5


def test_where_no_engine_was_started_only_the_wait_counts(play):
    seconds, engines, _ = play("running.yml")["running"]
    assert 0.2 <= engines <= seconds - 1


def test_a_failed_transfer_counts_and_the_table_is_printed_all_the_same(play):
    assert play("failing.yml")["failing"][2] >= 0.5


def tasks_of(role):
    for path in (ROOT / "roles" / role / "tasks").glob("*.yml"):
        pending = yaml.safe_load(path.read_text())
        while pending:
            task = pending.pop()
            pending += [inner for part in ("block", "rescue", "always") for inner in task.get(part, [])]
            yield task


def kinds(role):
    """Name of each task of a role that is told apart -> its kind."""
    found = {}
    in_role = SimpleNamespace(get_name=lambda: role)
    for task in tasks_of(role):
        for action in (
            *map("ansible.builtin.{}".format, ("command", "copy", "fetch", "systemd_service")),
            "engine_ready",
        ):
            if action in task:
                kind = phase_times.kind_of(SimpleNamespace(action=action, args=task[action], _role=in_role))
                found |= {task["name"]: kind} if kind else {}
    return found


@pytest.mark.parametrize(
    ("role", "told_apart"),
    [("container_image", {"images"}), ("vllm_engine", {"engines", "start"}), ("vllm_router", set())],
)
def test_the_roles_have_what_is_told_apart(role, told_apart):
    assert set(kinds(role).values()) == told_apart


def test_push_pull_copy_and_load_are_transfers_and_looking_is_not():
    assert sorted(kinds("container_image")) == [
        "Copy the archive",
        "Fetch its parts",
        "Load the image",
        "Pull the image by its digest",
        "Push the image to the registry",
    ]
