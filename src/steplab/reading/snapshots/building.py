"""Convert the objects in a snapshot's pickle to columns; `torch.cuda.memory._snapshot` documents them. Unknown keys are
skipped. A known key of another type refuses the file.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct, convert

from steplab.reading.snapshots.history import (
    ACTIONS,
    ALLOCATED,
    AWAITING_FREE,
    INACTIVE,
    NONE,
    OTHER,
    AllocatorSettings,
    Blocks,
    DeviceHistory,
    Events,
    Frame,
    History,
    Integers,
    Numbers,
    Segments,
)
from steplab.records.memory_marks import Natural


class Refused(Exception):
    pass


def expect(condition: bool, why: str) -> None:
    if not condition:
        raise Refused(why)


_STATES = {
    "inactive": INACTIVE,
    "active_allocated": ALLOCATED,
    "active_pending_free": AWAITING_FREE,
    "active_awaiting_free": AWAITING_FREE,  # the name in torch's docstring
}
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_HIGHEST = 2**63 - 1
_NARROW = {"state": np.int8, "stack": np.int32, "is_expandable": np.bool_}

_Kind = TypeVar("_Kind", Segments, Blocks)
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=_HIGHEST)]
_Frames = Any
"""Cache of converted stacks; many events share one list object."""


class _Event(Struct, gc=False):
    action: str
    addr: _Number | None = None
    size: _Number | None = None
    stream: _Number | None = None
    time_us: _Number | None = None
    frames: _Frames = None


class _OldEvent(Struct, gc=False):
    real_size: Natural | None = None
    frames: _Frames = None


class _Block(Struct, gc=False):
    size: Natural
    state: str
    address: Natural | None = None
    requested_size: Natural | None = None
    frames: _Frames = None
    history: list[_OldEvent] = []
    """The block's history, as torch 1.12 to 2.0 wrote it."""


class _Segment(Struct, gc=False):
    address: Natural
    total_size: Natural
    device: Natural | None = None
    blocks: list[_Block] = []
    is_expandable: bool = False


class _Settings(Struct):
    max_split_size: _Number | None = None
    """-1: no limit; torch writes its largest unsigned number so."""
    expandable_segments: bool = False
    roundup_power2_divisions: dict[Any, _Number] = {}


class _Snapshot(Struct):
    segments: list[_Segment]
    device_traces: list[list[_Event]] = []
    allocator_settings: _Settings | None = None


class _Frame(Struct):
    filename: str
    line: int
    name: str


def build_history(snapshot: object) -> History:
    """Convert a snapshot to a History. Raises Refused if it is no memory snapshot."""
    if isinstance(snapshot, list):  # early torch.cuda.memory_snapshot(), without a history
        snapshot = {"segments": snapshot}
    stacks = _Stacks()
    try:
        found = convert(snapshot, _Snapshot)
        events = {index: _events(trace, stacks) for index, trace in enumerate(found.device_traces)}
        held = _held(found.segments, stacks)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Refused(f"it is a pickle without a memory snapshot: {error}") from error
    devices = sorted(held.keys() | {index for index, trace in events.items() if len(trace)})
    none = _events([], stacks)
    no_segments, no_blocks = _columns(Segments, []), _columns(Blocks, [])
    return History(
        devices=tuple(
            DeviceHistory(
                index=index,
                events=events.get(index, none),
                segments=held[index][0] if index in held else no_segments,
                blocks=held[index][1] if index in held else no_blocks,
            )
            for index in devices
        ),
        stacks=stacks.all(),
        settings=_settings(found.allocator_settings or _Settings()),
    )


class _Stacks:
    """Number stacks in order of first appearance. Object identity identifies them, since torch writes each frame once
    and the snapshot stays alive.
    """

    def __init__(self) -> None:
        self._of_list: dict[int, int] = {}
        self._of_identities: dict[tuple[int, ...], int] = {}
        self._numbers: dict[tuple[Frame, ...], int] = {}

    def of(self, frames: Sequence[object]) -> Numbers:
        identities, known = list(map(id, frames)), self._of_list
        for identity, each in dict(zip(identities, frames, strict=True)).items():
            if identity not in known:
                known[identity] = self._new(each) if isinstance(each, list) else NONE
        return np.fromiter(map(known.__getitem__, identities), np.int32, len(identities))

    def all(self) -> tuple[tuple[Frame, ...], ...]:
        return tuple(self._numbers)

    def _new(self, frames: Sequence[object]) -> int:
        identities = tuple(map(id, frames))
        number = self._of_identities.get(identities)
        if number is None:
            stack = tuple((_text(f.filename), f.line, _text(f.name)) for f in convert(frames, list[_Frame]))
            number = self._of_identities[identities] = self._numbers.setdefault(stack, len(self._numbers))
        return number


def _text(text: str) -> str:
    """Text without half surrogate pairs, which pickles may hold but JSON may not."""
    return text.encode("utf-8", "backslashreplace").decode()


def _events(trace: Sequence[_Event], stacks: _Stacks) -> Events:
    return Events(
        action=np.fromiter((_CODES.get(event.action, OTHER) for event in trace), np.int8, len(trace)),
        address=_integers([event.addr for event in trace], NONE),
        size_bytes=_integers([event.size for event in trace], NONE),
        stream=_integers([event.stream for event in trace], 0),
        time_us=_integers([event.time_us for event in trace], NONE),
        stack=stacks.of([event.frames for event in trace]),
    )


def _integers(values: list[int | None], absent: int) -> Integers:
    return np.array([absent if value is None else value for value in values], dtype=np.int64)


def _held(segments: Sequence[_Segment], stacks: _Stacks) -> dict[int, tuple[Segments, Blocks]]:
    of_device = defaultdict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]](lambda: ([], []))
    for segment in segments:
        segment_rows, block_rows = of_device[segment.device or 0]
        address = segment.address
        for block in segment.blocks:
            row = _block(block, address, stacks)
            block_rows.append(row)
            address = row[0] + row[1]  # older snapshots have no addresses of blocks
            expect(address <= _HIGHEST, "the end of a block is not a number of 64 bits")
        segment_rows.append((segment.address, segment.total_size, segment.is_expandable))
    return {
        index: (_columns(Segments, segment_rows), _columns(Blocks, block_rows))
        for index, (segment_rows, block_rows) in of_device.items()
    }


def _block(block: _Block, address: int, stacks: _Stacks) -> tuple[int, ...]:
    old = block.history[0] if block.history and block.requested_size is None else _OldEvent()
    requested = old.real_size if block.requested_size is None else block.requested_size
    return (
        address if block.address is None else block.address,
        block.size,
        block.size if requested is None else requested,
        _STATES.get(block.state, INACTIVE),
        int(stacks.of([old.frames if block.frames is None else block.frames])[0]),
    )


def _columns(kind: type[_Kind], rows: Sequence[tuple[int, ...]]) -> _Kind:
    names = [field.name for field in fields(kind)]
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(names)).T
    return kind(
        **{
            name: column.astype(_NARROW.get(name, np.int64), copy=False)
            for name, column in zip(names, columns, strict=True)
        }
    )


def _settings(settings: _Settings) -> AllocatorSettings:
    return AllocatorSettings(
        max_split_bytes=max(settings.max_split_size or 0, 0) or None,
        expandable_segments=settings.expandable_segments,
        roundup_divisions=tuple(settings.roundup_power2_divisions.values()),
    )
