"""Measures several steps alternately on one device, so a drift of the machine affects all.

Each step has a process that builds it, warms up and waits for turns of a few steps, A B B A A B and so on. Between
turns it holds only weights and optimizer state on the device.

If they do not all fit, or take several processes each, each turn is a new process and longer (`turns.alternating`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

import msgspec

from steplab.errors import UserError
from steplab.measurement.jobs import JOBS, StepTask
from steplab.measurement.processes.conversation import HERE, Conversation, Listener, Surroundings
from steplab.measurement.processes.launch import measure_in_child
from steplab.measurement.processes.wire import Request
from steplab.measurement.progress import OnProgress
from steplab.records.codec import encode, new_head, new_id, now_utc
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.memory import Memory
from steplab.records.run import Run
from steplab.records.timing import MOST_IN_A_BLOCK, Timing, Turn, Turns, joined
from steplab.specs.model import refuse_planning_only
from steplab.specs.step import StepSpec

_JOB = "step"
_FEWEST_TURNS = 10
"""Turns of each side, steps permitting; fewer than eight cannot distinguish a difference from chance."""
_ALTERNATING_ROUNDS = 2


@dataclass(eq=False, kw_only=True)
class Side:
    label: str
    spec: StepSpec
    surroundings: Surroundings = HERE
    failure: Failure | None = None
    """Reason that the side cannot be measured; else None."""
    run: Run | None = None
    earlier: Run | None = None
    """Record of turns in earlier processes; None in its first process."""
    failed_in: Environment | None = None
    conversation: Conversation | None = field(default=None, repr=False)
    listener: Listener | None = field(default=None, repr=False)

    @property
    def environment(self) -> Environment | None:
        if self.run:
            return self.run.environment
        return self.listener.environment if self.listener else self.failed_in

    @property
    def is_resident(self) -> bool:
        return self.conversation is not None


class Session:
    """Context manager of alternating steps; on exit it ends their processes."""

    def __init__(
        self,
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress = lambda progress: None,
        loads_ahead: bool = False,
    ) -> None:
        """`timeout_s` limits the time until a side is warm, and each turn's. `loads_ahead`: the next side's process
        imports its modules while a side is built.
        """
        self.id = new_id()
        self.alternating: str | None = None
        """Reason that each turn needs a new process; None: processes stay alive."""
        self.timeout_s = timeout_s
        """Timeout for sides that enter later."""
        self._on_progress, self._loads_ahead = on_progress, loads_ahead
        self._spare: Conversation | None = None
        self._sides: list[Side] = []
        self._turns = 0
        self._last: Side | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for side in self._sides:
            _end(side)
        self._end_spare()

    def enter(self, label: str, spec: StepSpec, surroundings: Surroundings = HERE) -> Side:
        """Build and warm up a side's step; if that fails, the side has the failure. Raises UserError (or the process's
        SteplabError) for an impossible step.
        """
        refuse_planning_only(spec.model)
        side = Side(label=label, spec=spec, surroundings=surroundings)
        self._sides.append(side)
        if spec.layout.world_size > 1:
            if surroundings is not HERE:
                raise UserError(f"layout {spec.layout} cannot be measured at another revision; leave out --layout")
            self._alternate("a step of several processes cannot wait for its turn")
        if not self.alternating:
            self._start(side)
        return side

    def measure(
        self,
        sides: Sequence[Side],
        steps: int,
        *,
        is_enough: Callable[[int], bool] = lambda rounds: False,
        apart: bool = True,
    ) -> None:
        """Measure `steps` further steps of each side, alternately; a failed side is measured no further.

        `is_enough` gets the number of rounds after each and ends the measurement, except with a process per turn.
        Sides that do not fit in memory together, or have several processes, get a process per turn; without `apart`,
        no more turns. Raises as `enter`.
        """
        self._await_spare()  # it would disturb the measurement
        while not self.alternating:
            for side in sides:
                if not side.is_resident and side.failure is None and not self.alternating:
                    side.earlier = side.run
                    self._start(side)
            if self.alternating:
                break
            before = [side.run for side in sides]
            if self._all_turns(sides, steps, is_enough):
                return
            for side, run in zip(sides, before, strict=True):
                side.run = run  # the turns are taken again, in other processes
        if apart:
            self._alternating_turns(sides, steps)

    def resume(self) -> None:
        """Return from a process per turn to processes that wait, once a side that did not fit has left. Processes ended
        for it restart with their next turn.
        """
        self.alternating = None

    def leave(self, side: Side) -> Run:
        """End a side's process, and return its record, maybe a failure. Can be called again after an interruption."""
        _end(side)
        if side in self._sides:
            self._sides.remove(side)
        turns = Turns(session=self.id, label=side.label, alternating=self.alternating)
        if side.failure is not None or side.run is None:
            failure = side.failure or Failure(kind="error", message="it had no turn")
            return Run(**new_head(), spec=side.spec, environment=side.environment, failure=failure, turns=turns)
        return side.run

    # --- processes that wait ------------------------------------------------------------------------------

    def _start(self, side: Side) -> None:
        task = StepTask(spec=side.spec, turns=Turns(session=self.id, label=side.label))
        request = Request(job=_JOB, task=msgspec.Raw(encode(task)), device=side.spec.device)
        self._await_spare()
        if self._spare and side.surroundings is HERE:
            side.conversation, self._spare = self._spare, None
            side.conversation.listener.on_progress = self._on_progress
            side.conversation.begin(request, self.timeout_s)
        else:
            listener = Listener(JOBS[_JOB], self._on_progress)
            side.conversation = Conversation(request, listener, self.timeout_s, surroundings=side.surroundings)
        side.listener = side.conversation.listener
        if self._loads_ahead and not self._spare:
            self._spare = Conversation(None, Listener(JOBS[_JOB]), None, ahead_of=_JOB)
        self._heard(side, side.conversation.listen())

    def _await_spare(self) -> None:
        if self._spare and not self._spare.listener.is_ready and self._spare.listen() is not None:
            self._end_spare()

    def _end_spare(self) -> None:
        if self._spare:
            self._spare.end()
        self._spare = None

    def _heard(self, side: Side, failure: Failure | None) -> None:
        assert side.listener is not None
        if failure is None and not side.listener.is_ready:
            ended = side.listener.result.failure if side.listener.result else None
            failure = ended or Failure(kind="crashed", message="it ended before its turn")
        if failure is None:
            return
        if failure.kind == "out_of_memory" and any(other.is_resident for other in self._sides if other is not side):
            self._alternate("the device's memory does not hold all of them at once")
            return
        side.failure = failure
        _end(side)

    def _alternate(self, why: str) -> None:
        self.alternating = self.alternating or why
        self._end_spare()
        for side in self._sides:
            _end(side)

    def _all_turns(self, sides: Sequence[Side], steps: int, is_enough: Callable[[int], bool]) -> bool:
        for number, turn_steps in enumerate(_in_turns(steps)):
            for side in sides if number % 2 == 0 else reversed(sides):
                if _is_over(sides):
                    return True
                if side.failure is None:
                    self._turn(side, turn_steps)
                if self.alternating:
                    return False
            if is_enough(number + 1):
                return True
        return True

    def _turn(self, side: Side, steps: int) -> None:
        assert side.conversation is not None
        assert side.listener is not None
        failure = side.conversation.give(Turn(place=self._turns, steps=steps))
        self._turns += 1
        if failure is None and side.listener.is_ready and side.listener.measured is None:
            failure = Failure(kind="error", message="it sent no record of its turn")
        self._heard(side, failure)
        if side.is_resident:
            measured, before = side.listener.measured, side.run
            run = _both(side.earlier, measured) if side.earlier and measured else measured
            side.run = dataclasses.replace(run, id=before.id) if run and before else run  # one record, of more turns

    # --- a process for each turn --------------------------------------------------------------------------

    def _alternating_turns(self, sides: Sequence[Side], steps: int) -> None:
        each = -(-steps // _ALTERNATING_ROUNDS)
        order = [side for number in range(_ALTERNATING_ROUNDS) for side in (sides[::-1] if number % 2 else sides)]
        if self._last is order[0] and order[0].run is not None:
            del order[0]  # the turn before these was its own
        for side, turns in ((side, len(list(same))) for side, same in groupby(order)):
            if _is_over(sides):
                return
            if side.failure is None:
                self._process_turn(side, each * turns)

    def _process_turn(self, side: Side, steps: int) -> None:
        run = measure_in_child(
            StepTask(spec=dataclasses.replace(side.spec, steps=steps)),
            surroundings=side.surroundings,
            timeout_s=self.timeout_s,
            on_progress=self._on_progress,
        )
        turn = Turn(place=self._turns, steps=steps)
        self._turns += 1
        self._last = side
        if run.failure is not None:
            side.failure, side.failed_in = run.failure, run.environment
            return
        turns = Turns(session=self.id, label=side.label, turns=(turn,), alternating=self.alternating)
        run = dataclasses.replace(run, spec=side.spec, turns=turns)
        side.run = _both(side.run, run) if side.run else run


def _in_turns(steps: int) -> list[int]:
    turns = min(steps, max(_FEWEST_TURNS, -(-steps // MOST_IN_A_BLOCK)))
    return [steps // turns + (number < steps % turns) for number in range(turns)]


def _is_over(sides: Sequence[Side]) -> bool:
    return sum(side.failure is None for side in sides) < min(2, len(sides))


def _end(side: Side) -> None:
    if side.conversation is not None:
        side.conversation.end()
        side.conversation = None


def _both(earlier: Run, later: Run) -> Run:
    assert earlier.timing is not None
    assert later.timing is not None
    assert earlier.turns is not None
    assert later.turns is not None
    timing = Timing(
        warmup=earlier.timing.warmup,
        back_to_back=joined([earlier.timing.back_to_back, later.timing.back_to_back]),
        first_step_s=earlier.timing.first_step_s,
    )
    return dataclasses.replace(
        earlier,
        created_utc=now_utc(),
        timing=timing,
        memory=_larger(earlier.memory, later.memory),
        ranks=(),
        turns=dataclasses.replace(later.turns, turns=earlier.turns.turns + later.turns.turns),
    )


def _larger(earlier: Memory | None, later: Memory | None) -> Memory | None:
    if earlier is None or later is None:
        return earlier or later
    peaks = tuple(peak.with_larger_of(earlier.peak(peak.phase) or peak) for peak in later.peaks)
    return dataclasses.replace(earlier, peaks=peaks)
