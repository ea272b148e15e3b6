"""Convert the objects in a snapshot's pickle to columns; `torch.cuda.memory._snapshot` documents them. Unknown keys are
skipped. A file with a value of the wrong type under a known key is refused.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct, convert

from steplab.reading.snapshots import history
from steplab.reading.snapshots.history import NONE, Blocks, DeviceHistory, Events, Frame, History, Integers, Segments
from steplab.records.memory_marks import Natural


class Refused(Exception):
    pass


def expect(condition: bool, why: str) -> None:
    if not condition:
        raise Refused(why)


_STATES = {
    "inactive": history.INACTIVE,
    "active_allocated": history.ALLOCATED,
    "active_pending_free": history.AWAITING_FREE,
    "active_awaiting_free": history.AWAITING_FREE,  # the name in torch's docstring
}
_CODES = {name: code for code, name in enumerate(history.ACTIONS)}
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
        traces = {index: trace for index, trace in enumerate(found.device_traces) if trace}
        segments = defaultdict[int, list[_Segment]](list)
        for segment in found.segments:
            segments[segment.device or 0].append(segment)
        devices = [
            _device(index, traces.get(index, ()), segments[index], stacks)
            for index in sorted(traces.keys() | segments.keys())
        ]
    except (msgspec.ValidationError, RecursionError) as error:
        raise Refused(f"it is a pickle without a memory snapshot: {error}") from error
    settings = _settings(found.allocator_settings or _Settings())
    return History(devices=tuple(devices), stacks=stacks.all(), settings=settings)


class _Stacks:
    """Number stacks in order of first appearance. Object identity identifies them, since torch writes each frame once
    and the snapshot stays alive.
    """

    def __init__(self) -> None:
        self._of_list: dict[int, int] = {}
        self._of_identities: dict[tuple[int, ...], int] = {}
        self._numbers: dict[tuple[Frame, ...], int] = {}

    def of(self, frames: Sequence[object]) -> history.Numbers:
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
        action=np.fromiter((_CODES.get(event.action, history.OTHER) for event in trace), np.int8, len(trace)),
        address=_integers([event.addr for event in trace], NONE),
        size_bytes=_integers([event.size for event in trace], NONE),
        stream=_integers([event.stream for event in trace], 0),
        time_us=_integers([event.time_us for event in trace], NONE),
        stack=stacks.of([event.frames for event in trace]),
    )


def _integers(values: list[int | None], absent: int) -> Integers:
    return np.array([absent if value is None else value for value in values], dtype=np.int64)


def _device(index: int, trace: Sequence[_Event], segments: Sequence[_Segment], stacks: _Stacks) -> DeviceHistory:
    events = _events(trace, stacks)
    blocks = list[tuple[int, ...]]()
    for segment in segments:
        address = segment.address
        for block in segment.blocks:
            blocks.append(_block(block, address, stacks))
            address = sum(blocks[-1][:2])  # older snapshots have no addresses of blocks
            expect(address <= _HIGHEST, "the end of a block is not a number of 64 bits")
    rows = [(segment.address, segment.total_size, segment.is_expandable) for segment in segments]
    return DeviceHistory(index=index, events=events, segments=_columns(Segments, rows), blocks=_columns(Blocks, blocks))


def _block(block: _Block, address: int, stacks: _Stacks) -> tuple[int, ...]:
    old = block.history[0] if block.history and block.requested_size is None else _OldEvent()
    requested = old.real_size if block.requested_size is None else block.requested_size
    return (
        address if block.address is None else block.address,
        block.size,
        block.size if requested is None else requested,
        _STATES.get(block.state, history.INACTIVE),
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


def _settings(settings: _Settings) -> history.AllocatorSettings:
    return history.AllocatorSettings(
        max_split_bytes=max(settings.max_split_size or 0, 0) or None,
        expandable_segments=settings.expandable_segments,
        roundup_divisions=tuple(settings.roundup_power2_divisions.values()),
    )
