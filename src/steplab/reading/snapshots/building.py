"""Builds columns from the objects of a snapshot's pickle.

`torch.cuda.memory._snapshot` documents the format. Unknown keys are skipped; a known key of another type refuses the
file. 1 GB holds millions of events as dicts, so each column is built at once.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar

import numpy as np

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
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_NARROW = {"state": np.int8, "stack": np.int32, "is_expandable": np.bool_}

_Kind = TypeVar("_Kind", Segments, Blocks)
_Dict = Mapping[Any, Any]


def build_history(snapshot: object) -> History:
    """Raises Refused if it is not a memory snapshot."""
    if isinstance(snapshot, list):  # early torch.cuda.memory_snapshot(), without a history
        snapshot = {"segments": snapshot}
    expect(isinstance(snapshot, dict) and "segments" in snapshot, "it is a pickle without a memory snapshot")
    assert isinstance(snapshot, dict)
    stacks = _Stacks()
    traces = _list(snapshot.get("device_traces", []), "device_traces")
    events = {index: _events(_list(trace, "a device's trace"), stacks) for index, trace in enumerate(traces)}
    held = _held(_list(snapshot["segments"], "segments"), stacks)
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
        settings=_settings(snapshot.get("allocator_settings")),
    )


class _Stacks:
    """Numbers stacks in order of first appearance.

    Identity identifies lists and frames while the snapshot is kept: torch has each frame once.
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
            stack = tuple(map(_frame, frames))
            number = self._of_identities[identities] = self._numbers.setdefault(stack, len(self._numbers))
        return number


def _frame(frame: object) -> Frame:
    if isinstance(frame, dict):
        file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
        if isinstance(file, str) and isinstance(line, int) and isinstance(name, str):
            return _text(file), line, _text(name)
    raise Refused("a stack frame lacks filename, line or name")


def _text(text: str) -> str:
    """Pickles may hold half surrogate pairs, JSON may not."""
    return text.encode("utf-8", "backslashreplace").decode()


def _events(trace: Sequence[Any], stacks: _Stacks) -> Events:
    expect(set(map(type, trace)) <= {dict}, "it is a pickle without a memory snapshot: an event is not a dict")
    actions = [event.get("action") for event in trace]
    expect(set(map(type, actions)) <= {str}, "an event of its history has no action")
    return Events(
        action=np.fromiter((_CODES.get(action, OTHER) for action in actions), np.int8, len(actions)),
        address=_integers(trace, "addr", NONE),
        size_bytes=_integers(trace, "size", NONE),
        stream=_integers(trace, "stream", 0),
        time_us=_integers(trace, "time_us", NONE),
        stack=stacks.of([event.get("frames") for event in trace]),
    )


def _integers(rows: Sequence[_Dict], key: str, absent: int) -> Integers:
    values = [row.get(key) for row in rows]
    kinds = set(map(type, values))
    if NoneType in kinds:
        values = [absent if value is None else value for value in values]
    try:
        expect(kinds <= {int, NoneType}, _not_a_number(key))
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise Refused(_not_a_number(key)) from error


def _not_a_number(key: object) -> str:
    return f"it is a pickle without a memory snapshot: {key} is not a number of 64 bits"


def _held(segments: Sequence[object], stacks: _Stacks) -> dict[int, tuple[Segments, Blocks]]:
    of_device = defaultdict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]](lambda: ([], []))
    for each in segments:
        segment = _dict(each, "a segment")
        segment_rows, block_rows = of_device[_int(segment, "device", 0)]
        address = start = _int(segment, "address", NONE)
        size = _int(segment, "total_size", NONE)
        for block in _list(segment.get("blocks", []), "a segment's blocks"):
            row = _block(_dict(block, "a block"), address, stacks)
            block_rows.append(row)
            address = row[0] + row[1]  # older snapshots have no addresses of blocks
            expect(address <= _HIGHEST, "the end of a block is not a number of 64 bits")
        segment_rows.append((start, size, bool(segment.get("is_expandable"))))
    return {
        index: (_columns(Segments, segment_rows), _columns(Blocks, block_rows))
        for index, (segment_rows, block_rows) in of_device.items()
    }


def _block(block: _Dict, address: int, stacks: _Stacks) -> tuple[int, ...]:
    state = block.get("state")
    expect(isinstance(state, str), "a block has no state")
    size = _int(block, "size", NONE)
    requested = _int(block, "requested_size", NONE)
    history = block.get("history")
    if requested == NONE and isinstance(history, list) and history and isinstance(history[0], dict):
        requested = _int(history[0], "real_size", size)  # the form of torch 1.12 to 2.0
        block = {**history[0], **block}
    return (
        _int(block, "address", address),
        size,
        size if requested == NONE else requested,
        _STATES.get(str(state), INACTIVE),
        int(stacks.of([block.get("frames")])[0]),
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


def _settings(settings: object) -> AllocatorSettings:
    if not isinstance(settings, dict):
        return AllocatorSettings()
    most = _int(settings, "max_split_size", NONE)
    divisions = settings.get("roundup_power2_divisions")
    steps = [_int(divisions, key, 0) for key in divisions] if isinstance(divisions, dict) else []
    return AllocatorSettings(
        # torch writes its largest unsigned number, "no limit", as -1
        max_split_bytes=most if most > 0 else None,
        expandable_segments=bool(settings.get("expandable_segments")),
        roundup_divisions=tuple(steps),
    )


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise Refused(f"it is a pickle without a memory snapshot: {what} is not a list")
    return value


def _dict(value: object, what: str) -> _Dict:
    if not isinstance(value, dict):
        raise Refused(f"it is a pickle without a memory snapshot: {what} is not a dict")
    return value


def _int(owner: _Dict, key: Any, absent: int) -> int:
    value = owner.get(key)
    if value is None:
        return absent
    if not isinstance(value, int) or isinstance(value, bool) or not _LOWEST <= value <= _HIGHEST:
        raise Refused(_not_a_number(key))
    return value
