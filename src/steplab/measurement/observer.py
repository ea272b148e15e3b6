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
    """Called with the environment, and again once its clocks are read."""
    on_stage: Callable[[str, int], None] = lambda stage, num_steps: None
    """Called at the beginning of a stage, with its name and number of steps, or 0."""
    on_step: Callable[[int], None] = lambda iteration: None
    """Called after each step, with its number from 0."""
    on_measured: Callable[[Run], None] = lambda run: None
    """Called after all timing and after each turn, before recording, which may kill the process."""
    next_turn: Callable[[], Turn | None] = lambda: None
    """Wait for an alternating step's next turn; None: no more."""
    on_facts: Callable[[Any], None] = lambda facts: None
    """Called with facts common to all cells."""
    on_under_way: Callable[[Sequence[int]], None] = lambda cells: None
    """Called with the numbers of the cells that run next: one is the cause if the process dies."""
    on_cell: Callable[[int, Any], None] = lambda number, cell: None
