"""Splits attention into scores, softmax and values: time, FLOPs, bytes and share of the roofline.

An operator belongs to the part that its range's name ends with; nothing is estimated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from steplab import units
from steplab.costs.roofline import Roofline
from steplab.records.profile import ATTENTION_PARTS, OpStats, Profile
from steplab.records.run import Run
from steplab.report.kit.grouping import grouped
from steplab.report.profile.roofline import find_roofs, roof_dtype, why_no_roof

FUSED = "fused"
_PHASES = ("forward", "backward", "outside")
_NEARLY_ALL = 0.995
_NAMED = 3  # operators without FLOPs


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    time_s: float
    flops: float | None
    moved_bytes: float | None
    counted_s: float
    """Device time of operators with both FLOPs and bytes; the fields below use only these."""
    intensity: float | None
    flops_per_s: float | None
    bytes_per_s: float | None
    """Achieved bandwidth, if each tensor moved once."""
    ceiling_share: float | None
    """FLOP/s over min(peak, intensity × bandwidth); None without a known roofline."""
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRow:
    part: str
    """scores, softmax, values or fused."""
    phase: str
    """forward or backward; outside if phases are unmarked."""
    work: Work
    uncounted: tuple[str, ...]


def attention_rows(run: Run, profile: Profile) -> list[AttentionRow]:
    """One row per part of attention, by phase; empty if no operator is marked as attention."""
    roofs = find_roofs(run)
    groups = grouped(profile.ops, lambda op: (op.phase, part_of(op)))
    return [
        AttentionRow(
            phase=phase,
            part=part,
            work=work_of(groups[phase, part], run, profile, roofs),
            uncounted=tuple(dict.fromkeys(op.name for op in groups[phase, part] if op.flops is None)),
        )
        for phase in _PHASES
        for part in (*ATTENTION_PARTS, FUSED)
        if (phase, part) in groups
    ]


def part_of(op: OpStats) -> str | None:
    last = op.range.rpartition(".")[2]
    if last in ATTENTION_PARTS:
        return last
    return FUSED if op.category == "attention" else None


def work_of(ops: Sequence[OpStats], run: Run, profile: Profile, roofs: Roofline) -> Work:
    steps = profile.num_steps
    flops = [op.flops for op in ops if op.flops is not None]
    moved = [op.moved_bytes for op in ops if op.moved_bytes is not None]
    counted_s = counted_flops = counted_bytes = 0.0
    format_flops: dict[str, float] = {}
    for op in ops:
        if op.flops is not None and op.moved_bytes is not None:
            counted_s += op.device_s
            counted_flops += op.flops
            counted_bytes += op.moved_bytes
            dtype = roof_dtype(run, profile, op)
            format_flops[dtype] = format_flops.get(dtype, 0.0) + op.flops
    dtype = max(format_flops, key=lambda name: format_flops[name], default="")
    counted = counted_s > 0 and counted_bytes > 0
    least_s = roofs.least_time_s(counted_flops, counted_bytes, dtype) if counted else None
    return Work(
        time_s=sum(op.device_s for op in ops) / steps,
        flops=sum(flops) / steps if flops else None,
        moved_bytes=sum(moved) / steps if moved else None,
        counted_s=counted_s / steps,
        intensity=counted_flops / counted_bytes if counted else None,
        flops_per_s=counted_flops / counted_s if counted else None,
        bytes_per_s=counted_bytes / counted_s if counted else None,
        ceiling_share=least_s / counted_s if least_s is not None else None,
        dtype=dtype,
    )


def attention_notes(run: Run, rows: Sequence[AttentionRow]) -> list[str]:
    roofs = find_roofs(run)
    notes = ["Figures are per step. Time is of all kernels of a part, of any category."]
    if any(row.work.flops or row.work.moved_bytes for row in rows):
        notes.append(
            "FLOPs are as executed, 2 for each multiply-add; bytes as if each tensor were read or written once, the "
            "least there is to move. Rates and shares are of the operators for which both are counted."
        )
    partly = [row for row in rows if 0 < row.work.counted_s < _NEARLY_ALL * row.work.time_s]
    counted = [
        f"{units.format_percent(row.work.counted_s / row.work.time_s)} of {row.phase} {row.part}" for row in partly
    ]
    notes += [f"Both are counted for part of the time only: {', '.join(counted)}."] if counted else []
    notes += [
        f"No FLOPs for {row.phase} {row.part}: the inputs in the trace do not give FLOPs of "
        f"{', '.join(row.uncounted[:_NAMED])}."
        for row in rows
        if row.work.flops is None
    ]
    dtypes = list(dict.fromkeys(row.work.dtype for row in rows if row.work.dtype))
    if roofs.hardware is None:
        return [*notes, f"No ceiling: {why_no_roof(run)}."]
    known = [(dtype, peak) for dtype in dtypes if (peak := roofs.peak(dtype)) is not None]
    peaks = ", ".join(f"{units.format_rate(peak, 'FLOP/s')} in {dtype}" for dtype, peak in known)
    bandwidth = units.format_rate(roofs.hardware.memory_bandwidth_bytes_per_s, "B/s")
    if peaks:
        notes.append(f"Ceiling: min(peak, FLOP/B x bandwidth) of {roofs.hardware.name}: {peaks}; {bandwidth}.")
    above = [f"{row.phase} {row.part}" for row in rows if (row.work.ceiling_share or 0.0) > 1]
    if above:
        notes.append(
            f"Above 100 %: {', '.join(above)}. The ceiling assumes that every byte comes from memory, but tensors that "
            "fit in the L2 cache do not."
        )
    notes += [f"No ceiling for {dtype}: no peak is stated." for dtype in dtypes if roofs.peak(dtype) is None]
    return notes
