"""Read a snapshot of torch.cuda.memory._dump_snapshot into a History.

A pickle is a program that may import and call anything. This unpickler refuses every import, so it builds only
containers, text and numbers. The process bounds memory and time (reading.bounded).
"""

import io
import pickle
from pathlib import Path
from typing import NoReturn

import numpy as np

from steplab.errors import UserError
from steplab.reading.snapshots.building import Refused, build_history, expect
from steplab.reading.snapshots.history import OOM, SEGMENT_UNMAP, History
from steplab.units import MIB
from steplab.unpacking import OnProgress, Unpacked, unwatched

_WHAT_IS_READ = "steplab reads torch.cuda.memory._dump_snapshot's files, plain, .gz or .xz"
_NO_SNAPSHOT = "which no memory snapshot does: refused"
_PROTO = b"\x80"
_ZIP = b"PK\x03\x04"
_BUFFER_BYTES = MIB


def read_snapshot(path: Path, on_progress: OnProgress = unwatched) -> History:
    """Read a snapshot. `on_progress` gets bytes read and the file's size. Raises UserError if the file is unreadable,
    no memory snapshot, or its pickle imports anything.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            history = build_history(_unpickled(Unpacked(file, on_progress, size_bytes=size_bytes)))
            refuse_impossible(history)
            return history
    except Refused as error:
        raise UserError(f"{path}: {error}; {_WHAT_IS_READ}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


class _Unpickler(pickle.Unpickler):
    """Unpickler that refuses every class and function, without which a pickle can call nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        wanted = ".".join(part[:100] if part.isprintable() else ascii(part[:100]) for part in (module, name))
        raise Refused(f"the pickle wants to import {wanted}, {_NO_SNAPSHOT}")

    def persistent_load(self, identifier: object) -> NoReturn:
        raise Refused(f"the pickle wants to load an object from elsewhere (a persistent id), {_NO_SNAPSHOT}")


class _Buffered(io.BufferedReader):
    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not size > _BUFFER_BYTES:
            return super().read(size)
        parts = list[bytes]()
        while size > 0 and (part := super().read(min(size, _BUFFER_BYTES))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _unpickled(source: Unpacked) -> object:
    file = _Buffered(source, _BUFFER_BYTES)
    _check_head(file.peek(len(_ZIP)), source)
    try:
        return _Unpickler(file).load()
    except (Refused, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        damage = f"its {source.damage.removeprefix('the ')}" if source.damage else ""
        raise Refused(damage or f"the pickle is damaged, or ends early ({error})") from error


def _check_head(head: bytes, source: Unpacked) -> None:
    if source.damage and not head:
        raise Refused(f"its {source.damage.removeprefix('the ')}")
    if not head:
        raise Refused("it is empty")
    if head.startswith(_ZIP):
        raise Refused("it is a zip archive, such as torch.save's, not a memory snapshot")
    if not head.startswith(_PROTO):
        raise Refused("it is not a pickle of protocol 2 or later")


_HIGHEST = 2**63 - 1


def refuse_impossible(history: History) -> None:
    for device in history.devices:
        events, segments, blocks = device.events, device.segments, device.blocks
        placed = events.action <= SEGMENT_UNMAP
        expect(not (placed & (events.address < 0)).any(), "an event's address is missing or negative")
        expect(
            not ((placed | (events.action == OOM)) & (events.size_bytes < 0)).any(),
            "an event's size is missing or negative",
        )
        for what, address, size_bytes in (
            ("an event", events.address[placed], events.size_bytes[placed]),
            ("a segment", segments.address, segments.size_bytes),
            ("a block", blocks.address, blocks.size_bytes),
        ):
            expect(not (address > _HIGHEST - size_bytes).any(), f"the end of {what} is not a number of 64 bits")
        sizes = (
            events.size_bytes[events.action <= OOM],
            blocks.size_bytes,
            blocks.requested_bytes,
            segments.size_bytes,
        )
        total = sum(float(column.sum(dtype=np.float64)) for column in sizes)
        expect(total < _HIGHEST, "the sum of its sizes exceeds 64 bits")
