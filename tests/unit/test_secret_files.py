"""Files with keys: on the workstation others may not read them; the front's own key is whole or not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORD = "A-SECRET-OF-THE-FILE-0123456789"


def validate(**variables):
    """Exit status of playbooks/validate.yml for the lab with these variables, and its output on one line."""
    command = [
        Path(sys.executable).parent / "ansible-playbook",
        "-i",
        "inventory/lab",
        "playbooks/validate.yml",
    ]
    done = subprocess.run(
        [*command, "-v", "-e", json.dumps(variables)],
        cwd=ROOT, env=os.environ | {"ANSIBLE_NOCOLOR": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert WORD not in output
    return done.returncode, " ".join(output.split())


@pytest.mark.parametrize(
    ("variable", "what"), [("fleet_tls_certificate", "key"), ("fleet_client_keys", "keys")]
)
def test_a_file_with_keys_that_others_may_read_is_refused(tmp_path, variable, what):
    pem, keys = tmp_path / "front.pem", tmp_path / "keys.yml"
    pem.write_text(WORD)
    keys.write_text(f"alice: {WORD}\n")
    # As certbot keeps them: what counts is the file, and not the link.
    link = tmp_path / "live.pem"
    link.symlink_to(pem)
    pem.chmod(0o600)
    keys.chmod(0o600)
    given = {"fleet_tls_certificate": str(link), "fleet_client_keys": str(keys)}
    assert validate(**given)[0] == 0
    open_one = pem if variable == "fleet_tls_certificate" else keys
    for mode in ("0640", "0604"):
        open_one.chmod(int(mode, 8))
        status, output = validate(**given)
        assert status != 0
        path = given[variable]
        assert f"{path} has mode {mode}, so others can read the {what}. Run: chmod 600 {path}" in output


def make_own_key(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run the command of access.yml that makes the front's own key in the folder."""
    text = (ROOT / "roles/fleet_front/tasks/access.yml").read_text()
    [argv] = (
        task["ansible.builtin.command"]["argv"]
        for block in yaml.safe_load(text)
        for task in block.get("block", [])
        if "Make a key" in task["name"]
    )
    return subprocess.run(
        [re.sub(r"\{\{ .* \}\}", str(folder / "front.key"), word) for word in argv],
        env={"PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_fronts_own_key_is_whole_or_not_there(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text("#!/bin/sh\nprintf 0123; kill -9 $PPID; exit 1\n")
    python.chmod(0o755)
    assert make_own_key(tmp_path, f"{tmp_path}/bin:/usr/bin:/bin").returncode != 0
    assert not (tmp_path / "front.key").exists()
    assert make_own_key(tmp_path, "/usr/bin:/bin").returncode == 0
    key = tmp_path / "front.key"
    assert re.fullmatch("[0-9a-f]{64}", key.read_text())
    assert key.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "front.key"}
