"""Run any benchmark of several cells: measure them, report each as it ends, and store one record of all."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from steplab.errors import SteplabError
from steplab.lab.keeping import Place, checked_name, keep, open_store
from steplab.lab.processes import is_first_rank, let_the_first_store
from steplab.measurement.processes.cells_launch import Cells, measure_cells
from steplab.measurement.processes.messages import BadMessage
from steplab.measurement.progress import OnProgress
from steplab.records.codec import now_utc
from steplab.records.environment import Environment
from steplab.records.failure import Outcome
from steplab.records.record import Benchmark
from steplab.records.validation import first_problem
from steplab.units import counted


class Measuring(TypedDict, total=False):
    """How a benchmark is measured and stored."""

    name: str
    """Name of the record."""
    store: Path | str | None
    """The store; None: the default one."""
    timeout_s: float | None
    """How long one cell may take, or go without progress where it tells of that; None: any time."""
    on_progress: OnProgress
    """Called as the processes tell where they are."""
    on_cell: Callable[[int, Any], None]
    """Called with the number and the result of each cell as it ends."""
    place: Place | None
    """Place of the record in a study, to which the record of an interrupted benchmark does not belong."""


Cell = TypeVar("Cell", bound=Outcome)
Run = TypeVar("Run", bound=Benchmark[Any])


def measure_benchmark(
    run: Run,
    cells: Cells[Cell],
    *,
    with_costs: Callable[[Cell], Cell] = lambda cell: cell,
    with_facts: Callable[[Run, Any], Run] = lambda run, facts: run,
    with_traces: Callable[[Run], Run] = lambda run: run,
    concluded: Callable[[Run], Run] = lambda run: run,
    **how: Unpack[Measuring],
) -> Run:
    """Measure the cells and store the record; an interrupted benchmark is stored with the cells that had ended.

    `run` is the record without its cells. `with_costs` adds to a cell what follows from its spec; `with_facts` adds
    the facts that the ranks report; `with_traces` reads the traces after all measuring, which reading would slow;
    `concluded` adds what follows from all cells.

    Under torchrun every process calls it, and only the first stores the record. Raises UserError for a request that is
    not supported, and SteplabError if the store cannot be written.
    """
    run = dataclasses.replace(run, name=checked_name(how.get("name", "")))
    on_cell = how.get("on_cell") if is_first_rank() else None
    heard = _Heard(run, on_cell or (lambda number, cell: None), with_costs, with_facts)

    def measured() -> None:
        measure_cells(
            cells,
            timeout_s=how.get("timeout_s"),
            on_progress=how.get("on_progress", lambda progress: None),
            on_cell=heard.on_cell,
            on_environment=heard.on_environment,
            on_facts=heard.on_facts,
        )

    if not is_first_rank():
        measured()
        result = concluded(heard.record())
        if not went_well(result):
            let_the_first_store()
        return result
    with open_store(how.get("store"), write=True) as opened:
        try:
            measured()
            result = concluded(with_traces(heard.record()))
        except (KeyboardInterrupt, SteplabError) as error:
            if not heard.cells:
                raise
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            result = concluded(heard.record(f"{why}: the record has only the cells that had ended"))
            keep(opened, result)
            stored = f"record {result.id} has the {counted(len(result.cells), 'cell')} that had ended"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(stored) from error
            raise SteplabError(f"{error}; {stored}") from error
        return keep(opened, result, how.get("place"))


def went_well(run: Benchmark[Any]) -> bool:
    """Whether at least one cell was measured, and none ended its processes."""
    crashed = any(cell.status in ("crashed", "timeout") for cell in run.cells)
    return not crashed and any(cell.failure is None for cell in run.cells)


class _Heard:
    """The results of a benchmark so far."""

    def __init__(
        self,
        run: Benchmark[Any],
        tell: Callable[[int, Any], None],
        with_costs: Callable[[Any], Any],
        with_facts: Callable[[Any, Any], Any],
    ) -> None:
        self._run, self._tell, self._with_costs, self._with_facts = run, tell, with_costs, with_facts
        self.cells: dict[int, Any] = {}
        """The cells that have ended, by number."""

    def on_cell(self, number: int, cell: Any) -> None:
        """Add a cell that has ended."""
        self.cells[number] = self._with_costs(cell)
        self._tell(number, self.cells[number])

    def on_environment(self, environment: Environment) -> None:
        """Set the environment of the measurement."""
        self._run = dataclasses.replace(self._run, environment=environment)

    def on_facts(self, facts: Any) -> None:
        """Add the facts that are the same for all cells. Raises BadMessage if they are of another benchmark."""
        run = self._with_facts(self._run, facts)
        problem = first_problem(run)
        if problem is not None:
            raise BadMessage(problem)
        self._run = run

    def record(self, *notes: str) -> Any:
        """The record of the results so far, with these notes."""
        cells = tuple(self.cells[number] for number in sorted(self.cells))
        return dataclasses.replace(self._run, created_utc=now_utc(), cells=cells, notes=(*self._run.notes, *notes))
