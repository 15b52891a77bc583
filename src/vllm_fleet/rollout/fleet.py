"""The part of a plan that controlling a fleet takes: its engines' heads, in order, and its front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRAINER_RANKS = 1
"""The trainer is rank 0 of the group that weights are sent in (vLLM's NCCL backend, vime)."""


class RolloutError(Exception):
    """The call is wrong and nothing was done; the text says what to do."""


@dataclass(frozen=True)
class Engine:
    """The head of one engine of ours.

    Attributes:
        name: as in the plan.
        role: prefill, decode or mixed.
        url: of its API, without a path.
        world_size: its ranks, TP x PP x DP.
        rank_offset: of its first rank in the group that weights are sent in.

    """

    name: str
    role: str
    url: str
    world_size: int
    rank_offset: int


@dataclass(frozen=True)
class Fleet:
    """What is controlled.

    Attributes:
        engines: in plan order, which is the order of ranks too.
        external: names of engines that the plan lists but that are not ours; they are never called.
        control_url: the front's control port.
        timeout: seconds that one control call may take (`fleet_control_timeout`).

    """

    engines: tuple[Engine, ...]
    external: tuple[str, ...]
    control_url: str
    timeout: float

    @property
    def prefills(self) -> tuple[Engine, ...]:
        """Engines that give KV away."""
        return tuple(engine for engine in self.engines if engine.role == "prefill")

    @property
    def decodes(self) -> tuple[Engine, ...]:
        """Engines that clients' tokens come from: decode or mixed."""
        return tuple(engine for engine in self.engines if engine.role != "prefill")

    @property
    def world_size(self) -> int:
        """Ranks in the group that weights are sent in, the trainer's among them."""
        return TRAINER_RANKS + sum(engine.world_size for engine in self.engines)

    @classmethod
    def from_plan(cls, document: Any) -> Fleet:
        """Take a plan, or all that `vllm-fleet plan --json` prints.

        Raises:
            RolloutError: it is neither, or the plan's engines cannot be controlled.

        """
        plan: Any = document.get("plan", document) if isinstance(document, Mapping) else None
        try:
            profile, router, timeout = plan["profile"], plan["router"], plan["timeouts"]["control"]
            ours = [engine for engine in plan["engines"] if not engine["external"]]
            external = tuple(engine["name"] for engine in plan["engines"] if engine["external"])
            engines, rank = [], TRAINER_RANKS
            for engine in ours:
                size = 1
                for kind in ("tensor", "pipeline", "data"):
                    size *= engine[f"{kind}_parallel_size"]
                engines.append(Engine(engine["name"], engine["role"], engine["url"], size, rank))
                rank += size
            fleet = cls(tuple(engines), external, router["control_url"], float(timeout))
        except (KeyError, TypeError):
            raise RolloutError(
                "This is no plan of a fleet. `vllm-fleet plan -i INVENTORY --json` prints one; what an older "
                "version printed has to be made again."
            ) from None
        if profile != "rl":
            raise RolloutError(
                f"The fleet's profile is {profile}: its engines have no control endpoints. Write "
                "`fleet_profile: rl` into the inventory and run playbooks/site.yml."
            )
        if not engines:
            raise RolloutError("All engines of this fleet are external: there is none to control.")
        return fleet
