"""Measure a benchmark's cells, and store one record of all."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from steplab.errors import SteplabError
from steplab.lab.keeping import Place, checked_name, keep, open_store
from steplab.lab.machine import is_first_rank, let_the_first_store
from steplab.measurement.processes.launch import Cells, measure_cells
from steplab.measurement.processes.wire import BadMessage
from steplab.measurement.progress import OnProgress
from steplab.records.codec import now_utc
from steplab.records.environment import Environment
from steplab.records.failure import Outcome
from steplab.records.record import Benchmark
from steplab.records.validation import first_problem
from steplab.units import counted


class Measuring(TypedDict, total=False):
    name: str
    store: Path | str | None
    timeout_s: float | None
    """Timeout in seconds of one cell, or between its progress reports; None: no limit."""
    on_progress: OnProgress
    on_cell: Callable[[int, Any], None]
    place: Place | None
    """Study that the record belongs to; an interrupted benchmark joins none."""


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
    """Measure the cells and store the record, also after an interruption.

    `run`: the record without cells. `with_costs` adds computed figures to a cell, `with_facts` facts that ranks report,
    `with_traces` reads traces, `concluded` adds figures over all cells.

    Under torchrun every process calls this, and rank 0 stores. Raises UserError for an unsupported request,
    SteplabError if the store cannot be written.
    """
    run = dataclasses.replace(run, name=checked_name(how.get("name", "")))
    ended: dict[int, Cell] = {}
    tell = how.get("on_cell") if is_first_rank() else None

    def on_cell(number: int, cell: Cell) -> None:
        ended[number] = with_costs(cell)
        if tell:
            tell(number, ended[number])

    def on_environment(environment: Environment) -> None:
        nonlocal run
        run = dataclasses.replace(run, environment=environment)

    def on_facts(facts: Any) -> None:
        nonlocal run
        found = with_facts(run, facts)
        problem = first_problem(found)
        if problem is not None:  # they are of another benchmark
            raise BadMessage(problem)
        run = found

    def so_far(*notes: str) -> Run:
        cells = tuple(ended[number] for number in sorted(ended))
        return dataclasses.replace(run, created_utc=now_utc(), cells=cells, notes=(*run.notes, *notes))

    def measured() -> Run:
        on_progress = how.get("on_progress", lambda progress: None)
        measure_cells(
            cells,
            timeout_s=how.get("timeout_s"),
            on_progress=on_progress,
            on_cell=on_cell,
            on_environment=on_environment,
            on_facts=on_facts,
        )
        return so_far()

    if not is_first_rank():
        result = concluded(measured())
        if not went_well(result):
            let_the_first_store()
        return result
    with open_store(how.get("store"), write=True) as opened:
        try:
            result = concluded(with_traces(measured()))
        except (KeyboardInterrupt, SteplabError) as error:
            if not ended:
                raise
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            result = concluded(so_far(f"{why}: the record has only the cells that had ended"))
            keep(opened, result)
            stored = f"record {result.id} has the {counted(len(result.cells), 'cell')} that had ended"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(stored) from error
            raise SteplabError(f"{error}; {stored}") from error
        return keep(opened, result, how.get("place"))


def went_well(run: Benchmark[Any]) -> bool:
    """True if at least one cell was measured, and none crashed its processes."""
    crashed = any(cell.status in ("crashed", "timeout") for cell in run.cells)
    return not crashed and any(cell.failure is None for cell in run.cells)
