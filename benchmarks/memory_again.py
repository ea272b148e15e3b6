"""Digest again what memory_study.py kept, with the code as it is now: the same measurements, without a GPU.

python -m benchmarks.memory_again RECORDS.jsonl.xz PART.tar ...     (from the root of the checkout)

Writes a record a cell; one whose snapshot was left out stays as it was measured.
"""

import dataclasses
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.memory_cells import records

from steplab.lab.memory import read_memory
from steplab.records.codec import encode
from steplab.records.run import Run


def digested_again(run: Run, folder: Path) -> Run:
    """The record with the profile that its snapshot and marks in the folder give."""
    compressed = folder / f"{run.name}.pickle.xz"
    if not compressed.exists():
        print(f"{run.name}: no snapshot", file=sys.stderr)
        return run
    for file in (compressed, folder / f"{run.name}.marks.json.xz"):
        file.with_suffix("").write_bytes(lzma.decompress(file.read_bytes()))
    unwatched = run.memory.peak("step") if run.memory else None
    peak_bytes = unwatched.peak_allocated_bytes if unwatched else None
    profile = read_memory(compressed.with_suffix(""), lambda progress: None, unwatched_peak_bytes=peak_bytes)
    if profile != run.memory_profile:
        print(f"{run.name}: digested otherwise than when it was measured", file=sys.stderr)
    return dataclasses.replace(run, memory_profile=profile)


def main(target: str, *parts: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            with tarfile.open(part) as packed:
                packed.extractall(folder, filter="data")
        again = [digested_again(run, Path(folder)) for run in records(Path(folder))]
    Path(target).write_bytes(lzma.compress(b"".join(encode(run) + b"\n" for run in again)))
    print(f"{len(again)} records", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
