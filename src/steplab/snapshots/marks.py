"""The marks beside a snapshot: whoever wrote them, what is taken is what a recorder can have written."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from steplab.errors import UserError
from steplab.records.memory_marks import MARKS_SCHEMA, Made, Marks, Owned, Saved
from steplab.records.memory_profile import MEMORY_CATEGORIES
from steplab.snapshots.history import ALLOC, History

_BELOW = 2**63


def read_marks(path: Path) -> Marks:
    """The marks in a file of JSON. Raises UserError, with one line of why, if it cannot be read or holds none."""
    try:
        marks = msgspec.json.decode(path.read_bytes(), type=Marks)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: it holds no marks of a memory snapshot: {error}") from error
    if marks.schema != MARKS_SCHEMA:
        raise UserError(f"{path}: it has format {marks.schema!r}, and this version reads {MARKS_SCHEMA}")
    for what, number in _numbers(marks):
        if not 0 <= number < _BELOW:
            raise UserError(f"{path}: it holds no marks of a memory snapshot: {what} is {number}")
    for owner in marks.owned:
        if owner.category not in MEMORY_CATEGORIES:
            raise UserError(f"{path}: it holds no marks of a memory snapshot: a category is {owner.category!r}")
    return marks


def check_same_history(marks: Marks, history: History, path: Path) -> None:
    """Raises UserError if the marks in `path` count other allocations than the history has."""
    found = [int((d.events.action == ALLOC).sum()) for d in history.devices if d.index == marks.device_index]
    num_allocations = found[0] if found else 0
    if marks.block_bytes and len(marks.block_bytes) != num_allocations:
        raise UserError(
            f"{path}: it is of another snapshot: it counts {len(marks.block_bytes)} allocations, and the snapshot has "
            f"{num_allocations} on device {marks.device_index}; remove it to read the snapshot alone"
        )


def _numbers(marks: Marks) -> Iterator[tuple[str, int]]:
    yield "device_index", marks.device_index
    for name in ("counted_peak_bytes", "reserved_bytes"):
        value = getattr(marks, name)
        if value is not None:
            yield name, value
    for stretch in (*marks.phases, *marks.modules, *marks.operators):
        yield "a start", stretch.start
        yield "an end", stretch.end
    pieces: tuple[Owned | Made | Saved, ...] = (*marks.owned, *marks.made, *marks.saved)
    for piece in pieces:
        yield "an address", piece.address
        yield "a position", piece.position
    for saved in marks.saved:
        yield "storage_bytes", saved.storage_bytes
    shapes = [*(made.shape for made in marks.made), *(saved.shape for saved in marks.saved)]
    for shape in (*shapes, *(shape for shape, _ in marks.block_inputs.values())):
        yield from (("a length of a shape", length) for length in shape)
    yield from (("a block's size", size) for size in marks.block_bytes)
