"""Makes columns from the objects of a snapshot's pickle.

`torch.cuda.memory._snapshot` documents what torch writes. Unknown keys are skipped; known ones must have the type that
torch gives them. A list that is read in full may occur only once: a reference to it takes two bytes of a pickle.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from steplab.snapshots.event_runs import StackRef
from steplab.snapshots.event_window import ABSENT
from steplab.snapshots.history import (
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
    History,
    Segments,
)
from steplab.snapshots.refusal import Refused, expect
from steplab.snapshots.stacks import Stacks

_STATES = {
    "inactive": INACTIVE,
    "active_allocated": ALLOCATED,
    "active_pending_free": AWAITING_FREE,
    "active_awaiting_free": AWAITING_FREE,  # the name in torch's docstring
}
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_DEEPEST = 24
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_NARROW = {"action": np.int8, "state": np.int8, "stack": np.int32, "is_expandable": np.bool_}
"""Types of the columns that do not have numbers of 64 bits."""

_Kind = TypeVar("_Kind", Events, Segments, Blocks)
_Dict = Mapping[Any, object]


def build_history(snapshot: object, stacks: Stacks) -> History:
    """The History in a pickle. Raises Refused if it is not a memory snapshot."""
    _check_nesting(snapshot)
    if isinstance(snapshot, list):  # the form of torch.cuda.memory_snapshot() before there was a history
        snapshot = {"segments": snapshot}
    expect(isinstance(snapshot, dict) and "segments" in snapshot, "it is a pickle, but holds no memory snapshot")
    assert isinstance(snapshot, dict)
    builder = _Builder(stacks)
    traces = _list(snapshot.get("device_traces", []), "device_traces")
    events = {index: builder.events(_list(trace, "a device's trace")) for index, trace in enumerate(traces)}
    held = builder.held(_list(snapshot["segments"], "segments"))
    devices = sorted(held.keys() | {index for index, trace in events.items() if len(trace)})
    none = builder.events([])
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


class _Builder:
    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._seen: dict[int, object] = {}
        self._stack_of_list: dict[int, int] = {}

    def events(self, trace: list[object]) -> Events:
        """One device's events; those that were read in bulk are columns already."""
        self._once(trace, "a device's trace")
        parts = list[Events]()
        rows = list[tuple[int, ...]]()
        for event in trace:
            if isinstance(event, Events):
                parts.append(_columns(Events, rows))
                parts.append(event)
                rows = []
            else:
                rows.append(self._event(_dict(event, "an event")))
        parts.append(_columns(Events, rows))
        return _joined(parts)

    def _event(self, event: _Dict) -> tuple[int, ...]:
        action = event.get("action")
        expect(isinstance(action, str), "an event of its history has no action")
        return (
            _CODES.get(str(action), OTHER),
            _int(event, "addr", ABSENT["address"]),
            _int(event, "size", ABSENT["size_bytes"]),
            _int(event, "stream", ABSENT["stream"]),
            _int(event, "time_us", ABSENT["time_us"]),
            self._stack(event),
        )

    def held(self, segments: list[object]) -> dict[int, tuple[Segments, Blocks]]:
        """The segments and blocks of each device that has any."""
        self._once(segments, "segments")
        of_device = defaultdict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]](lambda: ([], []))
        for each in segments:
            segment = _dict(each, "a segment")
            segment_rows, block_rows = of_device[_int(segment, "device", 0)]
            blocks = _list(segment.get("blocks", []), "a segment's blocks")
            self._once(blocks, "a segment's blocks")
            address = start = _int(segment, "address", NONE)
            size = _int(segment, "total_size", NONE)
            for block in blocks:
                row = self._block(_dict(block, "a block"), address)
                block_rows.append(row)
                address = row[0] + row[1]  # older snapshots have no addresses of blocks
                expect(address <= _HIGHEST, "the end of a block is not a number of 64 bits")
            segment_rows.append((start, size, bool(segment.get("is_expandable"))))
        return {
            index: (_columns(Segments, segment_rows), _columns(Blocks, block_rows))
            for index, (segment_rows, block_rows) in of_device.items()
        }

    def _block(self, block: _Dict, address: int) -> tuple[int, ...]:
        state = block.get("state")
        expect(isinstance(state, str), "a block of its segments has no state")
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
            self._stack(block),
        )

    def _stack(self, owner: _Dict) -> int:
        frames = owner.get("frames")
        if isinstance(frames, StackRef):
            return frames.stack
        if not isinstance(frames, list):
            return NONE
        known = self._stack_of_list.get(id(frames))
        if known is None:
            known = self._stacks.number_of(frames)
            expect(known is not None, "a frame of its stacks has no filename, line and name")
            assert known is not None
            self._stack_of_list[id(frames)] = known
        return known

    def _once(self, item: object, what: str) -> None:
        """Refuse a list that occurs twice and is read in full: a short pickle could name a long one any number of
        times."""
        expect(id(item) not in self._seen, f"{what} occurs twice in it: refused")
        self._seen[id(item)] = item


def _columns(kind: type[_Kind], rows: list[tuple[int, ...]]) -> _Kind:
    """Columns of rows that have their values in the order of the fields."""
    names = [field.name for field in fields(kind)]
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(names)).T
    return kind(
        **{
            name: column.astype(_NARROW.get(name, np.int64), copy=False)
            for name, column in zip(names, columns, strict=True)
        }
    )


def _joined(parts: list[Events]) -> Events:
    names = [field.name for field in fields(Events)]
    return Events(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _settings(settings: object) -> AllocatorSettings:
    if not isinstance(settings, dict):
        return AllocatorSettings()
    most = _int(settings, "max_split_size", NONE)
    divisions = settings.get("roundup_power2_divisions")
    steps = [_int(divisions, key, 0) for key in divisions] if isinstance(divisions, dict) else []
    return AllocatorSettings(
        # torch's "no limit" is the largest unsigned number, which it writes as -1
        max_split_bytes=most if most > 0 else None,
        expandable_segments=bool(settings.get("expandable_segments")),
        roundup_divisions=tuple(steps),
    )


def _check_nesting(root: object) -> None:
    """Raise Refused for objects nested without end, or nearly so."""
    level: list[object] = [root]
    for _ in range(_DEEPEST):
        inner: dict[int, object] = {}
        for item in level:
            children = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
            inner |= {id(child): child for child in children if isinstance(child, (dict, list, tuple))}
        if not inner:
            return
        level = list(inner.values())
    raise Refused(f"the pickle nests deeper than {_DEEPEST}, or holds itself, which no memory snapshot does: refused")


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise Refused(f"it is a pickle, but no memory snapshot: {what} is not a list")
    return value


def _dict(value: object, what: str) -> _Dict:
    if not isinstance(value, dict):
        raise Refused(f"it is a pickle, but no memory snapshot: {what} is not a dict")
    return value


def _int(owner: _Dict, key: Any, absent: int) -> int:
    value = owner.get(key)
    if value is None:
        return absent
    if not isinstance(value, int) or isinstance(value, bool) or not _LOWEST <= value <= _HIGHEST:
        raise Refused(f"it is a pickle, but no memory snapshot: {key} is not a number of 64 bits")
    return value
