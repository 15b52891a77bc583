"""Measures pause, sleep, wake and resume of a whole fleet against its engines alone, in the same run.

    python benchmarks/rollout.py [PLAN]

PLAN is what `vllm-fleet plan --json` printed of a fleet that runs, with this host among its controllers.
Without it, 8 engines are scripted: number n of 8 takes n eighths of the seconds in SLOWEST for each call. On
2x H200 (vLLM 0.26) one took 8 s for /sleep and 0.3 s for /wake_up; here is a fourth of that, and a wake of
weights that takes longer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from scripted_engine import scripted_fleet  # type: ignore[import-not-found]  # noqa: E402  of the tests

from vllm_fleet.rollout import Fleet, Rollout  # noqa: E402

RUNS = 3
SLOWEST = {"/pause": 0.2, "/sleep": 2.0, "/wake_up": 0.6, "/resume": 0.05}


def cycle(plan: dict[str, Any]) -> float:
    """Seconds of the whole sequence; every step must end well."""
    controls = Rollout(Fleet.from_plan(plan))
    began = time.perf_counter()
    for step in (controls.pause, controls.sleep, controls.wake, controls.resume):
        result = step()
        if not result.ok:
            raise SystemExit("\n".join(result.lines()))
    return time.perf_counter() - began


def alone(plan: dict[str, Any], name: str) -> dict[str, Any]:
    """The plan of one engine and the front."""
    return plan | {"engines": [engine for engine in plan["engines"] if engine["name"] == name]}


def measure(plan: dict[str, Any]) -> None:
    """Print a row for each run."""
    print(f"{'together':>8} {'slowest':>8} {'ratio':>6} {'more':>6} {'one by one':>11}  seconds")
    for _ in range(RUNS):
        seconds = cycle(plan)
        own = [cycle(alone(plan, engine.name)) for engine in Fleet.from_plan(plan).engines]
        most = max(own)
        print(f"{seconds:8.2f} {most:8.2f} {seconds / most:6.2f} {seconds - most:6.2f} {sum(own):11.2f}")
        if seconds > most + 1:
            raise SystemExit("The sequence took over 1 s more than its slowest engine.")


def main() -> None:
    """Measure the fleet of a plan, or a scripted one."""
    if sys.argv[1:]:
        measure(json.loads(Path(sys.argv[1]).read_text())["plan"])
        return
    with scripted_fleet(4, 4) as fleet:
        for number, engine in enumerate(fleet.engines.values(), 1):
            engine.delays = {path: seconds * number / 8 for path, seconds in SLOWEST.items()}
        measure(fleet.plan())


if __name__ == "__main__":
    main()
