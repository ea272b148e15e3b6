"""The data-parallel study: measure variants, read traces, add formulas."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Unpack

from steplab.costs.communication import bus_factor
from steplab.costs.data_parallel import Link, buckets_of, fit_link, state_bytes
from steplab.errors import SteplabError, Unsupported, UserError
from steplab.lab.benchmark import Measuring, measure_benchmark
from steplab.lab.files import Destination, folder_for
from steplab.lab.machine import processes_here
from steplab.lab.measuring import named_fields
from steplab.measurement.processes.launch import Cells
from steplab.measurement.progress import OnProgress, Progress
from steplab.reading.bounded import read_bounded
from steplab.records.codec import new_head
from steplab.records.ddp import MOMENTS, CurvePoint, DdpCell, DdpFacts, DdpRun, OverheadModel, StateMemory, TracedSteps
from steplab.specs.checkpointing import AUTO
from steplab.specs.ddp import BYTES_PER_MB, DDP, SMALL_STEP, DdpStudy, Variant, asked_variants
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.units import parse_duration

DEFAULT_PROCESSES = 2
_FITTED = ("flat", "overlap", "bucketed", "torch_ddp")
"""Variants that only all-reduce: their communication without computation gives the link's bandwidth and latency."""
_POINTS_A_DECADE = 12


def ddp(
    model: str | None = None,
    *,
    name: str = "",
    store: Path | str | None = None,
    traces: Path | str | None = None,
    force: bool = False,
    timeout_s: float = parse_duration(DDP.timeout),
    on_progress: OnProgress = lambda progress: None,
    **fields: object,
) -> DdpRun:
    """Compare variants of data parallelism on one step, as `steplab ddp` does, and store the record.

    `fields` are each rank's step, as in `measure`; `bucket_sizes` are in units of 1e6 bytes:

        run = steplab.ddp("tiny", processes=2, variants=["bucketed:1", "sharded"], steps=5)
        steplab.show(run)

    Further fields are the command's gpus, processes, variants, bucket_sizes, transport, update and profiled_steps. The
    folder `traces`, if given, gets a trace of each variant. Raises UserError for an unsupported request, SteplabError
    if the store cannot be written.
    """
    study = ddp_study(named_fields(model, fields))
    return measure_ddp(
        study, name=name, store=store, traces=traces, force=force, timeout_s=timeout_s, on_progress=on_progress
    )


def ddp_step(fields: Mapping[str, object], gpus: int | None, processes: int | None) -> tuple[StepSpec, int]:
    """Each rank's step, which is small by default on a CPU, and the number of ranks: as requested, else torchrun's,
    else two. Raises UserError for contradictory requests.
    """
    count, device = processes_here(gpus, processes, default=(DEFAULT_PROCESSES, "cpu"))
    return resolve_step({**(SMALL_STEP if device == "cpu" else {}), **fields, "device": device}), count


def ddp_study(given: Mapping[str, object]) -> DdpStudy:
    """The study, by default with bucket sizes (MB) for the device and with the transport `collectives`. Raises
    UserError with the valid values, Unsupported for a transport that needs GPUs.
    """
    fields, asked = DDP.asked(given)
    step, count = ddp_step(fields, asked.gpus, asked.processes)
    if step.checkpointing == AUTO:
        why = "the variants need different amounts of memory, and are compared in equal steps"
        raise Unsupported("checkpointing auto in a benchmark of data parallelism", why, "use none, selective or full")
    small = step.device == "cpu"
    if small and asked.transport and "peer_copy" in asked.transport:
        raise Unsupported("transport peer_copy on a CPU", "it copies between GPUs of one host", "leave --transport out")
    return DdpStudy(
        step=step, processes=count, contenders=asked_variants(asked, small=small), profiled_steps=asked.profiled_steps
    )


def measure_ddp(
    study: DdpStudy, *, traces: Path | str | None = None, force: bool = False, **how: Unpack[Measuring]
) -> DdpRun:
    """Measure the study and store its record; other keywords and errors are as in `measure_benchmark`. The folder
    `traces` gets a trace of each variant; `force` replaces files there that steplab did not write.
    """
    on_progress = how.get("on_progress", lambda progress: None)
    with _folder(study, traces, how.get("store"), force) as folder:
        return measure_benchmark(
            DdpRun(**new_head(), study=study),
            ddp_cells(study, folder if study.profiled_steps else None),
            with_facts=lambda run, facts: dataclasses.replace(run, facts=facts),
            with_traces=lambda run: _with_traces(run, folder, on_progress),
            concluded=_with_model,
            **how,
        )


def ddp_cells(study: DdpStudy, traces: Path | None) -> Cells[DdpCell]:
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
    numbers = {contender: number for number, contender in enumerate(run.study.contenders)}
    found = []
    for done, cell in enumerate(run.cells):
        on_progress(Progress(stage="traces", done=done, total=len(run.cells)))
        found.append(_with_trace(cell, folder / run.study.trace_name(numbers[cell.contender])))
    return dataclasses.replace(run, cells=tuple(found))


def _with_model(run: DdpRun) -> DdpRun:
    sent = (with_wire_bytes(cell, run.study) for cell in run.cells)
    cells = tuple(with_expected(cell, run.study, run.facts) for cell in sent)
    return dataclasses.replace(run, cells=cells, model=overhead_model(cells, run.facts))


@contextmanager
def _folder(study: DdpStudy, kept: Path | str | None, store: Path | str | None, force: bool) -> Iterator[Path]:
    targets: list[Destination] = []
    if kept is not None:
        try:
            Path(kept).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write traces to {kept}: {error.strerror}") from error
        names = map(study.trace_name, range(len(study.contenders)))
        targets = [Destination(path=Path(kept) / name, store=store, force=force) for name in names]
    for target in targets:
        target.check()
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
    except SteplabError as error:  # the measurement is complete without it
        return dataclasses.replace(cell, notes=(*cell.notes, f"trace: {error}"))


def with_expected(cell: DdpCell, study: DdpStudy, facts: DdpFacts | None) -> DdpCell:
    if facts is None or cell.failure or not facts.num_parameters:
        return cell
    held = state_bytes(
        facts.num_parameters,
        parameter_bytes=facts.gradient_bytes // facts.num_parameters,
        states=0 if study.step.optimizer == "sgd" else 2,
        size=study.processes,
        stage=_stage(cell.contender),
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


def _stage(variant: Variant) -> int:
    """ZeRO stage. `sharded` is stage 2 by peer copies; by collectives it keeps buckets of all gradients, stage 1."""
    if variant.kind == "sharded":
        return 2 if variant.transport == "peer_copy" else 1
    return 3 if variant.kind == "fsdp2" else 0


def with_wire_bytes(cell: DdpCell, study: DdpStudy) -> DdpCell:
    """Add the bytes sent per rank and step, by the bus factors of nccl-tests."""
    if not cell.messages:
        return cell
    sent = (bus_factor(sent.collective, study.processes) * sent.total_bytes for sent in cell.messages)
    return dataclasses.replace(cell, wire_bytes=round(sum(sent)))


def overhead_model(cells: Sequence[DdpCell], facts: DdpFacts | None) -> OverheadModel | None:
    """Fit time per call and bandwidth to times of communication without computation; None with too few measurements."""
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
    beside = [_backward_s(cell, baseline=True) for cell in cells]
    backward_s = median([seconds for seconds in beside if seconds] or [_backward_s(baseline, baseline=False)])
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


def _backward_s(cell: DdpCell, *, baseline: bool) -> float:
    """Median seconds of backward on the slowest rank; 0: not timed. `baseline`: in the turns of the step without
    communication that alternate with the cell's own, instead of these.
    """
    timed = [samples for rank in cell.ranks if (samples := rank.samples("backward", baseline=baseline))]
    return max((median(samples) for samples in timed), default=0.0)


def _curve(
    link: Link, total: float, backward_s: float, num_tensors: int, cells: Sequence[DdpCell]
) -> Iterator[CurvePoint]:
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
