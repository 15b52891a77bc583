"""What a call to the whole set did: typed, for trainers; as a table, for people; as JSON, for both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .engines import Admission, State
from .fleet import Engine


@dataclass(frozen=True)
class EngineResult:
    """One engine.

    Attributes:
        engine: which.
        reached: it is in the state that the action was to bring it to.
        before: what it was in; None where it did not say.
        after: what it is in now; None where it did not say.
        seconds: that its own calls took.
        fault: what went wrong, in a sentence; empty if nothing did.

    """

    engine: Engine
    reached: bool
    before: State | None
    after: State | None
    seconds: float
    fault: str


@dataclass(frozen=True)
class Result:
    """The set.

    Attributes:
        action: what was asked.
        ok: every engine reached the state, and admission at the front is what the action leaves it at.
        changed: something was called that may change an engine or the front.
        engines: in plan order.
        admission: of the front, at the end; None where it did not say.
        world_size: ranks in the group that weights are sent in, the trainer's among them.
        seconds: from the first call to the last.
        message: why it is not ok; empty if it is.
        remedy: what to do then; there always is something.
        notes: what else should be known.

    """

    action: str
    ok: bool
    changed: bool
    engines: tuple[EngineResult, ...]
    admission: Admission | None
    world_size: int
    seconds: float
    message: str
    remedy: str
    notes: tuple[str, ...]

    @property
    def reached(self) -> tuple[str, ...]:
        """Names of the engines that are in the state that was asked for."""
        return tuple(one.engine.name for one in self.engines if one.reached)

    @property
    def missed(self) -> tuple[str, ...]:
        """Names of those that are not."""
        return tuple(one.engine.name for one in self.engines if not one.reached)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain JSON; what each engine is, and is in, stands in one object."""
        engines = [
            {
                **asdict(one.engine),
                "reached": one.reached,
                "state": one.after.word if one.after else None,
                "weight_version": one.after.weight_version if one.after else None,
                "before": asdict(one.before) if one.before else None,
                "after": asdict(one.after) if one.after else None,
                "seconds": round(one.seconds, 3),
                "fault": one.fault,
            }
            for one in self.engines
        ]
        admission = asdict(self.admission) if self.admission else {"word": None, "in_flight": None}
        return {
            "action": self.action,
            "ok": self.ok,
            "changed": self.changed,
            "engines": engines,
            "admission": admission["word"],
            "in_flight": admission["in_flight"],
            "world_size": self.world_size,
            "seconds": round(self.seconds, 3),
            "message": self.message,
            "remedy": self.remedy,
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """A table, and under it what should be known."""
        rows = [("engine", "role", "ranks", "state", "weights", "requests", "seconds", "")]
        for one in self.engines:
            first, size, after = one.engine.rank_offset, one.engine.world_size, one.after
            told = (after.word, after.weight_version, str(after.requests)) if after else ("unknown", "", "")
            ranks = str(first) if size == 1 else f"{first}-{first + size - 1}"
            mark = "" if one.reached else "  <-- not " + ("answering" if after is None else "there")
            rows.append((one.engine.name, one.engine.role, ranks, *told, f"{one.seconds:.1f}", mark))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows]  # noqa: B905  hosts have Python 3.9
        front = (
            f"{self.admission.word}, {self.admission.in_flight} requests in flight"
            if self.admission
            else "unknown"
        )
        table += ["", f"Admission at the front: {front}."]
        table += list(self.notes)
        unsaid = [one for one in self.engines if one.fault and one.fault not in self.message]
        faults = [f"  {one.engine.name}: {one.fault}" for one in unsaid]
        if self.ok:
            table.append(f"{self.action}: done in {self.seconds:.1f} s.")
        else:
            table += [f"{self.action} failed: {self.message}", *faults, self.remedy]
        return table
