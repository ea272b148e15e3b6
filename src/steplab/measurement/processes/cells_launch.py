"""The cells of a benchmark, measured in processes of their own: one set of them for all cells, and a new one after each
cell that they do not survive."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from steplab.measurement.jobs import JOBS, CellsTask
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.processes.launch import converse
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import Request
from steplab.measurement.progress import OnProgress
from steplab.records.codec import encode
from steplab.records.environment import Environment
from steplab.records.failure import Failure, Outcome

Cell = TypeVar("Cell", bound=Outcome)
Converse = Callable[[Request, Listener, float | None], Failure | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells(Generic[Cell]):
    """A benchmark's cells, as processes are asked for them."""

    job: str
    """Name of the job, one of jobs.JOBS."""
    study: object
    """The benchmark's request, with all of its cells."""
    labels: Sequence[str]
    """What each cell is called; a rank's stages begin with the label of the cell that it is at."""
    failed: Callable[[int, Failure], Cell]
    """Makes the result of a cell, by its number, that failed."""
    groups: Sequence[Sequence[int]] | None = None
    """Cells that are timed in turns, by their numbers; None: each by itself."""
    essential: frozenset[int] = frozenset()
    """Cells without which the others are worth nothing: if one of these kills its processes, no new ones go on."""
    device: str = "auto"
    """Where the processes compute."""
    processes: int = 1
    """How many processes measure a cell together."""
    traces: Path | None = None
    """Folder for a trace of each cell; None: none is wanted."""

    def request(self, groups: Sequence[Sequence[int]]) -> Request:
        """The request for some of the cells."""
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
    """Measure all cells: `on_cell` is called with the number and the result of each as it ends.

    A cell that its processes do not survive is a failure, and the others go on in new ones; where several took turns as
    they died, each is measured by itself. Where torchrun has started this process there can be no new ones, and the
    others are failures too; so they are where new processes get to no cell, since others would fare no better.
    `timeout_s` is how long the processes may be without beginning another cell.

    Raises UserError (or the SteplabError a process named) for a request that cannot be served.
    """
    around = torchrun_around()
    if around is not None and not around.is_first:
        timeout_s = None  # only the first process of torchrun's hears of a cell as it ends
    left = [list(group) for group in cells.groups or [[number] for number in range(len(cells.labels))]]
    results: set[int] = set()

    def keep(number: int, cell: Cell) -> None:
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
            # Processes that end well without a result would be followed by others like them for ever.
            failure = Failure(kind="error", message="the processes gave no result")
        if failure is None or not left:  # what fails once all cells have ended costs none of them
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
    """The cells that may have ended their processes. None: that was a cell which had its result already.

    The failing rank names the cell that it was at as its stage, since the first rank may be elsewhere; an essential
    cell is timed around others too, so that its name says nothing. Else it is those that were under way.
    """
    missing = {number for group in left for number in group}
    stage = failure.phase or ""
    named = [
        number
        for number, label in enumerate(cells.labels)
        if stage.startswith(f"{label}: ") and number not in cells.essential
    ]
    return [number for number in named or under_way if number in missing]
