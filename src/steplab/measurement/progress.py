from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    stage: str
    """starting, joining (of several processes), build, compile, warmup, measure, phases, profile, trace, memory or
    snapshot. In an audit: sums, build, reference, audit and scaling. After the process: read, dry run and read
    snapshot. In a report: predict and draw.
    """
    done: int
    """Completed steps of this stage; bytes while reading; runs while predicting."""
    total: int
    """Number of steps or bytes of this stage; 0: unknown."""


OnProgress = Callable[[Progress], None]
