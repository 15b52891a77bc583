"""The engine image: one identity on the builders, in the registry and on the engine hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest
from lab import ENGINES, REGISTRY, ROOT, play, refused, run

STATE = ROOT / ".state/molecule"
BUILDER = STATE / "builder"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    """What the builder has, without the role."""
    command = [sys.executable, ROOT / "images/build", "--check", "vllm-nixl:cpu"]
    [image] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert image["id"]
    return image


@pytest.fixture(scope="module")
def digest(built: dict[str, str]) -> str:
    """The manifest digest in the registry, whose manifest is that of the image that was built."""
    url = f"{REGISTRY}/v2/{built['tag'].replace(':', '/manifests/')}"
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Accept": MANIFEST}), timeout=10
    ) as answer:
        assert json.load(answer)["config"]["digest"] == built["id"]
        return answer.headers["Docker-Content-Digest"]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_host_has_the_image_that_was_built(built: dict[str, str], name: str) -> None:
    assert built["id"] in run(name, "docker image ls --quiet --no-trunc").splitlines()


@pytest.mark.parametrize("name", ENGINES)
def test_it_came_by_digest(built: dict[str, str], digest: str, name: str) -> None:
    reference = f"{REGISTRY.removeprefix('http://')}/{built['tag'].split(':')[0]}@{digest}"
    digests = json.loads(
        run(name, f"docker image inspect --format '{{{{json .RepoDigests}}}}' {built['id']}")
    )
    assert reference in digests


def test_both_builders_say_the_same(built: dict[str, str], digest: str) -> None:
    said = [json.loads((STATE / f"{name}.json").read_text()) for name in ("localhost", "molecule-builder")]
    assert said[0] == said[1]
    assert (said[0]["id"], said[0]["reference"].split("@")[1]) == (built["id"], digest)


def test_the_other_builder_worked_in_its_own_folder(built: dict[str, str]) -> None:
    [copy], [venv] = BUILDER.glob("images-*"), BUILDER.glob("venv-*")
    assert (copy / "build").stat().st_mode & 0o111
    assert (venv / "bin/uv").exists()
    command = [venv / "bin/python", copy / "build", f"--state={BUILDER}/.state", "--check", "vllm-nixl:cpu"]
    [image] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert (image["tag"], image["id"]) == (built["tag"], built["id"])


def test_another_image_under_the_digest_is_refused(digest: str) -> None:
    """What is pulled has to be what was built."""
    wanted = "sha256:" + "0" * 64
    done = play(
        ROOT / "roles/container_image/molecule/default/pull.yml",
        container_image_id=wanted,
        container_image_reference=f"198.18.40.2:5000/vllm-fleet/vllm-nixl@{digest}",
    )
    assert done.rc != 0
    assert "Check that it is the image that was built" in done.words


def test_a_registry_that_is_down_is_told() -> None:
    seen = refused("container_image", container_image_registry="198.18.40.2:5999")
    assert "localhost: the registry 198.18.40.2:5999 does not answer" in seen
    assert "Nothing was changed." in seen
