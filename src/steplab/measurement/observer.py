"""Measuring never prints: it calls an observer, and the measuring process sends the calls to its parent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steplab.records.environment import Environment
from steplab.records.run import Run
from steplab.records.timing import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Observer:
    on_environment: Callable[[Environment], None] = lambda environment: None
    """The environment, and again with its clocks."""
    on_stage: Callable[[str, int], None] = lambda stage, num_steps: None
    """Name of a beginning stage, and its number of steps or 0."""
    on_step: Callable[[int], None] = lambda iteration: None
    """Number of the step that ended, from 0."""
    on_measured: Callable[[Run], None] = lambda run: None
    """After all timing, before recording, which may kill the process; and after each turn."""
    next_turn: Callable[[], Turn | None] = lambda: None
    """Waits for an alternating step's next turn; None: no more."""
    on_facts: Callable[[Any], None] = lambda facts: None
    """Facts common to all cells."""
    on_under_way: Callable[[Sequence[int]], None] = lambda cells: None
    """Numbers of the cells that run next: one of them is the cause if the process dies."""
    on_cell: Callable[[int, Any], None] = lambda number, cell: None
