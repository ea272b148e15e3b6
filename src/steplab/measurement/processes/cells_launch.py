"""Measures the cells of a benchmark in child processes: one set for all cells, and a new set after each cell that ends
them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from steplab.measurement.jobs import JOBS, CellsTask
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.processes.conversation import Listener
from steplab.measurement.processes.launch import converse
from steplab.measurement.processes.wire import BadMessage, Request
from steplab.measurement.progress import OnProgress
from steplab.records.codec import encode
from steplab.records.environment import Environment
from steplab.records.failure import Failure, Outcome

Cell = TypeVar("Cell", bound=Outcome)
Converse = Callable[[Request, Listener, float | None], Failure | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells(Generic[Cell]):
    job: str
    study: object
    labels: Sequence[str]
    """Name of each cell; a rank's stages begin with it."""
    failed: Callable[[int, Failure], Cell]
    """Makes a failed cell's result from its number and failure."""
    groups: Sequence[Sequence[int]] | None = None
    """Numbers of alternating cells, by group; None: each alone."""
    essential: frozenset[int] = frozenset()
    """Cells that all others need: no new processes start if one of them ends its own."""
    device: str = "auto"
    processes: int = 1
    traces: Path | None = None
    """Folder for a trace of each cell; None: no traces."""

    def request(self, groups: Sequence[Sequence[int]]) -> Request:
        traces = str(self.traces) if self.traces else None
        task = CellsTask(study=self.study, groups=[list(group) for group in groups], traces=traces)
        return Request(job=self.job, task=msgspec.Raw(encode(task)), device=self.device, processes=self.processes)


def measure_cells(
    cells: Cells[Cell],
    *,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_cell: Callable[[int, Cell], None],
    on_environment: Callable[[Environment], None] = lambda environment: None,
    on_facts: Callable[[Any], None] = lambda facts: None,
    converse: Converse = converse,
) -> None:
    """Measure all cells; `on_cell` is called with the number and the result of each as it ends.

    A cell that ends its processes is a failure; new processes measure the others, each alone if several alternated. The
    remaining cells fail too under torchrun, or if new processes end before they reach a cell. `timeout_s` limits the
    time between the beginnings of two cells.

    Raises UserError (or a process's SteplabError) for an impossible request.
    """
    around = torchrun_around()
    left = [list(group) for group in cells.groups or [[number] for number in range(len(cells.labels))]]
    results: set[int] = set()

    def keep(number: int, cell: Cell) -> None:
        if number >= len(cells.labels):
            raise BadMessage(f"there is no cell {number}")
        if number not in results:
            results.add(number)
            on_cell(number, cell)

    def fail(number: int, failure: Failure) -> None:
        keep(number, cells.failed(number, failure))

    while left:
        before = len(results)
        listener = Listener(
            JOBS[cells.job], on_progress, on_environment=on_environment, on_facts=on_facts, on_cell=keep
        )
        failure = converse(cells.request(left), listener, timeout_s)
        left = _without(left, results)
        if failure is None and len(results) == before:
            # processes that end well without a result would otherwise be restarted forever
            failure = Failure(kind="error", message="the processes gave no result")
        if failure is None or not left:  # a failure after the last cell is not any cell's failure
            continue
        suspects = _suspects(cells, failure, listener.under_way, left)
        if len(suspects) > 1:
            left = [[number] for number in suspects] + _without(left, {*suspects})
            continue
        for number in suspects:
            fail(number, failure)
        left = _without(left, results)
        if around is not None or len(results) == before or cells.essential.intersection(suspects):
            if suspects:
                earlier = f"the processes failed earlier in {cells.labels[suspects[0]]}: {failure.message}"
                failure = dataclasses.replace(failure, message=f"not measured; {earlier}")
            for number in (number for group in left for number in group):
                fail(number, failure)
            return


def _without(groups: Sequence[Sequence[int]], ended: set[int]) -> list[list[int]]:
    return [rest for group in groups if (rest := [number for number in group if number not in ended])]


def _suspects(
    cells: Cells[Cell], failure: Failure, under_way: Sequence[int], left: Sequence[Sequence[int]]
) -> list[int]:
    """The cells that may have ended their processes; none if that cell already has its result.

    The failing rank's stage names its cell, since the first rank may be at another; an essential cell is timed with
    others, so its name proves nothing. Otherwise: the cells under way.
    """
    missing = {number for group in left for number in group}
    stage = failure.phase or ""
    named = [
        number
        for number, label in enumerate(cells.labels)
        if stage.startswith(f"{label}: ") and number not in cells.essential
    ]
    return [number for number in named or under_way if number in missing]
