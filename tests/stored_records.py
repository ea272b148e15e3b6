"""The records that come with the repository, in tests/golden and benchmarks/results."""

import gzip
import lzma
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from steplab.records.codec import decode
from steplab.records.record import Record

ROOT = Path(__file__).parents[1]
Kind = TypeVar("Kind", bound=Record)


def stored(name: str, kind: type[Kind]) -> list[Kind]:
    return [record for record in _every(name) if isinstance(record, kind)]


@lru_cache(maxsize=2)
def _every(name: str) -> tuple[Record, ...]:
    folders = ROOT / "tests" / "golden", ROOT / "benchmarks" / "results"
    [path] = [path for folder in folders for path in folder.glob(f"{name}_2*.jsonl.*")]
    opener = gzip if path.suffix == ".gz" else lzma
    return tuple(map(decode, opener.decompress(path.read_bytes()).splitlines()))
