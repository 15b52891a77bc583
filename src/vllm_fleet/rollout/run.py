"""One call to the whole set: steps that all engines take at once, what is known of them, and the result."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .engines import Admission, CallError, State, admission, observe
from .fleet import Engine, Fleet
from .results import EngineResult, Result

Call = Callable[[Engine], Any]
Judge = Callable[[State], bool]
Progress = Callable[[str], None]


class StopError(Exception):
    """The action goes no further; the text says why, the remedy what to do if not what the action says."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


class Run:
    """What one action did and saw so far.

    Args:
        fleet: what is controlled.
        look_seconds: time-out of a question.
        progress: is given a line whenever an engine is done with a step.

    Attributes:
        states: engine -> what it was in when it last said so.
        notes: what the operator should know besides.

    """

    def __init__(self, fleet: Fleet, look_seconds: float, progress: Progress) -> None:
        self.fleet, self.look_seconds, self.progress = fleet, look_seconds, progress
        self.states: dict[Engine, State] = {}
        self.notes: list[str] = []
        self._first: dict[Engine, State] = {}
        self._faults: dict[Engine, str] = {}
        self._seconds: dict[Engine, float] = dict.fromkeys(fleet.engines, 0.0)
        self._admissions: list[Admission] = []
        self._leaves: str | None = None  # what the front is to do at the end; None: as it did at first
        self._changed = False
        self._began = time.monotonic()

    @property
    def admission(self) -> Admission:
        """What the front did when it was last asked."""
        return self._admissions[-1]

    def look(self) -> None:
        """See what every engine is in.

        Raises:
            StopError: one does not say.

        """
        self.states = {}
        silent = []
        for engine, _, seen in _at_once(
            self.fleet.engines, lambda engine: observe(engine, self.look_seconds)
        ):
            if isinstance(seen, CallError):
                silent.append(engine)
                self._faults.setdefault(engine, str(seen))
            else:
                self.states[engine] = seen
                self._first.setdefault(engine, seen)
        if silent:
            raise StopError(f"{self._some(silent)} did not say what state it is in.")

    def ask_front(self, change: str = "") -> None:
        """Learn whether the front admits requests, after a change (`close` or `open`) if one is wanted.

        Raises:
            StopError: it does not say, or does not do it.

        """
        try:
            self._admissions.append(admission(self.fleet.control_url, self.look_seconds, change))
        except CallError as fault:
            raise StopError(f"The front: {fault}.") from None

    def admit(self, change: str) -> None:
        """Close or open admission at the front, and see that it is.

        Raises:
            StopError: it is not.

        """
        self._changed = True
        self._leaves = {"close": "closed", "open": "open"}[change]
        self.ask_front(change)
        self.progress(f"{self._elapsed():6.1f} s  front: admission {self.admission.word}")
        if self.admission.word != self._leaves:
            raise StopError(
                f"The front answered the call to {change} admission, and it is {self.admission.word}."
            )

    def step(
        self, what: str, engines: Iterable[Engine], call: Call, *, changes: bool = True, remedy: str = ""
    ) -> None:
        """Make a call to several engines at once; all of them are waited for.

        Raises:
            StopError: one of the calls failed.

        """
        engines = list(engines)
        self._changed |= changes and bool(engines)
        failed = []
        for engine, seconds, seen in _at_once(engines, call):
            self._seconds[engine] += seconds
            told = f"{seconds:.1f} s"
            if isinstance(seen, CallError):
                failed.append(engine)
                self._faults[engine] = told = str(seen)
            self.progress(f"{self._elapsed():6.1f} s  {engine.name}: {what}: {told}")
        if failed:
            raise StopError(f"`{what}` failed at {self._some(failed)}.", remedy)

    def require(self, good: Judge, why: str, remedy: str = "") -> None:
        """Go on only if all engines are in such a state.

        Raises:
            StopError: one is not.

        """
        bad = [engine for engine in self.fleet.engines if not good(self.states[engine])]
        for engine in bad:
            self._faults[engine] = why
        if bad:
            raise StopError(f"{self._some(bad)}: {why}.", remedy)

    def require_one_version(self, remedy: str) -> None:
        """Go on only if all engines have weights of the same version.

        Raises:
            StopError: they have not.

        """
        names: dict[str, list[str]] = {}
        for engine in self.fleet.engines:
            names.setdefault(self.states[engine].weight_version, []).append(engine.name)
        if len(names) > 1:
            told = "; ".join(f"{version} in {', '.join(having)}" for version, having in names.items())
            raise StopError(
                f"The engines have weights of several versions: {told}. (One that restarted has `default`.)",
                remedy,
            )

    def result(self, action: str, reached: Judge, remedy: str, stop: StopError | None) -> Result:
        """Look again, if something was done, and judge."""
        if self._changed:
            for look in (self.look, self.ask_front):
                try:
                    look()
                except StopError as more:
                    stop = stop or more
        engines = tuple(self._result(engine, reached) for engine in self.fleet.engines)
        missed = [one.engine for one in engines if not one.reached]
        if missed and not stop:
            stop = StopError(f"{self._some(missed)} answered as it should and is in another state.")
        stop = stop or self._misled(action)
        for one in engines:
            if one.before and one.after and one.after.kv_expired > one.before.kv_expired:
                self.notes.append(
                    f"{one.engine.name}: no decode fetched the KV of "
                    f"{one.after.kv_expired - one.before.kv_expired} requests in time. Their clients had "
                    "left, or they will fail."
                )
        if self.fleet.external:
            self.notes.append(f"Not ours, so not called: {', '.join(self.fleet.external)}.")
        message = str(stop or "")
        if stop and not self._changed:
            if remedy:  # what only looks has none
                message += " Nothing was done."
            remedy = f"Mend that (playbooks/status.yml shows what runs), and run {action} again."
        return Result(
            action=action,
            ok=stop is None,
            changed=self._changed,
            engines=engines,
            admission=self._admissions[-1] if self._admissions else None,
            world_size=self.fleet.world_size,
            seconds=self._elapsed(),
            message=message,
            remedy=(stop.remedy or remedy) if stop else "",
            notes=tuple(self.notes),
        )

    def _misled(self, action: str) -> StopError | None:
        """What is wrong with the front, which more than one controller may tell what to do."""
        now, leaves = self.admission.word, self._leaves or self._admissions[0].word
        if now == leaves:
            return None
        return StopError(
            f"The front's admission is {now}, and {action} leaves it {leaves}: somebody else changed it.",
            f"Have one controller at a time, and run {'resume' if leaves == 'open' else 'pause'}.",
        )

    def _result(self, engine: Engine, reached: Judge) -> EngineResult:
        after = self.states.get(engine)
        return EngineResult(
            engine=engine,
            reached=after is not None and reached(after),
            before=self._first.get(engine),
            after=after,
            seconds=self._seconds[engine],
            fault=self._faults.get(engine, ""),
        )

    def _some(self, engines: list[Engine]) -> str:
        names = ", ".join(engine.name for engine in self.fleet.engines if engine in engines)
        return f"{len(engines)} of {len(self.fleet.engines)} engines ({names})"

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def _at_once(engines: Iterable[Engine], call: Call) -> Iterator[tuple[Engine, float, Any]]:
    """Call in a thread for each engine; as each is done: its seconds, and what came or its CallError.

    The threads do not keep the program from ending: a call may last as long as its time-out.
    """
    done: queue.SimpleQueue[tuple[Engine, float, Any]] = queue.SimpleQueue()

    def work(engine: Engine) -> None:
        began = time.monotonic()
        try:
            seen = call(engine)
        except Exception as error:  # noqa: BLE001  raised where the thread is waited for
            seen = error
        done.put((engine, time.monotonic() - began, seen))

    engines = list(engines)
    for engine in engines:
        threading.Thread(target=work, args=(engine,), daemon=True).start()
    for _ in engines:
        engine, seconds, seen = done.get()
        if isinstance(seen, Exception) and not isinstance(seen, CallError):
            raise seen
        yield engine, seconds, seen
