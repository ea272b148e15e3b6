import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import Program, Result, keep_result, kept_result, made_once, tiny

from steplab.specs.study import STUDIES, preset_names
from steplab.units import format_bytes

ODD_MODELS = """
import os
import signal
import time


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def sleeps():
    time.sleep(600)


def raises():
    raise RuntimeError("no such weights")
"""

STUDY = """
description = "everything that can happen to a cell"

[[grid]]
model = "tiny"
"model.vocab_size" = [100, 100_000_000_000]

[[grid]]
model = "odd:crashes"

[[grid]]
model = "tiny"
attention = "sdpa_cudnn"

[[grid]]
model = "xxl"

[[grid]]
model = "odd:sleeps"
"""
STATUSES = ["ok", "out_of_memory", "crashed", "error", "error", "timeout"]
TINY_CELLS = ("--device", "cpu", "--batch", "1", "--context", "8", "--warmup", "0", "--steps", "2")


@pytest.fixture(scope="session")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def measure(folder: Path) -> None:
        program = Program(folder)
        program.write("odd.py", ODD_MODELS)
        program.write("mixed.toml", STUDY)
        swept = program("study", "mixed.toml", *TINY_CELLS, "--timeout", "6s", "--format", "json")
        keep_result(swept, folder / "sweep.json")

    return made_once(tmp_path_factory, "mixed", measure)


@pytest.fixture
def mixed(mixed_folder: Path) -> Result:
    return kept_result(mixed_folder / "sweep.json")


@pytest.fixture
def mixed_program(mixed_folder: Path) -> Program:
    return Program(mixed_folder)


def failure_of(result: Result, status: str) -> str:
    return " ".join(row["failure"] for row in result.rows() if row["status"] == status)


def test_one_good_cell_makes_a_sweep_a_success(mixed: Result) -> None:
    assert mixed.code == 0, mixed.stderr
    assert [row["status"] for row in mixed.rows()] == STATUSES
    assert "Traceback" not in mixed.stderr


def test_a_cell_out_of_memory_says_so(mixed: Result) -> None:
    [row] = [row for row in mixed.rows() if row["status"] == "out_of_memory"]
    assert "100000000000" in row["model"]
    assert row["failure"]
    assert row["step_time_s"] is None


def test_a_crashed_cell_names_the_signal(mixed: Result) -> None:
    assert "SIGSEGV" in failure_of(mixed, "crashed")


def test_a_cell_that_took_too_long_names_the_time_it_had(mixed: Result) -> None:
    assert "6.00 s" in failure_of(mixed, "timeout")


def test_cells_that_cannot_be_served_are_rows_with_the_reason(mixed: Result) -> None:
    reasons = failure_of(mixed, "error")
    assert "sdpa_cudnn" in reasons
    assert "planning" in reasons


def test_progress_away_from_a_terminal_is_a_line_a_cell(mixed: Result) -> None:
    *lines, summary = mixed.stderr.splitlines()
    cells = [line for line in lines if line.startswith("[")]  # a busy machine gives a warning after them
    assert [line.split("]")[0] for line in cells] == [f"[{n}/6" for n in range(1, 7)]
    assert "per step" in cells[0]
    assert "about" in cells[0]
    assert "left" in cells[0]
    assert "left" not in cells[-1]
    for line, status in zip(cells[1:], STATUSES[1:], strict=True):
        assert status.replace("_", " ") in line
    assert "6 measurements, 5 failed" in summary


def test_the_store_has_every_cell_of_the_sweep_and_counts_them(mixed: Result, mixed_program: Program) -> None:
    assert [row["id"] for row in reversed(mixed_program.rows())] == [row["id"] for row in mixed.rows()]
    [study] = mixed_program("list", "--kind", "study", "--format", "json").rows()
    assert (study["name"], study["num_cells"], study["num_ok"], study["num_failed"]) == ("mixed", 6, 1, 5)
    assert study["description"] == "everything that can happen to a cell"
    assert study["id"] in mixed.stderr


def test_a_failed_cells_record_keeps_what_is_known_of_the_failure(mixed: Result, mixed_program: Program) -> None:
    def failure(status: str) -> dict[str, Any]:
        [first, *_] = [row["id"] for row in mixed.rows() if row["status"] == status]
        record = json.loads(mixed_program("show", first, "--format", "json").stdout)
        found: dict[str, Any] = record["failure"]
        return found

    table_bytes = 100_000_000_000 * 128 * 4
    state = format_bytes(4 * 2 * table_bytes)  # of embedding and head: weights, gradients and two moments
    assert f"optimizer state take {state}" in failure("out_of_memory")["message"]
    assert failure("crashed")["signal"] == "SIGSEGV"
    assert failure("timeout")["phase"] == "build"


def test_failed_cells_are_in_every_kind_of_report(mixed_program: Program) -> None:
    for syntax in ("table", "html"):
        report = mixed_program("report", "--format", syntax)
        assert report.code == 0, report.stderr
        assert "SIGSEGV" in report.stdout, syntax


def test_a_sweep_whose_cells_all_fail_is_a_failure(steplab: Program) -> None:
    steplab.write("odd.py", ODD_MODELS)
    result = steplab("sweep", *tiny(), "--model", "odd:raises,odd:crashes", "--format", "json")
    assert result.code == 1
    assert [row["status"] for row in result.rows()] == ["error", "crashed"]
    assert len(steplab.rows()) == 2


def test_a_dry_run_lists_the_cells_and_touches_nothing(steplab: Program) -> None:
    words = ("--context", "8,16", "--precision", "fp32,bf16", "--dry-run", "--output", "cells.csv")
    result = steplab("sweep", *words)
    assert (result.code, result.stderr) == (0, "4 measurements, none made\n")
    assert not (steplab.cwd / "cells.csv").exists(), "what is written there is the results"
    lines = result.stdout.splitlines()
    assert len(lines) == len(set(lines)) == 4
    assert [("context 8 " in line, "bf16" in line) for line in lines] == [
        (True, False), (True, True), (False, False), (False, True),
    ]  # fmt: skip
    assert not steplab.store.exists()


def test_a_dry_run_of_a_resumed_sweep_lists_what_is_missing(filled: Program) -> None:
    words = ("sweep", *tiny(context="8,16"), "--resume", "--dry-run")
    done = filled(*words)
    assert (done.code, done.stdout, done.stderr) == (0, "", "0 of 2 measurements are missing, none made now\n")
    (second,) = (str(row["id"]) for row in filled.rows() if row["context"] == 16)
    assert filled("rm", second, "--yes").code == 0
    (line,) = filled(*words).stdout.splitlines()
    assert "context 16" in line or "tiny" in line
    filled.write("two.toml", '[[grid]]\nmodel = ["tiny"]\ncontext = [8, 16]\n')
    assert filled("study", "two.toml", "--resume", "--dry-run").stderr.startswith("2 of 2 measurements are missing")


def test_options_replace_the_fields_of_a_study(steplab: Program) -> None:
    steplab.write("mine.toml", "[[grid]]\ncontext = [8, 16]\nwarmup = 1\nmodel.num_layers = [1, 2, 3]\n")
    assert len(steplab("study", "mine.toml", "--dry-run").stdout.splitlines()) == 6
    replaced = steplab("study", "mine.toml", "--context", "32", "--dry-run").stdout.splitlines()
    assert len(replaced) == 3
    assert all("layers" in line or "tiny" in line for line in replaced)


def test_the_presets_that_the_help_names_exist(steplab: Program) -> None:
    told = " ".join(steplab.here("study", "--help").stdout.split())
    for preset in preset_names(STUDIES):
        result = steplab.here("study", preset, "--dry-run")
        assert result.code == 0, preset
        assert len(result.stdout.splitlines()) > 1, preset
        assert preset in told


def test_a_cell_given_twice_is_measured_once(steplab: Program) -> None:
    assert len(steplab("sweep", "--context", "8,8,16", "--dry-run").stdout.splitlines()) == 2
