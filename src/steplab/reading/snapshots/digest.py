"""Build a MemoryProfile from an allocator's History and, if present, its marks (records.memory_marks)."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from steplab.errors import SteplabError, UserError
from steplab.reading.snapshots import timeline
from steplab.reading.snapshots.history import ALLOC, FREE_COMPLETED, NONE, OOM, Codes, DeviceHistory, History, Integers
from steplab.reading.snapshots.made import Origin, Origins
from steplab.reading.snapshots.replay import Lifetimes, replay, reserved_peak_bytes
from steplab.reading.snapshots.timeline import Positions, Residents
from steplab.records import memory_profile
from steplab.records.memory_marks import MARKS_SCHEMA, Marks, Saved, Stretch, history_digest
from steplab.records.memory_profile import MEASURED_CATEGORIES, UNNAMED_CATEGORIES, LeftOut, MemoryProfile
from steplab.records.module_names import without_numbers
from steplab.units import counted, format_bytes
from steplab.unpacking import small_file


class _Head(msgspec.Struct):
    schema: str


def read_marks(path: Path) -> Marks:
    """Read marks from a JSON file. Raises a one-line UserError if it is unreadable or no such file."""
    try:
        content = small_file(path)
        schema = msgspec.json.decode(content, type=_Head).schema
        if schema != MARKS_SCHEMA:
            raise UserError(f"{path}: it has format {schema!r}; this version reads {MARKS_SCHEMA}")
        marks = msgspec.json.decode(content, type=Marks)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not the marks of a memory snapshot: {error}") from error
    for owner in marks.owned:
        if owner.category not in MEASURED_CATEGORIES:
            raise UserError(f"{path}: not the marks of a memory snapshot: a category is {owner.category!r}")
    return marks


def check_same_history(marks: Marks, history: History, path: Path) -> None:
    """Raise UserError if marks belong to another history, or name no owners. A history is identified by its digest; old
    marks lack it and are compared by block sizes.
    """
    why = _why_not_of(marks, next((device for device in history.devices if device.index == marks.device_index), None))
    if why:
        raise UserError(f"{path}: {why}; remove it to read the snapshot alone")


def _why_not_of(marks: Marks, device: DeviceHistory | None) -> str | None:
    if device is None:
        return f"it belongs to another snapshot: the snapshot has no device {marks.device_index}"
    events, num_counted = device.events, len(marks.block_bytes)
    allocated = events.size_bytes[events.action == ALLOC]
    if num_counted and num_counted != len(allocated):
        return (
            f"it belongs to another snapshot: it counts {num_counted} allocations, the snapshot "
            f"{len(allocated)} on device {marks.device_index}"
        )
    if marks.history_sha256 is None and not num_counted:
        return "it does not name its snapshot"
    of_blocks = events.action <= FREE_COMPLETED
    found_sha256 = history_digest(
        events.action[of_blocks].tobytes(),  # one byte each; ACTIONS begins with BLOCK_ACTIONS
        events.address[of_blocks].astype("<i8").tobytes(),
        events.size_bytes[of_blocks].astype("<i8").tobytes(),
    )
    if marks.history_sha256 not in (None, found_sha256):
        return "it belongs to another snapshot: its digest differs from the snapshot's history"
    if num_counted and bool((np.array(marks.block_bytes, dtype=np.int64) < allocated).any()):
        return "it belongs to another snapshot: a block is smaller than in the snapshot"
    known = np.concatenate((events.address[of_blocks], device.blocks.address))
    found = np.isin(np.array([owner.address for owner in marks.owned], dtype=np.int64), known)
    if 2 * found.sum() < len(found):
        return f"it belongs to another snapshot: only {found.sum()} of its {len(found)} addresses match"
    in_phases = any(phase.name == "forward" for phase in marks.phases)
    if in_phases and not any(owner.category == "parameters" for owner in marks.owned):
        return "it is damaged: it has phases of the step but no parameters of the model"
    return None


MOST_GROUPS = 100

_MOST_BLOCKS = 10
_TOLD_APART = ("parameters", "autocast_copies", "inputs")


class SavedMemory:
    """Tensors saved for backward, with their category and the bytes that no earlier one of them already counts."""

    def __init__(self, marks: Marks, lifetimes: Lifetimes, codes: Codes, residents: Residents) -> None:
        self._marks, self._lifetimes = marks, lifetimes
        self._residents = residents
        pieces = residents.find([s.address for s in marks.saved], [s.position for s in marks.saved]).tolist()
        self._rows = list(self._judged(pieces, codes))

    def _judged(self, pieces: Sequence[int], codes: Codes) -> Iterator[tuple[Saved, str, int]]:
        seen = set[tuple[int, int]]()
        for saved, piece in zip(self._marks.saved, pieces, strict=True):
            category = MEASURED_CATEGORIES[codes[piece]] if piece != NONE else ""
            category = category if category in _TOLD_APART else "activations"
            storage = (piece, 0) if piece != NONE else (NONE, saved.address)
            counts = category != "parameters" and storage not in seen
            seen.add(storage)
            # Requested bytes of a storage, as in categories; the marks' size if its allocation is unknown.
            asked_bytes = saved.storage_bytes if piece == NONE else int(self._lifetimes.requested_bytes[piece])
            yield saved, category, asked_bytes if counts else 0

    def groups(self) -> tuple[tuple[memory_profile.SavedTensors, ...], LeftOut | None]:
        sums = defaultdict[tuple[str, str, tuple[int, ...], str, str], list[int]](list)
        for saved, category, stored_bytes in self._rows:
            alike = (without_numbers(saved.module), saved.op, tuple(saved.shape), saved.dtype, category)
            sums[alike].append(stored_bytes)
        found = [
            memory_profile.SavedTensors(
                module=module,
                op=op,
                shape=shape,
                dtype=dtype,
                count=len(stored),
                stored_bytes=sum(stored),
                category=category,
            )
            for (module, op, shape, dtype, category), stored in sums.items()
        ]
        found.sort(key=lambda group: -group.stored_bytes)
        beyond = [group.stored_bytes for group in found[MOST_GROUPS:]]
        return tuple(found[:MOST_GROUPS]), _left_out(beyond)

    def blocks(self) -> tuple[tuple[memory_profile.BlockMemory, ...], LeftOut | None]:
        emitted = self._gradient_bytes()
        found = dict[tuple[object, ...], memory_profile.BlockMemory]()
        for module, (shape, dtype) in self._marks.block_inputs.items():
            inside = f"{module}."
            kept = sum(
                stored_bytes
                for saved, category, stored_bytes in self._rows
                if category == "activations" and (saved.module == module or saved.module.startswith(inside))
            )
            block = memory_profile.BlockMemory(
                module=module,
                saved_bytes=kept,
                gradient_bytes=sum(n for name, n in emitted.items() if name.startswith(inside)) if emitted else None,
                input_bytes=memory_profile.tensor_bytes(shape, dtype),
                input_shape=tuple(shape),
                input_dtype=dtype,
            )
            looks = (kept, block.gradient_bytes, block.input_shape, dtype)
            found.setdefault(looks, block)
        kinds = tuple(found.values())
        return kinds[:_MOST_BLOCKS], _left_out([block.saved_bytes for block in kinds[_MOST_BLOCKS:]])

    def _gradient_bytes(self) -> dict[str, int]:
        owned = [owner for owner in self._marks.owned if owner.category == "gradients" and owner.name]
        pieces = self._residents.find([o.address for o in owned], [o.position for o in owned]).tolist()
        return {
            owner.name: int(self._lifetimes.requested_bytes[piece])
            for owner, piece in zip(owned, pieces, strict=True)
            if owner.name and piece != NONE
        }


def _left_out(sizes: Sequence[int]) -> LeftOut | None:
    return LeftOut(count=len(sizes), num_bytes=sum(sizes)) if sizes else None


_MOST_AT_PEAK, _MOST_OTHERS = 25, 10
_Alike = tuple[int, int, Origin]
_MOST_KINDS = 50_000


def largest(
    lifetimes: Lifetimes, codes: Codes, names: Sequence[str], origins: Origins, peak_moment: int
) -> tuple[memory_profile.Allocation, ...]:
    """Group similar allocations, by total bytes: first those alive at the peak, then others."""
    alive = lifetimes.alive_at(peak_moment)
    at_peak = _groups(np.flatnonzero(alive), lifetimes, codes, names, origins, at_peak=True)
    others = _groups(np.flatnonzero(~alive), lifetimes, codes, names, origins, at_peak=False)
    return (*_most(at_peak, _MOST_AT_PEAK), *others[:_MOST_OTHERS])


def _most(groups: list[memory_profile.Allocation], limit: int) -> list[memory_profile.Allocation]:
    chosen = groups[:limit]
    widest = max(groups, key=lambda group: group.requested_bytes, default=None)
    return chosen if widest is None or widest in chosen else [*chosen[:-1], widest]


def _groups(
    pieces: Integers, lifetimes: Lifetimes, codes: Codes, names: Sequence[str], origins: Origins, *, at_peak: bool
) -> list[memory_profile.Allocation]:
    counts, totals = Counter[_Alike](), Counter[_Alike]()
    modules = defaultdict[_Alike, set[str | None]](set)
    for piece, count, total_bytes in _kinds(pieces, lifetimes, codes, origins):
        origin = origins.of(piece)
        pattern = replace(origin, module=without_numbers(origin.module)) if origin.module else origin
        alike = (int(lifetimes.requested_bytes[piece]), int(codes[piece]), pattern)
        counts[alike] += count
        totals[alike] += total_bytes
        modules[alike].add(origin.module)
    ordered = sorted(counts, key=lambda alike: -totals[alike])
    return [
        memory_profile.Allocation(
            requested_bytes=requested,
            block_bytes=totals[alike] // counts[alike],
            category=names[code],
            phase=origin.phase,
            module=next(iter(modules[alike])) if len(modules[alike]) == 1 else origin.module,
            op=origin.op,
            source=origin.source,
            shape=origin.shape,
            dtype=origin.dtype,
            at_peak=at_peak,
            count=counts[alike],
        )
        for alike in ordered
        for requested, code, origin in [alike]
    ]


def _kinds(pieces: Integers, lifetimes: Lifetimes, codes: Codes, origins: Origins) -> Iterator[tuple[int, int, int]]:
    if not len(pieces):
        return
    sizes = [lifetimes.requested_bytes[pieces], codes[pieces].astype(np.int64)]
    columns = np.stack(sizes + origins.kinds(pieces))
    order = np.lexsort(columns)
    columns = columns[:, order]
    begins = np.flatnonzero(np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0)))
    counts = np.diff(np.append(begins, len(order)))
    total_bytes = np.add.reduceat(lifetimes.block_bytes[pieces[order]], begins)
    kept = np.argsort(-total_bytes, kind="stable")[:_MOST_KINDS]
    kept = kept[np.argsort(order[begins[kept]])]
    yield from zip(pieces[order[begins[kept]]].tolist(), counts[kept].tolist(), total_bytes[kept].tolist(), strict=True)


_Replayed = tuple[DeviceHistory, Lifetimes, Integers]
"""A device, lifetimes of its memory, and its allocated bytes at every moment."""


def digest(history: History, marks: Marks | None, *, unwatched_peak_bytes: int | None = None) -> MemoryProfile:
    """Build the profile of one device. With marks it is theirs, and memory is split by MEASURED_CATEGORIES. Without, it
    is the device with the highest peak, split by UNNAMED_CATEGORIES.

    `unwatched_peak_bytes`, the peak of steps timed before, is stored. Raises SteplabError if nothing was allocated.
    """
    replayed = device, lifetimes, allocated_bytes = _chosen(history, marks)
    positions = Positions(device.events)
    residents = Residents(lifetimes, positions)
    names = MEASURED_CATEGORIES if marks else UNNAMED_CATEGORIES
    codes = categories(lifetimes, marks, positions, residents) if marks else unnamed_categories(lifetimes)
    peak = int(allocated_bytes.argmax())
    origins = Origins(lifetimes, history.stacks, positions, marks, residents)
    at_peak = _origin_at(peak, lifetimes, origins)
    phases = marks.phases if marks else ()
    given_up = np.sort(lifetimes.end[codes == names.index("gradients")]) if marks else np.zeros(0, dtype=np.int64)
    moments = timeline.phase_moments(phases, positions, given_up)
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
        timeline=timeline.timeline(lifetimes, codes, names, positions, allocated_bytes, moments),
        phases=timeline.phase_records(moments, phases, positions, allocated_bytes),
        largest=largest(lifetimes, codes, names, origins, peak),
        saved=saved,
        saved_left_out=saved_left_out,
        blocks=blocks,
        blocks_left_out=blocks_left_out,
        num_events=len(device.events),
        device=f"cuda:{device.index}" if len(history.devices) > 1 else None,
        notes=(*(marks.notes if marks else ()), *_notes(history, marks, replayed, positions)),
    )


def _chosen(history: History, marks: Marks | None) -> _Replayed:
    devices = [device for device in history.devices if marks is None or device.index == marks.device_index]
    replayed = ((device, _sized(replay(device, history.settings), marks)) for device in devices)
    measured = ((device, of, timeline.bytes_over_time(of, of.block_bytes)) for device, of in replayed)
    best = max(measured, key=lambda each: each[2].max(), default=None)
    if best is None or not len(best[1]):
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
    alive = lifetimes.alive_at(moment)
    requested = lifetimes.requested_bytes[alive]
    sums = {name: int(requested[codes[alive] == code].sum()) for code, name in enumerate(names)}
    return sums | {"rounding": int((lifetimes.block_bytes[alive] - requested).sum())}


def _notes(history: History, marks: Marks | None, replayed: _Replayed, positions: Positions) -> Iterator[str]:
    device, lifetimes, allocated_bytes = replayed
    events = device.events
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
        elsewhere = (marks.counted_peak_bytes or 0) - int(allocated_bytes.max())
        if marks.counted_peak_bytes is not None and elsewhere:
            sign = "more" if elsewhere > 0 else "less"
            yield f"peak: the allocator itself counted {format_bytes(abs(elsewhere))} {sign}"
    elif len(history.devices) > 1:
        others = ", ".join(f"cuda:{other.index}" for other in history.devices if other is not device)
        yield f"devices: figures show cuda:{device.index}, with the highest peak; the snapshot also has {others}"
    refused = events.size_bytes[events.action == OOM]
    if len(refused):
        yield (
            f"out of memory: {counted(len(refused), 'allocation')} failed, the largest with "
            f"{format_bytes(int(refused.max()))}"
        )
    yield from lifetimes.notes


def unnamed_categories(lifetimes: Lifetimes) -> Codes:
    before, during = UNNAMED_CATEGORIES.index("before"), UNNAMED_CATEGORIES.index("during")
    return np.where(lifetimes.start == NONE, before, during).astype(np.int8)


def categories(lifetimes: Lifetimes, marks: Marks, positions: Positions, residents: Residents) -> Codes:
    """Index into MEASURED_CATEGORIES of each allocation; the first owner that the marks name for it decides."""
    codes: Codes = np.full(len(lifetimes), MEASURED_CATEGORIES.index("temporaries"), dtype=np.int8)
    always = (lifetimes.start == NONE) & (lifetimes.end == lifetimes.num_events)
    codes[always] = MEASURED_CATEGORIES.index("workspaces")
    ordinals = positions.ordinals(lifetimes.start)
    for stretch in _forward_stretches(marks):
        made = (ordinals >= stretch.start) & (ordinals < stretch.end)
        kept = lifetimes.end >= positions.last_moment(stretch.end)
        codes[made & kept & (lifetimes.end < lifetimes.num_events)] = MEASURED_CATEGORIES.index("activations")
    pieces = residents.find([owner.address for owner in marks.owned], [owner.position for owner in marks.owned])
    for piece, owner in reversed(list(zip(pieces.tolist(), marks.owned, strict=True))):
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
