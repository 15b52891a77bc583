#!/usr/bin/python
"""One host of the lab: a container that runs systemd, sshd and a docker daemon of its own."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lab_host
short_description: Keep one systemd host of the lab as a container on this machine
description:
  - Creates, starts, replaces or removes a container that stands for one host of a fleet.
  - Runs on the workstation and needs the docker SDK for Python there.
  - A container made from another image, with another address or other settings of this module is replaced;
    its docker volume is kept. One that stopped is started.
  - The hosts belong to the machine. Clones of this repository on one machine share them, and each may log in
    with its own key.
options:
  name: {description: Name of the host., type: str, required: true}
  state: {description: Whether the host is there., type: str, choices: [present, absent], default: present}
  image: {description: Image of the host. Needed when it is to be present., type: str}
  address: {description: IPv4 address on the lab's network. Needed when it is to be present., type: str}
  network: {description: Name of the lab's docker network., type: str, default: vllm-fleet-lab}
  subnet: {description: Subnet of the lab's network., type: str, default: 198.18.40.0/24}
  authorized_key:
    description: SSH public key that may log in as root. Needed when the host is to be present.
    type: str
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
host_key:
  description: The host's ed25519 public key as `type key`, null where there is none in check mode.
  returned: always
  type: str
did:
  description: What was done or, in check mode, would be done.
  returned: always
  type: list
  elements: str
"""

import contextlib
import hashlib
import io
import json
import tarfile
import time
from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    import docker
    import docker.errors
    import docker.types
    import requests
except ImportError:
    HAS_DOCKER = False
else:
    HAS_DOCKER = True

PREFIX = "vllm-fleet-lab-"
LABEL = "vllm-fleet.lab"
BOOT_SECONDS = 90
AUTHORIZED_KEYS = "/root/.ssh/authorized_keys"
# The capabilities are those with which systemd and a nested docker daemon run; `--privileged` is no way where
# the machine itself lacks CAP_SYS_RESOURCE (measured).
SETTINGS = {
    "cap_add": ["ALL"],
    "cap_drop": ["SYS_RESOURCE"],
    "cgroupns": "host",
    "security_opt": ["seccomp=unconfined", "apparmor=unconfined"],
    "tmpfs": {"/run": "exec", "/run/lock": "", "/tmp": "exec"},  # noqa: S108  in the container
}


class LabHost:
    """The container of one host and what it stands on: the lab's network and the host's docker volume."""

    def __init__(self, module: AnsibleModule, client: Any) -> None:
        self.module = module
        self.want = module.params
        self.client = client
        self.name = PREFIX + self.want["name"]
        self.volume = f"{self.name}-docker"
        self.did: list[str] = []

    def step(self, what: str, action: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Note what is done; do it unless in check mode."""
        self.did.append(what)
        if not self.module.check_mode:
            action(*args, **kwargs)

    def fail(self, what: str) -> None:
        """End the module; the message begins with the host's name."""
        self.module.fail_json(msg=f"{self.want['name']}: {what}", did=self.did)

    def container(self) -> Any:
        """The container, or None."""
        try:
            return self.client.containers.get(self.name)
        except docker.errors.NotFound:
            return None

    def image_id(self) -> str:
        """The image's id; in check mode nothing for an image that is not built yet."""
        try:
            return str(self.client.images.get(self.want["image"] or "none").id)
        except docker.errors.ImageNotFound:
            if not self.module.check_mode:
                self.fail(
                    f"there is no image {self.want['image']} on this machine; run images/build lab-host"
                )
            return ""

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

    def made_of(self, image_id: str) -> str:
        """Changes when the container has to be made anew."""
        parts = [image_id, self.want["address"], self.want["network"], SETTINGS]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def create(self, image_id: str) -> None:
        """Create and start the container."""
        address = self.client.api.create_endpoint_config(ipv4_address=self.want["address"])
        self.client.containers.create(
            image_id,
            name=self.name,
            hostname=self.want["name"],
            labels={LABEL: "host", f"{LABEL}.made-of": self.made_of(image_id)},
            network=self.want["network"],
            networking_config={self.want["network"]: address},
            volumes=["/sys/fs/cgroup:/sys/fs/cgroup:rw", f"{self.volume}:/var/lib/docker"],
            **SETTINGS,
        ).start()

    def authorize(self, container: Any) -> None:
        """Let the key log in, beside those of other clones."""
        key = self.want["authorized_key"].strip()
        seen = container.exec_run(["cat", AUTHORIZED_KEYS])
        keys = seen.output.decode().splitlines() if seen.exit_code == 0 else []
        if key in keys:
            return
        content = "".join(f"{line}\n" for line in [*keys, key]).encode()
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            folder = tarfile.TarInfo("root/.ssh")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(folder)
            entry = tarfile.TarInfo(AUTHORIZED_KEYS.lstrip("/"))
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
        self.step("key authorized", container.put_archive, "/", archive.getvalue())

    def wait(self, container: Any) -> str:
        """Wait until systemd has finished starting and sshd listens with its keys; return the host key."""
        deadline = time.monotonic() + BOOT_SECONDS
        while True:
            container.reload()
            if container.status != "running":
                tail = container.logs(tail=15).decode(errors="replace")
                self.fail(f"the container {self.name} stopped while starting:\n{tail}")
            state = container.exec_run(["systemctl", "is-system-running"]).output.decode().strip()
            key = container.exec_run(["cat", "/etc/ssh/ssh_host_ed25519_key.pub"])
            # A container that docker itself started again may be "running" before its sshd listens.
            sshd = container.exec_run(["ss", "-Hltn", "sport = :22"]).output.strip()
            if state in ("running", "degraded") and key.exit_code == 0 and sshd:
                break
            if time.monotonic() > deadline:
                listens = "listens" if sshd else "does not listen"
                self.fail(
                    f"systemd in the container {self.name} is {state!r} and its sshd {listens} after "
                    f"{BOOT_SECONDS} s; look at `docker logs {self.name}`"
                )
            time.sleep(0.5)
        if state == "degraded":
            failed = container.exec_run(["systemctl", "--failed", "--plain", "--no-legend"]).output.decode()
            self.module.warn(f"{self.want['name']}: failed units: {failed.strip()}")
        return " ".join(key.output.decode().split()[:2])

    def present(self) -> str | None:
        """Bring the host up; return its host key (None in check mode where it does not run as wanted)."""
        image_id = self.image_id()
        self.network()
        container = self.container()
        if container and container.labels.get(f"{LABEL}.made-of") != self.made_of(image_id):
            self.step("removed, for another image, address or settings", container.remove, force=True)
            container = None
        if container is None:
            self.step("created", self.create, image_id)
        elif container.status != "running":
            self.step("started", container.start)
        if self.did and self.module.check_mode:
            return None
        container = self.container()
        key = self.wait(container)
        self.authorize(container)
        return key

    def absent(self) -> None:
        """Remove the container, its volume and, with the last host, the network."""
        container = self.container()
        if container:
            self.step("removed", container.remove, force=True)
        with contextlib.suppress(docker.errors.NotFound):
            self.step("volume removed", self.client.volumes.get(self.volume).remove, force=True)
        network = self.want["network"]
        others = self.client.containers.list(all=True, filters={"network": network})
        if all(other.name == self.name for other in others):
            for found in self.client.networks.list(names=[f"^{network}$"]):
                self.step("network removed", found.remove)


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
    if not HAS_DOCKER:
        module.fail_json(msg=missing_required_lib("docker"))
    name, key = module.params["name"], None
    try:
        host = LabHost(module, docker.from_env(timeout=120))
    except docker.errors.DockerException as error:
        module.fail_json(msg=f"{name}: no docker engine answers on this machine ({error}); run scripts/setup")
    try:
        if module.params["state"] == "present":
            key = host.present()
        else:
            host.absent()
    except (docker.errors.DockerException, requests.RequestException) as error:
        module.fail_json(
            msg=f"{name}: the docker engine on this machine says: {error}",
            did=host.did,
            changed=bool(host.did),
        )
    module.exit_json(changed=bool(host.did), did=host.did, host_key=key)


if __name__ == "__main__":
    main()
