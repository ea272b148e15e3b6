"""A change that a walk may try, and one that it tried."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from steplab.lab.outlook import Promise
from steplab.records.comparison import Ratio
from steplab.records.run import Run
from steplab.records.timing import waits_for_host
from steplab.specs.changes import Change


@dataclass(eq=False, kw_only=True)
class Attempt:
    """One change that was tried."""

    change: Change
    base: Any
    """The side of the step without it."""
    promise: Promise | None = None
    side: Any = None
    """The side of the step with it; None if it could not be built."""
    ratio: Ratio | None = None
    kept: bool = False
    failure: str | None = None
    took_s: float = 0.0
    """Seconds from its beginning until it was decided."""

    @property
    def along(self) -> tuple[Change, ...]:
        """The changes that were made with it."""
        return self.change.brings(self.base.spec)

    @property
    def waits_for_host(self) -> bool | None:
        """Whether the device waited for the host in the step with it; None: not known."""
        return waited(self.side)

    @property
    def is_settled(self) -> bool:
        """Whether it was kept, failed, or saves nothing although the host launches it in time."""
        if self.kept or self.ratio is None:
            return True
        return self.ratio.decision in ("higher", "same") and not self.waits_for_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A change of the fastest step that was not tried."""

    change: Change
    promise: Promise | None
    is_fast: bool
    """Whether the recipe `fast` sets it."""
    takes_s: float
    """Seconds that trying it takes, as far as is known."""


def waited(side: Any) -> bool | None:
    """Whether the device waited for the host in the step of a side; None: not known."""
    timing = side.run.timing if side and side.run else None
    return waits_for_host(timing.back_to_back) if timing else None


def step_s(run: Run | None) -> float | None:
    """Median step time in seconds; None without one."""
    step = run.timing.phase("step") if run and run.timing and not run.failure else None
    return median(step.best_s) if step and step.best_s else None
