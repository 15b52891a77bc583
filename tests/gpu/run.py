"""Run the scenarios on this machine's GPUs; results as JSON, written after each of them.

    python tests/gpu/run.py PACKS OUT [SCENARIO ...]

PACKS is what pack.py wrote. OUT/results.json is continued where it is there, if it is of the same code on the same machine;
logs are beside it. Models that are not there are made. Needs root (an address on loopback, a device node), NVIDIA GPUs, and torch, vllm, nixl, vllm-router, aiohttp and
ansible-core on this Python's path.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Run as a program, it finds these nowhere else: so the imports below come after it (E402).
sys.path += [str(ROOT / "tests"), str(ROOT / "src")]

from gpu.machine import DIFFERS, PLACES, SkipError, address, gpus, imex_channel, kept  # noqa: E402
from gpu.scenarios import SCENARIOS  # noqa: E402
from gpu.shapes import MODELS  # noqa: E402


def main() -> int:
    """Run them."""
    packs, out, *chosen = sys.argv[1:]
    found = gpus()
    if not found:
        print("skipped: NVIDIA GPUs are needed, and this machine has none")
        return 0
    # Engines are processes of their own sessions, and would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    results = Path(out) / "results.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    here = conditions(Path(packs), found)
    told = continued(results, here)
    plan = json.loads((Path(packs) / "pair/plan.json").read_text())
    with address(plan["router"]["address"]):
        for name in chosen or SCENARIOS:
            done = told["scenarios"][name] = {"ok": False}
            try:
                perform(name, Path(packs), Path(out), done, len(found))
            finally:
                results.write_text(json.dumps(told, indent=1) + "\n")
            print(f"== {name}: {word(done)} in {done['seconds']} s {'; '.join(done['why'])}", flush=True)
    return 0 if all(done["ok"] or "skipped" in done for done in told["scenarios"].values()) else 1


def conditions(packs: Path, found: list[str]) -> dict[str, Any]:
    """What figures are of: code, machine, and what is set besides."""
    code = hashlib.sha256()
    files = [path for folder in ("src", "plugins", "tests/gpu") for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([*files, *(path for path in packs.rglob("*") if path.is_file())]):
        code.update(path.read_bytes())
    return {
        "commit": (packs / "commit").read_text().strip(),
        "code": code.hexdigest()[:12],
        "gpus": found,
        "versions": versions(),
        # Where things are differs from machine to machine, and says nothing.
        "environment": {key: "a path" if key in PLACES else value for key, value in kept().items()},
        "differs": list(DIFFERS),
    }


def continued(results: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The results that are there, or none yet; refused where they were measured under other conditions."""
    if not results.exists():
        return {"date": time.strftime("%Y-%m-%d", time.gmtime()), **here, "scenarios": {}}
    there: dict[str, Any] = json.loads(results.read_text())
    if other := [
        f"{key} {there.get(key)}, and not {value}" for key, value in here.items() if there.get(key) != value
    ]:
        sys.exit(f"{results} is of {'; '.join(other)}: name another folder")
    return there


def perform(name: str, packs: Path, out: Path, done: dict[str, Any], gpus_here: int) -> None:
    """One scenario, with its model made: when, with which code, how long, and why it is not ok or was skipped."""
    begin = time.monotonic()
    done |= {
        "begun": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": (packs / "commit").read_text().strip(),
        "why": ["it was ended from outside"],
    }
    try:
        done["why"] = _performed(name, packs, out, done, gpus_here)
    except SkipError as missing:
        done |= {"skipped": str(missing), "why": []}
    except Exception as error:  # noqa: BLE001  the others are still worth their time
        traceback.print_exc()
        done["why"] = [f"it broke: {type(error).__name__}: {error}"]
    finally:
        done |= {
            "ok": not done["why"] and "skipped" not in done,
            "seconds": round(time.monotonic() - begin, 1),
        }


def _performed(name: str, packs: Path, out: Path, done: dict[str, Any], gpus_here: int) -> list[str]:
    variant, scenario, channel = SCENARIOS[name]
    plan = json.loads((packs / variant / "plan.json").read_text())
    (host,) = plan["hosts"].values()
    needed = 1 + max(device for member in host["members"] for device in member["devices"])
    if needed > gpus_here:
        raise SkipError(f"it needs {needed} GPUs, and this machine has {gpus_here}")
    folder = Path(plan["model"]["path"])
    if not (folder / "tokenizer_config.json").exists():
        shape, layers = MODELS[folder.name]
        words = [sys.executable, ROOT / "tests/gpu/make_model.py", shape, folder, "--layers", str(layers)]
        subprocess.run(words, check=True)
    with imex_channel(there=channel):
        return scenario(packs, out, done)


def word(done: dict[str, Any]) -> str:
    """For people."""
    return f"skipped, {done['skipped']}," if "skipped" in done else "ok" if done["ok"] else "NOT OK"


def versions() -> dict[str, str]:
    """What is measured."""
    names = ("vllm", "torch", "nixl-cu13", "vllm-router")
    driver = subprocess.check_output(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True
    )
    return {name: version(name) for name in names} | {"driver": driver.split()[0]}


if __name__ == "__main__":
    sys.exit(main())
