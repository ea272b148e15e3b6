import gzip
import io
import json
import lzma
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.comm_records import make_comm
from tests.first import first
from tests.profiles import launch_bound_run
from tests.runs import make_run
from tests.stored_lines import fill

from steplab.cli.app import main
from steplab.records.codec import encode, encode_with_summary
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.store.database import Store

GOOD = make_run({"context": 128}, id="aaaa00000001", name="good")
OTHER = make_run({"context": 256}, id="aaaa00000002", name="other")
PROFILED = launch_bound_run(id="bbbb00000001", name="bad")


def with_columns_unlike(run: Run) -> Run:
    assert run.profile is not None
    assert run.profile.timeline is not None
    timeline = replace(run.profile.timeline, stream=(1,))
    return replace(run, profile=replace(run.profile, timeline=timeline))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "store.db"
    monkeypatch.setenv("STEPLAB_STORE", str(path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return path


def put(store: Path, *records: Record) -> None:
    """Stores past all checks of imports."""
    fill(store, *records)


def write(path: Path, *records: Record) -> Path:
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    return path


def ids(store: Path) -> set[str]:
    with sqlite3.connect(store) as raw:
        found = {str(row[0]) for row in raw.execute("SELECT id FROM record")}
    raw.close()
    return found


def spoil(store: Path, record_id: str, column: str, value: object) -> None:
    with sqlite3.connect(store) as raw:
        raw.execute(f"UPDATE record SET {column} = ? WHERE id = ?", (value, record_id))
    raw.close()


def test_import_refuses_a_record_that_cannot_be_right_and_all_beside_it(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "first.jsonl", OTHER)
    write(tmp_path / "runs.jsonl", GOOD, with_columns_unlike(PROFILED))
    assert main(["import", "first.jsonl", "runs.jsonl"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("steplab: runs.jsonl, line 2: record bbbb00000001: profile.timeline.")
    assert line.endswith("nothing was imported")
    assert not store.exists()


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_import_takes_compressed_files(
    pack: Callable[[bytes], bytes], tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(encode(GOOD) + b"\n" + encode(OTHER))
    (tmp_path / "runs.jsonl.packed").write_bytes(packed)
    assert main(["import", "runs.jsonl.packed"]) == 0
    assert ids(store) == {GOOD.id, OTHER.id}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(packed)))
    assert main(["import", "-"]) == 0


@pytest.mark.parametrize("pack", first(1, [gzip.compress, lzma.compress]))
def test_a_file_that_unpacks_without_end_is_refused(
    pack: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("steplab.limits.IMPORT_BYTES", 1 << 20)
    monkeypatch.setattr("steplab.limits.RECORD_BYTES", 1 << 19)
    bombs = {"line 1 has more than 512": b" " * (2 << 20), "it has more than 1.00 MiB": b"\n" * (2 << 20)}
    for why, content in bombs.items():
        (tmp_path / "bomb").write_bytes(pack(content))
        assert main(["import", "bomb"]) == 2
        assert f"bomb: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_compressed_file_that_is_cut_off_is_refused(
    pack: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = pack(encode(GOOD))
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    assert main(["import", "cut"]) == 2
    assert "cut is a damaged compressed file" in capsys.readouterr().err


# Records already stored


def test_a_page_leaves_out_what_cannot_be_drawn_and_says_so(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, GOOD, with_columns_unlike(PROFILED), replace(PROFILED, id="cccc00000001", name="fine"))
    assert main(["report", "cccc00000001", "--output", "page.html"]) == 0
    assert "left-out" not in (tmp_path / "page.html").read_text()
    assert main(["report", GOOD.id, PROFILED.id, "cccc00000001", "--output", "page.html", "--debug"]) == 0
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    told = [line for line in shown.splitlines() if line.startswith("steplab: ") and PROFILED.id in line]
    assert len(told) == 1
    assert told[0].startswith(f"steplab: record {PROFILED.id} is left out of where the time goes, which cannot be")
    page = (tmp_path / "page.html").read_text()
    assert page.count(f"record {PROFILED.id} is left out of where the time goes") == 1
    assert "GPU time by phase" in page  # the other profile is there
    assert 'id="runs"' in page


@pytest.mark.parametrize("format", ["table", "latex"])
def test_other_formats_leave_out_what_cannot_be_drawn(
    format: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = make_comm()
    silent = tuple(replace(times, device_s=None, alone_s=()) for times in benchmark.cells[0].ranks)
    broken = replace(benchmark, id="dddd00000001", cells=(replace(benchmark.cells[0], ranks=silent),))
    put(store, GOOD, benchmark, replace(benchmark, id=broken.id))
    spoil(store, broken.id, "body", encode(broken))
    assert main(["report", GOOD.id, benchmark.id, broken.id, "--format", format]) == 0
    shown = capsys.readouterr()
    assert GOOD.id in shown.out
    assert "all_reduce" in shown.out.replace("\\", "")
    assert f"record {broken.id} is left out of the report" in shown.err
    assert main(["report", broken.id, "--format", format]) == 1
    assert "no record can be reported" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"\xff", b"[1]", b'{"schema":"steplab.run/9"}'])
def test_a_row_that_cannot_be_read_harms_no_other(
    body: bytes, tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, GOOD, replace(OTHER, created_utc="2027-01-01T00:00:00Z"))
    spoil(store, OTHER.id, "body", body)
    assert main(["list", "--format", "json"]) == 0
    assert {row["id"] for row in json.loads(capsys.readouterr().out)} == {GOOD.id, OTHER.id}
    assert main(["export"]) == 0
    shown = capsys.readouterr()
    assert shown.out.encode() == encode_with_summary(GOOD) + b"\n"
    [line] = shown.err.splitlines()
    assert line.startswith(f"steplab: left out: record {OTHER.id} in {store} is unreadable: ")
    assert line.endswith(f"remove it: `steplab rm {OTHER.id}`")
    assert main(["report", "--output", "page.html"]) == 0  # the newest of those that can be read
    assert OTHER.id in capsys.readouterr().err
    assert main(["show", GOOD.id]) == 0
    capsys.readouterr()
    assert main(["show", OTHER.id]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert OTHER.id in line


def test_a_damaged_summary_is_said_and_the_rest_is_listed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, GOOD, OTHER)
    spoil(store, OTHER.id, "summary", b"{")
    assert main(["list", "--format", "json"]) == 0
    shown = capsys.readouterr()
    rows: dict[str, dict[str, Any]] = {row["id"]: row for row in json.loads(shown.out)}
    assert rows[GOOD.id]["step_time_s"] > 0
    assert rows[OTHER.id]["name"] == "other"
    assert f"the summary of record {OTHER.id} is damaged" in shown.err
    assert main(["list"]) == 0


def test_a_summary_without_its_keys_is_listed_and_reported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, GOOD, OTHER)
    spoil(store, OTHER.id, "summary", b'{"cre!ted_utc":"x","status":7}')
    for words in (
        ["list"],
        ["report", "--format", "md"],
        ["list", "--sort", "created_utc"],
        ["compare", "good", "other"],
    ):
        assert main(words) in (0, 3)
    assert "internal error" not in capsys.readouterr().err


def test_a_record_that_an_index_alone_knows_is_no_internal_error(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, GOOD)
    spoil(store, GOOD.id, "id", GOOD.id.encode())  # a blob, which no text equals
    assert main(["show", "last"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "the store is damaged; `steplab store check`" in line


@pytest.mark.parametrize("column", first(4, ["id", "kind", "created_utc", "name", "status", "cell", "study", "schema"]))
@pytest.mark.parametrize("value", first(1, ["CAST(x'ff1b5b' AS TEXT)", b"\xff\xfe", 1.5]))
def test_a_damaged_text_is_listed_as_far_as_it_goes(
    column: str, value: object, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, GOOD, OTHER)
    with sqlite3.connect(store) as raw:
        if isinstance(value, str):
            raw.execute(f"UPDATE record SET {column} = {value} WHERE id = ?", (OTHER.id,))
        else:
            raw.execute(f"UPDATE record SET {column} = ? WHERE id = ?", (value, OTHER.id))
    raw.close()
    for words in (["list"], ["list", "--format", "csv"], ["list", "--kind", "study"], ["show", GOOD.id], ["report"]):
        assert main(words) == 0
    shown = capsys.readouterr()
    assert GOOD.id in shown.out
    assert "internal error" not in shown.err
    assert "\x1b" not in shown.out + shown.err


def test_a_record_of_an_unknown_kind_is_named(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, GOOD, OTHER)
    spoil(store, OTHER.id, "kind", "poem")
    assert main(["list"]) == 0
    shown = capsys.readouterr()
    assert GOOD.name in shown.out
    assert f"record {OTHER.id} has the unknown kind 'poem'" in shown.err


# Removing


def test_rm_removes_what_is_named_and_says_so(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, GOOD, OTHER, PROFILED)
    spoil(store, OTHER.id, "body", b"{")  # it need not be readable
    assert main(["rm", OTHER.id, "bbbb", "--yes"]) == 0
    assert ids(store) == {GOOD.id}
    told = capsys.readouterr().err
    assert f"removed run {OTHER.id}, 'other', {OTHER.created_utc}, ok" in told
    assert f"removed run {PROFILED.id}" in told


def test_rm_does_not_guess(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, GOOD, OTHER, PROFILED)
    for given, said in ((["aaaa"], "several ids"), (["bbbb", "ffff"], "no record 'ffff'")):
        assert main(["rm", *given, "--yes"]) == 2
        assert said in capsys.readouterr().err
    assert main(["rm", "bbbb"]) == 2  # nobody can be asked here
    assert "--yes" in capsys.readouterr().err
    assert ids(store) == {GOOD.id, OTHER.id, PROFILED.id}


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("n\n", False), ("", False)])
def test_rm_asks_at_a_terminal(
    answer: str, goes: bool, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    put(store, GOOD)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert main(["rm", GOOD.id]) == 0
    assert "Remove 1 record for good? [y/N]" in capsys.readouterr().err
    assert (GOOD.id not in ids(store)) == goes


def test_a_study_goes_with_its_last_record(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, *(replace(run, study="feed00000001") for run in (GOOD, OTHER)))
    assert main(["rm", GOOD.id, "--yes"]) == 0
    assert "study" not in capsys.readouterr().err
    with Store.open(store, write=False) as opened:
        assert [row["id"] for row in opened.studies()] == ["feed00000001"]
    assert main(["rm", OTHER.id, "--yes"]) == 0
    assert "removed study feed00000001" in capsys.readouterr().err
    with Store.open(store, write=False) as opened:
        assert opened.studies() == []


@pytest.mark.parametrize("odd", ["", "\x1b[2J", "-x"])
def test_a_record_with_an_odd_id_can_be_removed(odd: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, GOOD, replace(OTHER, id=odd))
    assert main(["rm", "--yes", "--", odd]) == 0
    assert ids(store) == {GOOD.id}
    assert "\x1b" not in capsys.readouterr().err
