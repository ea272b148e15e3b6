"""How far a measurement is, as whoever waits for it is told."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the cell under way is."""

    stage: str
    """starting, joining (of several processes), build, compile, warmup, measure, phases, profile, trace, memory or
    snapshot; of an audit sums, build, reference, audit and scaling; after the process, read and read snapshot; of a
    report predict and draw."""
    done: int
    """Steps done of this stage; of reading, bytes; of predictions, runs."""
    total: int
    """Steps of this stage, or bytes; 0 where it has none."""


OnProgress = Callable[[Progress], None]
