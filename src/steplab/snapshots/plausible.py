"""Refuses numbers that no allocator writes, before a replay would compute with them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.snapshots.history import ACTIONS, NONE, OOM, SEGMENT_UNMAP, DeviceHistory, History, Integers
from steplab.snapshots.refusal import Refused, expect

_HIGHEST = 2**63 - 1


def refuse_impossible(history: History) -> None:
    """Raise Refused if a size or an address is missing or negative, or lies beyond 64 bits."""
    for device in history.devices:
        expect(device.index >= 0, f"the number of a device is negative: {device.index}")
        _check_events(device)
        _check_held("a segment", device.segments.address, device.segments.size_bytes)
        _check_held("a block", device.blocks.address, device.blocks.size_bytes)
        requested = device.blocks.requested_bytes
        _refuse(np.flatnonzero(requested < 0), "the requested size of a block", requested)
        _check_sum(device)


def _check_events(device: DeviceHistory) -> None:
    """Check the events that allocate, release or map memory, and the size of a failed allocation."""
    events = device.events
    placed = events.action <= SEGMENT_UNMAP
    sized = placed | (events.action == OOM)
    for of_which, column, what in ((sized, events.size_bytes, "size"), (placed, events.address, "address")):
        bad = np.flatnonzero(of_which & (column < 0))
        action = ACTIONS[events.action[bad[0]]] if len(bad) else ""
        _refuse(bad, f"the {what} of an event ({action})", column)
    _refuse_beyond("an event", events.address[placed], events.size_bytes[placed])


def _check_held(what: str, address: Integers, size_bytes: Integers) -> None:
    _refuse(np.flatnonzero(size_bytes < 0), f"the size of {what}", size_bytes)
    _refuse(np.flatnonzero(address < 0), f"the address of {what}", address)
    _refuse_beyond(what, address, size_bytes)


def _check_sum(device: DeviceHistory) -> None:
    """Check that the sum of all sizes fits into 64 bits, since live sizes are summed."""
    columns: Sequence[Integers] = (
        device.events.size_bytes[device.events.action <= OOM],
        device.blocks.size_bytes,
        device.blocks.requested_bytes,
        device.segments.size_bytes,
    )
    total = sum(float(column.sum(dtype=np.float64)) for column in columns)
    expect(total < _HIGHEST, "the sum of its sizes exceeds 64 bits")


def _refuse(bad: NDArray[np.intp], what: str, column: Integers) -> None:
    if len(bad):
        value = int(column[bad[0]])
        raise Refused(f"{what} is {'missing or negative' if value == NONE else f'negative: {value}'}")


def _refuse_beyond(what: str, address: Integers, size_bytes: Integers) -> None:
    expect(not (address > _HIGHEST - size_bytes).any(), f"the end of {what} is not a number of 64 bits")
