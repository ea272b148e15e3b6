"""Reads the marks beside a snapshot, of any writer, and accepts only what a recorder can have written."""

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
    """The marks in a file of JSON. Raises UserError, in one line, if it cannot be read or contains none."""
    try:
        content = small_file(path)
        schema = msgspec.json.decode(content, type=_Head).schema
        if schema != MARKS_SCHEMA:
            raise UserError(f"{path}: it has format {schema!r}, and this version reads {MARKS_SCHEMA}")
        marks = msgspec.json.decode(content, type=Marks)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: it holds no marks of a memory snapshot: {error}") from error
    for owner in marks.owned:
        if owner.category not in MEASURED_CATEGORIES:
            raise UserError(f"{path}: it holds no marks of a memory snapshot: a category is {owner.category!r}")
    return marks


def check_same_history(marks: Marks, history: History, path: Path) -> None:
    """Raise UserError if the marks in `path` belong to another history, or lack the owners of memory.

    Marks name their history by its digest. Older files, without a digest, are recognised by the sizes of all
    allocations.
    """
    why = _why_not_of(marks, next((device for device in history.devices if device.index == marks.device_index), None))
    if why:
        raise UserError(f"{path}: {why}; remove it to read the snapshot alone")


def _why_not_of(marks: Marks, device: DeviceHistory | None) -> str | None:
    """Why the marks do not belong to that device's history; None if they do."""
    if device is None:
        return f"it belongs to another snapshot: the snapshot has no device {marks.device_index}"
    events, num_counted = device.events, len(marks.block_bytes)
    allocated = events.size_bytes[events.action == ALLOC]
    if num_counted and num_counted != len(allocated):
        return (
            f"it belongs to another snapshot: it counts {num_counted} allocations, and the snapshot has "
            f"{len(allocated)} on device {marks.device_index}"
        )
    if marks.history_sha256 is None and not num_counted:
        return "it does not name its snapshot"
    of_blocks = events.action <= FREE_COMPLETED
    if marks.history_sha256 not in (None, _digest(events, of_blocks)):
        return "it belongs to another snapshot: its digest is not that of the snapshot's history"
    if num_counted and bool((np.array(marks.block_bytes, dtype=np.int64) < allocated).any()):
        return "it belongs to another snapshot: a block in it is smaller than what the snapshot has there"
    known = np.concatenate((events.address[of_blocks], device.blocks.address))
    found = np.isin(np.array([owner.address for owner in marks.owned], dtype=np.int64), known)
    if 2 * found.sum() < len(found):
        return f"it belongs to another snapshot: the snapshot has {found.sum()} of the {len(found)} addresses in it"
    in_phases = any(phase.name == "forward" for phase in marks.phases)
    if in_phases and not any(owner.category == "parameters" for owner in marks.owned):
        return "it is damaged: it has the step's phases but none of the model's parameters"
    return None


def _digest(events: Events, of_blocks: Flags) -> str:
    return history_digest(
        events.action[of_blocks].tobytes(),  # one byte each: the places in ACTIONS begin with those in BLOCK_ACTIONS
        events.address[of_blocks].astype("<i8").tobytes(),
        events.size_bytes[of_blocks].astype("<i8").tobytes(),
    )
