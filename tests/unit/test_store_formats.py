"""A store that an earlier version wrote: its study of five cells is continued (two ok, one out of memory, one crashed,
one missing)."""

import dataclasses
import lzma
from pathlib import Path

import pytest
from tests.sure import sure

from steplab.errors import SteplabError
from steplab.lab.keeping import import_files
from steplab.records.codec import encode
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step
from steplab.specs.study import StudySpec
from steplab.store.database import Store
from steplab.store.selection import cell_key

GOLDEN = Path(__file__).parents[1] / "golden"
FIELDS: tuple[dict[str, object], ...] = (
    {},
    {"pass": "forward", "precision": "bf16"},
    {"layout": "dp=2", "data_parallel": "flat"},
    {"layout": "pp=2", "microbatches": 2, "pipeline_schedule": "gpipe"},
    {"seed": 3},
)
STUDY = StudySpec(name="resumed", description="", cells=tuple(resolve_step(fields) for fields in FIELDS))


def unpacked(folder: Path, number: int) -> Path:
    path = folder / "store.db"
    path.write_bytes(lzma.decompress((GOLDEN / f"store_format_{number}.db.xz").read_bytes()))
    return path


def test_a_sweep_begun_before_goes_on(tmp_path: Path) -> None:
    path = unpacked(tmp_path, 3)
    before = path.read_bytes()
    with Store.open(path, write=False) as store:
        records = [record for record in store.iterate() if isinstance(record, Run)]
        (study,) = store.studies()
    assert path.read_bytes() == before, "a reader changes nothing"
    with Store.open(path, write=True) as store:
        assert store.find_study(STUDY) == study["id"]
        crashed, not_measured = STUDY.cells[3:]
        assert store.finished_cells(str(study["id"])) == {cell_key(cell) for cell in STUDY.cells[:3]}
        assert list(store.iterate()) == records
        for row, record in zip(store.rows(), reversed(records), strict=True):
            as_requested = run_row(record) | {"steps": sure(record.spec).steps}
            assert as_requested | row == as_requested, "rows may lack columns, and had the requested steps"
        again = dataclasses.replace(records[3], id="ffff", created_utc="2026-11-22T00:00:00Z", failure=None)
        store.add(again)
        shown = [row["id"] for row in store.rows(study=str(study["id"]))]
        assert "ffff" in shown
        assert len(shown) == 4, "the new attempt stands for the crashed one"
        assert {crashed, not_measured}.isdisjoint(STUDY.cells[:3])
        newer = store.begin_study(STUDY)
        assert store.find_study(STUDY) == newer


def test_a_store_of_a_development_version_is_read_and_not_written(tmp_path: Path) -> None:
    path = unpacked(tmp_path, 1)
    before = path.read_bytes()
    with pytest.raises(SteplabError, match="format 1, which only development versions wrote; `steplab export"):
        Store.open(path, write=True)
    with Store.open(path, write=False) as store:
        lines = b"".join(encode(record) + b"\n" for record in store.iterate(all_attempts=True))
    assert path.read_bytes() == before
    (tmp_path / "records.jsonl").write_bytes(lines)
    assert import_files(tmp_path / "records.jsonl", tmp_path / "new.db")[0] == 4
