#!/usr/bin/python
"""One host of the lab: a container that runs systemd, sshd and a docker daemon of its own."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lab_host
short_description: Keep one systemd host of the lab as a container on this machine
description:
  - Creates, starts, replaces or removes a container that stands for one host of a fleet.
  - Runs on the workstation and needs the docker SDK for Python there.
  - A container made from another image or with another address is replaced; its docker volume is kept.
options:
  name: {description: Name of the host., type: str, required: true}
  state: {description: Whether the host is there., type: str, choices: [present, absent], default: present}
  image: {description: Image of the host. Needed when it is to be present., type: str}
  address: {description: IPv4 address on the lab's network. Needed when it is to be present., type: str}
  network: {description: Name of the lab's docker network., type: str, default: vllm-fleet-lab}
  subnet: {description: Subnet of the lab's network., type: str, default: 198.18.40.0/24}
  authorized_key: {description: SSH public key that may log in as root., type: str}
attributes:
  check_mode: {description: Tells what it would change and changes nothing., support: full}
"""

EXAMPLES = r"""
- name: Start a lab host
  lab_host:
    name: rack1-04
    image: vllm-fleet/lab-host:868befa00f23097e
    address: 198.18.40.4
    authorized_key: "{{ lookup('file', '.lab/id_ed25519.pub') }}"
"""

RETURN = r"""
host_key: {description: The host's ed25519 public key as `type key`., returned: present, type: str}
did: {description: What was done or, in check mode, would be done., returned: always, type: list, elements: str}
"""

import io
import tarfile
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    import docker
    import docker.errors
    import docker.types
    import requests
except ImportError:
    docker = None

PREFIX = "vllm-fleet-lab-"
LABEL = "vllm-fleet.lab"
BOOT_SECONDS = 90


class LabHost:
    """The container of one host and what it stands on: the lab's network and the host's docker volume."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.want = module.params
        self.client = docker.from_env(timeout=120)
        self.name = PREFIX + self.want["name"]
        self.did: list[str] = []

    def step(self, what: str, action: Any, *args: Any, **kwargs: Any) -> Any:
        """Note what is done; do it unless in check mode."""
        self.did.append(what)
        return None if self.module.check_mode else action(*args, **kwargs)

    def container(self) -> Any:
        """The container, or None."""
        try:
            return self.client.containers.get(self.name)
        except docker.errors.NotFound:
            return None

    def network(self) -> None:
        """Make the lab's network, which all its hosts share."""
        if not self.client.networks.list(names=[f"^{self.want['network']}$"]):
            pool = docker.types.IPAMConfig(pool_configs=[docker.types.IPAMPool(subnet=self.want["subnet"])])
            self.step(
                f"network {self.want['network']} created",
                self.client.networks.create,
                self.want["network"],
                driver="bridge",
                ipam=pool,
                labels={LABEL: "network"},
            )

    def create(self) -> None:
        """Create and start the container.

        The capabilities are those with which systemd and a nested docker daemon run; `--privileged` is no way
        where the machine itself lacks CAP_SYS_RESOURCE (measured).
        """
        address = self.client.api.create_endpoint_config(ipv4_address=self.want["address"])
        host_config = self.client.api.create_host_config(
            binds=["/sys/fs/cgroup:/sys/fs/cgroup:rw", f"{self.name}-docker:/var/lib/docker"],
            cap_add=["ALL"],
            cap_drop=["SYS_RESOURCE"],
            security_opt=["seccomp=unconfined", "apparmor=unconfined"],
            tmpfs={"/run": "exec", "/run/lock": "", "/tmp": "exec"},
        )
        host_config["CgroupnsMode"] = "host"  # not a parameter of the SDK's low-level call
        created = self.client.api.create_container(
            self.want["image"],
            name=self.name,
            hostname=self.want["name"],
            host_config=host_config,
            networking_config=self.client.api.create_networking_config({self.want["network"]: address}),
            labels={LABEL: "host", f"{LABEL}.address": self.want["address"]},
        )
        self.client.api.start(created["Id"])

    def authorize(self, container: Any) -> None:
        """Let the lab's key log in."""
        key = self.want["authorized_key"].strip() + "\n"
        seen = container.exec_run(["cat", "/root/.ssh/authorized_keys"])
        if seen.exit_code == 0 and seen.output.decode() == key:
            return
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            folder = tarfile.TarInfo("root/.ssh")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(folder)
            entry = tarfile.TarInfo("root/.ssh/authorized_keys")
            entry.size, entry.mode = len(key), 0o600
            tar.addfile(entry, io.BytesIO(key.encode()))
        self.step("key authorized", container.put_archive, "/", archive.getvalue())

    def wait(self, container: Any) -> str:
        """Wait until systemd has finished starting and sshd has its keys; return the host key."""
        deadline = time.monotonic() + BOOT_SECONDS
        state = "nothing"
        while time.monotonic() < deadline:
            state = container.exec_run(["systemctl", "is-system-running"]).output.decode().strip()
            key = container.exec_run(["cat", "/etc/ssh/ssh_host_ed25519_key.pub"])
            if state in ("running", "degraded") and key.exit_code == 0:
                break
            time.sleep(0.5)
            container.reload()
            if container.status != "running":
                break
        else:
            self.module.fail_json(
                msg=f"{self.want['name']}: systemd in the container {self.name} is still "
                f"{state!r} after {BOOT_SECONDS} s; look at `docker logs {self.name}`"
            )
        if container.status != "running":
            tail = container.logs(tail=15).decode(errors="replace")
            self.module.fail_json(
                msg=f"{self.want['name']}: the container {self.name} stopped while starting:\n{tail}"
            )
        if state == "degraded":
            failed = (
                container.exec_run(["systemctl", "--failed", "--plain", "--no-legend"])
                .output.decode()
                .strip()
            )
            self.module.warn(f"{self.want['name']}: failed units: {failed}")
        return " ".join(key.output.decode().split()[:2])

    def present(self) -> str | None:
        """Bring the host up; return its host key (None in check mode where it does not run)."""
        try:
            image = self.client.images.get(self.want["image"])
        except docker.errors.ImageNotFound:
            self.module.fail_json(
                msg=f"{self.want['name']}: there is no image {self.want['image']} on this machine; "
                "run images/build lab-host"
            )
        self.network()
        container = self.container()
        if container and (
            container.attrs["Image"] != image.id
            or container.labels.get(f"{LABEL}.address") != self.want["address"]
        ):
            self.step("replaced, for another image or address", container.remove, force=True)
            container = None
        if container is None:
            self.step("created", self.create)
        elif container.status != "running":
            self.step("started", container.start)
        container = self.container()
        if container is None or container.status != "running":
            return None
        key = self.wait(container)
        self.authorize(container)
        return key

    def absent(self) -> None:
        """Remove the container, its volume and, with the last host, the network."""
        container = self.container()
        if container:
            self.step("removed", container.remove, force=True)
        for volume in self.client.volumes.list(filters={"name": f"{self.name}-docker"}):
            self.step("volume removed", volume.remove, force=True)
        for network in self.client.networks.list(names=[f"^{self.want['network']}$"]):
            network.reload()
            if not network.attrs["Containers"]:
                self.step("network removed", network.remove)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "image": {"type": "str"},
            "address": {"type": "str"},
            "network": {"type": "str", "default": "vllm-fleet-lab"},
            "subnet": {"type": "str", "default": "198.18.40.0/24"},
            "authorized_key": {"type": "str", "no_log": False},
        },
        required_if=[("state", "present", ["image", "address", "authorized_key"])],
        supports_check_mode=True,
    )
    if docker is None:
        module.fail_json(msg=missing_required_lib("docker"))
    try:
        host = LabHost(module)
        key = host.present() if module.params["state"] == "present" else host.absent()
    except (docker.errors.DockerException, requests.RequestException) as error:
        module.fail_json(msg=f"{module.params['name']}: the docker engine on this machine says: {error}")
    module.exit_json(changed=bool(host.did), did=host.did, host_key=key)


if __name__ == "__main__":
    main()
