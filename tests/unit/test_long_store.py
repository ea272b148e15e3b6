import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs import make_run

from steplab.cli.app import main
from steplab.cli.options import FileOptions
from steplab.cli.output import emit
from steplab.lab.choosing import records_to_report
from steplab.lab.listing import list_records
from steplab.records.codec import decode
from steplab.store.database import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "store.db"
    run = make_run()
    with Store.open(made, write=True) as store:
        for number in range(200):
            of = f"{number:012x}"
            time = f"2026-11-21T07:{number // 60:02}:{number % 60:02}Z"
            store.add(replace(run, id=of, created_utc=time, study=None if number % 2 else of))
    return made


def test_a_report_of_what_was_measured_last_reads_no_more_than_it_shows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[bytes]()

    def counting(body: bytes) -> object:
        read.append(body)
        return decode(body)

    monkeypatch.setattr("steplab.store.record_table.decode", counting)
    found = records_to_report(store=path).records
    assert [record.id for record in found] == [f"{number:012x}" for number in range(81, 200, 2)]
    assert len(read) == 61


def test_a_list_by_a_condition_counts_what_it_leaves_out(path: Path) -> None:
    with Store.open(path, write=True) as store:
        store._connection.query("UPDATE record SET summary = x'00' WHERE id = ?", f"{7:012x}")
    with pytest.warns(UserWarning, match="the summary of record 000000000007 is damaged"):
        listing = list_records(store=path, where="context=128 and precision=fp32", sort="id:desc", limit=3)
    assert [row["id"] for row in listing.rows] == [f"{number:012x}" for number in (199, 198, 197)]
    assert (listing.num_left_out, listing.rows[0]["model"]) == (196, "small")


def test_the_newest_that_can_be_read_is_found_behind_many_that_cannot(path: Path) -> None:
    with Store.open(path, write=True) as store:
        for number in range(150, 200):
            store._connection.query("UPDATE record SET body = x'00' WHERE id = ?", f"{number:012x}")
    with pytest.warns(UserWarning, match="is unreadable"):
        found = records_to_report(store=path).records
    assert [record.id for record in found][-1] == f"{149:012x}"


def test_a_record_whose_row_denies_what_it_is_is_reported_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db", write=True) as store:
        store.add(make_run())
        store._connection.query("UPDATE record SET study = 'x'")
    (record,) = records_to_report(store=tmp_path / "store.db").records
    assert record.id == make_run().id


def test_an_export_is_written_record_by_record(tmp_path: Path) -> None:
    seen = list[int]()

    def pieces() -> Iterator[str]:
        for number in range(3):
            seen.append(sum((folder / "written").stat().st_size for folder in tmp_path.glob(".steplab-tmp-*")))
            yield f"{number}" * 1_000_000 + "\n"

    emit(pieces(), FileOptions(output=tmp_path / "all.jsonl"), "jsonl")
    assert seen[0] < seen[1] < seen[2]
    emit(pieces(), FileOptions(output=tmp_path / "all.jsonl.gz"), "jsonl")
    assert gzip.decompress((tmp_path / "all.jsonl.gz").read_bytes()) == (tmp_path / "all.jsonl").read_bytes()


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    target = tmp_path / "all.jsonl"
    target.write_text("")

    def pieces() -> Iterator[str]:
        yield "1\n"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        emit(pieces(), FileOptions(output=target), "jsonl")
    assert target.read_text() == ""
    assert list(tmp_path.iterdir()) == [target]


def test_an_export_of_a_store_is_whole(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--store", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 200
