"""Formulas for a data-parallel study: the expected memory of each variant, and the overhead by bucket size."""

import dataclasses
from collections.abc import Iterator, Sequence
from statistics import median

from steplab.costs.communication import bus_factor
from steplab.costs.data_parallel import Link, buckets_of, fit_link, state_bytes
from steplab.records.ddp import MOMENTS, CurvePoint, DdpCell, DdpFacts, OverheadModel, StateMemory
from steplab.specs.ddp import BYTES_PER_MB, DdpStudy, Variant

_FITTED = ("flat", "overlap", "bucketed", "torch_ddp")
"""Kinds of variant whose communication by itself the link is fitted to: all-reduces, launched without waiting."""
_POINTS_A_DECADE = 12


def with_expected(cell: DdpCell, study: DdpStudy, facts: DdpFacts | None) -> DdpCell:
    """The cell with the memory that the formulas give."""
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
    """The stage of ZeRO: peer copies leave averages on their owners alone, and collectives have buckets of all
    gradients."""
    if variant.kind == "sharded":
        return 2 if variant.transport == "peer_copy" else 1
    return 3 if variant.kind == "fsdp2" else 0


def with_wire_bytes(cell: DdpCell, study: DdpStudy) -> DdpCell:
    """The cell with the bytes that each rank sends in a step, by the factors of nccl-tests."""
    if not cell.messages:
        return cell
    sent = (bus_factor(sent.collective, study.processes) * sent.total_bytes for sent in cell.messages)
    return dataclasses.replace(cell, wire_bytes=round(sum(sent)))


def overhead_model(cells: Sequence[DdpCell], facts: DdpFacts | None) -> OverheadModel | None:
    """The model fitted to the variants' communication by itself; None if there are too few measurements."""
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
    """Seconds of the backward pass without communication on the slowest rank; 0 if it was not timed.

    With `baseline`, the samples that the baseline took in turns with the variant, when the machine has settled.
    """
    timed = [samples for rank in cell.ranks if (samples := rank.samples("backward", baseline=baseline))]
    return max((median(samples) for samples in timed), default=0.0)


def _curve(
    link: Link, total: float, backward_s: float, num_tensors: int, cells: Sequence[DdpCell]
) -> Iterator[CurvePoint]:
    """Predictions over the measured bucket sizes, and a little beyond."""
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
