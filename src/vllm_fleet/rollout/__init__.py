"""Control of a whole fleet for RL: pause, sleep, update, wake and resume all engines, in order.

    from vllm_fleet.rollout import Fleet, Rollout

    fleet = Rollout(Fleet.from_plan(json.load(file)))  # of `vllm-fleet plan -i INVENTORY --json`
    result = fleet.sleep(level=1)
    if not result.ok:
        raise RuntimeError(f"{result.message} {result.remedy}")

The same code is the command `vllm-fleet rollout`, and, as ansible.module_utils.fleet_rollout, the module that
playbooks/rollout.yml runs on the router's host: so it takes Python 3.9 and nothing but the standard library.
"""

from .engines import DISCARDED, Admission, State
from .fleet import Engine, Fleet, RolloutError
from .results import EngineResult, Result
from .rollout import ACTIONS, LEVELS, MODES, TAGS, Rollout

__all__ = [
    "ACTIONS",
    "DISCARDED",
    "LEVELS",
    "MODES",
    "TAGS",
    "Admission",
    "Engine",
    "EngineResult",
    "Fleet",
    "Result",
    "Rollout",
    "RolloutError",
    "State",
]
