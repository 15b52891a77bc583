"""Measures what native cross-building saves: wheels for arm64 installed here, or by pip under emulation.

`python benchmarks/image.py`, with the Python of the environment. It needs docker, images/engine-base:arm64,
`make wheelhouse TARGET=arm64-cu13`, and qemu for arm64 registered with the kernel (Debian: qemu-user-static,
binfmt-support); it ends with a message where one is missing. Downloads are not in it. The part of the lock is
named below: all of it, 9 GB, would take hours under emulation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUBSET = (
    *(
        "nixl",
        "nixl-cu13",
        "vllm-router",
        "numpy",
        "pillow",
        "orjson",
        "safetensors",
        "tokenizers",
        "transformers",
    ),
    *("huggingface-hub", "pydantic", "pydantic-core", "fastapi", "openai", "sympy", "pip"),
)
WHEELS = ROOT / ".state/wheelhouse/vllm-nixl-arm64-cu13"
RUNS = 3


def subset() -> str:
    """Those distributions' part of the lock."""
    lock = (ROOT / "images/vllm-nixl/arm64-cu13.lock").read_text()
    entries = re.findall(r"^([a-z0-9-]+)(==.*(?:\n    .*)+)\n", lock, re.MULTILINE)
    return "".join(f"{name}{rest}\n" for name, rest in entries if name in SUBSET)


def seconds(command: Sequence[str | Path]) -> float:
    """How long a command takes that must end well."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout)[-1500:]
        sys.exit(f"image.py: {command[0]} ended with status {done.returncode}: {said}")
    return time.monotonic() - started


def image(name: str) -> str:
    """The tag of an image that has been built."""
    check = [sys.executable, str(ROOT / "images/build"), "--check", name]
    (told,) = json.loads(subprocess.run(check, capture_output=True, check=True).stdout)
    if not told["id"]:
        sys.exit(f"image.py: {name} is not built; run images/build {name}")
    return str(told["tag"])


def main() -> None:
    """Time both ways in turn, print the medians and their ratio."""
    if not WHEELS.exists():
        sys.exit("image.py: there are no wheels; run make wheelhouse TARGET=arm64-cu13")
    target, native = image("engine-base:arm64"), image("base")
    docker = ["docker", "run", "--rm", "--network=none", f"--user={os.getuid()}:{os.getgid()}"]
    seconds([*docker, "--platform=linux/arm64", target, "python3", "-c", "pass"])  # an emulator is registered
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    figures: dict[str, list[float]] = {"native": [], "emulated": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "lock").write_text(subset())
        (pip,) = WHEELS.glob("pip-*.whl")
        for number in range(RUNS):
            site = folder / f"native{number}"
            install = [
                uv,
                "pip",
                "install",
                "--quiet",
                "--offline",
                "--no-index",
                f"--find-links={WHEELS}",
                "--no-deps",
            ]
            install += [
                "--require-hashes",
                "--only-binary=:all:",
                "--python-version=3.11",
                f"--target={site}",
            ]
            install += ["--python-platform=aarch64-manylinux_2_36", f"--cache-dir={folder}/cache{number}"]
            compiling = [
                *docker,
                f"--volume={site}:/site",
                native,
                "python3",
                "-m",
                "compileall",
                "-q",
                "-j",
                "0",
                "/site",
            ]
            figures["native"].append(
                seconds([*install, f"--requirement={folder}/lock"]) + seconds([*compiling])
            )
            (folder / f"emulated{number}").mkdir()
            install = [
                *docker,
                "--platform=linux/arm64",
                f"--volume={WHEELS}:/wheels:ro",
                f"--volume={folder}:/work",
            ]
            install += [
                "--env=HOME=/work",
                target,
                "python3",
                f"/wheels/{pip.name}/pip",
                "install",
                "--quiet",
                "--no-index",
            ]
            install += [
                "--no-deps",
                "--require-hashes",
                "--find-links=/wheels",
                f"--target=/work/emulated{number}",
            ]
            figures["emulated"].append(seconds([*install, "--no-cache-dir", "--requirement=/work/lock"]))
            print(" ".join(f"{way} {times[-1]:.1f} s" for way, times in figures.items()), flush=True)
    here, emulated = (statistics.median(times) for times in figures.values())
    print(f"{len(SUBSET)} distributions: {here:.1f} s, under emulation {emulated:.1f} s", end=", ")
    print(f"ratio {emulated / here:.1f}")


if __name__ == "__main__":
    main()
