"""The raw files of measured cells, NAME.pickle, NAME.marks.json and NAME.run.json: compressed, packed, and back."""

import lzma
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from steplab.records.codec import decode
from steplab.records.run import Run

PART_BYTES = 15_000_000
_ROOM_BYTES = 20_480
"""What a tar file is rounded up to and ends with, twice over."""


def compress(file: Path) -> None:
    """Replace a file by FILE.xz."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_bytes(lzma.compress(file.read_bytes(), preset=1))
    unfinished.rename(file.with_name(f"{file.name}.xz"))
    file.unlink()


def records(folder: Path) -> Iterator[Run]:
    """The records of a folder's cells."""
    for file in sorted(folder.glob("*.run.json.xz")):
        record = decode(lzma.decompress(file.read_bytes()))
        assert isinstance(record, Run)
        yield record


def pack(folder: Path, others: Sequence[Path], target: Path, most_bytes: int) -> Iterator[str]:
    """Pack the cells, and other files, into target/cells-N.tar of less than PART_BYTES each, and tell of it.

    Every record is packed. If all the rest is more than `most_bytes` together, the snapshots of the largest cells, with
    their marks, are left out, and so are those that no part holds.
    """
    target.mkdir(parents=True, exist_ok=True)
    always = [*sorted(folder.glob("*.run.json.xz")), *others]
    raw = [
        [file, file.with_name(file.name.replace(".pickle.xz", ".marks.json.xz"))] for file in folder.glob("*.pickle.xz")
    ]
    groups = sorted(([file for file in group if file.exists()] for group in raw), key=_packed_bytes)
    left_bytes = most_bytes - _packed_bytes(always) - _ROOM_BYTES
    parts = [(always, PART_BYTES - _packed_bytes(always) - _ROOM_BYTES)]
    for group in groups:
        size_bytes = _packed_bytes(group)
        if size_bytes > min(left_bytes, PART_BYTES - _ROOM_BYTES):
            yield f"left out: {group[0].name}, {size_bytes / 1e6:.1f} MB"
            continue
        if size_bytes > parts[-1][1]:
            parts.append(([], PART_BYTES - _ROOM_BYTES))
            left_bytes -= _ROOM_BYTES
        files, room_bytes = parts[-1]
        parts[-1] = ([*files, *group], room_bytes - size_bytes)
        left_bytes -= size_bytes
    for number, (files, _) in enumerate(parts):
        part = target / f"cells-{number}.tar"
        with tarfile.open(part, "w") as packed:
            for file in files:
                packed.add(file, arcname=file.name)
        yield f"{part}: {len(files)} files, {part.stat().st_size / 1e6:.1f} MB"


def _packed_bytes(files: Sequence[Path]) -> int:
    """With a header each, in blocks of 512."""
    return sum(1536 + file.stat().st_size for file in files)
