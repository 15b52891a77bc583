"""Acceptance test of the image `lab-host`: everything that a role may ask of a host without a network."""

import json
import pathlib
import shutil

import apt  # noqa: F401 - ansible.builtin.apt needs it

for program in (
    "systemctl",
    "sshd",
    "dockerd",
    "iptables",
    "nft",
    "haproxy",
    "docker-registry",
    "journalctl",
):
    assert shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin"), f"{program} is missing"
json.loads(pathlib.Path("/etc/docker/daemon.json").read_text())
keys = list(pathlib.Path("/etc/ssh").glob("ssh_host_*"))
assert not keys, f"ssh host keys must be made for each host, not baked into the image: {keys}"
