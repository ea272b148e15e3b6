import json
import pickle
from pathlib import Path

import pytest
from tests.cli.program import Program, Result, complaint, kept_result
from tests.cli.test_profile import stored

from steplab.cli.app import main

DYING = """
import os
import signal

import torch
from torch import nn


class Dying(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        if self.layer._forward_hooks:  # only a watched step has any
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x).sum()


def build():
    return Dying(), lambda: torch.ones(2, 3)
"""


@pytest.fixture
def seen(watched_folder: Path) -> Path:
    return watched_folder


@pytest.fixture
def watched(seen: Path) -> Result:
    return kept_result(seen / "memory.json")


def test_a_watched_run_is_one_record_with_the_timing_of_other_steps(seen: Path, watched: Result) -> None:
    record = stored(Program(seen))
    told = f"record {record['id']}; `steplab report {record['id']} --output page.html` draws it\n"
    assert (watched.code, watched.stderr) == (0, told)
    assert record["name"] == "seen"
    [step] = [phase for phase in record["timing"]["back_to_back"] if phase["phase"] == "step"]
    assert len(step["host_s"]) == 3
    profile = record["memory_profile"]
    assert sum(profile["at_peak"].values()) == profile["peak_bytes"]
    assert profile["source"] == "cpu allocator"
    num_buffer_bytes = 4 * 8 * 32  # the rotary table: context x head dimension
    assert profile["at_peak"]["parameters"] == 4 * record["model"]["num_parameters"] + num_buffer_bytes
    assert [phase["name"] for phase in profile["phases"]] == ["forward", "backward", "optimizer"]
    assert profile["at_peak"].get("rounding", 0) == 0, "a CPU gives what is asked for"


def test_the_rows_are_the_parts_of_the_peak_with_their_prediction(seen: Path, watched: Result) -> None:
    at_peak = stored(Program(seen))["memory_profile"]["at_peak"]
    rows = {row["category"]: row for row in watched.rows()}
    for category, num_bytes in at_peak.items():
        if num_bytes:
            assert rows[category]["bytes"] == num_bytes
    assert rows["parameters"]["predicted_bytes"] == at_peak["parameters"]


def test_the_snapshot_that_is_kept_is_the_raw_one(seen: Path) -> None:
    snapshot = pickle.loads((seen / "work" / "kept.pickle").read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)
    assert stored(Program(seen))["memory_profile"]["num_events"] == len(snapshot["device_traces"][0])
    assert sorted(path.name for path in (seen / "work").iterdir()) == ["kept.marks.json", "kept.pickle"]


def test_the_snapshot_that_is_kept_is_imported_with_its_owners(
    seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPLAB_STORE", str(tmp_path / "store.db"))
    assert main(["import-snapshot", str(seen / "work" / "kept.pickle"), "--format", "json"]) == 0
    told = capsys.readouterr()
    rows = {row["category"]: row["bytes"] for row in json.loads(told.out)}
    at_peak = stored(Program(seen))["memory_profile"]["at_peak"]
    assert {name: size for name, size in rows.items() if size} == {n: size for n, size in at_peak.items() if size}
    assert main(["list", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert f"record {row['id']}; `steplab report {row['id']} --output page.html` draws it\n" in told.err
    assert main(["show", row["id"]]) == 0
    shown = capsys.readouterr().out
    assert "kept (imported snapshot)" in shown
    assert "from kept.pickle" in shown


def test_the_timing_outlives_the_watched_step(steplab: Program) -> None:
    steplab.write("dying.py", DYING)
    result = steplab("memory", "--model", "dying:build", "--device", "cpu", "--warmup", "1", "--steps", "2")
    assert result.code == 1
    assert "SIGKILL" in result.stderr
    record = stored(steplab)
    assert record["timing"] is not None
    assert record.get("memory_profile") is None
    assert any(note.startswith("memory: ") and "SIGKILL" in note for note in record["notes"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--snapshot", "missing/kept.pickle"), "no folder missing"),
        (("--snapshot", "kept.json"), "use a name ending in .pickle or .pkl"),
        (("--model", "xxl", "--predict"), "measuring 'xxl' is not supported"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_measured(
    steplab: Program, arguments: tuple[str, ...], words: str
) -> None:
    result = steplab("memory", *arguments)
    assert words in complaint(result, result.code)
    assert result.code in (1, 2)
    assert "building" not in result.stderr
    assert steplab.rows() == []


def test_a_model_of_ones_own_is_predicted_by_what_torch_would_run(steplab: Program) -> None:
    sizes = ("--device", "cpu", "--warmup", "0", "--steps", "1")
    result = steplab("memory", "--model", "toy", *sizes, "--predict", "--format", "json")
    assert result.code == 0
    rows = {row["category"]: row for row in result.rows()}
    assert rows["parameters"]["predicted_bytes"] == rows["parameters"]["bytes"] > 0


DECIDING = """import torch

class Deciding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        loss = self.layer(x).square().sum()
        return loss if loss > 0 else -loss

def build():
    return Deciding(), lambda: torch.ones(4, 8)
"""


def test_what_has_no_prediction_is_measured_all_the_same(steplab: Program) -> None:
    steplab.write("mine.py", DECIDING)
    sizes = ("--device", "cpu", "--warmup", "0", "--steps", "1")
    result = steplab("memory", "--model", "mine:build", *sizes, "--predict", "--format", "json")
    assert result.code == 0
    why = "at mine.py:10 it computes with values of tensors"
    assert result.stderr.startswith(f"steplab: measuring without a prediction: {why}")
    assert sum(row["bytes"] for row in result.rows()) == stored(steplab)["memory_profile"]["peak_bytes"]
    assert not any("predicted_bytes" in row for row in result.rows())
