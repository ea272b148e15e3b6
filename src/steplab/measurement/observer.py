"""The observer of a measurement: one interface for steps, audits and the cells of every benchmark.

Measuring never prints: it calls an observer, and the measuring process sends the calls to its parent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steplab.records.environment import Environment
from steplab.records.run import Run
from steplab.records.turns import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Observer:
    """The callbacks of a measurement; one that is not given does nothing."""

    on_environment: Callable[[Environment], None] = lambda environment: None
    """Called with the environment once it has been read, and again once the clocks have been read."""
    on_stage: Callable[[str, int], None] = lambda stage, num_steps: None
    """Called with the name of each stage as it begins, and its number of steps (0 if it has none)."""
    on_step: Callable[[int], None] = lambda iteration: None
    """Called with the number of each step that ends, from 0."""
    on_measured: Callable[[Run], None] = lambda run: None
    """Called with the record when all timing is done and recording begins, which the process may not survive; of steps
    that take turns, with the record so far after each turn."""
    next_turn: Callable[[], Turn | None] = lambda: None
    """Called when a step that takes turns is ready for its next one; waits until it may begin. None: it was the
    last."""
    on_facts: Callable[[Any], None] = lambda facts: None
    """Called with the facts that hold for all cells of a benchmark: its ranks, versions, the model's sizes."""
    on_under_way: Callable[[Sequence[int]], None] = lambda cells: None
    """Called with the numbers of the cells that run next; if the process dies, one of them is the cause."""
    on_cell: Callable[[int, Any], None] = lambda number, cell: None
    """Called with the number and the result of each cell as it ends."""
