import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.attention_records import make_benchmark, make_cell
from tests.cli.program import Program
from tests.runs import ENVIRONMENT
from tests.stored_lines import fill

from steplab.cli.app import main
from steplab.lab import benchmark
from steplab.measurement.processes.launch import Cells
from steplab.records.attention import AttentionCell, AttentionRun
from steplab.store.database import Store

TINY = ("--sequence", "16,32", "--dim", "8", "--heads", "2", "--causal", "--device", "cpu", "--repeats", "3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--implementation", "magic"), "implementation 'magic' is not known; choose one of plain, sdpa"),
        (("--sequence", "many"), "sequence must be a whole number, not 'many'"),
        (("--pass", "sideways"), "pass 'sideways' is not known; choose some of forward, backward, both"),
        (
            ("--grid", "nowhere"),
            "no grid 'nowhere': choose one of choice, long, peers, study, tiny, or give the path of a TOML file",
        ),
        (("--gpu", "H200 SXM"), "--gpu needs --derive"),
        (("--derive", "--gpu", "abacus"), "unknown hardware 'abacus'"),
        (("--derive", "--output", "page.html"), "this command does not write html; choose one of table, json, csv"),
        (
            ("--implementation", "plain", "--against", "sdpa"),
            "--against 'sdpa' is not among the implementations; choose one of plain",
        ),
        (("--repeats", "0"), "the number of repeats must be at least 1"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert main(["attention", *arguments, "--store", str(tmp_path / "store.db")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_tiny_grid_is_measured_kept_and_drawn(steplab: Program) -> None:
    result = steplab("attention", *TINY, "--implementation", "plain,sdpa", "--format", "json", "--name", "mine")
    assert result.code == 0, result.stderr
    rows = result.rows()
    assert [(row["queries"], row["implementation"]) for row in rows] == [
        (16, "plain"),
        (16, "sdpa"),
        (32, "plain"),
        (32, "sdpa"),
    ]
    with Store.open(steplab.store, write=False) as store:
        (listed,) = store.rows(kind="attention", name="mine")
        record = store.get(str(listed["id"]))
    assert isinstance(record, AttentionRun)
    for row, cell in zip(rows, record.cells, strict=True):
        for name in ("forward", "backward", "both"):
            assert len(cell.samples(name)) == 3
            assert row[f"{name}_s"] == median(cell.samples(name)) > 0
            assert row[f"{name}_flops_per_s"] == pytest.approx(cell.flops[name] / row[f"{name}_s"])
        assert row["output_error"] < 1e-5
        assert row["checked_heads"] == 2
        assert row["first_call_s"] > 0
    plain, fused = record.cells[2:]
    assert plain.memory is not None
    assert plain.memory.saved_bytes == 2 * 32 * 32 * 4 + 32 * 32 + 2 * 32 * 8 * 4  # softmax, mask, output
    assert fused.memory is not None
    assert fused.memory.saved_bytes is not None
    assert fused.memory.saved_bytes < plain.memory.saved_bytes
    assert fused.interleaved == ("plain",)
    assert "[4/4] 1×2×32×8 causal fp32 sdpa: forward " in result.stderr


def test_all_cells_failing_is_a_failure_that_is_kept(steplab: Program) -> None:
    result = steplab("attention", *TINY, "--implementation", "sdpa_cudnn")  # which no CPU has
    assert result.code == 1
    assert "error: attention 'sdpa_cudnn' is not supported" in result.stdout
    with Store.open(steplab.store, write=False) as store:
        assert [row["num_failed"] for row in store.rows(kind="attention")] == [2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_had_ended_before_an_interruption_is_kept(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(cells: Cells[AttentionCell], *, on_cell: Callable[[int, AttentionCell], None], **rest: Any) -> None:
        study: Any = cells.study
        rest["on_environment"](ENVIRONMENT)
        on_cell(0, make_cell(study.cells[0]))
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(benchmark, "measure_cells", interrupted)
    before = signal.signal(number, signal.default_int_handler)  # as the program has it (cli.ending)
    try:
        code = main(["attention", *TINY, "--implementation", "plain,sdpa", "--store", str(tmp_path / "store.db")])
    finally:
        signal.signal(number, before)
    assert code == 130
    with Store.open(tmp_path / "store.db", write=False) as store:
        (row,) = store.rows(kind="attention")
        record = store.get(str(row["id"]))
    assert f"interrupted; record {record.id} has the 1 cell that had ended" in capsys.readouterr().err
    assert isinstance(record, AttentionRun)
    assert [cell.spec.column for cell in record.cells] == ["plain"]
    assert record.environment == ENVIRONMENT


@pytest.fixture
def peers(tmp_path: Path) -> tuple[AttentionRun, list[str]]:
    record, path = make_benchmark("peers"), tmp_path / "store.db"
    fill(path, record)
    return record, ["--store", str(path)]


def test_a_stored_benchmark_is_listed_shown_reported_and_accounted_for(
    peers: tuple[AttentionRun, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, store = peers
    assert main(["list", "--kind", "attention", *store]) == 0
    assert record.id in capsys.readouterr().out
    assert main(["show", record.id, *store]) == 0
    assert "flash_triton" in capsys.readouterr().out
    assert main(["report", "--format", "md", *store]) == 0
    assert "## Time and rate" in capsys.readouterr().out
    assert main(["export", "--output", str(tmp_path / "records.jsonl"), *store]) == 0
    assert main(["import", str(tmp_path / "records.jsonl"), "--store", str(tmp_path / "other.db")]) == 0
    capsys.readouterr()
    assert main(["attention", "--derive", *store]) == 0
    assert "The smallest plain attention that does not fit: 4×16×4096×64 causal bf16" in capsys.readouterr().out


def test_memory_is_accounted_for_a_gpu_one_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["attention", "--derive", "--gpu", "RTX 4090", "--grid", "long", "--dtype", "fp32", "--dim", "64"]
    assert main(asked) == 0
    assert "does not fit: 1×1×65536×64 causal fp32" in capsys.readouterr().out
