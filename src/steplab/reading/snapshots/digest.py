"""Builds a MemoryProfile from a History: replay, categories, peak."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steplab.errors import SteplabError
from steplab.reading.snapshots.history import NONE, OOM, Codes, DeviceHistory, History, Integers
from steplab.reading.snapshots.largest import alive_at, largest
from steplab.reading.snapshots.made import Origin, Origins
from steplab.reading.snapshots.replay import Lifetimes, replay, reserved_peak_bytes
from steplab.reading.snapshots.saved import SavedMemory
from steplab.reading.snapshots.timeline import (
    Positions,
    Residents,
    bytes_over_time,
    phase_moments,
    phase_records,
    timeline,
)
from steplab.records.memory_marks import Marks, Stretch
from steplab.records.memory_profile import MEASURED_CATEGORIES, UNNAMED_CATEGORIES, MemoryProfile
from steplab.units import counted, format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replayed:
    device: DeviceHistory
    lifetimes: Lifetimes
    allocated_bytes: Integers


def digest(
    history: History,
    marks: Marks | None,
    *,
    file: str | None = None,
    device_name: str | None = None,
    unwatched_peak_bytes: int | None = None,
) -> MemoryProfile:
    """Sum up a history: with marks, their device by MEASURED_CATEGORIES; without, the device with the highest peak by
    UNNAMED_CATEGORIES. Raises SteplabError without allocations.
    """
    replayed = _chosen(history, marks)
    device, lifetimes, allocated_bytes = replayed.device, replayed.lifetimes, replayed.allocated_bytes
    positions = Positions(device.events)
    residents = Residents(lifetimes, positions)
    names = MEASURED_CATEGORIES if marks else UNNAMED_CATEGORIES
    codes = categories(lifetimes, marks, positions, residents) if marks else unnamed_categories(lifetimes)
    peak = int(allocated_bytes.argmax())
    origins = Origins(lifetimes, history.stacks, positions, marks, residents)
    at_peak = _origin_at(peak, lifetimes, origins)
    phases = marks.phases if marks else ()
    given_up = np.sort(lifetimes.end[codes == names.index("gradients")]) if marks else np.zeros(0, dtype=np.int64)
    moments = phase_moments(phases, positions, given_up)
    memory = SavedMemory(marks, lifetimes, codes, residents) if marks else None
    saved, saved_left_out = memory.groups() if memory else ((), None)
    blocks, blocks_left_out = memory.blocks() if memory else ((), None)
    return MemoryProfile(
        source=marks.source if marks else "snapshot",
        peak_bytes=int(allocated_bytes[peak]),
        at_peak=_by_category(lifetimes, codes, names, peak),
        peak_s=round(positions.seconds(peak), 6),
        peak_phase=at_peak.phase,
        peak_module=at_peak.module,
        peak_op=at_peak.op,
        peak_source=at_peak.source,
        counted_peak_bytes=marks.counted_peak_bytes if marks else None,
        unwatched_peak_bytes=unwatched_peak_bytes,
        reserved_bytes=marks.reserved_bytes if marks else reserved_peak_bytes(device),
        outside_bytes=marks.outside_bytes if marks else None,
        timeline=timeline(lifetimes, codes, names, positions, allocated_bytes, moments),
        phases=phase_records(moments, phases, positions, allocated_bytes),
        largest=largest(lifetimes, codes, names, origins, peak),
        saved=saved,
        saved_left_out=saved_left_out,
        blocks=blocks,
        blocks_left_out=blocks_left_out,
        num_events=len(device.events),
        device=f"cuda:{device.index}" if len(history.devices) > 1 else None,
        device_name=device_name,
        file=file,
        notes=(*(marks.notes if marks else ()), *_notes(history, marks, replayed, positions)),
    )


def _chosen(history: History, marks: Marks | None) -> _Replayed:
    devices = [device for device in history.devices if marks is None or device.index == marks.device_index]
    best: _Replayed | None = None
    for device in devices:
        lifetimes = _sized(replay(device, history.settings), marks)
        allocated_bytes = bytes_over_time(lifetimes, lifetimes.block_bytes)
        if best is None or allocated_bytes.max() > best.allocated_bytes.max():
            best = _Replayed(device=device, lifetimes=lifetimes, allocated_bytes=allocated_bytes)
    if best is None or not len(best.lifetimes):
        raise SteplabError("the snapshot contains no allocations")
    return best


def _sized(lifetimes: Lifetimes, marks: Marks | None) -> Lifetimes:
    num_before = int((lifetimes.start < 0).sum())
    if marks is None or not marks.block_bytes or len(marks.block_bytes) != len(lifetimes) - num_before:
        return lifetimes
    seen = np.array(marks.block_bytes, dtype=np.int64)
    return replace(lifetimes, block_bytes=np.concatenate((lifetimes.block_bytes[:num_before], seen)))


def _origin_at(moment: int, lifetimes: Lifetimes, origins: Origins) -> Origin:
    pieces = np.flatnonzero(lifetimes.start == moment - 1)
    return origins.of(int(pieces[0])) if moment and len(pieces) else Origin()


def _by_category(lifetimes: Lifetimes, codes: Codes, names: Sequence[str], moment: int) -> dict[str, int]:
    alive = alive_at(lifetimes, moment)
    requested = lifetimes.requested_bytes[alive]
    sums = {name: int(requested[codes[alive] == code].sum()) for code, name in enumerate(names)}
    return sums | {"rounding": int((lifetimes.block_bytes[alive] - requested).sum())}


def _notes(history: History, marks: Marks | None, replayed: _Replayed, positions: Positions) -> Iterator[str]:
    events = replayed.device.events
    if not len(events):
        yield "history: missing in the snapshot; figures show memory at its end"
    elif positions.by_event:
        yield "times: missing in the snapshot; events are numbered"
    if marks:
        counted_allocations = max((phase.end for phase in marks.phases), default=0)
        if counted_allocations > positions.num_allocations:
            yield (
                f"marks: {counted_allocations} allocations were counted during the step, the history has "
                f"{positions.num_allocations}, so owners are uncertain"
            )
        elsewhere = (marks.counted_peak_bytes or 0) - int(replayed.allocated_bytes.max())
        if marks.counted_peak_bytes is not None and elsewhere:
            sign = "more" if elsewhere > 0 else "less"
            yield f"peak: the allocator itself counted {format_bytes(abs(elsewhere))} {sign}"
    elif len(history.devices) > 1:
        others = ", ".join(f"cuda:{d.index}" for d in history.devices if d is not replayed.device)
        shown = f"cuda:{replayed.device.index}"
        yield f"devices: figures show {shown}, with the highest peak; the snapshot also has {others}"
    refused = events.size_bytes[events.action == OOM]
    if len(refused):
        yield (
            f"out of memory: {counted(len(refused), 'allocation')} failed, the largest with "
            f"{format_bytes(int(refused.max()))}"
        )
    yield from replayed.lifetimes.notes


def unnamed_categories(lifetimes: Lifetimes) -> Codes:
    before, during = UNNAMED_CATEGORIES.index("before"), UNNAMED_CATEGORIES.index("during")
    return np.where(lifetimes.start == NONE, before, during).astype(np.int8)


def categories(lifetimes: Lifetimes, marks: Marks, positions: Positions, residents: Residents) -> Codes:
    """Indices into MEASURED_CATEGORIES. A piece belongs to its first named owner."""
    codes: Codes = np.full(len(lifetimes), MEASURED_CATEGORIES.index("temporaries"), dtype=np.int8)
    always = (lifetimes.start == NONE) & (lifetimes.end == lifetimes.num_events)
    codes[always] = MEASURED_CATEGORIES.index("workspaces")
    ordinals = positions.ordinals(lifetimes.start)
    for stretch in _forward_stretches(marks):
        made = (ordinals >= stretch.start) & (ordinals < stretch.end)
        kept = lifetimes.end >= positions.last_moment(stretch.end)
        codes[made & kept & (lifetimes.end < lifetimes.num_events)] = MEASURED_CATEGORIES.index("activations")
    owned = [owner for owner in marks.owned if owner.category in MEASURED_CATEGORIES]
    pieces = residents.find([owner.address for owner in owned], [owner.position for owner in owned])
    for piece, owner in reversed(list(zip(pieces.tolist(), owned, strict=True))):
        if piece != NONE:
            codes[piece] = MEASURED_CATEGORIES.index(owner.category)
    return codes


def _forward_stretches(marks: Marks) -> Iterator[Stretch]:
    names = [phase.name for phase in marks.phases]
    if "forward" in names and "backward" in names:
        yield from (phase for phase in marks.phases if phase.name == "forward")
    yield from _outermost([module for module in marks.modules if module.in_backward])


def _outermost(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    end = NONE
    for stretch in stretches:
        if stretch.start >= end:
            yield stretch
            end = stretch.end
