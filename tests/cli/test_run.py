import csv
import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import Program, Result, command, complaint, digests, tiny
from tests.sure import sure

from steplab.records.codec import decode
from steplab.records.run import Run

COMMANDS = ("run", "sweep", "list", "show", "report", "export", "import", "doctor")


@pytest.fixture
def first_id(first_run: Result) -> str:
    return str(first_run.rows()[0]["id"])


# Measuring


def test_run_gives_one_row_with_units_in_its_names(first_run: Result) -> None:
    assert first_run.code == 0
    assert first_run.stderr == ""
    [row] = first_run.rows()
    assert re.fullmatch(r"[0-9a-f]{12}", row["id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["created_utc"])
    said = {"name": "first", "status": "ok", "model": "tiny", "batch": 1, "context": 8, "steps": 3, "warmup": 1}
    assert {key: row[key] for key in said} == said
    assert 0 < row["forward_s"] < row["step_time_s"]
    assert row["backward_s"] > 0
    assert row["optimizer_s"] > 0
    assert row["tokens_per_s"] == pytest.approx(8 / row["step_time_s"])
    assert isinstance(row["host_peak_bytes"], int)
    assert row["failure"] is None


def test_an_unknown_peak_gives_no_mfu_but_the_reason_and_the_remedy(first_run: Result) -> None:
    [row] = first_run.rows()
    assert row["mfu"] is None
    assert row["device"] in row["peak_source"]
    assert "steplab doctor" in row["peak_source"]


def test_run_is_shown_in_the_format_asked_for(steplab: Program) -> None:
    result = steplab("run", *tiny(), "--pass", "forward", "--format", "md")
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("# tiny · batch 1 · context 8")
    assert "\x1b" not in result.stdout


def test_run_writes_the_file_whole_and_in_the_format_of_its_ending(steplab: Program) -> None:
    old = steplab.write("row.csv", "id,created_utc,name\n1,2,an older file\n")
    result = steplab("run", *tiny(), "--pass", "forward", "--output", old, "--force")
    assert result.code == 0, result.stderr
    assert result.stdout == ""
    [row] = csv.DictReader(io.StringIO(old.read_text()))
    assert float(row["step_time_s"]) > 0
    assert row["backward_s"] == ""
    assert os.listdir(steplab.cwd) == ["row.csv"]
    assert old.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_output_folder_that_is_missing_is_one_line(filled: Program) -> None:
    before = digests(filled.store.parent)
    said = complaint(filled.here("list", "--output", "missing/rows.csv"), 1)
    assert "missing/rows.csv" in said
    assert digests(filled.store.parent) == before


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_page_as_output_is_refused_before_anything_is_measured(filled: Program, command: str) -> None:
    before = digests(filled.store.parent)
    said = complaint(filled.here(command, *tiny(), "--output", "page.html"), 2)
    assert "report" in said
    assert digests(filled.store.parent) == before


# Reading it again


def test_show_describes_the_run(filled: Program, first_id: str) -> None:
    result = filled("show", first_id)
    assert result.code == 0
    assert result.stderr == ""
    assert first_id in result.stdout
    for word in ("first", "tiny", "batch 1", "context 8", "torch"):
        assert word in result.stdout


def test_show_gives_the_whole_record_as_json(filled: Program, first_id: str) -> None:
    result = filled("show", first_id, "--format", "json")
    assert filled("show", first_id[:7], "--format", "json") == result
    record = decode(result.stdout)
    assert isinstance(record, Run)
    assert (record.id, record.name, record.status) == (first_id, "first", "ok")
    assert sure(record.spec).steps == 3
    step = sure(sure(record.timing).phase("step"))
    assert len(step.best_s) == 3
    assert record.environment is not None


def test_list_says_when_it_left_out_older_runs(filled: Program, first_id: str) -> None:
    result = filled("list", "--limit", "2", "--format", "json")
    assert len(result.rows()) == 2
    assert first_id not in result.stdout
    assert "--limit" in result.stderr
    assert filled("list", "--limit", "3").stderr == ""


def test_list_selects_by_name_and_by_study(filled: Program, first_id: str) -> None:
    assert [row["id"] for row in filled("list", "--name", "first", "--format", "json").rows()] == [first_id]
    [study] = filled("list", "--kind", "study", "--format", "json").rows()
    of_study = filled("list", "--study", study["id"][:7], "--format", "json").rows()
    assert [row["context"] for row in of_study] == [16, 8]


def test_a_table_fits_the_columns_there_are(filled: Program) -> None:
    for columns in (40, 60, 100):
        shown = filled("list", variables={"COLUMNS": str(columns)}).stdout
        assert max(map(len, shown.splitlines())) <= columns


def test_the_store_named_by_option_wins_over_the_variable(filled: Program, tmp_path: Path) -> None:
    said = complaint(filled.here("list", "--store", tmp_path / "other.db"), 1)
    assert str(tmp_path / "other.db") in said
    assert "steplab run" in said


def test_without_a_name_the_store_lies_in_the_data_folder(steplab: Program) -> None:
    said = complaint(steplab("list", variables={"STEPLAB_STORE": ""}), 1)
    assert f"{steplab.environment['XDG_DATA_HOME']}/steplab/store.db" in said


# Carrying it elsewhere


def test_export_and_import_carry_every_record_unchanged(filled: Program, tmp_path: Path) -> None:
    assert filled("export", "--output", "all.jsonl").code == 0
    exported = (filled.cwd / "all.jsonl").read_text()
    assert len(exported.splitlines()) == 3
    assert filled("export").stdout == exported
    other = ("--store", tmp_path / "other.db")
    first, again = (filled("import", "all.jsonl", *other) for _ in range(2))
    assert (first.code, first.stdout) == (0, "")
    assert "3 records added, 0" in first.stderr
    assert again.code == 0
    assert "0 records added, 3" in again.stderr
    assert filled("export", *other).stdout == exported
    assert filled("report", *other, "--format", "json").stdout == filled("report", "--format", "json").stdout


def test_export_takes_records_by_id_and_a_study(filled: Program, first_id: str) -> None:
    [line] = filled("export", first_id[:6]).stdout.splitlines()
    assert decode(line).id == first_id
    [study] = filled("list", "--kind", "study", "--format", "json").rows()
    assert len(filled("export", "--study", study["id"]).stdout.splitlines()) == 2


# Reports


def test_report_gives_the_newest_study_or_named_runs_in_the_order_named(filled: Program, first_id: str) -> None:
    assert [row["context"] for row in filled("report", "--format", "json").rows()] == [8, 16]
    ids = [first_id, *(row["id"] for row in filled.rows() if row["name"] != "first")]
    assert [row["id"] for row in filled("report", *ids, "--format", "json").rows()] == ids
    assert filled("report", "--format", "latex").stdout.startswith("\\documentclass{article}")


def test_the_page_is_one_file_that_asks_for_nothing_else(filled: Program) -> None:
    result = filled("report", "--output", "page.html", "--title", "Ours & <theirs>")
    assert result.code == 0, result.stderr
    page = (filled.cwd / "page.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "Ours &amp; &lt;theirs&gt;" in page
    assert "<theirs>" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert filled("report", "--format", "html").stdout.lstrip().lower().startswith("<!doctype html>")


# The program itself


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(filled: Program) -> None:
    with Path("/dev/full").open("wb") as full:
        finished = subprocess.run(
            command(["list"]), stdout=full, stderr=subprocess.PIPE, env=filled.environment, check=False
        )
    said = complaint(Result(code=finished.returncode, stdout="", stderr=finished.stderr.decode()), 1)
    assert "No space left" in said


def test_the_program_explains_itself_and_its_commands(steplab: Program) -> None:
    alone = steplab()
    assert alone.code == 0
    for name in COMMANDS:
        assert name in alone.stdout
        result = steplab(name, "--help")
        assert (result.code, result.stderr) == (0, "")
        assert f"steplab {name}" in result.stdout
    assert not steplab.store.exists()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", steplab("--version").stdout)


# Ceilings


def test_doctor_measures_the_peak_that_later_runs_need_for_their_mfu(steplab: Program) -> None:
    seen = steplab("doctor", "--device", "cpu")
    assert seen.code == 0, seen.stderr
    assert "matmul" in seen.stdout
    assert "copy" in seen.stdout
    [row] = steplab("run", *tiny(batch="4", context="64"), "--format", "json").rows()
    [ceilings] = _exported(steplab, "steplab.ceilings")
    assert ceilings["id"] in row["peak_source"]
    assert "steplab doctor" in row["peak_source"]
    assert steplab("show", ceilings["id"]).stdout == seen.stdout
    if "MFU does not use such ceilings" in seen.stdout:  # this machine is busy
        assert row["mfu"] is None
        assert "are doubtful" in row["peak_source"]
        return
    assert 0 < row["mfu"] < 1.5
    assert row["mfu_convention"] == "causal"
    assert row["peak_flops_per_s"] > 0
    assert "measured" in row["peak_source"]


def _exported(program: Program, schema: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in program("export").stdout.splitlines()]
    return [record for record in records if record["schema"].startswith(schema)]
