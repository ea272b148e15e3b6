"""Measure cells in child processes, and turn the processes' ends into records.

A child (`processes.child`) leads its own session, so Ctrl-C reaches only the parent, which ends the child. A
benchmark's cells share one set of processes, replaced after each cell that ends it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import msgspec
import psutil  # type: ignore[import-untyped]

from steplab.errors import Unsupported, UserError
from steplab.measurement.jobs import JOBS, AuditTask, CellsTask, StepTask
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.processes.conversation import HERE, Conversation, Listener, Surroundings
from steplab.measurement.processes.rank import Rank
from steplab.measurement.processes.wire import BadMessage, Request
from steplab.measurement.progress import OnProgress
from steplab.records.ceilings import Ceilings
from steplab.records.codec import encode, new_head
from steplab.records.environment import Environment
from steplab.records.failure import Failure, Outcome
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.specs.model import refuse_planning_only
from steplab.specs.step import StepSpec
from steplab.units import MIB, format_bytes

_PROCESS_BYTES = 128 * MIB


class Asking(TypedDict, total=False):
    timeout_s: float | None
    on_progress: OnProgress
    surroundings: Surroundings


def measure_in_child(task: StepTask, **how: Unpack[Asking]) -> Run:
    """Measure one cell in a new process; the record may be a failure, or have a note if further steps failed.

    Raises UserError (or the child's SteplabError) for an impossible request. KeyboardInterrupt ends the child and
    passes on.
    """
    spec = task.spec
    refuse_planning_only(spec.model)
    if max(spec.layout.pp, spec.layout.tp) > 1 and spec.model.shape is None:
        why = "only steplab's own Transformer is split along tp and pp; other models can be planned so"
        raise Unsupported(f"layout {spec.layout} for {spec.model.name}", why, f"use fsdp={spec.layout.world_size}")
    answer = ask("step", task, device=spec.device, processes=spec.layout.world_size, **how)
    if isinstance(answer.result, Run):
        return answer.result
    if answer.measured is not None:
        note = f"{'memory' if task.snapshot else 'profile'}: {answer.result.message}"
        return dataclasses.replace(answer.measured, notes=(*answer.measured.notes, note))
    return Run(**new_head(), spec=spec, environment=answer.environment, failure=answer.result)


def ceilings_in_child(device: str, **how: Unpack[Asking]) -> Ceilings:
    answer = ask("ceilings", device, **how)
    ceilings: Ceilings = answer.unless_failed(f"the ceilings of device {device} could not be measured")
    return ceilings


def numerics_in_child(spec: StepSpec | None = None, *, device: str = "auto", **how: Unpack[Asking]) -> Numerics:
    """Audit a step's precision, or without one run the accumulation study; the result may be a failure.

    Raises UserError (or the child's SteplabError) for an impossible request.
    """
    answer = ask("audit", AuditTask(spec=spec, device=device), **how)
    if isinstance(answer.result, Numerics):
        return answer.result
    return Numerics(**new_head(), spec=spec, environment=answer.environment, failure=answer.result)


def ask(job: str, task: object, *, device: str = "auto", processes: int = 1, **how: Unpack[Asking]) -> Listener:
    """Have a process do a job with one result, maybe a failure. Raises a process's SteplabError."""
    listener = Listener(JOBS[job], how.get("on_progress", lambda progress: None))
    request = Request(job=job, task=msgspec.Raw(encode(task)), device=device, processes=processes)
    failure = converse(request, listener, how.get("timeout_s"), how.get("surroundings", HERE))
    listener.result = failure or listener.result
    if listener.result is None:  # it waits for a turn, which this job does not have
        why = "the process gave no result"
        listener.result = Failure(kind="error", message=why, phase=listener.progress.stage)
    return listener


def converse(
    request: Request, listener: Listener, timeout_s: float | None, surroundings: Surroundings = HERE
) -> Failure | None:
    """Have a request served; returns the failure, None if the last message came.

    Under torchrun this process is one of several. Raises a process's SteplabError, and UserError if the processes do
    not fit into memory, or if torchrun started another number. KeyboardInterrupt ends them and passes on.
    """
    around = torchrun_around() if request.processes > 1 else None
    if around is not None:
        if around.size != request.processes:
            raise UserError(
                f"torchrun started {around.size} processes, but the layout takes "
                f"{request.processes}: give it --nproc-per-node and --nnodes for {request.processes} in all"
            )
        return Rank(request, listener, timeout_s, around).serve()
    if request.processes > 1:
        refuse_too_many(request.processes)
    with Conversation(request, listener, timeout_s, surroundings=surroundings) as conversation:
        return conversation.listen()


def refuse_too_many(processes: int) -> None:
    """Raise UserError without memory for the processes with only torch loaded: a swapping machine needs minutes to
    fail.
    """
    available = psutil.virtual_memory().available
    if processes * _PROCESS_BYTES > available:
        raise UserError(
            f"{processes} processes do not fit: each takes at least {format_bytes(_PROCESS_BYTES)}, and "
            f"{format_bytes(available)} of memory are free; start at most {available // _PROCESS_BYTES}"
        )


Cell = TypeVar("Cell", bound=Outcome)
Converse = Callable[[Request, Listener, float | None], Failure | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells(Generic[Cell]):
    job: str
    study: object
    labels: Sequence[str]
    failed: Callable[[int, Failure], Cell]
    groups: Sequence[Sequence[int]] | None = None
    """Groups of cell numbers that alternate; None: each alone."""
    essential: frozenset[int] = frozenset()
    """Cells that all others need; if one ends its processes, measuring stops."""
    device: str = "auto"
    processes: int = 1
    traces: Path | None = None

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
    """Measure all cells; `on_cell` gets the number and result of each as it ends.

    A cell that ends its processes is a failure; new processes measure the others, each alone if several alternated. The
    rest fail too under torchrun, or if new processes end before they reach a cell. `timeout_s` limits the time from one
    cell to the next.

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
    """The cells that may have ended their processes; none if the cell at fault already has its result.

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
