"""roles/container_image/files/other-image, with stand-ins for docker and for images/accept of the same contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "roles/container_image/files/other-image"
DIGEST = "0123456789abcdef" * 4
REFERENCE = f"images.example/vllm-openai@sha256:{DIGEST}"
TAG = "vllm-fleet/other:arm64-cu13-0123456789abcdef"
IMAGE = ["sha256:1", "arm64"]

# `images` is what docker has, `registry` what it can pull by platform: {name: [id, architecture]}; `calls` what was asked.
DOCKER = """\
#!{python}
import json, pathlib, sys
state = pathlib.Path(__file__).parent
images = json.loads((state / "images").read_text())
command, *rest = sys.argv[1:]
with (state / "calls").open("a") as calls:
    calls.write(command + "\\n")
if command == "image":
    if rest[-1] not in images:
        sys.exit("Error: No such image")
    print(*images[rest[-1]])
if command == "pull":
    platform = [word for word in rest if word.startswith("--platform=linux/")][0].rpartition("/")[2]
    found = json.loads((state / "registry").read_text()).get(rest[-1], {{}}).get(platform)
    if not found:
        sys.exit("Using default output\\nno matching manifest for " + platform)
    images[rest[-1]] = found
if command == "tag":
    images[rest[1]] = next(image for image in images.values() if image[0] == rest[0])
(state / "images").write_text(json.dumps(images))
"""
ACCEPT = """\
import json, pathlib, sys
state = pathlib.Path(__file__).parent
variant, image, *rest = sys.argv[1:]
assert variant == "arm64-cu13" and image.startswith("sha256:") and rest == ["--other", "--json"], sys.argv
with (state / "calls").open("a") as calls:
    calls.write("accept\\n")
verdict = (state / "verdict").read_text()
print(verdict)
sys.exit(0 if '"accepted": true' in verdict else 1)
"""


class Builder:
    """A host with a docker engine and an acceptance test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        docker = folder / "docker"
        docker.write_text(DOCKER.format(python=sys.executable))
        docker.chmod(0o755)
        self.accept = folder / "accept"
        self.accept.write_text(ACCEPT)
        self.judged_by = [self.accept]
        for name in ("build", "versions.toml", "vllm-nixl/arm64-cu13.lock"):
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
            self.judged_by.append(path)
        self.kept = folder / "state/others" / f"{TAG.rpartition(':')[2]}.json"
        self.has()
        self.registry({REFERENCE: {"arm64": IMAGE}})
        self.verdict(accepted=True, lacks=["numactl"])

    def has(self, **images):
        (self.folder / "images").write_text(json.dumps(images))

    def images(self):
        return json.loads((self.folder / "images").read_text())

    def registry(self, images):
        (self.folder / "registry").write_text(json.dumps(images))

    def verdict(self, *, accepted, problems=(), lacks=(), vllm="0.33.0"):
        verdict = {"accepted": accepted, "problems": list(problems), "lacks": list(lacks), "vllm": vllm}
        (self.folder / "verdict").write_text(json.dumps(verdict))

    def calls(self):
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []

    def __call__(self, *more):
        command = [
            sys.executable,
            "-",
            "--architecture=arm64",
            "--vllm-version=0.33.0",
            f"--accept={self.accept}",
        ]
        command += [f"--state={self.folder / 'state'}", *(more or ["--"]), REFERENCE, "arm64-cu13"]
        with PROGRAM.open() as program:  # as the role does
            return subprocess.run(
                command,
                stdin=program,
                env=os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                check=False,
            )

    def result(self, *more):
        done = self(*more)
        assert done.returncode == 0, done.stderr
        [result] = json.loads(done.stdout)
        return result

    def error(self):
        done = self()
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("image: ")
        assert "Traceback" not in done.stderr
        return done.stderr


@pytest.fixture
def builder(tmp_path):
    return Builder(tmp_path)


def test_it_is_pulled_for_the_hosts_judged_and_named(builder):
    assert builder.result() == {
        "name": "other", "variant": "arm64-cu13", "content": "", "tag": TAG, "id": "sha256:1",
        "architecture": "arm64", "changed": True,
        "lacks": ["numactl"], "verdict": str(builder.kept),
    }  # fmt: skip
    assert builder.images() == {REFERENCE: IMAGE, TAG: IMAGE}


def test_a_second_time_nothing_is_pulled_judged_or_named_and_what_it_lacks_is_said_again(builder):
    builder.result()
    before = builder.calls()
    again = builder.result()
    assert (again["changed"], again["lacks"]) == (False, ["numactl"])
    assert set(builder.calls()[len(before) :]) == {"image"}


@pytest.mark.parametrize("which", range(4))
def test_another_acceptance_test_judges_anew(builder, which):
    builder.result()
    path = builder.judged_by[which]
    path.write_text(path.read_text() + "# stricter\n")
    builder.verdict(accepted=False, problems=["no nixl"])
    assert "no nixl" in builder.error()


def test_another_image_under_the_reference_is_judged_anew(builder):
    builder.result()
    builder.has(**{REFERENCE: ["sha256:2", "arm64"], TAG: IMAGE})
    assert builder.result()["changed"] is True
    assert builder.calls().count("accept") == 2
    assert builder.images()[TAG][0] == "sha256:2"


def at_a_site(builder):
    """What a bundle brings where there is no network: docker load restores the tag and no digest."""
    builder.result()
    builder.has(**{TAG: IMAGE})
    builder.registry({})
    (builder.folder / "calls").unlink()


@pytest.mark.parametrize("more", [(), ("--check",)])
def test_one_that_was_loaded_from_an_archive_is_the_reference_where_its_verdict_says_so(builder, more):
    at_a_site(builder)
    there = builder.result(*more)
    assert (there["id"], there["tag"], there["architecture"]) == ("sha256:1", TAG, "arm64")
    assert there["changed"] is False
    assert set(builder.calls()) == {"image"}


def test_one_that_was_loaded_is_judged_by_a_stricter_test(builder):
    at_a_site(builder)
    builder.judged_by[-1].write_text("another lock")
    assert builder.result()["id"] == "sha256:1"
    assert builder.calls().count("accept") == 1


@pytest.mark.parametrize("verdict", [None, {"id": "sha256:2"}, {}])
def test_what_has_the_tag_without_a_verdict_about_it_is_not_taken(builder, verdict):
    at_a_site(builder)
    builder.kept.unlink()
    if verdict is not None:
        builder.kept.write_text(json.dumps(verdict))
    assert f"{REFERENCE} could not be pulled" in builder.error()
    assert builder.result("--check")["id"] == ""


@pytest.mark.parametrize(
    ("holds", "said"), [("0.32.0", "0.32.0"), ("0.33.0+cu130", "0.33.0+cu130"), ("", "(none)")]
)
def test_one_that_holds_another_vllm_is_refused_each_time(builder, holds, said):
    builder.verdict(accepted=True, vllm=holds)
    for _ in range(2):
        assert (
            f"{REFERENCE} holds vLLM {said}, and 0.33.0 is declared; set "
            "fleet_image_vllm_version to what it holds" in builder.error()
        )
    assert TAG not in builder.images()


def test_one_that_is_there_is_not_pulled(builder):
    builder.has(**{REFERENCE: IMAGE})
    assert builder.result()["changed"] is True
    assert "pull" not in builder.calls()


def test_one_that_is_there_for_another_architecture_is_pulled(builder):
    builder.has(**{REFERENCE: ["sha256:9", "amd64"]})
    assert builder.result()["id"] == "sha256:1"


def test_check_mode_pulls_and_judges_nothing(builder):
    looked = builder.result("--check")
    assert (looked["id"], looked["changed"]) == ("", True)
    assert set(builder.calls()) == {"image"}
    builder.result()
    looked = builder.result("--check")
    assert (looked["id"], looked["changed"], looked["tag"]) == ("sha256:1", False, TAG)


def test_one_that_is_refused_gets_no_name_and_every_problem_is_told(builder):
    builder.verdict(accepted=False, problems=["libcudart.so.12 is needed by a.so", "no nixl"])
    said = builder.error()
    for words in (
        REFERENCE,
        "arm64-cu13",
        "libcudart.so.12 is needed by a.so",
        "no nixl",
        "fleet_image_reference",
    ):
        assert words in said
    assert TAG not in builder.images()


def test_a_verdict_that_cannot_be_read_is_no_pass(builder):
    (builder.folder / "verdict").write_text("docker export failed")
    assert f"{REFERENCE} could not be judged: docker export failed" in builder.error()
    assert TAG not in builder.images()


def test_a_status_against_its_own_words_is_no_pass(builder):
    builder.accept.write_text(builder.accept.read_text().replace("sys.exit(0 if", "sys.exit(1 if"))
    assert "is not accepted" in builder.error()


def test_one_that_cannot_be_pulled(builder):
    builder.registry({REFERENCE: {"amd64": IMAGE}})
    assert f"{REFERENCE} could not be pulled (no matching manifest for arm64)" in builder.error()


def test_one_that_is_for_another_architecture_only(builder):
    builder.registry({REFERENCE: {"arm64": ["sha256:3", "amd64"]}})
    said = builder.error()
    assert f"{REFERENCE} is for amd64, the hosts are arm64" in said
    assert "accept" not in builder.calls()


def test_without_an_acceptance_test_nothing_is_accepted(builder):
    builder.accept.unlink()
    assert str(builder.accept) in builder.error()


def test_without_docker(builder, monkeypatch):
    (builder.folder / "docker").unlink()
    monkeypatch.setenv("PATH", str(builder.folder))
    assert "docker cannot be run on this host" in builder.error()
