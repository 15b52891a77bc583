"""Measures pause, sleep, wake and resume of 8 scripted engines against the slowest alone, in the same run.

Engine number n of 8 takes n eighths of the seconds in SLOWEST for each call. On 2x H200 (vLLM 0.26) one
took 8 s for /sleep and 0.3 s for /wake_up; here is a fourth of that, and a wake of weights that takes longer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


def main() -> None:
    """Print a row for each run."""
    print(f"{'all 8':>8} {'slowest':>8} {'ratio':>6} {'more':>6} {'one by one':>11}  seconds")
    with scripted_fleet(4, 4) as fleet:
        for number, engine in enumerate(fleet.engines.values(), 1):
            engine.delays = {path: seconds * number / 8 for path, seconds in SLOWEST.items()}
        slowest = list(fleet.engines)[-1]
        for _ in range(RUNS):
            fleet.calls.clear()
            seconds = cycle(fleet.plan())
            calls = [
                (fleet.engines[name], urlsplit(path).path) for name, path in fleet.calls if name != "front"
            ]
            one_by_one = sum(engine.delays.get(path, 0) for engine, path in calls)
            own = cycle(alone(fleet.plan(), slowest))
            print(f"{seconds:8.2f} {own:8.2f} {seconds / own:6.2f} {seconds - own:6.2f} {one_by_one:11.2f}")
            if seconds > own + 1:
                raise SystemExit("The sequence took over 1 s more than its slowest engine.")


if __name__ == "__main__":
    main()
