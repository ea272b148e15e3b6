"""The data-parallel study: measure the variants, read their traces, store one record of all."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from steplab.errors import SteplabError, Unsupported, UserError
from steplab.lab.benchmark import Measuring, measure_benchmark
from steplab.lab.ddp_model import overhead_model, with_expected, with_wire_bytes
from steplab.lab.files import Destination, folder_for
from steplab.lab.machine import visible_gpus
from steplab.lab.measuring import named_fields
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.processes.cells_launch import Cells
from steplab.measurement.progress import OnProgress, Progress
from steplab.reading.bounded import read_bounded
from steplab.records.codec import new_head
from steplab.records.ddp import DdpCell, DdpRun, TracedSteps
from steplab.specs.checkpointing import AUTO
from steplab.specs.ddp import (
    COLLECTIVES,
    KINDS,
    SMALL_BUCKETS_MB,
    STUDY_BUCKETS_MB,
    DdpStudy,
    bucket_sizes_mb,
    refuse_what_none_uses,
    variants_of,
)
from steplab.specs.layout import process_count
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import AFTER

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_PROCESSES = 2
_SMALL_STEP = {"context": 64, "batch": 2}


def ddp(
    model: str | None = None,
    *,
    gpus: int | None = None,
    processes: int | None = None,
    variants: Sequence[str] = KINDS,
    bucket_sizes: Sequence[object] | None = None,
    transport: Sequence[str] | None = None,
    update: Sequence[str] | None = None,
    profiled_steps: int = 2,
    name: str = "",
    store: Path | str | None = None,
    traces: Path | str | None = None,
    force: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress = lambda progress: None,
    **fields: object,
) -> DdpRun:
    """Compare variants of data parallelism on one step, as `steplab ddp` does, and store the record.

    `fields` are those of the step of each rank, as in `measure`; `bucket_sizes` are in units of 1e6 bytes:

        run = steplab.ddp("tiny", processes=2, variants=["bucketed:1", "sharded"], steps=5)
        steplab.show(run)

    A trace of each variant is kept in the folder `traces` if one is named. Raises UserError for a request that is not
    supported, and SteplabError if the store cannot be written.
    """
    study = ddp_study(
        named_fields(model, fields),
        gpus=gpus,
        processes=processes,
        variants=variants,
        bucket_sizes=bucket_sizes,
        transport=transport,
        update=update,
        profiled_steps=profiled_steps,
    )
    return measure_ddp(
        study, name=name, store=store, traces=traces, force=force, timeout_s=timeout_s, on_progress=on_progress
    )


def ddp_step(fields: Mapping[str, object], gpus: int | None, processes: int | None) -> tuple[StepSpec, int]:
    """The step of each rank and the number of ranks: the requested number, the number that torchrun started, or two.

    On a CPU the defaults make a small step. Raises UserError for fields or numbers that contradict each other.
    """
    around = torchrun_around()
    if around is not None and gpus is None and processes is None:
        return resolve_step({**({} if visible_gpus() else _SMALL_STEP), **fields}), around.size
    if gpus is None and processes is None:
        processes = DEFAULT_PROCESSES
    count, device = process_count(gpus, processes)
    if around is not None and around.size != count:
        raise UserError(f"torchrun started {around.size} processes, not {count}; leave --gpus and --processes out")
    return resolve_step({**(_SMALL_STEP if device == "cpu" else {}), **fields, "device": device}), count


def ddp_study(
    fields: Mapping[str, object],
    *,
    gpus: int | None = None,
    processes: int | None = None,
    variants: Sequence[str] = KINDS,
    bucket_sizes: Sequence[object] | None = None,
    transport: Sequence[str] | None = None,
    update: Sequence[str] | None = None,
    profiled_steps: int = 2,
) -> DdpStudy:
    """The study of a step with these fields; by default with the bucket sizes for the device, and with collectives as
    the transport. Bucket sizes are numbers in MB or their texts.

    Raises UserError that names what was given and what is valid, and Unsupported for a transport that needs GPUs.
    """
    step, count = ddp_step(fields, gpus, processes)
    if step.checkpointing == AUTO:
        why = "the variants need different amounts of memory, and are compared in equal steps"
        raise Unsupported("checkpointing auto in a benchmark of data parallelism", why, "use none, selective or full")
    small = step.device == "cpu" or (step.device == "auto" and not visible_gpus())
    if small and transport and "peer_copy" in transport:
        raise Unsupported("transport peer_copy on a CPU", "it copies between GPUs of one host", "leave --transport out")
    given_mb = bucket_sizes_mb(bucket_sizes) if bucket_sizes else None
    sizes_mb = given_mb or (SMALL_BUCKETS_MB if small else STUDY_BUCKETS_MB)
    found = variants_of(variants, sizes_mb, transport or (COLLECTIVES,), update or (AFTER,))
    refuse_what_none_uses(variants, given_mb, transport, update)
    return DdpStudy(
        step=step,
        processes=count,
        contenders=found,
        profiled_steps=profiled_steps,
    )


def measure_ddp(
    study: DdpStudy, *, traces: Path | str | None = None, force: bool = False, **how: Unpack[Measuring]
) -> DdpRun:
    """Measure a study and store the record, which an interruption stores too, with the variants that it has.

    A trace of each variant is kept in the folder `traces`; None: in none. A file there that has the name of a trace and
    is none is replaced with `force` alone.
    Under torchrun every process calls it, and the first one alone stores and reads traces. Raises UserError for a
    request that cannot be served, and SteplabError where the store cannot be written.
    """
    on_progress = how.get("on_progress", lambda progress: None)
    with _folder(_destinations(study, traces, how.get("store"), force)) as folder:
        return measure_benchmark(
            DdpRun(**new_head(), study=study),
            ddp_cells(study, folder if study.profiled_steps else None),
            with_facts=lambda run, facts: dataclasses.replace(run, facts=facts),
            with_traces=lambda run: _with_traces(run, folder, on_progress),
            concluded=_with_model,
            **how,
        )


def ddp_cells(study: DdpStudy, traces: Path | None) -> Cells[DdpCell]:
    """The study's variants, each measured by all ranks together; rank 0 writes their traces."""
    return Cells(
        job="ddp",
        study=study,
        labels=[contender.label for contender in study.contenders],
        failed=lambda number, failure: DdpCell(contender=study.contenders[number], failure=failure),
        essential=frozenset({0}),  # the baseline, without which there is nothing to compare
        device=study.step.device,
        processes=study.processes,
        traces=traces,
    )


def _with_traces(run: DdpRun, folder: Path, on_progress: OnProgress) -> DdpRun:
    """The record with the overlap read from the traces of its cells."""
    numbers = {contender: number for number, contender in enumerate(run.study.contenders)}
    found = []
    for done, cell in enumerate(run.cells):
        on_progress(Progress(stage="traces", done=done, total=len(run.cells)))
        found.append(_with_trace(cell, folder / run.study.trace_name(numbers[cell.contender])))
    return dataclasses.replace(run, cells=tuple(found))


def _with_model(run: DdpRun) -> DdpRun:
    """The record with the bytes that each cell sends, its expected memory, and the overhead model."""
    sent = (with_wire_bytes(cell, run.study) for cell in run.cells)
    cells = tuple(with_expected(cell, run.study, run.facts) for cell in sent)
    return dataclasses.replace(run, cells=cells, model=overhead_model(cells, run.facts))


def _destinations(study: DdpStudy, kept: Path | str | None, store: Path | str | None, force: bool) -> list[Destination]:
    """Destinations of the traces, in a folder that is created if needed. Raises UserError if one cannot be written."""
    if kept is None:
        return []
    try:
        Path(kept).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write traces to {kept}: {error.strerror}") from error
    names = [study.trace_name(number) for number in range(len(study.contenders))]
    targets = [Destination(path=Path(kept) / name, store=store, force=force) for name in names]
    for target in targets:
        target.check()
    return targets


@contextmanager
def _folder(targets: Sequence[Destination]) -> Iterator[Path]:
    """A folder for the traces, which are moved from there to their destinations, also after an interruption."""
    with folder_for(targets[0] if targets else None) as folder:
        try:
            yield folder
        finally:
            for target in targets:
                written = folder / target.path.name
                if written.exists():
                    target.take(written)


def _with_trace(cell: DdpCell, trace: Path) -> DdpCell:
    if cell.failure or not trace.exists():
        return cell
    try:
        return dataclasses.replace(cell, traced=read_bounded("traced_steps", TracedSteps, [trace]))
    except SteplabError as error:  # what was measured stands without it
        return dataclasses.replace(cell, notes=(*cell.notes, f"trace: {error}"))
