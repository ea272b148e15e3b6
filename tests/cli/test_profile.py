import gzip
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import Program, Result, complaint, digests, keep_result, kept_result, made_once, tiny

STEPS = 2
MODELS = '''
import os
import signal

import torch
from torch import nn


class Unlucky(nn.Module):
    """Does something on its seventh forward pass: one warm-up step, three measured, one counted, one profiled."""

    def __init__(self, act):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.act, self.calls = act, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 7:
            self.act()
        return self.layer(x).sum()


def explode():
    raise ZeroDivisionError("out of luck")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def exploding():
    return Unlucky(explode), lambda: torch.ones(2, 3)


def dying():
    return Unlucky(die), lambda: torch.ones(2, 3)


def hopeless():
    raise RuntimeError("no such weights")
'''


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        program = Program(folder)
        profiled = program(
            "profile", *tiny(), "--profiled-steps", str(STEPS), "--name", "seen", "--trace", "kept.json.gz",
            "--format", "json",
        )  # fmt: skip
        keep_result(profiled, folder / "profile.json")

    return made_once(tmp_path_factory, "profiled", make)


@pytest.fixture
def profiled(seen: Path) -> Result:
    return kept_result(seen / "profile.json")


@pytest.fixture
def guarded(steplab: Program, seen: Path) -> Iterator[Program]:
    shutil.copy(seen / "store" / "store.db", steplab.store)
    shutil.copy(seen / "work" / "kept.json.gz", steplab.cwd)
    before = digests(steplab.store.parent)
    yield steplab
    assert digests(steplab.store.parent) == before


def stored(program: Program) -> dict[str, Any]:
    newest = program.rows()[0]["id"]
    record = json.loads(program("show", newest, "--format", "json").stdout)
    assert isinstance(record, dict)
    return record


# --- profile ----------------------------------------------------------------------------------------------


def test_a_profile_is_one_record_with_the_timing_of_other_steps(seen: Path, profiled: Result) -> None:
    assert (profiled.code, profiled.stderr) == (0, "")
    record = stored(Program(seen))
    assert record["name"] == "seen"
    [step] = [phase for phase in record["timing"]["back_to_back"] if phase["phase"] == "step"]
    assert len(step["host_s"]) == 3
    profile = record["profile"]
    assert (profile["source"], profile["device"], profile["num_steps"]) == ("torch.profiler", "cpu", STEPS)
    assert [phase["phase"] for phase in profile["phases"]][:3] == ["forward", "backward", "optimizer"]
    assert record["utilizations"]


def test_the_rows_are_the_kernels_of_the_record(seen: Path, profiled: Result) -> None:
    kernels = stored(Program(seen))["profile"]["kernels"]
    rows = profiled.rows()
    assert [(row["name"], row["calls"], row["total_s"]) for row in rows] == [
        (kernel["name"], kernel["calls"], kernel["total_s"]) for kernel in kernels
    ]
    assert {"blocks.*.attention.scores", "blocks.*.attention.softmax", "blocks.*.attention.values", "loss"} <= {
        row["range"] for row in rows
    }


def test_the_trace_is_kept_where_it_was_asked_for(seen: Path) -> None:
    events = json.loads(gzip.decompress((seen / "work" / "kept.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("step") == STEPS
    assert [path.name for path in (seen / "work").iterdir()] == ["kept.json.gz"]


@pytest.mark.parametrize(
    ("format", "word"), [("table", "attention"), ("csv", "name,"), ("md", "| "), ("latex", "longtable")]
)
def test_every_format_is_written(guarded: Program, format: str, word: str) -> None:
    elsewhere = ("--store", guarded.cwd / "other.db")
    result = guarded("import-trace", "kept.json.gz", "--format", format, "--output", "out.txt", *elsewhere)
    assert (result.code, result.stdout) == (0, "")
    assert word in (guarded.cwd / "out.txt").read_text(encoding="utf-8")


def test_without_a_place_for_the_trace_none_is_left(steplab: Program) -> None:
    (steplab.folder / "tmp").mkdir()
    variables = {"TMPDIR": str(steplab.folder / "tmp")}
    result = steplab("profile", *tiny(), "--pass", "forward", "--profiled-steps", "1", variables=variables)
    assert result.code == 0, result.stderr
    assert "forward" in result.stdout
    assert list(steplab.cwd.iterdir()) == []
    assert [path.name for path in (steplab.folder / "tmp").iterdir() if path.name.startswith(".steplab")] == []


# --- what a failure under the profiler leaves -------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("exploding", "ZeroDivisionError: out of luck"),
        ("dying", "SIGKILL during profile"),
    ],
)
def test_the_timing_outlives_the_profiled_steps(steplab: Program, factory: str, words: str) -> None:
    steplab.write("mine.py", MODELS)
    result = steplab("profile", *tiny(), "--model", f"mine:{factory}", "--trace", "trace.json", "--format", "json")
    assert result.code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("steplab: profile: ")
    assert words in line
    [row] = result.rows()
    assert row["status"] == "ok"
    assert row["step_time_s"] > 0
    record = stored(steplab)
    assert record["profile"] is None
    assert len(record["timing"]["back_to_back"][0]["host_s"]) == 3
    assert any(words in note for note in record["notes"])
    assert not (steplab.cwd / "trace.json").exists()
    assert list(steplab.cwd.glob(".steplab*")) == []


def test_a_model_that_fails_is_a_row_as_in_run(steplab: Program) -> None:
    steplab.write("mine.py", MODELS)
    result = steplab("profile", *tiny(), "--model", "mine:hopeless", "--format", "json")
    assert result.code == 1
    (said,) = result.stderr.splitlines()
    assert said.startswith("steplab: error: RuntimeError: no such weights (mine.py:")
    assert result.rows()[0]["status"] == "error"


# --- import-trace -----------------------------------------------------------------------------------------


def test_a_trace_made_elsewhere_gives_the_same_kernels(seen: Path, steplab: Program, profiled: Result) -> None:
    trace = shutil.copy(seen / "work" / "kept.json.gz", steplab.cwd / "rank0.json.gz")
    result = steplab("import-trace", trace, "--format", "json")
    assert (result.code, result.stderr) == (0, "")
    assert result.rows() == profiled.rows()
    record = stored(steplab)
    assert record["name"] == "rank0"
    assert (record["spec"], record["timing"], record["environment"]) == (None, None, None)
    assert (record["profile"]["source"], record["profile"]["file"]) == ("kineto", "rank0.json.gz")


def test_an_imported_trace_goes_by_the_name_it_is_given(seen: Path, steplab: Program) -> None:
    assert steplab("import-trace", seen / "work" / "kept.json.gz", "--name", "theirs").code == 0
    assert steplab.rows()[0]["name"] == "theirs"


# --- what is refused --------------------------------------------------------------------------------------

USAGE: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "no profiled step": (("profile", "--profiled-steps", "0"), 2, ("profiled steps", "at least 1")),
    "a word for a number of steps": (("profile", "--profiled-steps", "few"), 2, ("--profiled-steps", "few")),
    "near miss of an option": (("profile", "--profiled-step", "2"), 2, ("--profiled-steps",)),
    "a flag with a value": (("profile", "--nsys=maybe"), 2, ("nsys",)),
    "unknown model": (("profile", "--model", "smal"), 2, ("'smal'", "small")),
    "a trace in no folder": (("profile", *tiny(), "--trace", "missing/trace.json"), 1, ("missing", "no folder")),
    "a trace of no known ending": (("profile", *tiny(), "--trace", "t.pt"), 2, ("t.pt", ".json.gz")),
    "a trace of half an ending": (("profile", *tiny(), "--trace", "t.gz"), 2, ("t.gz", ".json.gz")),
    "a trace in place of a folder": (("profile", *tiny(), "--trace", "."), 2, ("folder", "name a file")),
    "a page": (("profile", *tiny(), "--output", "page.html"), 2, ("html", "steplab report")),
    "an export in no folder": (("profile", *tiny(), "--output", "missing/rows.csv"), 1, ("missing",)),
    "a duration in words": (("profile", *tiny(), "--timeout", "soon"), 2, ("'soon'", "5min")),
    "no file": (("import-trace",), 2, ("FILE",)),
    "a file that is missing": (("import-trace", "missing.json"), 2, ("missing.json", "No such file")),
    "a folder for a file": (("import-trace", "."), 2, (".",)),
    "a file of something else": (("import-trace", "notes.txt"), 2, ("notes.txt",)),
    "an empty file": (("import-trace", "empty.json"), 2, ("empty.json",)),
    "two files": (("import-trace", "kept.json.gz", "notes.txt"), 2, ("notes.txt",)),
    "a format it does not write": (("import-trace", "kept.json.gz", "--format", "html"), 2, ("html",)),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "words"), USAGE.values(), ids=USAGE.keys())
def test_a_wrong_request_is_named_with_its_remedy(
    guarded: Program, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    guarded.write("notes.txt", "milk, eggs\n")
    guarded.write("empty.json", "")
    said = complaint(guarded(*arguments), code)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("command", ["profile", "import-trace"])
def test_help_has_an_example(steplab: Program, command: str) -> None:
    said = steplab(command, "--help")
    assert said.code == 0
    assert f"For example: steplab {command} " in said.stdout


# --- nsys, played by a script -----------------------------------------------------------------------------

NSYS = '''#!{python}
"""Plays nsys: looks at how it was called, answers as the measuring process would, and writes an export."""
import json, os, shutil, sys
from multiprocessing.connection import Connection

arguments = sys.argv[1:]
assert arguments[0] == "profile", arguments
at = arguments.index("-o")
options, report, command = arguments[1:at], arguments[at + 1], arguments[at + 2:]
assert {{"--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--export=sqlite",
         "--force-overwrite=true"}} <= set(options), options
assert command[1:3] == ["-P", "-c"] and "steplab.measurement.processes.child" in command[3], command
connection = Connection(int(command[5]))
request = json.loads(connection.recv_bytes())["value"]
task = request["task"]
assert (task["profiled_steps"], task["trace"]) == (2, None), request
with open("record.json") as file:
    record = json.load(file)
if os.path.exists("export"):
    shutil.copy("export", report + ".sqlite")
connection.send_bytes(json.dumps({{"kind": "result", "value": record}}).encode())
'''


@pytest.fixture
def nsys(steplab: Program, seen: Path) -> dict[str, str]:
    folder = steplab.folder / "bin"
    folder.mkdir()
    script = folder / "nsys"
    script.write_text(NSYS.format(python=sys.executable))
    script.chmod(0o755)
    record = stored(Program(seen)) | {"profile": None}
    steplab.write("record.json", json.dumps(record))
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def write_export(path: Path) -> None:
    """Two steps of a forward pass with two kernels each, a microsecond apart, in nsys' export format."""
    names = ["gemm", "softmax_kernel", "cudaLaunchKernel"]
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
        file.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.11.0')")
        file.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        file.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
        file.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
            "correlationId INTEGER, shortName INTEGER, demangledName INTEGER)"
        )
        file.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
            "correlationId INTEGER, nameId INTEGER)"
        )
        file.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, "
            "globalTid INTEGER)"
        )
        for step in range(2):
            zero = 1_000_000 + step * 100_000
            for name in ("step", "forward"):
                file.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, 7)", (zero, zero + 50_000, name))
            for kernel in range(2):
                launch, number = zero + 1_000 + kernel * 10_000, 10 * step + kernel + 1
                file.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 7, ?, 2)", (launch, launch + 500, number)
                )
                file.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, ?, ?)",
                    (launch + 1_000, launch + 4_000, number, kernel, kernel),
                )
    file.close()


def test_nsys_records_in_place_of_torch(steplab: Program, nsys: dict[str, str]) -> None:
    write_export(steplab.cwd / "export")
    result = steplab(
        "profile", *tiny(), "--profiled-steps", "2", "--nsys", "--name", "by nsys", "--trace", "kept.sqlite",
        "--format", "json", variables=nsys,
    )  # fmt: skip
    assert (result.code, result.stderr) == (0, "")
    assert {row["name"]: (row["calls"], row["total_s"]) for row in result.rows()} == {
        "gemm": (2, pytest.approx(6e-6)),
        "softmax_kernel": (2, pytest.approx(6e-6)),
    }
    record = stored(steplab)
    assert record["name"] == "by nsys"
    assert record["timing"] is not None
    assert (record["profile"]["source"], record["profile"]["num_steps"]) == ("nsys", 2)
    assert any("nsys attached" in note for note in record["notes"])
    assert (steplab.cwd / "kept.sqlite").read_bytes() == (steplab.cwd / "export").read_bytes()


def test_an_export_that_nsys_did_not_write_costs_no_timing(steplab: Program, nsys: dict[str, str]) -> None:
    result = steplab("profile", *tiny(), "--profiled-steps", "2", "--nsys", "--format", "json", variables=nsys)
    assert result.code == 1
    assert result.stderr.splitlines() == ["steplab: profile: nsys wrote no SQLite export"]
    assert result.rows()[0]["step_time_s"] > 0


def test_a_trace_that_cannot_be_read_is_kept_and_so_is_the_timing(steplab: Program, nsys: dict[str, str]) -> None:
    steplab.write("export", "this was never a database\n")
    said = complaint(steplab("profile", *tiny(), "--profiled-steps", "2", "--nsys", variables=nsys), 1)
    [row] = steplab.rows()
    [kept] = steplab.cwd.glob("steplab-trace-*")
    assert str(kept) in said
    assert row["id"] in said
    assert kept.read_text() == "this was never a database\n"
    assert row["step_time_s"] > 0


def test_without_nsys_the_flag_is_refused(guarded: Program) -> None:
    (guarded.folder / "empty").mkdir()
    variables = {"PATH": str(guarded.folder / "empty")}
    said = complaint(guarded("profile", *tiny(), "--nsys", variables=variables), 2)
    assert "nsys is not on the PATH" in said
    assert "torch.profiler" in said


def test_nsys_for_a_step_on_the_cpu_is_refused(guarded: Program) -> None:
    folder = guarded.folder / "bin"
    folder.mkdir()
    script = folder / "nsys"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nshift 2\nexec "$@"\n')
    script.chmod(0o755)
    variables = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    said = complaint(guarded("profile", *tiny(), "--nsys", variables=variables), 2)
    assert "cpu" in said
    assert "leave it out" in said
