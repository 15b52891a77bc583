"""An arm64/cu13 image built on this machine, of real wheels where they are small, and then broken on purpose.

torch and vllm are stand-ins made here, a few lines each: the real ones are 4 GB. All else is real: Debian's packages
for arm64, NIXL with its backend for CUDA 13, the router, nvcc; images/build, images/accept, docker and BuildKit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".state"
VARIANT = "arm64-cu13"
REAL = (
    "nixl",
    "nixl-cu13",
    "vllm-router",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-runtime",
    "nvidia-nvvm",
    "ninja",
    "orjson",
)
STAND_INS = {
    "torch": ("2.14.0", {"torch/version.py": "cuda = '13.0'\n", "torch/__init__.py": ""}),
    "vllm": (
        "0.33.0",
        {"vllm/__init__.py": "", "vllm/entrypoints.py": "def main():\n    print('a stand-in')\n"},
    ),
}
CONSOLE = {"vllm": "[console_scripts]\nvllm = vllm.entrypoints:main\n"}


def stand_in(name: str, version: str, files: dict[str, str], folder: Path) -> str:
    """Make a wheel; its line in a lock file."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{info}/entry_points.txt": CONSOLE[name]} if name in CONSOLE else {}),
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for path, text in files.items()
    )
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(
                zipfile.ZipInfo(path), text
            )  # without the time, so that it is the same each time
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def locked(names: tuple[str, ...]) -> str:
    """Those distributions' part of the real lock."""
    lock = (ROOT / f"images/vllm-nixl/{VARIANT}.lock").read_text()
    entries = re.findall(r"^([a-z0-9-]+)(==.*(?:\n    .*)+)\n", lock, re.MULTILINE)
    found = {name: f"{name}{rest}\n" for name, rest in entries if name in names}
    assert set(found) == set(names)
    return "".join(found.values())


class Images:
    """A copy of images/ with a small variant, and what is built from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = shutil.copytree(ROOT / "images", folder / "images")
        # Downloads are kept between runs, beside those of the real image and not among them.
        self.state = STATE / "cross-build"
        self.wheelhouse = self.state / "wheelhouse" / f"vllm-nixl-{VARIANT}"
        self.wheelhouse.mkdir(parents=True, exist_ok=True)
        self.lock(REAL)

    def lock(self, real: tuple[str, ...]) -> None:
        lines = [stand_in(name, *what, self.wheelhouse) for name, what in STAND_INS.items()]
        (self.folder / "vllm-nixl" / f"{VARIANT}.lock").write_text("".join(lines) + locked(real))

    def run(self, tool: str, *words: str, network: bool = True) -> subprocess.CompletedProcess[str]:
        alone = [] if network else ["unshare", "--net"]
        return subprocess.run(
            [*alone, sys.executable, self.folder / tool, *words],
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip

    def build(self, *words: str, network: bool = True) -> dict:
        done = self.run("build", f"--state={self.state}", *words, f"vllm-nixl:{VARIANT}", network=network)
        assert done.returncode == 0, done.stderr[-3000:]
        (built,) = json.loads(done.stdout)
        return built | {"said": done.stderr}


def docker(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        ["/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker", *words],
        input=stdin, capture_output=True, text=True, check=False, env={**os.environ, "DOCKER_BUILDKIT": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Images:
    return Images(tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def built(images):
    """The image, built without a network after one fetch."""
    images.build("--fetch")
    made = images.build(network=False)
    yield made
    docker("rmi", "--force", made["tag"])


def test_it_is_built_without_a_network_and_nothing_of_the_target_runs(built):
    """A process of the target could not: it is for another architecture, and no emulator is asked for."""
    assert built["architecture"] == "arm64"
    assert docker("image", "inspect", "--format", "{{.Architecture}}", built["tag"]) == "arm64"
    assert "is accepted" in built["said"]


def test_where_it_comes_from_is_told(built, images):
    labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", built["tag"]))
    assert labels["vllm-fleet.content"] == built["content"]
    assert json.loads(labels["vllm-fleet.versions"])["nixl"] == "1.5.1"
    lock = (images.folder / "vllm-nixl" / f"{VARIANT}.lock").read_bytes()
    assert labels["vllm-fleet.lock"] == hashlib.sha256(lock).hexdigest()
    environment = docker("image", "inspect", "--format", "{{json .Config.Env}}", built["tag"])
    assert "CUDA_HOME=/usr/local/lib/python3.11/dist-packages/nvidia/cu13" in environment


def test_the_sbom_lists_python_s_and_debian_s(built):
    sbom = json.loads(Path(built["sbom"]).read_text())
    purls = {component["purl"].partition("?")[0].partition("%2B")[0] for component in sbom["components"]}
    assert {"pkg:pypi/nixl-cu13@1.5.1", "pkg:pypi/torch@2.14.0"} <= purls
    assert any(purl.startswith("pkg:deb/debian/libibverbs1@") for purl in purls)
    assert sbom["metadata"]["component"]["version"] == built["id"]


def test_a_linker_finds_the_toolkit(built):
    container = docker("create", "--platform=linux/arm64", built["tag"], "-")
    try:
        toolkit = "/usr/local/lib/python3.11/dist-packages/nvidia/cu13"
        listed = subprocess.run(
            f"docker cp {container}:{toolkit}/lib - | tar -t",
            shell=True,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert {"lib/libcudart.so", "lib/libcudart.so.13", "lib/libnvvm.so"} <= set(listed)
    finally:
        docker("rm", container)


def test_one_pin_touches_one_layer(built, images):
    """With another version of one distribution only its layer is another; hosts have the rest already."""
    layers = json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", built["tag"]))
    told = images.folder / "vllm-nixl" / f"{VARIANT}.lock"
    before = told.read_text()
    try:
        images.lock(tuple(name for name in REAL if name != "orjson"))
        again = images.build(network=False)
        changed = json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", again["tag"]))
        docker("rmi", "--force", again["tag"])
    finally:
        told.write_text(before)
    # The last has image.json, which says what is locked.
    names = ("base", "cuda", "torch", "wheels", "nixl", "router", "vllm", "rootfs")
    different = {name for name, old, new in zip(names, layers, changed, strict=True) if old != new}
    assert different == {"wheels", "rootfs"}


SITE = "/usr/local/lib/python3.11/dist-packages"
BROKEN = {
    "an x86 library": ("COPY libz.so.1 /usr/local/lib/libstray.so\n", "architecture: not for arm64: usr/local/lib/libstray.so (EM_X86_64)"),
    "a backend for CUDA 12": (
        f"COPY METADATA {SITE}/nixl_cu12-1.5.1.dist-info/METADATA\n",
        "nixl: NIXL's backend should be nixl-cu13 alone; there is nixl-cu12, nixl-cu13",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_image_is_refused_by_name(built, images, tmp_path, what):
    lines, sentence = BROKEN[what]
    (tmp_path / "Dockerfile").write_text(f"FROM {built['tag']}\n{lines}")
    shutil.copy(Path("/usr/lib/x86_64-linux-gnu/libz.so.1"), tmp_path)
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl-cu12\nVersion: 1.5.1\n")
    docker("build", "--quiet", "--platform=linux/arm64", "--tag=vllm-fleet/broken:test", str(tmp_path))
    try:
        done = images.run("accept", VARIANT, "vllm-fleet/broken:test")
        other = images.run("accept", VARIANT, "vllm-fleet/broken:test", "--other")
    finally:
        docker("rmi", "--force", "vllm-fleet/broken:test")
    for verdict in (done, other):  # whoever made it
        assert verdict.returncode == 1
        assert f"is refused: {sentence}" in verdict.stderr


def test_an_image_without_nixl_is_refused_and_gets_no_name(built, images):
    told = images.folder / "vllm-nixl" / f"{VARIANT}.lock"
    before = told.read_text()
    try:
        images.lock(tuple(name for name in REAL if name != "nixl"))
        done = images.run("build", f"--state={images.state}", f"vllm-nixl:{VARIANT}")
    finally:
        told.write_text(before)
    assert done.returncode == 1
    assert "nixl: `nixl` is missing; vLLM imports it, and it finds the backend" in done.stderr
    (kept,) = re.findall(r"kept for a look as (sha256:\w+)", done.stderr)
    docker("rmi", "--force", kept)


def test_the_engine_for_this_machine_s_architecture_is_refused_for_the_other(images):
    """The base for amd64, taken for the one for arm64."""
    done = images.run("build", f"--state={images.state}", "engine-base:amd64")
    assert done.returncode == 0, done.stderr[-2000:]
    tag = json.loads(done.stdout)[0]["tag"]
    verdict = images.run("accept", "engine-base:arm64", tag, "--json")
    assert verdict.returncode == 1
    told = json.loads(verdict.stdout)
    assert told["accepted"] is False
    assert (
        told["problems"][0] == "architecture: the image says that it is for amd64, the variant is for arm64"
    )
    assert any(
        "usr/bin/python3.11 (EM_X86_64)" in problem or "(EM_X86_64)" in problem
        for problem in told["problems"][1:]
    )
