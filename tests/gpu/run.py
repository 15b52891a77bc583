"""Run the scenarios on this machine's GPUs; results as JSON, written after each of them.

    python tests/gpu/run.py PACKS OUT [SCENARIO ...]

PACKS is what pack.py wrote. OUT/results.json is continued where it is there; logs are beside it. Models that are not there
are made. Needs root (an address on loopback, a device node), NVIDIA GPUs, and torch, vllm, nixl, vllm-router, aiohttp and
ansible-core on this Python's path.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "src")]

from machine import DIFFERS, gpus, imex_channel  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402
from shapes import MODELS  # noqa: E402


def main() -> int:
    """Run them."""
    packs, out, *chosen = sys.argv[1:]
    found = gpus()
    if not found:
        print("skipped: NVIDIA GPUs are needed, and this machine has none")
        return 0
    # As at the end of a lease: engines are processes of their own sessions, and would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    results = Path(out) / "results.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"scenarios": {}}
    kept |= {"date": time.strftime("%Y-%m-%d"), "gpus": found, "differs": DIFFERS, "versions": versions()}
    kept["commit"] = (Path(packs) / "commit").read_text().strip()
    imex_channel(there=True)
    for name in chosen or SCENARIOS:
        done = kept["scenarios"][name] = {"ok": False}
        begin = time.monotonic()
        try:
            perform(name, Path(packs), Path(out), done, len(found))
        except Exception:  # noqa: BLE001  the others are still worth their time
            done["error"] = traceback.format_exc()[-4000:]
        finally:
            done["seconds"] = round(time.monotonic() - begin, 1)
            results.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"== {name}: {word(done)} in {done['seconds']} s {done.get('error', '')}", flush=True)
    return 0 if all(done["ok"] or "skipped" in done for done in kept["scenarios"].values()) else 1


def perform(name: str, packs: Path, out: Path, done: dict[str, Any], gpus_here: int) -> None:
    """One scenario, with its model made; or why it is skipped."""
    variant, scenario = SCENARIOS[name]
    plan = json.loads((packs / variant / "plan.json").read_text())
    (host,) = plan["hosts"].values()
    needed = 1 + max(device for member in host["members"] for device in member["devices"])
    if needed > gpus_here:
        done["skipped"] = f"it needs {needed} GPUs, and this machine has {gpus_here}"
        return
    folder = Path(plan["model"]["path"])
    if not (folder / "tokenizer_config.json").exists():
        shape, layers = MODELS[folder.name]
        words = [sys.executable, HERE / "make_model.py", shape, folder, "--layers", str(layers)]
        subprocess.run(words, check=True)
    scenario(packs, out, done)


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
