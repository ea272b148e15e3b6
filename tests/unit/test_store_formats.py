"""Stores of earlier formats: readable, and sweeps resume after the upgrade.

The last version of format N wrote tests/golden/store_format_N.db.xz: a study of five cells, two ok, one out of memory,
one crashed, one missing. A new format needs such a file.
"""

import dataclasses
import lzma
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from steplab.errors import Remark, SteplabError
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.specs.study import StudySpec
from steplab.store import connection, schema
from steplab.store.cells import cell_key, fingerprint_of_format_1
from steplab.store.database import Store

GOLDEN = Path(__file__).parents[1] / "golden"
FIELDS: tuple[dict[str, object], ...] = (
    {},
    {"pass": "forward", "precision": "bf16"},
    {"layout": "dp=2", "data_parallel": "flat"},
    {"layout": "pp=2", "microbatches": 2, "pipeline_schedule": "gpipe"},
    {"seed": 3},
)
STUDY = StudySpec(name="resumed", description="", cells=tuple(resolve_step(fields) for fields in FIELDS))


def test_a_study_of_models_with_newer_parts_has_no_fingerprint_of_format_1() -> None:
    cells = tuple(resolve_step({"model.norm": norm}) for norm in ("rmsnorm", "layernorm"))
    assert fingerprint_of_format_1(dataclasses.replace(STUDY, cells=cells[:1])) is not None
    assert fingerprint_of_format_1(dataclasses.replace(STUDY, cells=cells)) is None


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    made = tmp_path / "store.db"
    golden = GOLDEN / f"store_format_{getattr(request, 'param', 1)}.db.xz"
    made.write_bytes(lzma.decompress(golden.read_bytes()))
    return made


def version(path: Path) -> int:
    raw = sqlite3.connect(path)
    try:
        return schema.version(raw)
    finally:
        raw.close()


@pytest.mark.filterwarnings("ignore:the store:steplab.errors.Remark")
@pytest.mark.parametrize("path", range(1, schema.CURRENT_VERSION + 1), indirect=True)
def test_a_sweep_begun_before_goes_on(path: Path) -> None:
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
            assert run_row(record) | row == run_row(record), "rows of the present format may lack columns"
        again = dataclasses.replace(records[3], id="ffff", created_utc="2026-11-22T00:00:00Z", failure=None)
        store.add(again)
        shown = [row["id"] for row in store.rows(study=str(study["id"]))]
        assert "ffff" in shown
        assert len(shown) == 4, "the new attempt stands for the crashed one"
        assert {crashed, not_measured}.isdisjoint(STUDY.cells[:3])
    assert version(path) == schema.CURRENT_VERSION == 3


def test_an_upgrade_keeps_a_copy_in_the_earlier_format_and_says_so(path: Path) -> None:
    before = sqlite3.connect(path)
    content = list(before.iterdump())
    before.close()
    with pytest.warns(Remark, match=r"upgraded from format 1 to 3; .* store\.db\.format-1-"):
        Store.open(path, write=True).close()
    (kept,) = path.parent.glob("store.db.format-1-*")
    assert version(kept) == 1
    copy = sqlite3.connect(kept)
    assert list(copy.iterdump()) == content
    copy.close()
    Store.open(path, write=True).close()
    assert len(list(path.parent.iterdir())) == 2, "what is up to date is not copied"


def test_an_upgrade_that_cannot_be_copied_first_is_not_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "aside", lambda store, what: path.parent / "no folder" / what)
    with pytest.raises(SteplabError, match=r"cannot open the store .*no folder"):
        Store.open(path, write=True)
    assert version(path) == 1


@pytest.mark.filterwarnings("ignore:the store:steplab.errors.Remark")
def test_a_study_that_is_begun_anew_is_the_one_to_go_on(path: Path) -> None:
    with Store.open(path, write=True) as store:
        newer = store.begin_study(STUDY)
        assert store.find_study(STUDY) == newer


@pytest.mark.filterwarnings("ignore:the store:steplab.errors.Remark")
def test_a_record_that_cannot_be_read_is_kept_and_the_rest_upgraded(path: Path) -> None:
    raw = sqlite3.connect(path)
    raw.execute("UPDATE record SET body = x'00' WHERE seq = 1")
    before = raw.execute("SELECT seq, cell FROM record ORDER BY seq").fetchall()
    raw.commit()
    raw.close()
    Store.open(path, write=True).close()
    raw = sqlite3.connect(path)
    after = raw.execute("SELECT seq, cell FROM record ORDER BY seq").fetchall()
    assert raw.execute("SELECT body FROM record WHERE seq = 1").fetchone() == (b"\x00",)
    raw.close()
    assert after[0] == before[0]
    assert [key for _, key in after[1:]] == [cell_key(cell) for cell in STUDY.cells[1:4]]


@pytest.mark.filterwarnings("ignore:the store:steplab.errors.Remark")
def test_an_upgrade_that_fails_leaves_the_store_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sqlite: sqlite3.Connection) -> None:
        sqlite.execute("UPDATE record SET cell = 'half done'")
        raise KeyboardInterrupt

    monkeypatch.setattr(schema, "MIGRATIONS", (schema.MIGRATIONS[0], (fail,)))
    with pytest.raises(KeyboardInterrupt):
        Store.open(path, write=True)
    assert version(path) == 1
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT COUNT(*) FROM record WHERE cell = 'half done'").fetchone() == (0,)
    raw.close()


def test_a_study_that_uses_a_newer_field_was_in_no_earlier_store() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Longer(StepSpec):
        invented: float = 0.0

    def study(**more: Any) -> StudySpec:
        values = {field.name: getattr(STUDY.cells[0], field.name) for field in dataclasses.fields(StepSpec)} | more
        return dataclasses.replace(STUDY, cells=(Longer(**values),))

    assert fingerprint_of_format_1(study()) == fingerprint_of_format_1(
        dataclasses.replace(STUDY, cells=STUDY.cells[:1])
    )
    assert fingerprint_of_format_1(study(invented=1.0)) is None
