"""The build tool images/build and images/fetch-wheels, with a fake docker and image folders of the test's own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from by_path import load

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "base/Dockerfile": "FROM scratch\n",
    "base/acceptance.py": "assert base\n",
    "engine/Dockerfile": "ARG BASE\nFROM ${BASE}\n",
    "engine/acceptance.py": "assert engine\n",
    "engine/rootfs/etc/motd": "hello\n",
    "engine/rootfs/usr/bin/engine": "#!/bin/sh\n",
    "engine/cpu.lock": "# made by uv\nvllm==1.0 \\\n    --hash=sha256:ab\n    # via x==2\nnixl==2.0 ; y == 'z'\n",
    "engine/gpu.lock": "vllm==2.0\n",
    "engine/cpu.in": "vllm\n",
    "engine/cpu.overrides": "triton\n",
    "engine/README.md": "An engine.\n",
}
ALL = ["base", "engine:cpu", "engine:gpu"]


class Builder:
    """images/build on a copy, with a docker engine of its own."""

    def __init__(self, folder: Path) -> None:
        self.images = folder / "images"
        self.docker = folder / "docker"
        self.state = folder / "state"
        for path in (self.images, self.docker, folder / "bin"):
            path.mkdir()
        shutil.copy(ROOT / "images" / "build", self.images)
        (folder / "bin" / "docker").symlink_to(ROOT / "tests" / "support" / "fake_docker.py")
        for name, text in FOLDERS.items():
            self.write(name, text)
        (self.images / "engine/rootfs/usr/bin/engine").chmod(0o755)
        self.environment = {
            **os.environ,
            "FAKE_DOCKER": str(self.docker),
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DOCKER_HOST": "tcp://127.0.0.1:1",  # where the fake is passed over, the machine's own must not be taken
        }

    def write(self, name: str, text: str) -> Path:
        path = self.images / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, self.images / "build", f"--state={self.state}", *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __call__(self, *arguments: str) -> list[dict]:
        """Build; the result by image."""
        process = self.start(*arguments)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return json.loads(out)

    def error(self, *arguments: str) -> str:
        """What it says last when it fails, in one line without a traceback."""
        process = self.start(*arguments)
        out, err = process.communicate()
        assert process.returncode == 1, err
        assert out == ""
        assert "Traceback" not in err
        last = err.splitlines()[-1]
        assert last.startswith("images: ")
        return last

    def contents(self) -> dict[str, str]:
        image = load(self.images / "build").Image
        return {name: image(name).content for name in ALL}

    def calls(self, command: str) -> list[list[str]]:
        path = self.docker / "calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if call[0] == command]


@pytest.fixture
def builder(tmp_path):
    return Builder(tmp_path)


# --- What an image's content depends on ---------------------------------------------------------------------------


def edit(name):
    return lambda images: (images / name).open("a").write("# more\n")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (edit("engine/Dockerfile"), {"engine:cpu", "engine:gpu"}),
        (edit("engine/rootfs/etc/motd"), {"engine:cpu", "engine:gpu"}),
        (lambda images: (images / "engine/rootfs/etc/motd").chmod(0o755), {"engine:cpu", "engine:gpu"}),
        (lambda images: (images / "engine/rootfs/etc/motd").rename(images / "engine/x"), {"engine:cpu", "engine:gpu"}),
        (lambda images: (images / "engine/rootfs/link").symlink_to("nowhere"), {"engine:cpu", "engine:gpu"}),
        (lambda images: (images / "engine/rootfs/empty").write_text(""), {"engine:cpu", "engine:gpu"}),
        (edit("engine/cpu.lock"), {"engine:cpu"}),
        (edit("engine/gpu.lock"), {"engine:gpu"}),
        (edit("base/Dockerfile"), set(ALL)),
        (edit("base/acceptance.py"), set(ALL)),
        (edit("build"), set()),
        (edit("engine/README.md"), set()),
        (edit("engine/cpu.in"), set()),
        (edit("engine/cpu.overrides"), set()),
        (lambda images: os.utime(images / "engine/Dockerfile", (0, 0)), set()),
        (lambda images: (images / "engine/rootfs/etc/motd").chmod(0o600), set()),
        (lambda images: (images / "engine/__pycache__").mkdir(), set()),
    ],
)  # fmt: skip
def test_the_content_changes_with_the_inputs_and_only_then(builder, change, changed):
    before = builder.contents()
    change(builder.images)
    after = builder.contents()
    assert {name for name in ALL if before[name] != after[name]} == changed


# --- Building ---------------------------------------------------------------------------------------------------


def test_an_image_is_built_on_its_parent_tested_and_only_then_named(builder):
    (engine,) = builder("engine:cpu")
    contents = builder.contents()
    base = f"vllm-fleet/base:{contents['base']}"
    assert engine == {
        "name": "engine",
        "variant": "cpu",
        "content": contents["engine:cpu"],
        "tag": f"vllm-fleet/engine:cpu-{contents['engine:cpu']}",
        "id": "sha256:2",
        "changed": True,
    }
    first, second = builder.calls("build")
    assert "--build-arg=BASE=" in first
    assert f"--build-arg=BASE={base}" in second
    assert f"--label=vllm-fleet.content={contents['engine:cpu']}" in second
    assert not any(word.startswith(("--tag", "-t")) for word in first + second)
    order = [call[0] for call in builder.calls("build") + builder.calls("run") + builder.calls("tag")]
    assert order == ["build", "build", "run", "run", "tag", "tag"]
    test = builder.calls("run")[1]
    assert test[-2:] == ["sha256:2", "-"]
    assert "--network=none" in test
    assert "--env=LOCK=vllm==1.0 nixl==2.0" in test
    assert (builder.docker / "test").read_text() == "assert engine\n"
    assert builder.calls("tag") == [["tag", "sha256:1", base], ["tag", "sha256:2", engine["tag"]]]


def test_the_context_is_the_inputs_with_the_modes_that_git_keeps(builder):
    (builder.images / "engine/rootfs/etc/motd").chmod(0o600)
    (builder.images / "engine/rootfs/link").symlink_to("usr/bin/engine")
    builder("engine:cpu")
    context = builder.docker / "context"
    modes = {
        str(path.relative_to(context)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in context.rglob("*")
        if path.is_file()
    }
    assert modes == {
        "Dockerfile": "0o644",
        "acceptance.py": "0o644",
        "cpu.lock": "0o644",
        "rootfs/etc/motd": "0o644",
        "rootfs/link": "0o755",
        "rootfs/usr/bin/engine": "0o755",
    }
    assert (context / "rootfs/link").readlink() == Path("usr/bin/engine")
    assert not list((builder.state / "context").iterdir())


def test_an_image_that_is_there_is_not_built(builder):
    (first,) = builder("engine:cpu")
    (second,) = builder("engine:cpu")
    assert second == {**first, "changed": False}
    assert len(builder.calls("build")) == 2  # base and engine, once each
    builder.write("base/more", "")
    assert builder("engine:cpu")[0]["changed"]


def test_check_builds_nothing(builder):
    assert [image["changed"] for image in builder("--check", *ALL)] == [True, True, True]
    assert not builder.calls("build")
    assert not builder.state.exists()


def test_prepare_adds_to_the_context(builder):
    builder.write(
        "engine/prepare",
        "import os, pathlib\n"
        "print('not for stdout')\n"
        "pathlib.Path('made').write_text(' '.join(os.environ[name] for name in ('VARIANT', 'BASE', 'IMAGES')))\n",
    )
    builder("engine:gpu")
    base = builder.contents()["base"]
    assert (builder.docker / "context/made").read_text() == f"gpu vllm-fleet/base:{base} {builder.images}"


def test_a_failing_acceptance_test_leaves_no_name(builder):
    builder("base")
    (builder.docker / "fail-run").write_text("1")
    (tag,) = (image["tag"] for image in builder("--check", "engine:cpu"))
    assert builder.error("engine:cpu") == (
        f"images: {tag} failed its acceptance test and got no name; the reason is above, "
        "the image is kept for a look as sha256:2"
    )
    assert [call[2].split(":")[0] for call in builder.calls("tag")] == ["vllm-fleet/base"]
    (builder.docker / "fail-run").unlink()
    assert builder("engine:cpu")[0]["changed"]


# --- Faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "there is no image 'nope'; there are: base, engine"),
        ("../images/base", "there is no image '../images/base'; there are: base, engine"),
        ("engine", "'engine' names none of the variants of engine; write engine:cpu or engine:gpu"),
        ("engine:tpu", "'engine:tpu' names none of the variants of engine; write engine:cpu or engine:gpu"),
        ("base:cpu", "base has no variants; write base instead of 'base:cpu'"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_built(builder, name, message):
    assert builder.error("base", name) == f"images: {message}"
    assert not builder.calls("build")


def test_no_engine_answers(builder):
    (builder.docker / "silent").touch()
    assert builder.error("base") == (
        "images: no docker engine answers; start docker, or see whether you may use it "
        "(Cannot connect to the Docker daemon.)"
    )


def test_a_client_without_buildkit_is_not_used(builder):
    (builder.docker / "version").write_text("28.2.2")
    message = builder.error("base")
    assert message.endswith("/bin/docker cannot use BuildKit; install the buildx plugin (docker-buildx)")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("build", "docker could not build {}; its words are above"),
        ("tag", "docker could not name sha256:1 {}"),
    ],
)
def test_what_docker_refuses(builder, command, message):
    (builder.docker / f"fail-{command}").write_text("1")
    tag = f"vllm-fleet/base:{builder.contents()['base']}"
    assert builder.error("base") == f"images: {message.format(tag)}"


def test_what_prepare_cannot_make(builder):
    builder.write("base/prepare", "import sys\nsys.exit('images: the mirror is down')\n")
    process = builder.start("base")
    lines = process.communicate()[1].splitlines()
    assert lines[-2] == "images: the mirror is down"
    assert lines[-1].endswith("could not be prepared; the reason is above")
    assert process.returncode == 1
    assert not builder.calls("build")


def test_a_build_that_was_cut_off_is_made_again(builder):
    prepare = builder.write("base/prepare", "import time\nopen('half', 'w')\ntime.sleep(60)\n")
    process = builder.start("base")
    half = builder.state / "context/base-/half"
    deadline = time.monotonic() + 20
    while not half.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1].splitlines()[-1].startswith("images: interrupted")
    assert process.returncode == 1
    assert half.exists()
    prepare.write_text("")
    assert builder("base")[0]["changed"]
    assert not (builder.docker / "context/half").exists()


def test_two_builds_take_turns(builder):
    builder.state.mkdir()
    with (builder.state / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = builder.start("base")
        assert process.stderr.readline() == "images: another build is at work; waiting for it\n"
        assert not builder.calls("build")
    assert process.communicate(timeout=20)[0]
    assert builder.calls("build")


# --- The real prepare of `base` ---------------------------------------------------------------------------------


def test_debootstrap_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match=r"^images: debootstrap is not installed on this host; install it"):
        runpy.run_path(str(ROOT / "images/base/prepare"))


def test_debootstrap_fails(tmp_path):
    program = tmp_path / "debootstrap"
    program.write_text("#!/bin/sh\necho 'E: no mirror' >&2\nexit 3\n")
    program.chmod(0o755)
    (tmp_path / "packages").write_text("python3\n")
    done = subprocess.run(
        [sys.executable, ROOT / "images/base/prepare"],
        cwd=tmp_path, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "E: no mirror",
        f"images: {program} ended with status 3; its words are above",
    ]


# --- fetch-wheels -----------------------------------------------------------------------------------------------


@pytest.fixture
def fetch(tmp_path):
    """Run fetch-wheels with a pip that has only the folder `index`; its exit status and what it says."""
    index, wheelhouse = tmp_path / "index", tmp_path / "wheelhouse"
    index.mkdir()
    wheelhouse.mkdir()
    wheel = index / "Tiny_Pack.age-1.0+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "tiny_pack_age-1.0+cpu.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-pack-age\nVersion: 1.0+cpu\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    lock = tmp_path / "cpu.lock"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(
        f"# a comment\ntiny-pack-age==1.0+cpu \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n"
    )

    def run():
        done = subprocess.run(
            [sys.executable, ROOT / "images/fetch-wheels", lock, wheelhouse,
             "--python=3.11", "--arch=x86_64", "--glibc=2.36"],
            env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    run.index, run.wheelhouse = index, wheelhouse
    return run


def test_wheels_are_fetched_once(fetch):
    code, said = fetch()
    assert code == 0, said
    assert "fetching 1 wheels of cpu.lock" in said
    assert [path.name for path in fetch.wheelhouse.iterdir()] == [path.name for path in fetch.index.iterdir()]
    shutil.rmtree(fetch.index)
    assert fetch() == (0, "")  # without pip, and so without a network


def test_a_wheel_that_was_cut_off_is_fetched_again(fetch):
    (whole,) = fetch.index.iterdir()
    (fetch.wheelhouse / whole.name).write_bytes(whole.read_bytes()[:100])
    other = fetch.wheelhouse / "other-2.0-py3-none-any.whl"
    other.write_bytes(b"of another lock")
    code, said = fetch()
    assert code == 0, said
    assert (fetch.wheelhouse / whole.name).read_bytes() == whole.read_bytes()
    assert other.exists()


def test_pip_cannot_fetch(fetch):
    shutil.rmtree(fetch.index)
    code, said = fetch()
    assert code == 1
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("images: pip could not fetch every wheel of ")
