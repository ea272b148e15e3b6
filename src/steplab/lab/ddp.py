"""The data-parallel study: measure the contenders, read their traces, fit the model of the overhead, store one record."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from steplab import __version__
from steplab.costs.data_parallel import Link, buckets_of, fit_link, state_bytes
from steplab.errors import SteplabError, UserError
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.machine import has_cuda
from steplab.lab.processes import is_first_rank, let_the_first_store
from steplab.measurement.ddp_launch import ddp_in_children
from steplab.measurement.launch import OnProgress, Progress
from steplab.measurement.torchrun import torchrun_around
from steplab.records.codec import new_id, now_utc
from steplab.records.ddp import MOMENTS, CurvePoint, DdpCell, DdpFacts, DdpRun, OverheadModel, StateMemory, TracedSteps
from steplab.records.environment import Environment
from steplab.specs.ddp import (
    BYTES_PER_MB,
    COLLECTIVES,
    KINDS,
    SMALL_BUCKETS_MB,
    STUDY_BUCKETS_MB,
    DdpStudy,
    contenders_of,
)
from steplab.specs.layout import process_count
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.units import counted

DEFAULT_TIMEOUT_S = 600.0
_STAGES = {"sharded": 1, "fsdp2": 3}
_FITTED = ("flat", "overlap", "bucketed", "torch_ddp")
"""Whose messages by themselves the link is fitted to: all-reduces, launched without waiting for one another."""
_POINTS_A_DECADE = 12
DEFAULT_PROCESSES = 2
_SMALL_STEP = {"context": 64, "batch": 2}


def ddp_step(fields: Mapping[str, object], gpus: int | None, processes: int | None) -> tuple[StepSpec, int]:
    """The step of each rank, and how many ranks there are: as many as asked for, as torchrun started, or two on a CPU.

    On a CPU, what the fields leave out is small. Raises UserError for fields or numbers that do not go together.
    """
    around = torchrun_around()
    if around is not None and gpus is None and processes is None:
        return resolve_step(fields), around.size
    count, device = process_count(gpus, processes or (None if gpus else DEFAULT_PROCESSES))
    if around is not None and around.size != count:
        raise UserError(f"torchrun started {around.size} processes, not {count}; leave --gpus and --processes out")
    return resolve_step({**(_SMALL_STEP if device == "cpu" else {}), **fields, "device": device}), count


def ddp_study(
    step: StepSpec,
    *,
    processes: int,
    compile: str = "off",
    contenders: Sequence[str] = KINDS,
    bucket_sizes_mb: Sequence[float] | None = None,
    transports: Sequence[str] = (COLLECTIVES,),
    profiled_steps: int = 2,
) -> DdpStudy:
    """The study of a step; without bucket sizes, of those that suit the device.

    Raises UserError naming what is wrong with it, and what is valid.
    """
    small = step.device == "cpu" or (step.device == "auto" and not has_cuda())
    sizes_mb = bucket_sizes_mb or (SMALL_BUCKETS_MB if small else STUDY_BUCKETS_MB)
    return DdpStudy(
        step=step,
        processes=processes,
        compile=compile,  # type: ignore[arg-type]
        contenders=contenders_of(contenders, sizes_mb, transports),
        profiled_steps=profiled_steps,
    )


def measure_ddp(
    study: DdpStudy,
    *,
    name: str = "",
    store: Path | str | None = None,
    traces: Path | str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress = lambda progress: None,
    on_cell: Callable[[int, DdpCell], None] = lambda number, cell: None,
) -> DdpRun:
    """Measure a study and store the record, which an interruption stores too, with the contenders that it has.

    `timeout_s` is how long one contender may take. A trace a contender is kept in the folder `traces`; None: in none.
    Under torchrun every process calls it, and the first one alone stores. Raises UserError for a request that cannot be
    served, and SteplabError where the store or a trace cannot be written.
    """
    checked_name(name)
    found: dict[int, DdpCell] = {}
    environment: Environment | None = None
    facts: DdpFacts | None = None
    run = DdpRun(id=new_id(), created_utc=now_utc(), steplab_version=__version__, name=name, study=study)

    def ended(*notes: str) -> DdpRun:
        cells = tuple(_with_expected(found[number], study, facts) for number in sorted(found))
        return dataclasses.replace(
            run,
            created_utc=now_utc(),
            environment=environment,
            facts=facts,
            cells=cells,
            model=overhead_model(cells, facts),
            notes=notes,
        )

    def located(seen: Environment) -> None:
        nonlocal environment
        environment = seen

    def told(seen: DdpFacts) -> None:
        nonlocal facts
        facts = seen

    def measured(number: int, cell: DdpCell) -> None:
        found[number] = cell
        on_cell(number, cell)

    with open_store(store, write=True) as opened, _folder(traces) as folder:
        try:
            ddp_in_children(
                study,
                traces=folder if study.profiled_steps else None,
                again=torchrun_around() is None,
                timeout_s=timeout_s,
                on_progress=on_progress,
                on_cell=measured,
                on_environment=located,
                on_facts=told,
            )
            for number, cell in found.items():
                on_progress(Progress(stage="traces", done=number, total=len(found)))
                found[number] = _with_trace(cell, folder / f"{number}.json")
        except KeyboardInterrupt as error:
            if not found:
                raise
            keep(opened, ended("interrupted: only the contenders that had ended by then are here"))
            raise KeyboardInterrupt(f"record {run.id} has the {counted(len(found), 'contender')} that had ended") from error
        result = ended()
        if is_first_rank():
            keep(opened, result)
    return result


@contextmanager
def _folder(kept: Path | str | None) -> Iterator[Path]:
    """Where traces go: to the folder that keeps them, or to one that is gone afterwards."""
    if kept is None:
        with TemporaryDirectory(prefix="steplab-ddp-") as folder:
            yield Path(folder)
        return
    try:
        Path(kept).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write traces to {kept}: {error.strerror}") from error
    yield Path(kept).resolve()


def _with_trace(cell: DdpCell, trace: Path) -> DdpCell:
    if cell.failure or not trace.exists():
        return cell
    try:
        return dataclasses.replace(cell, traced=_read(trace))
    except SteplabError as error:  # what was measured stands without it
        return dataclasses.replace(cell, notes=(*cell.notes, f"trace: {error}"))


def _read(trace: Path) -> TracedSteps:
    from steplab.traces.communication import traced_steps
    from steplab.traces.reading import read_trace

    return traced_steps(read_trace(trace))


def _with_expected(cell: DdpCell, study: DdpStudy, facts: DdpFacts | None) -> DdpCell:
    """With the memory that the formulas give."""
    if facts is None or cell.failure or not facts.num_parameters:
        return cell
    held = state_bytes(
        facts.num_parameters,
        parameter_bytes=facts.gradient_bytes // facts.num_parameters,
        states=0 if study.step.optimizer == "sgd" else 2,
        size=study.processes,
        stage=_STAGES.get(cell.contender.kind, 0),
    )
    moments = zip(MOMENTS, ((0.0, 0.0), (held.gradients, 0.0), (held.gradients, held.optimizer)), strict=True)
    expected = [
        StateMemory(
            moment=moment,
            parameters_bytes=round(held.parameters),
            gradients_bytes=round(gradients),
            optimizer_bytes=round(optimizer),
        )
        for moment, (gradients, optimizer) in moments
    ]
    return dataclasses.replace(cell, expected=tuple(expected))


def overhead_model(cells: Sequence[DdpCell], facts: DdpFacts | None) -> OverheadModel | None:
    """The model fitted to the contenders' communication by itself; None where too little of it was measured."""
    points = [
        (cell.num_calls, max(median(rank.alone_s) for rank in cell.ranks))
        for cell in cells
        if cell.contender.kind in _FITTED and cell.num_calls and cell.ranks and all(rank.alone_s for rank in cell.ranks)
    ]
    baseline = next((cell for cell in cells if cell.contender.kind == "none" and cell.ranks), None)
    if facts is None or baseline is None or not points:
        return None
    calls, alone_s = [calls for calls, _ in points if calls], [seconds for _, seconds in points]
    link = fit_link(calls, facts.gradient_bytes, alone_s)
    if link is None:
        return None
    total = float(facts.gradient_bytes)
    backward_s = max(median(rank.samples("backward")) for rank in baseline.ranks)
    return OverheadModel(
        gradient_bytes=total,
        bytes_per_s=link.bytes_per_s,
        call_s=link.call_s,
        backward_s=backward_s,
        num_fitted=len(points),
        worst_fit=max(
            abs(link.alone_s(total, count) / seconds - 1) for count, seconds in zip(calls, alone_s, strict=True)
        ),
        best_bucket_mb=link.best_bucket_bytes(total) / BYTES_PER_MB,
        least_serial_s=link.least_serial_s(total),
        curve=tuple(_curve(link, total, backward_s, facts.num_tensors, cells)),
    )


def _curve(
    link: Link, total: float, backward_s: float, num_tensors: int, cells: Sequence[DdpCell]
) -> Iterator[CurvePoint]:
    """Over the bucket sizes measured, and a little beyond."""
    sizes_mb = [cell.contender.bucket_size_mb for cell in cells if cell.contender.bucket_size_mb is not None]
    if not sizes_mb:
        return
    low, high = min(sizes_mb) / 1.5, max(sizes_mb) * 1.5
    ratio = 10 ** (1 / _POINTS_A_DECADE)
    size_mb = low
    while size_mb <= high * ratio:
        num_buckets = buckets_of(total, size_mb * BYTES_PER_MB, num_tensors)
        yield CurvePoint(
            bucket_mb=size_mb,
            num_buckets=num_buckets,
            exposed_s=link.exposed_s(total, num_buckets, backward_s),
            serial_s=link.serial_s(total, num_buckets),
        )
        size_mb *= ratio
