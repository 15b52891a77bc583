"""The build tool images/build and images/fetch-wheels, with a fake docker and image folders of the test's own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
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
    "engine/Dockerfile": "ARG BASE=root\nFROM ${BASE}\n",
    "engine/acceptance.py": "assert engine\n",
    "engine/rootfs/etc/motd": "hello\n",
    "engine/rootfs/usr/bin/engine": "#!/bin/sh\n",
    "engine/cpu.lock": "# made by uv\nvllm==1.0 \\\n    --hash=sha256:ab\n    # via x==2\nnixl==2.0 ; y == 'z'\n",
    "engine/gpu.lock": "vllm==2.0\n",
    "engine/README.md": "An engine.\n",
    "root/Dockerfile": "FROM scratch\n",
    "root/acceptance.py": "assert root\n",
    "lab/Dockerfile": "ARG BASE=base\nFROM ${BASE}\n",
    "lab/acceptance.py": "assert lab\n",
    # Stands in for images/accept, which test_accept.py tests.
    "accept": "import os, pathlib, sys\n"
    "state = pathlib.Path(os.environ['FAKE_DOCKER'])\n"
    "(state / 'accepted').open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    "pathlib.Path(sys.argv[-1].removeprefix('--sbom=')).touch()\n"
    "sys.exit((state / 'fail-accept').exists())\n",
}
HERE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
AWAY = {"amd64": "arm64", "arm64": "amd64"}[HERE]
VERSIONS = f"""
[debian]
suite = "bookworm"
python = "3.11"
[root.amd64]
architecture = "amd64"
[root.arm64]
architecture = "arm64"
[engine.cpu]
architecture = "{HERE}"
wheels = "cpu"
[engine.gpu]
architecture = "{AWAY}"
wheels = "gpu"
[wheels.cpu]
versions = {{ vllm = "1.0" }}
[wheels.gpu]
cuda = 13
versions = {{ vllm = "2.0" }}
"""
ROOTS = {f"root:{HERE}", f"root:{AWAY}"}
ALL = ["base", "lab", f"root:{HERE}", f"root:{AWAY}", "engine:cpu", "engine:gpu"]


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
        for name, text in {**FOLDERS, "versions.toml": VERSIONS}.items():
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


def told(old, new):
    def change(images):
        text = (images / "versions.toml").read_text()
        assert text.count(old) == 1
        (images / "versions.toml").write_text(text.replace(old, new))

    return change


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
        (edit("base/Dockerfile"), {"base", "lab"}),
        (edit("base/acceptance.py"), {"base", "lab"}),
        (edit("root/Dockerfile"), {*ROOTS, "engine:cpu", "engine:gpu"}),
        (told('vllm = "1.0"', 'vllm = "1.1"'), {"engine:cpu"}),
        (told("cuda = 13", "cuda = 14"), {"engine:gpu"}),
        (told('python = "3.11"', 'python = "3.12"'), set(ALL)),
        (told("[wheels.cpu]", "# said\n[wheels.cpu]"), set()),
        (edit("accept"), set()),
        (edit("build"), set()),
        (edit("engine/README.md"), set()),
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
    root = f"vllm-fleet/root:{HERE}-{contents[f'root:{HERE}']}"
    sbom = builder.state / "sbom" / f"engine-cpu-{contents['engine:cpu']}.cdx.json"
    assert engine == {
        "name": "engine",
        "variant": "cpu",
        "content": contents["engine:cpu"],
        "tag": f"vllm-fleet/engine:cpu-{contents['engine:cpu']}",
        "id": "sha256:2",
        "architecture": HERE,
        "sbom": str(sbom),
        "changed": True,
    }
    first, second = builder.calls("build")
    assert "--build-arg=BASE=" in first
    assert f"--build-arg=BASE={root}" in second
    assert f"--platform=linux/{HERE}" in second
    assert not any(word.startswith("--build-arg=CUDA_HOME") for word in second)
    lock = hashlib.sha256(FOLDERS["engine/cpu.lock"].encode()).hexdigest()
    for label in (
        f"content={contents['engine:cpu']}",
        "variant=cpu",
        f"lock={lock}",
        'versions={"vllm": "1.0"}',
    ):
        assert f"--label=vllm-fleet.{label}" in second
    assert not any(word.startswith(("--tag", "-t")) for word in first + second)
    order = [call[0] for call in builder.calls("build") + builder.calls("run") + builder.calls("tag")]
    assert order == ["build", "build", "run", "run", "tag", "tag"]
    test = builder.calls("run")[1]
    assert test[-2:] == ["sha256:2", "-"]
    assert "--network=none" in test
    assert (builder.docker / "test").read_text() == "assert engine\n"
    assert (builder.docker / "accepted").read_text().splitlines()[1] == f"engine:cpu sha256:2 --sbom={sbom}"
    assert builder.calls("tag") == [["tag", "sha256:1", root], ["tag", "sha256:2", engine["tag"]]]


def test_an_image_for_another_architecture_is_judged_and_not_run(builder):
    (engine,) = builder("engine:gpu")
    assert engine["architecture"] == AWAY
    build = builder.calls("build")[1]
    assert f"--platform=linux/{AWAY}" in build
    assert "--build-arg=CUDA_HOME=/usr/local/lib/python3.11/dist-packages/nvidia/cu13" in build
    assert not builder.calls("run")
    accepted = [line.split()[0] for line in (builder.docker / "accepted").read_text().splitlines()]
    assert accepted == [f"root:{AWAY}", "engine:gpu"]


def test_an_image_without_variants_is_one_for_this_machine(builder):
    (lab,) = builder("lab")
    assert (lab["architecture"], lab["sbom"]) == (HERE, "")
    assert not (builder.docker / "accepted").exists()
    assert len(builder.calls("run")) == 2  # base and lab


def test_an_image_that_is_refused_gets_no_name(builder):
    (builder.docker / "fail-accept").touch()
    assert "failed its acceptance test and got no name" in builder.error("engine:gpu")
    assert not builder.calls("tag")


def test_fetch_builds_nothing(builder):
    """Downloads are made for the image and for those that it needs."""
    prepare = (
        "import os, pathlib, sys\n"
        "with (pathlib.Path(os.environ['STATE']) / 'fetched').open('a') as fetched:\n"
        "    print(pathlib.Path.cwd().name, repr(os.environ['ONLY_FETCH']), file=fetched)\n"
    )
    for image in ("base", "root", "engine"):
        builder.write(f"{image}/prepare", prepare)
    assert [image["changed"] for image in builder("--fetch", "engine:gpu")] == [False]
    assert not builder.calls("build")
    fetched = (builder.state / "fetched").read_text().splitlines()
    assert fetched == ["base- 'yes'", "base- 'yes'", f"root-{AWAY} 'yes'", "engine-gpu 'yes'"]
    builder("engine:gpu")
    assert (builder.state / "fetched").read_text().splitlines()[4:] == [
        "base- ''",
        f"root-{AWAY} ''",
        "engine-gpu ''",
    ]


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
    assert len(builder.calls("build")) == 2  # root and engine, once each
    builder.write("root/more", "")
    assert builder("engine:cpu")[0]["changed"]


def test_check_builds_nothing(builder):
    assert all(image["changed"] for image in builder("--check", *ALL))
    assert not builder.calls("build")
    assert not builder.state.exists()


def test_prepare_adds_to_the_context(builder):
    builder.write(
        "engine/prepare",
        "import os, pathlib\n"
        "print('not for stdout')\n"
        "told = ('VARIANT', 'ARCHITECTURE', 'NATIVE', 'IMAGES', 'SPEC')\n"
        "pathlib.Path('made').write_text(' '.join(os.environ[name] for name in told))\n",
    )
    builder("engine:gpu")
    base = builder.contents()["base"]
    made = (builder.docker / "context/made").read_text()
    assert made.startswith(f"gpu {AWAY} vllm-fleet/base:{base} {builder.images} {{")
    assert json.loads(made[made.index("{") :]) == {
        "suite": "bookworm", "python": "3.11", "architecture": AWAY, "wheels": "gpu", "cuda": 13,
        "versions": {"vllm": "2.0"},
    }  # fmt: skip


def test_a_failing_acceptance_test_leaves_no_name(builder):
    builder(f"root:{HERE}")
    (builder.docker / "fail-run").write_text("1")
    (tag,) = (image["tag"] for image in builder("--check", "engine:cpu"))
    assert builder.error("engine:cpu") == (
        f"images: {tag} failed its acceptance test and got no name; the reason is above, "
        "the image is kept for a look as sha256:2"
    )
    assert [call[2].split(":")[0] for call in builder.calls("tag")] == ["vllm-fleet/root"]
    (builder.docker / "fail-run").unlink()
    assert builder("engine:cpu")[0]["changed"]


# --- Faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "there is no image 'nope'; there are: base, engine, lab, root"),
        ("../images/base", "there is no image '../images/base'; there are: base, engine, lab, root"),
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


def test_what_is_there_is_told_without_waiting_for_a_build(builder):
    (first,) = builder("base")
    with (builder.state / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert builder("base") == [{**first, "changed": False}]


# --- fetch-packages --------------------------------------------------------------------------------------------


@pytest.fixture
def bootstrap(tmp_path):
    """Run fetch-packages with a debootstrap that does what a script says."""
    (tmp_path / "list").write_text("python3\n")

    def run(script: str | None, *names: str):
        if script:
            program = tmp_path / "debootstrap"
            program.write_text(f"#!/bin/sh\n{script}")
            program.chmod(0o755)
        path = f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path / "nowhere")
        done = subprocess.run(
            [sys.executable, ROOT / "images/fetch-packages", "folder", "--suite=bookworm", "--arch=arm64", "--include=list"],
            cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr.splitlines()

    run.folder = tmp_path / "folder"
    return run


MADE = (
    'for word; do case $word in --make-tarball=*) echo made > "${word#*=}"; echo "$@" >> asked;; esac; done\n'
)


def test_packages_are_fetched_once(bootstrap):
    code, said, _ = bootstrap(MADE)
    archive = Path(said.strip())
    assert (code, archive.parent, archive.read_text()) == (0, bootstrap.folder, "made\n")
    asked = (bootstrap.folder.parent / "asked").read_text()
    assert "--arch=arm64" in asked
    assert "--include=python3" in asked
    assert bootstrap("exit 9\n") == (0, said, [])  # without debootstrap, and so without a network
    (bootstrap.folder.parent / "list").write_text("python3 gcc\n")
    assert bootstrap("exit 9\n")[0] == 1


def test_debootstrap_fails(bootstrap):
    code, _, said = bootstrap("echo 'E: no mirror'\nexit 3\n")
    assert code == 1
    assert said[-2:] == ["E: no mirror", "images: debootstrap ended with status 3; its words are above"]
    assert not list(bootstrap.folder.glob("*.tgz"))


def test_debootstrap_is_missing(monkeypatch, capsys):
    module = load(ROOT / "images/fetch-packages")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(
        sys, "argv", ["fetch-packages", "nowhere", "--suite=s", "--arch=a", f"--include={os.devnull}"]
    )
    with pytest.raises(SystemExit, match=r"^images: debootstrap is not installed on this host; install it"):
        module.main()


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
