import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

from tests.runs import ENVIRONMENT, make_run

from steplab.measurement.processes.conversation import HERE, Surroundings
from steplab.measurement.processes.turns import Side
from steplab.records.codec import new_id
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing, Turn, Turns
from steplab.specs.step import StepSpec

Told = Callable[[StepSpec], float | str | Failure | Exception]
"""Seconds of a step, its out-of-memory message, another failure, or the error that rejects it."""


class FakeSession:
    environment = ENVIRONMENT
    alternating: str | None = None
    timeout_s: float | None = None

    def __init__(self, told: Told) -> None:
        self._told = told
        self.asked: list[StepSpec] = []
        self._place = 0

    def __call__(self, **options: Any) -> Any:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def resume(self) -> None:
        self.alternating = None

    def enter(self, label: str, spec: StepSpec, surroundings: Surroundings = HERE) -> Side:
        outcome = self._told(spec)
        if isinstance(outcome, Exception):
            raise outcome
        self.asked.append(spec)
        side = Side(label=label, spec=spec, listener=SimpleNamespace(environment=self.environment))  # type: ignore[arg-type]
        if isinstance(outcome, str):
            side.failure = Failure(kind="out_of_memory", message=outcome)
        elif isinstance(outcome, Failure):
            side.failure = outcome
        return side

    def measure(
        self,
        sides: Sequence[Side],
        steps: int,
        *,
        is_enough: Callable[[int], bool] = lambda rounds: False,
        apart: bool = True,
    ) -> None:
        if any(side.failure for side in sides):
            return  # as a session does, which measures no side by itself
        turns = min(steps, 10)
        for number in range(turns):
            for side in sides if number % 2 == 0 else reversed(sides):
                self._turn(side, steps // turns)
            if is_enough(number + 1):
                return

    def _turn(self, side: Side, steps: int) -> None:
        seconds = self._told(side.spec)
        assert isinstance(seconds, float)
        taken = side.run.turns.turns if side.run and side.run.turns else ()
        taken += (Turn(place=self._place, steps=steps),)
        self._place += 1
        # A little periodic noise, so medians and intervals match the given time.
        samples = tuple(
            seconds * (1 + 0.0005 * (number % 5 - 2)) for number in range(sum(turn.steps for turn in taken))
        )
        side.run = make_run(
            {"model": "small"},
            id=side.run.id if side.run else new_id(),
            spec=side.spec,
            timing=Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", device_s=samples),)),
            environment=self.environment,
            turns=Turns(session="s", label=side.label, turns=taken),
        )

    def leave(self, side: Side) -> Run:
        if side.run is not None and side.failure is None:
            return side.run
        run = make_run({"model": "small"}, id=new_id(), spec=side.spec, timing=None, memory=None)
        return dataclasses.replace(run, failure=side.failure, turns=Turns(session="s", label=side.label))
