import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import Program, Result, complaint, digests, kept_result, tiny

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
'''


@pytest.fixture
def seen(profiled_folder: Path) -> Path:
    return profiled_folder


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


@pytest.mark.parametrize(("format", "word"), [("csv", "name,"), ("latex", "longtable")])
def test_every_format_is_written(guarded: Program, format: str, word: str) -> None:
    elsewhere = ("--store", guarded.cwd / "other.db")
    named = ("--name", "theirs", "--format", format, "--output", "out.txt")
    result = guarded("import-trace", "kept.json.gz", *named, *elsewhere)
    assert (result.code, result.stdout) == (0, "")
    assert [row["name"] for row in guarded("list", "--format", "json", *elsewhere).rows()] == ["theirs"]
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
    ("factory", "words"), [("exploding", "ZeroDivisionError: out of luck"), ("dying", "SIGKILL during profile")]
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


# --- what is refused --------------------------------------------------------------------------------------

USAGE: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "no profiled step": (("profile", "--profiled-steps", "0"), 2, ("profiled steps", "at least 1")),
    "a word for a number of steps": (("profile", "--profiled-steps", "few"), 2, ("--profiled-steps", "few")),
    "a trace in no folder": (("profile", *tiny(), "--trace", "missing/trace.json"), 1, ("missing", "no folder")),
    "a trace of no known ending": (("profile", *tiny(), "--trace", "t.pt"), 2, ("t.pt", ".json.gz")),
    "a trace of half an ending": (("profile", *tiny(), "--trace", "t.gz"), 2, ("t.gz", ".json.gz")),
    "a trace in place of a folder": (("profile", *tiny(), "--trace", "."), 2, ("folder", "name a file")),
    "a page": (("profile", *tiny(), "--output", "page.html"), 2, ("html", "steplab report")),
    "no file": (("import-trace",), 2, ("FILE",)),
    "two files": (("import-trace", "kept.json.gz", "notes.txt"), 2, ("notes.txt",)),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "words"), USAGE.values(), ids=USAGE.keys())
def test_a_wrong_request_is_named_with_its_remedy(
    guarded: Program, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    said = complaint(guarded.here(*arguments), code)
    assert all(word in said for word in words), said
