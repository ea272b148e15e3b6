"""Reads a file with a memory snapshot, as written by torch.cuda.memory._dump_snapshot, into a History.

Reading executes nothing in the file, whoever made it (see machine).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steplab.errors import UserError
from steplab.limits import LimitReached, Limits
from steplab.snapshots.building import build_history
from steplab.snapshots.event_runs import EventRuns
from steplab.snapshots.history import ACTIONS, NONE, OOM, SEGMENT_UNMAP, DeviceHistory, History, Integers
from steplab.snapshots.machine import PickleMachine
from steplab.snapshots.refusal import Refused, expect
from steplab.snapshots.stacks import Stacks
from steplab.snapshots.window import WINDOW_BYTES, Window
from steplab.unpacking import OnProgress, Unpacked, unwatched

_WHAT_IS_READ = "steplab reads what torch.cuda.memory._dump_snapshot writes, plain or compressed by gzip or xz"
_PROTO = b"\x80"
_ZIP = b"PK\x03\x04"


def read_snapshot(
    path: Path,
    on_progress: OnProgress = unwatched,
    *,
    limits: Limits | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> History:
    """The memory snapshot in a file.

    `on_progress` is called with the bytes read of the file, and its size. `limits` None are the usual ones.
    `window_bytes` of the pickle, at least 4 MiB, are in memory at a time. Raises UserError, in one line, if the file
    cannot be read, is not a snapshot, asks for anything to be executed, or has more than the limits allow.
    """
    limits = limits or Limits()
    try:
        size_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            window = Window(
                Unpacked(file, limits, on_progress, size_bytes=size_bytes),
                window_bytes=window_bytes,
            )
            window.move(0)
            _check_head(window.bytes)
            stacks = Stacks(limits)
            history = build_history(PickleMachine(window, EventRuns(stacks, limits), limits).run(), stacks)
            refuse_impossible(history)
            return history
    except LimitReached as error:
        raise UserError(f"{path}: {error}") from error
    except Refused as error:
        raise UserError(f"{path}: {error}; {_WHAT_IS_READ}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _check_head(head: bytes) -> None:
    if not head:
        raise Refused("it is empty")
    if head.startswith(_ZIP):
        raise Refused("it is a zip archive, such as torch.save writes, and no memory snapshot")
    if not head.startswith(_PROTO):
        raise Refused("it is no pickle of protocol 2 or later")


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
