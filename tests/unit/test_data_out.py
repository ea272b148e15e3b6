import gzip
import json
import lzma
import statistics
from pathlib import Path
from typing import Any

import pytest
from tests.attention_records import make_benchmark
from tests.cli.program import REPOSITORY
from tests.runs import make_run, out_of_memory, recorder_run
from tests.stored_lines import fill, import_lines

import steplab
from steplab.cli.app import main
from steplab.errors import SteplabError, UserError
from steplab.records.codec import decode, encode_with_summary
from steplab.records.record import Record
from steplab.records.registry import summary_row
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.store.database import Store

RUNS = [make_run({"context": 128}), make_run({"context": 256}), out_of_memory({"model": "xl"}), recorder_run()]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    fill(str(path), *RUNS)
    return path


def golden() -> list[Record]:
    files = [*REPOSITORY.glob("tests/golden/*.jsonl.*"), *REPOSITORY.glob("benchmarks/results/*.jsonl.gz")]
    found = []
    for path in sorted(files):
        with (lzma if path.suffix == ".xz" else gzip).open(path) as lines:
            found.append(decode(next(iter(lines))))
    return found


# --- medians and intervals beside the samples -------------------------------------------------------------


def test_a_run_says_its_median_its_interval_and_its_mfu() -> None:
    run = make_run()
    assert run.median_s == statistics.median(run.samples_s)
    assert run.interval_s is not None
    low, high = run.interval_s
    assert low <= run.median_s <= high
    assert {low, high} <= set(run.samples_s)
    assert run.mfu == next(u.value for u in run.utilizations if u.kind == "mfu" and u.convention == "causal")


def test_a_failed_run_has_no_figures() -> None:
    run = out_of_memory()
    assert (run.samples_s, run.median_s, run.interval_s, run.mfu) == ((), None, None, None)


def test_fewer_than_six_steps_have_no_interval() -> None:
    row = run_row(make_run({"steps": 5}))
    assert row["step_time_s"] is not None
    assert row["step_time_low_s"] is row["step_time_high_s"] is None


@pytest.mark.parametrize("command", ["show", "export"])
def test_json_of_a_record_has_figures_beside_its_samples(
    filled: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments = [command, RUNS[0].id, "--store", str(filled)]
    assert main([*arguments, "--format", "json" if command == "show" else "jsonl"]) == 0
    found = json.loads(capsys.readouterr().out)
    samples = next(p["device_s"] for p in found["timing"]["back_to_back"] if p["phase"] == "step")
    summary = found["summary"]
    assert summary["step_time_s"] == statistics.median(samples)
    assert (summary["step_time_low_s"], summary["step_time_high_s"]) == RUNS[0].interval_s
    assert summary["mfu"] == RUNS[0].mfu


def test_rows_of_a_report_have_the_same_figures(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", RUNS[0].id, "--format", "json", "--store", str(filled)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == json.loads(encode_with_summary(RUNS[0]))["summary"]


@pytest.mark.parametrize(("said", "those"), [("night", (0, 1)), ("kept", (1, 2)), ("aa11", (0,))])
def test_a_name_and_a_tag_stand_for_all_that_have_them(
    said: str, those: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = (("aa1100000000", "night"), ("bb1100000000", "night"), ("cc1100000000", ""))
    runs = [make_run(id=run_id, name=name) for run_id, name in named]
    with Store.open(str(tmp_path / "s.db"), write=True) as opened:
        for run in runs:
            opened.add(run)
        for run in runs[1:]:
            opened.annotate(run.id, lambda record: {"tags": ["kept"]})
    expected = [runs[place].id for place in those]
    for command in (["export"], ["report", "--format", "json"]):
        assert main([*command, said, expected[0], "--store", str(tmp_path / "s.db")]) == 0
        told = capsys.readouterr().out
        rows = list(map(json.loads, told.splitlines())) if command == ["export"] else json.loads(told)
        assert sorted(row["id"] for row in rows) == expected  # each once, though one is given twice
    assert main(["export", "nobody", "--store", str(tmp_path / "s.db")]) == 2


def test_an_exported_record_is_read_as_the_same(filled: Path) -> None:
    for record in (*RUNS, make_benchmark()):
        line = encode_with_summary(record)
        assert decode(line) == record
        assert json.loads(line)["summary"] == json.loads(json.dumps(summary_row(record)))
    with Store.open(filled, write=True) as opened:
        assert import_lines(opened, [encode_with_summary(RUNS[0])]) == (0, 1)


# --- from Python ------------------------------------------------------------------------------------------


def test_load_gives_a_record_by_its_id_or_the_newest(filled: Path) -> None:
    assert steplab.load(RUNS[1].id[:8], store=str(filled)) == RUNS[1]
    assert steplab.load(store=filled) == RUNS[-1]
    with pytest.raises(UserError, match="no record 'zzzz'"):
        steplab.load("zzzz", store=filled)


def test_the_store_opens_at_its_default_path(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPLAB_STORE", str(filled))
    with steplab.Store.open() as opened:
        assert opened.path == filled
        assert len(opened.rows()) == len(RUNS)


def test_rows_are_flat_and_have_the_same_keys(filled: Path) -> None:
    with Store.open(filled) as opened:
        rows = opened.rows()
    assert [row["id"] for row in rows] == [run.id for run in reversed(RUNS)]
    assert len({tuple(row) for row in rows}) == 1
    assert all(isinstance(value, (str, int, float, bool, type(None))) for row in rows for value in row.values())


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_take_the_rows_as_they_are(filled: Path, library: str) -> None:
    frames: Any = pytest.importorskip(library)
    with Store.open(filled) as opened:
        frame = frames.DataFrame(opened.rows())
    assert frame.shape == (len(RUNS), len(run_row(RUNS[0])))
    assert frame["step_time_s"].max() == max(run.median_s for run in RUNS if run.median_s)


def test_the_steps_of_a_run_are_a_data_frame() -> None:
    pytest.importorskip("pandas")
    run = make_run()
    frame = run.to_frame()
    assert tuple(frame["step_s"]) == run.samples_s
    assert list(frame) == ["step_s", "forward_s", "backward_s", "optimizer_s"]
    assert out_of_memory().to_frame().empty


def test_without_pandas_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(SteplabError, match="pip install pandas"):
        make_run().to_frame()


# --- a short text -----------------------------------------------------------------------------------------


def test_the_text_of_a_record_is_a_line() -> None:
    for record in (*golden(), make_benchmark()):
        text = repr(record)
        if isinstance(record, Run):
            assert len(repr(record.profile)) < 300
            assert len(repr(record.memory_profile)) < 300
        assert text.startswith(f"<{type(record).__name__} {record.id}: ")
        assert "\n" not in text
        assert len(text) < 400  # a step names each of its choices that is not the default


def test_the_text_of_a_run_says_its_step_and_its_figures() -> None:
    text = repr(make_run({"context": 256}))
    for part in ("small", "context 256", "a step (95 % interval ", "n = 10", "MFU ", "NVIDIA H200", "2026-11-21"):
        assert part in text
    assert "out of memory: out of memory: asked 8.00 GiB" in repr(out_of_memory())
    assert "range" in repr(make_run({"steps": 3}))
