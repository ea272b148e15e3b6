import gzip
import json
import lzma
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.allocator_model import MIB, CachingAllocator

from steplab.cli.app import main

LINE = {"filename": "/home/me/app/model.py", "line": 81, "name": "forward"}
PAGE_BYTES = 3_000_000


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPLAB_STORE", str(tmp_path / "store.db"))
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def recorded() -> CachingAllocator:
    allocator = CachingAllocator()
    kept = [allocator.malloc(3 * MIB + 5, frames=(LINE,)) for _ in range(40)]
    for block in kept[::2]:
        allocator.free(block)
    return allocator


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["list", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    return rows


@pytest.mark.parametrize(("pack", "ending"), [(gzip.compress, ".gz"), (lzma.compress, ".xz")])
def test_a_packed_snapshot_becomes_a_record_a_table_rows_and_a_page(
    pack: Callable[[bytes], bytes], ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allocator = recorded()
    packed = pack(pickle.dumps(allocator.snapshot()))
    file = tmp_path / f"mine.pickle{ending}"
    file.write_bytes(packed)
    peak_bytes = max(allocator.allocated_bytes)

    assert main(["import-snapshot", str(file)]) == 0
    shown = capsys.readouterr()
    assert "reading the snapshot" in shown.err
    assert f"put its marks at {tmp_path / 'mine.marks.json'}" in shown.err
    assert f"{peak_bytes:,} bytes" in shown.out
    assert file.name in shown.out

    assert main(["import-snapshot", str(file), "--name", "again", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sum(row["bytes"] for row in rows) == peak_bytes
    assert {row["category"] for row in rows} == {"during", "rounding"}

    again, first = listed(capsys)
    assert (again["name"], first["name"]) == ("again", "mine")

    page = tmp_path / "page.html"
    assert main(["report", first["id"], "--format", "html", "--output", str(page)]) == 0
    assert page.stat().st_size < PAGE_BYTES
    assert "mine.pickle" in page.read_text(encoding="utf-8")

    file.write_bytes(packed[: len(packed) // 2])
    assert main(["import-snapshot", str(file)]) == 2
    assert "stream ends early" in capsys.readouterr().err


class Hostile:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.sentinel}",)


def test_a_hostile_pickle_is_refused_in_one_line_and_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentinel, file = tmp_path / "executed", tmp_path / "hostile.pickle"
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Hostile(sentinel)]]}))
    assert main(["import-snapshot", str(file)]) == 2
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if not line.endswith("…")]
    assert line.startswith(f"steplab: {file}: the pickle wants to import posix.system")
    assert shown.out == ""
    assert not sentinel.exists()
    assert listed(capsys) == []
