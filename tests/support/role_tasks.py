"""Runs tasks of a role on this machine as the host `a`, where programs are stand-ins of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: a
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: {}
        tasks_from: {}
"""


def run_tasks(
    role: str,
    part: str,
    folder: Path,
    programs: Mapping[str, str],
    variables: Mapping[str, Any],
    *options: str,
) -> subprocess.CompletedProcess[str]:
    """Run roles/ROLE/tasks/PART.yml. The stand-ins (name -> script) find `folder` in $FAKE."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "play.yml").write_text(PLAY.format(role, part))
    told = {"ansible_python_interpreter": sys.executable, **variables}
    (folder / "vars.json").write_text(json.dumps(told))
    command = [
        "ansible-playbook",
        "-i",
        "a,",
        "-c",
        "local",
        folder / "play.yml",
        "-e",
        f"@{folder}/vars.json",
    ]
    return subprocess.run(
        [*command, *options],
        cwd=ROOT, env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "FAKE": str(folder)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
