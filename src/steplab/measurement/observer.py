"""The observer of a measurement: one interface for steps, audits and the cells of every benchmark.

Measuring never prints: it calls an observer, and the measuring process sends the calls to its parent.
"""

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
    """Name and number of steps (or 0) of a beginning stage."""
    on_step: Callable[[int], None] = lambda iteration: None
    """Number of the step that ended, from 0."""
    on_measured: Callable[[Run], None] = lambda run: None
    """The record after all timing, before recording, which may kill the process; for alternating steps, after each
    turn.
    """
    next_turn: Callable[[], Turn | None] = lambda: None
    """Waits for an alternating step's next turn. None: it was the last."""
    on_facts: Callable[[Any], None] = lambda facts: None
    """Facts common to all cells: ranks, versions, model sizes."""
    on_under_way: Callable[[Sequence[int]], None] = lambda cells: None
    """Numbers of the cells that run next; if the process dies, one of them is the cause."""
    on_cell: Callable[[int, Any], None] = lambda number, cell: None
    """Number and result of each cell as it ends."""
