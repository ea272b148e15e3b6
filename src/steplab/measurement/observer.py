"""Who is told how far a measurement is: one interface for steps, audits and the cells of every benchmark.

Measuring itself never prints: it calls an observer, and the process that measures sends what it hears to its parent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steplab.records.environment import Environment
from steplab.records.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Observer:
    """Callbacks of a measurement; each does nothing unless it is given."""

    on_environment: Callable[[Environment], None] = lambda environment: None
    """Called with the machine as soon as it has been looked at, and again when its clocks have been read."""
    on_stage: Callable[[str, int], None] = lambda stage, num_steps: None
    """Called with the name of what begins and its number of steps; 0: it has none."""
    on_step: Callable[[int], None] = lambda iteration: None
    """Called with the number of the step that has ended, from 0."""
    on_measured: Callable[[Run], None] = lambda run: None
    """Called with the record when all timing is done and watching begins, which a process may not survive."""
    on_facts: Callable[[Any], None] = lambda facts: None
    """Called with what holds for all cells of a benchmark: its ranks, versions, the model's sizes."""
    on_under_way: Callable[[Sequence[int]], None] = lambda cells: None
    """Called with the numbers of the cells that run next: should the process die, it is because of one of these."""
    on_cell: Callable[[int, Any], None] = lambda number, cell: None
    """Called with the number and the result of each cell as it ends."""
