"""Pause, sleep, update, wake and resume a whole fleet, in order, until all of it is in one state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from .engines import DISCARDED, CallError, State, ask, call, observe
from .fleet import Engine, Fleet, RolloutError
from .results import Result
from .run import Call, Judge, Progress, Run, StopError

Mode = Literal["keep", "wait", "abort"]
Tag = Literal["weights", "kv_cache"]
MODES: tuple[Mode, ...] = ("keep", "wait", "abort")
LEVELS = (1, 2)
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
"""In the order that they wake in."""
ACTIONS: dict[str, tuple[str, ...]] = {
    "status": (),
    "pause": ("mode",),
    "resume": ("allow_mixed",),
    "sleep": ("level", "mode"),
    "wake": ("tags",),
    "abort": (),
    "reset": ("recompute",),
    "peers": (),
    "weights_info": (),
    "prepare_update": ("allow_mixed",),
    "set_version": ("version",),
}
"""Action -> its options: methods of `Rollout` and their arguments."""

LOOK_SECONDS = 30.0
"""For a question. Not less: an engine answers some only between two of its steps."""
POLL_SECONDS = 0.1
ABORT_AGAIN_SECONDS = 3.0
RESET_TRIES, RESET_PAUSE_SECONDS = 60, 1.0
KV_WAITS = (
    "A prefill pauses when its KV is fetched; a decode fetches it when it has a slot free. Run pause again "
    "to wait on, take the mode abort, or resume to go back."
)
NOT_PAUSED = "not paused", "Run pause or sleep first."
WEIGHTS_BACK = (
    "Send new weights (prepare_update says when) or have the engines load theirs, and run set_version."
)
SLEEP_AGAIN = {
    1: "Run sleep again to finish it, or wake and then resume to go back.",
    2: "Run sleep at level 2 again to finish it. To go back, run resume if no weights are discarded yet, and "
    f"else: {WEIGHTS_BACK} Then wake and resume.",
}
SEND_AGAIN = (
    "Have all engines paused or asleep, run prepare_update with allow_mixed, send the weights to all, and "
    "run set_version."
)


class Rollout:
    """The controls of one fleet.

    Each method calls all engines of ours, at once wherever order does not matter, looks afterwards what each
    is in, and gives a `Result`. It raises `RolloutError` for a wrong argument and for nothing else: what an
    engine or the front does wrong is in the result. Each may be called again; it does what is left to do.

    Args:
        fleet: what is controlled.
        timeout: seconds that one call to an engine may take; the fleet's own if None.
        progress: is given a line whenever an engine is done with a step.

    """

    def __init__(self, fleet: Fleet, timeout: float | None = None, progress: Progress | None = None) -> None:
        self.fleet = fleet
        self.timeout = fleet.timeout if timeout is None else timeout
        if self.timeout <= 0:
            raise RolloutError(f"The time-out is {self.timeout:g} s; it must be more than 0.")
        self.look_seconds = min(LOOK_SECONDS, self.timeout)
        self.progress = progress or (lambda _line: None)

    def perform(self, action: str, options: dict[str, Any]) -> Result:
        """Do an action by its name; options that are None are left out.

        Raises:
            RolloutError: there is no such action, or it has no such option.

        """
        _one_of("action", action, ACTIONS)
        given = {name: value for name, value in options.items() if value is not None}
        strange = sorted(given.keys() - set(ACTIONS[action]))
        if strange:
            raise RolloutError(
                f"{action} has no option {', '.join(strange)}; it has {_list(ACTIONS[action])}."
            )
        if action == "set_version" and "version" not in given:
            raise RolloutError("set_version needs a version.")
        result: Result = getattr(self, action)(**given)
        return result

    def status(self) -> Result:
        """Only look. It is right if every engine and the front answer."""
        return self._perform("status", lambda _run: None, _any_state)

    def pause(self, mode: Mode = "keep") -> Result:
        """Close admission, pause the prefills, let the decodes fetch all KV, pause the decodes.

        Args:
            mode: what becomes of requests that run: `keep` freezes them until `resume`, `wait` lets them
                finish first, `abort` ends them, with the tokens that they have.

        """
        _one_of("mode", mode, MODES)
        return self._perform(
            "pause",
            lambda run: self._pause(run, mode),
            lambda state: state.paused,
            "Run pause again to finish it, or resume to go back.",
        )

    def resume(self, *, allow_mixed: bool = False) -> Result:
        """Resume the decodes, then the prefills; open admission when all engines run.

        Refused while one sleeps, has no weights, or has weights of another version than the others.

        Args:
            allow_mixed: weights of several versions are meant.

        """

        def steps(run: Run) -> None:
            _require_weights(run)
            run.require(lambda state: not state.asleep, "asleep", "Run wake first.")
            if not allow_mixed:
                run.require_one_version(SEND_AGAIN)
            for engines in (self.fleet.decodes, self.fleet.prefills):
                paused = [engine for engine in engines if run.states[engine].paused]
                run.step("resume", paused, lambda engine: call(f"{engine.url}/resume", self.timeout))
            run.look()
            run.require(lambda state: not state.paused, "still paused, though the call to resume succeeded")
            run.admit("open")

        return self._perform(
            "resume",
            steps,
            lambda state: not state.paused,
            "Run resume again to finish it, or pause to go back.",
        )

    def sleep(self, level: int = 1, mode: Mode = "keep") -> Result:
        """Pause what is not paused, then release memory of all engines at once.

        Args:
            level: 1 keeps the weights in the hosts' memory; 2 throws them away, and until an update or
                `set_version` says what they are, the engines neither wake wholly nor resume.
            mode: as for `pause`.

        """
        _one_of("level", level, LEVELS)
        _one_of("mode", mode, MODES)

        def steps(run: Run) -> None:
            discarded = any(state.discarded for state in run.states.values())
            # vLLM would do nothing, and say the new level from then on.
            run.require(
                lambda state: not state.asleep or state.level == level,
                "asleep at another level",
                f"{WEIGHTS_BACK} Then run wake." if discarded else "Run wake first.",
            )
            self._pause(run, mode)
            if level == 2:
                # Before, so that no engine without weights is ever without the mark.
                run.step("mark the weights as discarded", self.fleet.engines, self._name_weights(DISCARDED))
            run.step(
                f"sleep at level {level}", self.fleet.engines, lambda engine: self._sleep(engine, level, mode)
            )

        return self._perform(
            "sleep",
            steps,
            lambda state: state.asleep and state.level == level,
            SLEEP_AGAIN[level],
        )

    def wake(self, tags: Iterable[Tag] = TAGS) -> Result:
        """Give the weights of all engines their memory back, then the KV caches, decodes first.

        An engine that is wholly awake runs: vLLM resumes it by itself. Admission stays closed until `resume`.

        Args:
            tags: what wakes: weights, kv_cache or both. kv_cache is refused while weights are discarded.

        """
        wanted = tuple(tags)
        for tag in wanted:
            _one_of("tag", tag, TAGS)

        def steps(run: Run) -> None:
            if any(state.asleep for state in run.states.values()):
                # Somebody may have opened it, and the first that is wholly awake runs.
                run.admit("close")
            if "weights" in wanted:
                self._wake(run, "weights", self.fleet.engines)
            if "kv_cache" in wanted:
                _require_weights(run)
                # A prefill's frozen requests would have their KV fetched by decodes that sleep.
                self._wake(run, "kv_cache", self.fleet.decodes)
                self._wake(run, "kv_cache", self.fleet.prefills)
                if "weights" not in wanted:
                    # Which tags sleep, no engine tells before.
                    run.look()
                    run.require(
                        lambda state: not state.asleep,
                        "still asleep, with its KV cache awake: its weights sleep",
                        "Run wake with weights and kv_cache.",
                    )
                run.notes.append("Engines that are wholly awake run; resume opens admission.")

        return self._perform(
            "wake",
            steps,
            lambda state: not state.asleep or "kv_cache" not in wanted,
            "Run wake again to finish it, or sleep at the same level to go back.",
        )

    def abort(self) -> Result:
        """End all requests, with the tokens that they have. Until that is done, admission is closed."""

        def steps(run: Run) -> None:
            was = run.admission.word
            run.admit("close")
            run.step("abort", self.fleet.engines, self._abort)
            if was == "open":
                run.admit("open")
            else:
                run.notes.append("Admission was closed before, and still is; resume opens it.")

        return self._perform(
            "abort",
            steps,
            _any_state,
            "Run abort again to finish it, and then resume, which opens admission.",
        )

    def reset(self, *, recompute: bool = False) -> Result:
        """Empty the prefix caches of all engines at once, as new weights demand.

        Args:
            recompute: requests that run or are frozen lose their KV and are computed again. Without it, an
                engine that has such requests cannot be reset.

        """

        def empty(engine: Engine) -> None:
            deadline = time.monotonic() + self.timeout
            for _ in range(RESET_TRIES):
                said = call(
                    f"{engine.url}/reset_prefix_cache",
                    self.timeout,
                    reset_running_requests=str(recompute).lower(),
                    reset_external="true",
                )
                if said.get("success") is True:
                    return
                if time.monotonic() + RESET_PAUSE_SECONDS > deadline:
                    break
                time.sleep(RESET_PAUSE_SECONDS)
            raise CallError(
                f"{engine.url}/reset_prefix_cache answered {said}: requests hold blocks. Have them aborted, "
                "or computed again (recompute)"
            )

        return self._perform(
            "reset",
            lambda run: run.step("reset the prefix cache", self.fleet.engines, empty),
            _any_state,
            "Run reset again.",
        )

    def weights_info(self) -> Result:
        """Look which version of weights each engine has. It is right if there is one."""
        return self._perform("weights_info", lambda run: run.require_one_version(SEND_AGAIN), _any_state)

    def peers(self) -> Result:
        """What a trainer builds its group of ranks from. The engines must have as many as the plan says."""
        return self._perform("peers", self._compare_ranks, _any_state)

    def prepare_update(self, *, allow_mixed: bool = False) -> Result:
        """Say whether new weights may be sent to all engines, packed or not.

        Where an engine sleeps, its weights wake. Refused where one does not answer, generates, has another
        number of ranks than the plan says, or has weights of another version than the others.

        Args:
            allow_mixed: the update is to mend a set whose last one did not reach all engines.

        """

        def steps(run: Run) -> None:
            run.require(lambda state: state.paused, *NOT_PAUSED)
            if not allow_mixed:
                run.require_one_version(SEND_AGAIN)
            self._compare_ranks(run)
            # Which tags sleep, no engine tells. To wake weights that are awake does nothing while KV sleeps.
            self._wake(run, "weights", self.fleet.engines)

        return self._perform(
            "prepare_update",
            steps,
            lambda state: state.paused,
            "Send no weights; run prepare_update again until it is right.",
        )

    def set_version(self, version: str) -> Result:
        """Give the weights of all engines a name, after an update that did not.

        It says, too, that weights which were discarded are there again.
        """
        if not version or version == DISCARDED:
            raise RolloutError(f"The version is {version!r}; it must be a name, and not {DISCARDED!r}.")

        def steps(run: Run) -> None:
            run.require(lambda state: state.paused, *NOT_PAUSED)
            run.step(f"name the weights {version}", self.fleet.engines, self._name_weights(version))

        return self._perform(
            "set_version", steps, lambda state: state.weight_version == version, "Run set_version again."
        )

    def _pause(self, run: Run, mode: Mode) -> None:
        """Pause all engines that do not sleep. Paused ones are asked again: the mode may be another."""
        run.admit("close")
        if mode == "wait":
            self._wait_for_requests(run)
        awake = [engine for engine in self.fleet.engines if not run.states[engine].asleep]
        if mode == "abort":
            # Requests that no decode has a slot for keep the prefills waiting, which are paused first.
            run.step("abort", awake, self._abort)

        def pause(engine: Engine) -> None:
            # What is cached stays right until weights change; `reset` empties it then.
            call(f"{engine.url}/pause", self.timeout, mode=mode, clear_cache="false")

        def fetch_and_pause(engine: Engine) -> None:
            # Paused, it would fetch no more, and the prefills keep KV for 30 s only.
            self._until(engine, "fetches KV", lambda state: not state.kv_to_fetch)
            pause(engine)

        # A prefill answers when no decode has KV to fetch from it any more: before that, it is not idle.
        run.step(f"pause {mode}", [one for one in awake if one.role == "prefill"], pause, remedy=KV_WAITS)
        run.step(f"pause {mode}", [one for one in awake if one.role != "prefill"], fetch_and_pause)
        run.look()
        run.require(lambda state: state.paused, "not paused, though the call succeeded; was it restarted?")

    def _abort(self, engine: Engine) -> None:
        """End all requests of an engine.

        Again and again until it counts none: one call ends what one of its API servers has then, and the
        routers may send more.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            call(f"{engine.url}/abort_requests", self.timeout)
            again = time.monotonic() + ABORT_AGAIN_SECONDS
            while time.monotonic() < again:
                left = observe(engine, self.look_seconds).requests
                if not left:
                    return
                if time.monotonic() > deadline:
                    raise CallError(f"{engine.url} still has {left} requests after {self.timeout:g} s")
                time.sleep(POLL_SECONDS)

    def _wait_for_requests(self, run: Run) -> None:
        """Wait until the routers have none."""
        if run.admission.in_flight and any(state.paused for state in run.states.values()):
            raise StopError(
                f"{run.admission.in_flight} requests are frozen in paused engines and cannot finish.",
                "Run resume first, or take the mode keep or abort.",
            )
        deadline = time.monotonic() + self.timeout
        while run.admission.in_flight:
            if time.monotonic() > deadline:
                raise StopError(f"{run.admission.in_flight} requests still run after {self.timeout:g} s.")
            time.sleep(POLL_SECONDS)
            run.ask_front()

    def _until(self, engine: Engine, what: str, done: Judge) -> None:
        deadline = time.monotonic() + self.timeout
        while not done(observe(engine, self.look_seconds)):
            if time.monotonic() > deadline:
                raise CallError(f"{engine.url} still {what} after {self.timeout:g} s")
            time.sleep(POLL_SECONDS)

    def _sleep(self, engine: Engine, level: int, mode: Mode) -> None:
        """Put a paused engine to sleep.

        vLLM (0.32.0, 0.33.0) takes the blocks of frozen requests, but for those whose KV was fetched and that
        had no turn yet, and fails if there are any. They are first in line: a moment's run gives them one.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                call(f"{engine.url}/sleep", self.timeout, level=level, mode=mode)
            except CallError:
                held = observe(engine, self.look_seconds).kv_held
                if not held or time.monotonic() > deadline:
                    raise
            else:
                return
            call(f"{engine.url}/resume", self.timeout)
            self._until(engine, "holds fetched KV", _fewer_held(held))
            call(f"{engine.url}/pause", self.timeout, mode=mode, clear_cache="false")

    def _wake(self, run: Run, tag: Tag, engines: Iterable[Engine]) -> None:
        # Not those that are awake: vLLM would resume one that is only paused.
        asleep = [engine for engine in engines if run.states[engine].asleep]
        run.step(f"wake {tag}", asleep, lambda engine: call(f"{engine.url}/wake_up", self.timeout, tags=tag))

    def _name_weights(self, version: str) -> Call:
        payload = {"new_version": version}
        return lambda engine: call(f"{engine.url}/update_weight_version", self.timeout, payload)

    def _compare_ranks(self, run: Run) -> None:
        def compare(engine: Engine) -> None:
            size = ask(f"{engine.url}/get_world_size", "world_size", int, self.look_seconds)
            if size != engine.world_size:
                raise CallError(
                    f"{engine.url} has {size} ranks, and the plan says {engine.world_size}: run "
                    "playbooks/site.yml"
                )

        run.step("compare the ranks", self.fleet.engines, compare, changes=False)

    def _perform(self, action: str, steps: Callable[[Run], None], reached: Judge, remedy: str = "") -> Result:
        """Look, do the steps, look again and judge."""
        run = Run(self.fleet, self.look_seconds, self.progress)
        stop = None
        try:
            run.look()
            run.ask_front()
            steps(run)
        except StopError as error:
            stop = error
        return run.result(action, reached, remedy, stop)


def _fewer_held(than: int) -> Judge:
    return lambda state: state.kv_held < than


def _any_state(_state: State) -> bool:
    return True


def _require_weights(run: Run) -> None:
    run.require(
        lambda state: not state.discarded,
        "without weights, which sleep at level 2 threw away",
        WEIGHTS_BACK,
    )


def _one_of(what: str, value: Any, allowed: Iterable[Any]) -> None:
    if value not in allowed:
        raise RolloutError(f"There is no {what} {value}; there are {_list(allowed)}.")


def _list(words: Iterable[Any]) -> str:
    return ", ".join(str(word) for word in words) or "none"
