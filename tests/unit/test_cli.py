"""The command line: exit codes, streams and shapes of its output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fleets import lab
from typer.testing import CliRunner

from vllm_fleet.cli import app


@pytest.fixture
def inventory(tmp_path):
    """Writes a fleet of the tests as an inventory file; gives its path."""

    def write(fleet) -> str:
        children = {
            name: {"hosts": dict.fromkeys(members)} for name, members in fleet.groups.items() if name != "all"
        }
        path = tmp_path / "hosts.yml"
        path.write_text(
            yaml.safe_dump({"all": {"hosts": fleet.hosts, "children": children}}, sort_keys=False)
        )
        return str(path)

    return write


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_a_right_inventory_exits_0(inventory):
    result = run("validate", "-i", inventory(lab()))
    assert (result.exit_code, result.stdout) == (0, "The inventory is right: 2 engines on 2 hosts.\n")


def test_problems_exit_1_and_are_on_stderr(inventory):
    result = run("validate", "-i", inventory(lab().pool("decode", args={"port": 1})), "-e", "fleet_prot=1")
    assert (result.exit_code, result.stdout) == (1, "")
    for text in (
        "unknown-variable",
        "fleet_prot",
        "option -e",
        "owned-argument",
        "fleet_pools.decode.args.port",
        "hosts.yml:",
    ):
        assert text in result.stderr


@pytest.mark.parametrize("arguments", [
    ["validate", "-i", "no/such/file"], ["plan", "-i", "no/such/file"], ["validate"], ["validate", "--no-such-option"], ["nonsense"],
    ["validate", "-i", ".", "--vault-password-file", "no/such/file"],
    ["validate", "-i", ".", "-e", "/no/at/sign.yml"], ["validate", "-i", ".", "-e", "@no/such/file"],
])  # fmt: skip
def test_wrong_usage_exits_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_plan_as_json_is_the_plan(inventory):
    fleet = lab()
    result = run("plan", "-i", inventory(fleet), "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["ok"], document["problems"]) == (True, [])
    assert document["plan"] == json.loads(json.dumps(fleet.plan()))


def test_the_plan_hides_what_may_be_a_secret(inventory):
    result = run("plan", "-i", inventory(lab().pool("decode", env={"HF_HOME": "sesame"})), "--json")
    assert "sesame" not in result.output
    assert '"HF_HOME": "(hidden)"' in result.output


def test_an_ipv6_address_is_shown_whole(inventory):
    fleet = lab()
    fleet.hosts["rack1-04"]["fleet_address"] = "fd00::4"
    assert "http://[fd00::4]:8000" in run("plan", "-i", inventory(fleet)).output


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_problems_as_json(inventory, command):
    result = run(command, "-i", inventory(lab().everywhere(fleet_registry_port=80)), "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"], document.get("plan")) == (1, False, None)
    assert document["problems"][0]["rule"] == "port-range"
    assert result.stderr == ""


def test_the_plan_as_text_names_engines_ports_and_pairs_without_colour(inventory):
    result = run("plan", "-i", inventory(lab()))
    assert result.exit_code == 0
    for text in (
        "prefill-rack1-04-0",
        "http://198.18.40.1:8000",
        "198.18.40.2:5600",
        "router a",
        "29002",
        "registry",
    ):
        assert text in result.stdout
    assert "\x1b" not in result.stdout


def test_a_warning_does_not_refuse(inventory):
    fleet = lab().everywhere(fleet_gpus_per_host=2).pool("prefill", gpus=2)
    result = run("validate", "-i", inventory(fleet))
    assert result.exit_code == 0
    assert "WARNING tensor-parallel-equal" in result.stderr


def test_a_broken_inventory_exits_1_with_one_message(tmp_path):
    (tmp_path / "hosts.yml").write_text("all: [")
    result = run("validate", "-i", str(tmp_path / "hosts.yml"))
    assert result.exit_code == 1
    assert result.stderr.count("ERROR") == 1


def vllm_fleet(*arguments: str, cwd: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, without this process's Ansible settings."""
    command = [str(Path(sys.executable).with_name("vllm-fleet")), *arguments]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE")} | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("directory", [".", "/"])
def test_the_command_works_from_any_directory_and_prints_no_traceback(inventory, directory):
    result = vllm_fleet("plan", "-i", inventory(lab()), "-e", "fleet_x={{ y }}", cwd=directory)
    assert result.returncode == 1
    assert "Traceback" not in result.stdout + result.stderr
    assert "WARNING]" not in result.stderr


def test_a_broken_ansible_configuration_is_one_message(inventory, tmp_path):
    (tmp_path / "ansible.cfg").write_text("[defaults\nforks = x")
    result = vllm_fleet("validate", "-i", inventory(lab()), cwd=str(tmp_path))
    assert result.returncode == 2
    assert "Traceback" not in result.stdout + result.stderr
    assert "ansible.cfg" in re.sub(r"[│\s]", "", result.stderr)  # it is in a box


def test_relative_inventories_are_of_the_working_directory(inventory, tmp_path):
    inventory(lab())
    assert vllm_fleet("validate", "-i", "hosts.yml", cwd=str(tmp_path)).returncode == 0
    assert vllm_fleet("validate", "-i", ".", cwd=str(tmp_path)).returncode == 0


def test_the_plan_as_a_flowchart(inventory):
    result = run("plan", "-i", inventory(lab()), "--mermaid")
    assert result.exit_code == 0
    assert result.stdout.startswith("flowchart")
    assert "prefill-rack1-04-0" in result.stdout
    assert run("plan", "-i", inventory(lab()), "--mermaid", "--json").exit_code == 2


def test_show_writes_a_picture_of_a_right_inventory_only(inventory, tmp_path):
    picture = tmp_path / "fleet.svg"
    result = run("show", "-i", inventory(lab().pool("decode", args={"port": 1})), "--svg", str(picture))
    assert (result.exit_code, picture.exists()) == (1, False)
    result = run("show", "-i", inventory(lab()), "--svg", str(picture))
    assert (result.exit_code, result.stdout) == (0, f"{picture}\n")
    assert "<svg" in picture.read_text()
    result = run("show", "-i", inventory(lab()), "--svg", str(tmp_path / "no" / "such" / "folder.svg"))
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in " ".join(result.stderr.split())


def test_diff_says_what_would_be_restarted_and_why(inventory, tmp_path):
    before = tmp_path / "before.yml"
    Path(inventory(lab())).rename(before)
    after = inventory(lab().pool("decode", args={"max_num_seqs": 8}, env={"HF_HOME": "s3cret"}))
    result = run("diff", "-i", str(before), "-i", after)
    assert result.exit_code == 0
    for seen in ("restart", "decode-rack1-05-0", "max_num_seqs", "HF_HOME"):
        assert seen in result.stdout
    assert "prefill-rack1-04-0 " not in result.stdout
    assert "s3cret" not in result.stdout
    changes = json.loads(run("diff", "-i", str(before), "-i", after, "--json").stdout)["changes"]
    assert [c["engine"] for c in changes if c["action"] == "restart"] == ["decode-rack1-05-0"]
    assert "Nothing would change" in run("diff", "-i", str(before), "-i", str(before)).stdout
    assert run("diff", "-i", after).exit_code == 2


def test_diff_refuses_a_wrong_inventory(inventory, tmp_path):
    before = tmp_path / "before.yml"
    Path(inventory(lab())).rename(before)
    result = run("diff", "-i", str(before), "-i", inventory(lab().pool("decode", args={"port": 1})))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "owned-argument" in result.stderr


def test_an_accepted_break_of_a_rule_is_shown_with_its_reason(inventory):
    fleet = lab().pool("decode", enable_expert_parallel=True)
    reason = "an experiment of the kernel team"
    fleet.everywhere(fleet_rule_overrides={"expert-parallel-needs-gpu": reason})
    result = run("validate", "-i", inventory(fleet))
    assert result.exit_code == 0
    assert "OVERRIDDEN expert-parallel-needs-gpu" in result.stderr
    assert f"accepted because: {reason}" in result.stderr
