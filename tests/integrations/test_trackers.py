import dataclasses
import json
import shlex
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.program import REPOSITORY
from tests.cli.test_readme import blocks, commands
from tests.runs import make_run, out_of_memory, recorder_run
from tests.stored_lines import fill
from tests.sure import sure

from steplab.cli.app import main
from steplab.cli.commands.export import export
from steplab.cli.options import FileOptions
from steplab.errors import SteplabError, UserError
from steplab.integrations.tracking import Tracked, track, tracked
from steplab.records.codec import decode
from steplab.records.rows import run_row

RUN = make_run({"context": 256, "batch": 2}, name="a run")
ROW = run_row(RUN)
PAGE = "<!doctype html><title>a run</title>"


def test_the_configuration_is_parameters_and_the_figures_are_metrics() -> None:
    one = tracked(RUN, PAGE)
    assert (one.id, one.name, one.is_ok) == (RUN.id, "a run", True)
    assert {"model": "small", "context": 256, "batch": 2, "device": "NVIDIA H200"}.items() <= one.params.items()
    names = ("step_time_s", "forward_s", "tokens_per_s", "mfu", "peak_allocated_bytes")
    assert {name: one.metrics[name] for name in names} == {name: ROW[name] for name in names}
    assert not one.params.keys() & one.metrics.keys()
    assert None not in one.params.values()
    record = json.loads(one.files["record.json"])
    record.pop("summary")
    assert decode(json.dumps(record)) == RUN
    assert one.files["report.html"] == PAGE.encode()


def test_a_loops_own_phases_are_metrics_under_names_that_all_trackers_take() -> None:
    loop = recorder_run()
    phase = sure(sure(loop.timing).phase("load batch"))
    assert min(phase.best_s) < tracked(loop).metrics["load_batch_s"] < max(phase.best_s)


def test_an_id_leads_out_of_no_folder() -> None:
    """Imports refuse such an id, but a foreign store may hold it, and it names a tracker's folder."""
    assert tracked(RUN).id == RUN.id
    assert tracked(dataclasses.replace(RUN, id="../../home/.config")).id == ".._.._home_.config"


def test_a_failure_has_no_figures() -> None:
    failed = tracked(out_of_memory())
    assert not failed.is_ok
    assert failed.metrics.keys() <= {"peak_allocated_bytes"}
    assert failed.params["failure"] == "out of memory: asked 8.00 GiB"
    assert failed.name == f"run {failed.id}"


# --- MLflow -----------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("mlflow", reason="mlflow is missing: pip install 'steplab[mlflow]'")
    pytest.importorskip("alembic", reason="alembic is missing: pip install 'steplab[mlflow]'")
    monkeypatch.chdir(tmp_path)  # for artifacts, which MLflow puts next to the program
    path = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    return path


def test_mlflow_has_parameters_figures_and_the_report(
    mlflow_here: Path, filled: FileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs" / "report.md").read_text(encoding="utf-8")
    [command] = (line for block in blocks(page) if "mlflow" in block.text for line in commands(block))
    address, program, *words = shlex.split(command.text)
    monkeypatch.setenv(*address.split("=", 1))
    assert program == "steplab"
    assert main([*words, "--store", str(filled.store)]) == 0
    one = tracked(RUN, PAGE)
    assert track(one, "mlflow") == "experiment steplab of sqlite:///mlflow.db"  # and finds it there
    track(tracked(out_of_memory()), "mlflow")
    with sqlite3.connect(mlflow_here) as database:
        runs = database.execute("SELECT run_uuid, name, status, artifact_uri FROM runs ORDER BY status").fetchall()
        assert [(name, status) for _, name, status, _ in runs] == [
            (f"run {out_of_memory().id}", "FAILED"),
            ("a run", "FINISHED"),
        ]
        [(uuid, _, _, artifacts)] = runs[1:]
        params = dict(database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (uuid,)))
        metrics = dict(database.execute("SELECT key, value FROM metrics WHERE run_uuid = ?", (uuid,)))
    assert params == {key: str(value) for key, value in one.params.items()}
    assert metrics == pytest.approx(dict(one.metrics))
    folder = Path(artifacts.removeprefix("file://"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.pop("report.html").startswith(b"<!doctype html>")
    assert files == {"record.json": one.files["record.json"]}


def test_an_address_that_mlflow_does_not_know_is_refused_by_name(
    mlflow_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(SteplabError, match=r"MLflow refused record .* of nowhere://x"):
        track(tracked(RUN), "mlflow")


# --- W&B --------------------------------------------------------------------------------------------------


def entries(log: bytes) -> Iterator[bytes]:
    """Entries of W&B's log in LevelDB's format: a 7-byte header, then 32 KiB blocks of pieces, each with checksum,
    length and type (1 whole, 2 first, 3 middle, 4 last).
    """
    entry, at = b"", 7
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:  # too short for a piece, so filled up
            at += left
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        entry += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def test_wandb_has_them_in_a_folder_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is missing: pip install 'steplab[wandb]'")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    one = tracked(RUN, PAGE)
    folder = Path(track(one, "wandb"))
    config: dict[str, object] = {}
    summary: dict[str, float] = {}
    artifacts: list[str] = []
    for data in entries((next(folder.glob("*.wandb"))).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        summary |= {item.key: json.loads(item.value_json) for item in record.summary.update}
        artifacts += [entry.path for entry in record.request.log_artifact.artifact.manifest.contents]
        artifacts += [entry.path for entry in record.artifact.manifest.contents]
    assert one.params.items() <= config.items()
    assert {key: summary[key] for key in one.metrics} == pytest.approx(dict(one.metrics))
    assert set(artifacts) == {"record.json", "report.html"}


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> FileOptions:
    fill(tmp_path / "store.db", RUN)
    return FileOptions(store=tmp_path / "store.db")


def test_the_command_exports_each_record_with_its_page(
    filled: FileOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[Tracked] = []

    def take(one: Tracked, tracker: str) -> str:
        assert tracker == "mlflow"
        taken.append(one)
        return "somewhere"

    monkeypatch.setattr("steplab.integrations.tracking.track", take)
    export((RUN.id[:6],), tracker="mlflow", out=filled)
    [one] = taken
    assert one.params == tracked(RUN).params
    assert one.files["report.html"].startswith(b"<!doctype html>")
    assert capsys.readouterr().err.endswith("exported 1 record to somewhere\n")


def test_two_destinations_at_once_are_refused() -> None:
    with pytest.raises(UserError, match="--tracker excludes"):
        export((), tracker="wandb", out=FileOptions(output=Path("runs.csv")))


def test_a_tracker_whose_library_is_missing_is_refused_with_the_remedy(
    filled: FileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'steplab\[wandb\]'"):
        export((), tracker="wandb", out=filled)
