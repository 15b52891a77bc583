"""The role container_image where docker's answers decide, and what it leaves on another builder.

`docker` and `sudo` are stand-ins that answer and record.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ID = "sha256:" + "ab" * 32
DOCKER = """\
#!/bin/sh
case "$1" in
    info) cat "$FAKE/store" ;;
    version) echo amd64 ;;
    image) echo sha256:1 ;;
    save) head -c 6000 /dev/urandom ;;
esac
"""
# Becomes nobody else: it runs the command that follows its own options.
SUDO = """\
#!/bin/sh
echo called >> "$FAKE/sudo-calls"
while [ "$1" != /bin/sh ]; do shift; done
exec "$@"
"""
CONTAINERD = '[["driver-type","io.containerd.snapshotter.v1"]]'
OVERLAY = '[["Backing Filesystem","extfs"],["Supports d_type","true"]]'


class Host:
    """This machine as two hosts; parts of the role run on the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("docker", DOCKER), ("sudo", SUDO)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "store").write_text(OVERLAY)

    def play(self, tasks: list[dict[str, object]], **variables: object) -> subprocess.CompletedProcess[str]:
        told = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        told |= {"ansible_become_exe": str(self.folder / "sudo")}
        inventory = {"all": {"hosts": {"a": {"own": 1}, "b": {}}, "vars": told | variables}}
        (self.folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
        play = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
        (self.folder / "play.yml").write_text(yaml.safe_dump(play))
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "FAKE": str(self.folder)}
        environment["ANSIBLE_BECOME_ALLOW_SAME_USER"] = "true"
        return subprocess.run(
            ["ansible-playbook", "-i", self.folder / "hosts.yml", self.folder / "play.yml"],
            cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def role(
        self, part: str, *, become: bool = False, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        use = {"name": "container_image", "tasks_from": part}
        task = {"ansible.builtin.import_role": use, "vars": variables, "when": "own is defined"}
        return self.play([task], ansible_become=become)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> bool:
    return "docker keeps its images in containerd's store" in done.stdout + done.stderr


@pytest.mark.parametrize("part", ["look", "main"])
def test_a_docker_whose_ids_a_registry_does_not_keep_is_refused_with_a_registry_only(host, part):
    # Where no builder can have its copy of images/, main ends soon.
    told = {"container_image_folder": "/proc/none"}
    assert not refused(host.role(part, container_image_source="registry", **told))
    (host.folder / "store").write_text(CONTAINERD)
    assert not refused(host.role(part, container_image_source="archive", **told))
    done = host.role(part, container_image_source="registry", **told)
    assert done.returncode == 2
    assert refused(done)
    assert "fleet_image_source to archive" in " ".join((done.stdout + done.stderr).split())


def test_parts_are_fetched_without_become_and_a_second_time_not_at_all(host):
    told = {
        "container_image_folder": str(host.folder / "far"), "container_image_part_size": "500",
        "container_image_built": {"id": ID, "tag": "a:b"}, "__container_image_state": str(host.folder / "here"),
    }  # fmt: skip
    calls = host.folder / "sudo-calls"
    done = host.role("save", become=True, **told)
    assert done.returncode == 0, done.stdout
    far, here = (host.folder / name / "archives" / ("ab" * 6) for name in ("far/.state", "here"))
    parts = sorted(path.name for path in far.iterdir())
    assert len(parts) > 10
    assert [(here / name).read_bytes() for name in parts] == [(far / name).read_bytes() for name in parts]
    # The tasks before them become root; a part does not.
    assert 0 < len(calls.read_text().splitlines()) < len(parts)
    times = {path: path.stat().st_mtime_ns for path in here.iterdir()}
    (here / parts[3]).write_bytes(b"cut off")
    done = host.role("save", become=True, **told)
    assert done.returncode == 0, done.stdout
    anew = {path.name for path, before in times.items() if path.stat().st_mtime_ns != before}
    assert anew == {parts[3]}


def test_hosts_are_looked_at_with_the_image_of_their_own(host):
    [check] = [play for play in yaml.safe_load((ROOT / "playbooks/check.yml").read_text()) if "tasks" in play]
    image = check["tasks"][0]["vars"]["host_check_image"]
    done = host.play([
        {"ansible.builtin.set_fact": {"container_image_here": {"id": ID}}, "when": "own is defined"},
        {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} has <" + image + ">"}},
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout
    for words in (f"a has <{ID}>", "b has <>"):
        assert words in done.stdout


def test_another_builder_is_told_which_commit_it_builds(host):
    far = host.folder / "far"
    told = {"container_image_folder": str(far), "container_image_source": "archive"}
    done = host.role("main", **told)
    assert done.returncode == 0, done.stdout
    [copy] = far.glob("images-*")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (copy / ".revision").read_text().removesuffix("\n").removesuffix("-dirty") == head.stdout.strip()
    assert (copy / ".complete").exists()
