"""The engine image: one identity on builders, in the registry and on engine hosts, whichever way it goes.

What brings an image to hosts is tried with the small image `base`, which no engine runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab import ENGINES, LAB, REGISTRY, ROOT, converge, play, refused, run

STATE = ROOT / ".state/molecule"
BUILDER = STATE / "builder"
STATES = (ROOT / ".state", BUILDER / ".state")  # of the workstation and of the other builder
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
REPOSITORY = f"{REGISTRY.removeprefix('http://')}/vllm-fleet"
HOST = "rack1-05"
ARCHIVES = "/var/lib/vllm-fleet/archives"
COPIES = "/var/lib/vllm-fleet/images-*"
FORWARDED = "127.0.0.1:15000"  # docker speaks plain HTTP to a loopback registry


def build(name: str) -> dict[str, str]:
    """What the builder has, without the role."""
    command = [sys.executable, ROOT / "images/build", "--check", name]
    [image] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert image["id"]
    return image


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    """The engines' image."""
    return build("vllm-nixl:cpu")


@pytest.fixture
def base() -> Iterator[dict[str, str]]:
    """A small image, which the hosts do not have, before and after."""

    def forget() -> None:
        run(HOST, f"docker image ls --quiet --filter label={label} | sort -u | xargs -r docker rmi --force")
        run(HOST, f"rm -rf {ARCHIVES} {COPIES}")

    image = build("base")
    label = f"vllm-fleet.content={image['content']}"
    forget()
    yield image
    forget()


def digest(image: dict[str, str]) -> str:
    """The manifest digest in the registry, whose manifest is that of the image that was built."""
    url = f"{REGISTRY}/v2/{image['tag'].replace(':', '/manifests/')}"
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Accept": MANIFEST}), timeout=10
    ) as answer:
        assert json.load(answer)["config"]["digest"] == image["id"]
        return answer.headers["Docker-Content-Digest"]


def has(image: dict[str, str]) -> bool:
    return image["id"] in run(HOST, "docker image ls --quiet --no-trunc").splitlines()


def said(builder: str = "localhost") -> dict[str, str]:
    """What the role says of the image."""
    return json.loads((STATE / f"{builder}.json").read_text())


# --- the registry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_host_has_the_image_that_was_built(built: dict[str, str], name: str) -> None:
    assert built["id"] in run(name, "docker image ls --quiet --no-trunc").splitlines()


def test_it_comes_by_digest(base: dict[str, str]) -> None:
    converge("container_image", only=HOST, container_image_name="base")
    shown = run(HOST, f"docker image inspect --format '{{{{json .RepoDigests}}}}' {base['id']}")
    assert json.loads(shown) == [f"{REPOSITORY}/base@{digest(base)}"]


def test_both_builders_say_the_same(built: dict[str, str]) -> None:
    converge("container_image")
    here, there = said(), said("molecule-builder")
    # The SBOM lies where the image was made.
    assert here | {"sbom": ""} == there | {"sbom": ""}
    assert (said()["id"], said()["reference"].split("@")[1]) == (built["id"], digest(built))


def test_the_other_builder_has_its_own_copy_and_installs_nothing_where_the_image_is_there(
    built: dict[str, str],
) -> None:
    [copy] = BUILDER.glob("images-*")
    assert (copy / "build").stat().st_mode & 0o111
    assert not list(BUILDER.glob("venv-*"))
    command = [sys.executable, copy / "build", f"--state={BUILDER}/.state", "--check", "vllm-nixl:cpu"]
    [image] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert (image["tag"], image["id"]) == (built["tag"], built["id"])


def test_a_builder_that_has_to_build_gets_an_environment_of_its_own() -> None:
    playbook = ROOT / "roles/container_image/molecule/default/builder.yml"
    done = play(playbook)
    assert done.rc == 0, done.output[-4000:]
    [venv] = BUILDER.glob("venv-*")
    assert (venv / "bin/uv").exists()
    assert play(playbook).changed("localhost") == 0


def test_another_image_under_the_digest_is_refused(base: dict[str, str]) -> None:
    """What is pulled has to be what was built."""
    wanted = {"id": "sha256:" + "0" * 64, "reference": f"{REPOSITORY}/base@{digest(base)}"}
    seen = refused("container_image", only=HOST, container_image_wanted=wanted)
    assert f"{HOST}: the image that is here is not the one that is wanted (id {wanted['id']}): none" in seen


def test_a_registry_that_is_down_is_told() -> None:
    seen = refused("container_image", container_image_registry="198.18.40.2:5999")
    assert "localhost: the registry 198.18.40.2:5999 does not answer" in seen
    assert "Nothing was changed." in seen


# --- an image that does not fit -----------------------------------------------------------------------------


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize("source", ["registry", "archive", "build"])
def test_another_architecture_is_refused_before_anything_comes_to_a_host(
    base: dict[str, str], source: str
) -> None:
    """That of the image on the builder; where each host builds, that of the host."""
    variables = {"container_image_name": "base", "container_image_source": source}
    if source == "build":
        variables["builder"] = "none"
    seen = refused("container_image", only=HOST, container_image_architecture="arm64", **variables)
    if source == "build":
        assert f"{HOST}: its docker engine is amd64, and the image base is for arm64" in seen
        assert "Its engines were left as they are." in seen
    else:
        assert f"localhost: the image {base['tag']} is for amd64, and the hosts are arm64" in seen
    assert not has(base)
    assert run(HOST, f"ls {ARCHIVES} 2>/dev/null || true") == ""


# --- an archive ---------------------------------------------------------------------------------------------


@pytest.fixture
def archive(base: dict[str, str]) -> Iterator[Path]:
    """The folder of the archive on this workstation, where none is yet."""
    folders = [state / "archives" / base["id"].removeprefix("sha256:")[:12] for state in STATES]

    def forget() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    forget()
    yield folders[0]
    forget()


ARCHIVE = {
    "builder": "localhost",
    "only": HOST,
    "container_image_name": "base",
    "container_image_source": "archive",
    "container_image_part_size": "8M",
}


def start(**variables: str) -> subprocess.Popen[bytes]:
    """Begin the scenario's play, in a process group of its own."""
    playbook = ROOT / "roles/container_image/molecule/default/converge.yml"
    command = [ROOT / ".venv/bin/ansible-playbook", "-i", LAB, playbook, "-e", json.dumps(variables)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def parts(name: str) -> dict[str, str]:
    """Part of the archive on the host -> its inode, which a copy changes."""
    listed = run(HOST, f"ls --inode {ARCHIVES}/{name} 2>/dev/null || true").splitlines()
    return {part: inode for inode, part in (line.split() for line in listed) if part.startswith("part.")}


def test_an_archive_is_saved_once_and_gone_from_the_host_when_it_is_loaded(
    base: dict[str, str], archive: Path
) -> None:
    first = converge("container_image", **ARCHIVE)
    assert first.changed(HOST) > 0
    assert has(base)
    assert base["tag"] in run(HOST, "docker image ls --format '{{.Repository}}:{{.Tag}}'").splitlines()
    assert run(HOST, f"ls {ARCHIVES}") == ""
    saved = {path: path.stat().st_mtime_ns for path in archive.iterdir()}
    assert len(saved) > 2
    again = converge("container_image", **ARCHIVE)
    assert (again.changed(HOST), again.changed("localhost")) == (0, 0)
    assert {path: path.stat().st_mtime_ns for path in archive.iterdir()} == saved


def test_a_copy_that_was_cut_off_goes_on_and_a_corrupt_part_is_refused(
    base: dict[str, str], archive: Path
) -> None:
    """One that did not get there is damaged on the workstation, then mended."""
    copying = start(**ARCHIVE)
    try:
        deadline = time.monotonic() + 120
        while len(parts(archive.name)) < 2:
            assert copying.poll() is None, "it ended before it was cut off"
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.killpg(copying.pid, signal.SIGKILL)
        copying.wait()
    cut_off = parts(archive.name)
    missing = sorted({path.name for path in archive.glob("part.*")} - cut_off.keys())
    assert missing, "all parts were there before it was cut off"
    assert not has(base)

    damaged = archive / missing[-1]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    seen = refused("container_image", **ARCHIVE)
    assert f"{HOST}: the image's archive is corrupt, so nothing was loaded" in seen
    assert f"{damaged.name}: FAILED" in seen
    assert str(archive) in seen
    assert not has(base)
    went_on = parts(archive.name)
    assert {part: went_on[part] for part in cut_off} == cut_off
    assert went_on.keys() == {path.name for path in archive.glob("part.*")}

    damaged.write_bytes(whole)
    converge("container_image", **ARCHIVE)
    assert has(base)


def test_another_builder_brings_its_archive_to_this_workstation(base: dict[str, str], archive: Path) -> None:
    converge("container_image", **ARCHIVE | {"builder": "molecule-builder"})
    theirs = BUILDER / ".state/archives" / archive.name
    kept = {path.name: path.read_bytes() for path in theirs.iterdir()}
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == kept
    assert len(kept) > 2
    assert has(base)
    (archive / "part.0001").unlink()
    run(HOST, f"docker rmi --force {base['id']}")
    converge("container_image", **ARCHIVE | {"builder": "molecule-builder"})
    assert (archive / "part.0001").read_bytes() == kept["part.0001"]
    assert has(base)


# --- built on each host -------------------------------------------------------------------------------------

BUILD = {"only": HOST, "container_image_name": "base", "container_image_source": "build"}


def build_on_host(base: dict[str, str], content: str) -> str:
    """Stands in for a build on the host, which fetches for minutes: the same name, another id; the id."""
    run(HOST, "mkdir -p /tmp/stand-in && touch /tmp/stand-in/file")
    dockerfile = f"FROM scratch\\nCOPY file /\\nLABEL vllm-fleet.content={content} host={HOST}\\n"
    run(HOST, f"printf '{dockerfile}' > /tmp/stand-in/Dockerfile")
    run(HOST, f"docker build --quiet --tag {base['tag']} /tmp/stand-in && rm -r /tmp/stand-in")
    return run(HOST, f"docker image inspect --format '{{{{.Id}}}}' {base['tag']}")


def test_an_image_that_the_host_built_is_compared_by_its_content(base: dict[str, str]) -> None:
    own = build_on_host(base, base["content"])
    assert own != base["id"]
    done = converge("container_image", **BUILD)
    assert done.changed(HOST) == 3  # the sources of images, of which commit, and that they are complete
    assert converge("container_image", **BUILD).changed(HOST) == 0
    assert run(HOST, f"docker image inspect --format '{{{{.Id}}}}' {base['tag']}") == own


def test_an_image_of_other_content_under_the_name_is_refused(base: dict[str, str]) -> None:
    build_on_host(base, "0123456789abcdef")
    seen = refused("container_image", **BUILD)
    assert f"{HOST}: the image that is here is not the one that is wanted (content {base['content']})" in seen
    assert "0123456789abcdef" in seen
    run(HOST, f"docker rmi --force {base['tag']}")


# --- an image of somebody else ------------------------------------------------------------------------------


@contextmanager
def forwarded() -> Iterator[None]:
    """The registry on this machine's loopback."""
    host, port = REPOSITORY.partition("/")[0].split(":")
    command = ["ssh", "-F", ROOT / ".lab/ssh_config", "-N", "-o", "ExitOnForwardFailure=yes"]
    tunnel = subprocess.Popen([*command, "-L", f"{FORWARDED}:{host}:{port}", "rack1-router"])
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"http://{FORWARDED}/v2/", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield
    finally:
        tunnel.terminate()
        tunnel.wait()


@pytest.fixture
def other(base: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables for the image `base` as that of somebody else, in a registry of theirs."""
    converge("container_image", only=HOST, container_image_name="base")
    run(HOST, f"docker rmi --force {base['id']}")
    reference = f"{FORWARDED}/vllm-fleet/base@{digest(base)}"
    mark = f"cpu-{digest(base).removeprefix('sha256:')[:16]}"
    yield {
        "only": HOST,
        "container_image_name": "theirs:cpu",
        "container_image_other": reference,
        "container_image_vllm_version": "0.32.0",
        "__container_image_accept": str(tmp_path / "accept"),
    }
    subprocess.run(["docker", "rmi", reference, f"vllm-fleet/other:{mark}"], capture_output=True, check=False)
    for state in STATES:
        (state / f"others/{mark}.json").unlink(missing_ok=True)


def accepting(folder: Path, *, accepted: bool, **verdict: list[str]) -> None:
    """Stands in for images/accept: a verdict of the same form."""
    said = json.dumps({"accepted": accepted, "problems": [], "lacks": [], "vllm": "0.32.0"} | verdict)
    for decides in ("build", "versions.toml"):  # a verdict holds until one of them changes
        shutil.copy(ROOT / "images" / decides, folder)
    (folder / "accept").write_text(f"import sys\nprint({said!r})\nsys.exit({int(not accepted)})\n")


def test_an_image_of_somebody_else_is_accepted_with_what_it_lacks_and_comes_to_the_hosts(
    base: dict[str, str], other: dict[str, str], tmp_path: Path
) -> None:
    accepting(tmp_path, accepted=True, lacks=["numactl"])
    with forwarded():
        done = converge("container_image", **other)
    assert re.search(r"WARNING: \S+ is used, and lacks:' - numactl", done.words)
    assert has(base)
    assert said()["id"] == base["id"]
    assert f"{REPOSITORY}/other@{digest(said())}" == said()["reference"]
    again = converge("container_image", **other)
    assert (again.changed(HOST), again.changed("localhost")) == (0, 0)
    assert "numactl" in again.words


def test_one_that_is_not_accepted_comes_to_no_host(
    base: dict[str, str], other: dict[str, str], tmp_path: Path
) -> None:
    accepting(tmp_path, accepted=False, problems=["libcudart.so.12 is needed by vllm/_C.so"])
    with forwarded():
        seen = refused("container_image", **other)
    assert "is not accepted for cpu, so no host gets it" in seen
    assert "libcudart.so.12 is needed by vllm/_C.so" in seen
    assert not has(base)
