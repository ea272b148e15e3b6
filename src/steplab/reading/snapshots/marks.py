"""Reads the marks next to a snapshot, from any writer; accepts only marks that a recorder can write."""

from pathlib import Path

import msgspec
import numpy as np

from steplab.errors import UserError
from steplab.reading.snapshots.history import ALLOC, FREE_COMPLETED, DeviceHistory, Events, Flags, History
from steplab.records.memory_marks import MARKS_SCHEMA, Marks, history_digest
from steplab.records.memory_profile import MEASURED_CATEGORIES
from steplab.unpacking import small_file


class _Head(msgspec.Struct):
    schema: str


def read_marks(path: Path) -> Marks:
    """The marks in a JSON file. Raises UserError, on one line, for an unreadable file or another content."""
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
    """Raise UserError for marks of another history, or without owners of memory.

    Marks name their history by its digest; old files are matched by all allocation sizes.
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
    if marks.history_sha256 not in (None, _digest(events, of_blocks)):
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


def _digest(events: Events, of_blocks: Flags) -> str:
    return history_digest(
        events.action[of_blocks].tobytes(),  # one byte each; ACTIONS begins with BLOCK_ACTIONS
        events.address[of_blocks].astype("<i8").tobytes(),
        events.size_bytes[of_blocks].astype("<i8").tobytes(),
    )
