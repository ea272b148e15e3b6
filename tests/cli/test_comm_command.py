import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.cli.program import Program
from tests.comm_records import make_comm, make_comm_cell
from tests.runs import make_run
from tests.stored_lines import fill

from steplab.cli.app import main
from steplab.lab import benchmark
from steplab.measurement.processes.launch import Cells
from steplab.records.comm import CommCell, CommRun
from steplab.store.database import Store

TINY = ("--size", "1kB,2kB,4kB", "--repeats", "3")


def test_collectives_are_measured_on_several_ranks_and_kept(steplab: Program) -> None:
    some = ("--collective", "all-reduce,send-recv")
    result = steplab("comm", "--processes", "2", *TINY, *some, "--format", "json", "--name", "mine")
    assert result.code == 0, result.stderr
    rows = result.rows()
    assert [row["collective"] for row in rows] == ["all_reduce"] * 3 + ["send_recv"] * 3
    with Store.open(steplab.store, write=False) as store:
        (listed,) = store.rows(kind="comm", name="mine")
        record = store.get(str(listed["id"]))
    assert isinstance(record, CommRun)
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert len({rank.host for rank in record.ranks}) == 1
    for row, cell in zip(rows, record.cells, strict=True):
        assert cell.failure is None
        assert len(cell.ranks) == cell.spec.world_size
        assert all(len(times.alone_s) == 3 for times in cell.ranks)
        assert row["time_s"] == max(median(times.alone_s) for times in cell.ranks) > 0
        assert cell.check is not None
        assert cell.check.num_elements > 0 == cell.check.num_wrong
        assert cell.wire_bytes == cell.message_bytes, "of both collectives on two ranks"
    assert {(fit.collective, fit.world_size) for fit in record.profile} == {("all_reduce", 2), ("send_recv", 2)}
    assert "[6/6] send_recv of 4 kB, gloo, 2 ranks: " in result.stderr


@pytest.mark.parametrize(("status", "code"), [("crashed", 1), ("out_of_memory", 0)])
def test_a_cell_that_ended_its_processes_is_a_failure_and_one_without_memory_is_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: Any, code: int
) -> None:
    from steplab.records.failure import Failure

    def ended(cells: Cells[CommCell], *, on_cell: Callable[[int, CommCell], None], **rest: Any) -> None:
        study: Any = cells.study
        on_cell(0, make_comm_cell(study.cells[0]))
        failure = Failure(kind=status, message="rank 1 on vm: gone")
        on_cell(1, make_comm_cell(study.cells[1], ranks=(), failure=failure))

    monkeypatch.setattr(benchmark, "measure_cells", ended)
    assert main(["comm", "--processes", "2", *TINY, "--store", str(tmp_path / "store.db")]) == code
    assert "rank 1 on vm: gone" in " ".join(capsys.readouterr().out.split())


def test_every_record_that_is_named_is_reported_or_the_format_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, benchmark, store = make_run(), make_comm(), ["--store", str(tmp_path / "store.db")]
    fill(tmp_path / "store.db", run, benchmark)
    both = [run.id, benchmark.id, *store]
    assert main(["report", *both]) == 0
    told = capsys.readouterr().out
    assert run.id in told
    assert "Bus bandwidth" in told
    for command, kind in (("report", "json"), ("report", "csv")):
        assert main([command, "--format", kind, *both]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"{kind} " in captured.err
    assert main(["report", "--format", "json", run.id, *store]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [run.id]
