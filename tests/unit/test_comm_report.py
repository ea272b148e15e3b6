import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from matplotlib.axes import Axes
from tests.attention_records import make_benchmark
from tests.comm_records import ALPHA_S, failing, make_comm, make_comm_cell, make_failure
from tests.ddp_records import make_ddp_run
from tests.rendering import render_page
from tests.runs import make_run
from tests.stored_lines import import_lines
from tests.sure import sure

from steplab.lab.choosing import records_to_report
from steplab.lab.comm import profile_of, with_profile
from steplab.records.codec import encode
from steplab.records.comm import CommCell, CommRun
from steplab.records.record import Record
from steplab.records.registry import kind_of, summary_row
from steplab.report.attention.document import REPORT as ATTENTION_REPORT
from steplab.report.comm.charts import time_over_size
from steplab.report.comm.document import REPORT as COMM_REPORT
from steplab.report.comm.document import bandwidth_table, comm_cell_line, comm_rows
from steplab.report.ddp.document import REPORT as DDP_REPORT
from steplab.report.kit.charts import DASHED
from steplab.report.kit.document import Document
from steplab.report.kit.rendering import render
from steplab.report.run.columns import rows_document
from steplab.specs.comm import CommStudy
from steplab.store.database import Store


def render_comm(run: CommRun, format: str = "table", width: int | None = None) -> str:
    return render(COMM_REPORT.document(run), format, width=width)


@pytest.fixture(scope="module")
def gpus() -> CommRun:
    return make_comm()


# --- kept -------------------------------------------------------------------------------------------------


def test_an_interrupted_benchmark_says_so(gpus: CommRun) -> None:
    short = dataclasses.replace(gpus, cells=gpus.cells[:6])
    assert COMM_REPORT.document(short).verdict.cautions[0] == (
        "Warning: the benchmark was interrupted: 6 of 48 cells had ended, and the record has only these."
    )
    assert summary_row(short)["warnings"] == "interrupted"


@pytest.mark.parametrize(
    ("run", "counts"),
    [(make_comm(), (48, 48, 0)), (make_benchmark("peers"), (35, 29, 6)), (make_ddp_run(broken=("flat",)), (14, 13, 1))],
    ids=["comm", "attention", "ddp"],
)
def test_a_benchmark_is_stored_listed_exported_and_imported(run: Any, counts: tuple[int, ...], tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db", write=True) as store:
        store.add(run)
        (row,) = store.rows(kind=kind_of(run).name)
        assert (row["num_cells"], row["num_ok"], row["num_failed"]) == counts
        assert store.rows() == []  # a listing of runs is of runs
        assert store.get(run.id[:6]) == run
        lines = [encode(record) for record in store.iterate()]
    with Store.open(tmp_path / "other.db", write=True) as other:
        assert import_lines(other, lines) == (1, 0)
        assert other.get(run.id) == run
    assert records_to_report(store=tmp_path / "store.db").records == (run,)
    assert records_to_report((run.id,), store=tmp_path / "store.db").records == (run,)


def test_a_listing_tells_benchmarks_apart_also_from_older_ones(gpus: CommRun) -> None:
    cpu = make_comm({"backend": ["gloo"], "collective": ["broadcast", "all_reduce"]}, ranks=2)
    older = {key: value for key, value in summary_row(gpus).items() if key not in ("backend", "collectives")}
    text = render(rows_document([older, summary_row(cpu)]), width=119)  # not known to be gloo's
    assert re.search(rf"{gpus.id} +4 +– +– +48 ", text)
    assert re.search(rf"{cpu.id} +2 +gloo +broadcast, all_reduce +8 ", text)
    studies = [make_ddp_run(("flat", "bucketed")), make_ddp_run(("torch_ddp",))]
    rows = [summary_row(run) for run in studies]
    assert [(row["backend"], row["variants"]) for row in rows] == [("nccl", "flat; bucketed"), ("nccl", "torch DDP")]


def test_a_report_without_ids_is_of_what_was_measured_last(gpus: CommRun, tmp_path: Path) -> None:
    before, after = make_run(created_utc="2026-11-21T17:00:00Z"), make_run(created_utc="2026-11-21T19:00:00Z")
    after = dataclasses.replace(after, id="af7e00000000")
    swept = make_run(id="5e9700000000", created_utc="2026-11-21T20:00:00Z", study="5e5e5e5e5e5e")
    with Store.open(tmp_path / "store.db", write=True) as store:
        told = []
        for record in (before, gpus, after, swept, make_ddp_run(created_utc="2026-11-21T21:00:00Z")):
            store.add(record)
            selection = records_to_report(store=store.path)
            told.append([kind_of(record).name for record in selection.records])
    assert told == [["run"], ["comm"], ["run", "run"], ["run"], ["ddp"]]


# --- figures ----------------------------------------------------------------------------------------------


def test_a_cpus_times_are_those_of_single_calls() -> None:
    run = make_comm({"backend": ["gloo"]}, ranks=2)
    for row, cell in zip(comm_rows(run.cells), run.cells, strict=True):
        assert row["time_s"] == row["alone_s"] == median(cell.ranks[1].alone_s)
    text = render_comm(run, width=160)
    assert " alone " not in text
    assert "Calls are timed one by one, each after a barrier" in text


def test_calls_on_a_cpu_are_not_told_to_be_timed_by_events_as_a_gpus_beside_them() -> None:
    run = make_comm({"backend": ["nccl", "peer_copy", "gloo"], "collective": ["all_reduce"]}, ranks=2)
    text = " ".join(render_comm(run, width=160).split())
    assert "Calls of nccl and peer_copy are timed back to back by events on the device, short ones" in text
    assert "Calls of gloo are timed one by one, each after a barrier, by the host's clock." in text
    assert "(steplab's peer_copy) reaches" in text


def test_the_profile_is_without_a_cell_that_had_not_settled_and_says_so() -> None:
    lists: dict[str, Sequence[object]] = {"backend": ["gloo"], "collective": ["all_reduce"]}
    run = make_comm(lists, ranks=2)
    first = run.cells[0]
    slow = tuple(4e-3 if index < 6 else seconds for index, seconds in enumerate(first.ranks[1].alone_s))
    disturbed = make_comm_cell(first.spec, ranks=(first.ranks[0], dataclasses.replace(first.ranks[1], alone_s=slow)))
    cells = (disturbed, *run.cells[1:])
    (fit,) = profile_of(cells)
    assert fit.num_points == 3
    assert fit.alpha_s == pytest.approx(ALPHA_S["gloo"], rel=0.05)
    (note,) = with_profile(dataclasses.replace(run, cells=tuple(cells), notes=())).notes
    assert re.match(
        r"all_reduce of 10 kB, gloo, 2 ranks: call times did not settle \(medians of the first, middle and last third: "
        r"4.00 ms, 4.00 ms, 3\d\d µs\), so the communication profile leaves this cell out$",
        note,
    )
    assert profile_of(cells[:3])[0].num_points == 3, "of three sizes none can be left out"


def test_of_a_record_made_without_a_head_start_the_caption_says_so(gpus: CommRun) -> None:
    assert "include event and launch overhead" not in " ".join(render_comm(gpus, width=160).split())
    cell = gpus.cells[0]
    older = tuple(dataclasses.replace(times, num_waits=None) for times in cell.ranks)
    run = dataclasses.replace(gpus, cells=(dataclasses.replace(cell, ranks=older), *gpus.cells[1:]))
    assert "short messages, and α, include event and launch overhead" in " ".join(render_comm(run, width=160).split())


def test_of_samples_in_which_the_device_may_have_waited_for_python_a_note_tells() -> None:
    run = make_comm({"collective": ["all_reduce"]}, ranks=2)
    first = run.cells[0]
    late = make_comm_cell(first.spec, ranks=(first.ranks[0], dataclasses.replace(first.ranks[1], num_waits=4)))
    (note,) = with_profile(dataclasses.replace(run, cells=(late, *run.cells[1:]), notes=())).notes
    assert re.match(r"all_reduce of .*: in 4 of 9 samples of rank 1 the device may have waited for Python", note)


def test_what_was_timed_at_too_few_sizes_has_no_line_and_a_note_says_why() -> None:
    def gathered(cells: Sequence[CommCell]) -> CommRun:
        study = CommStudy(cells=tuple(cell.spec for cell in cells), num_processes=2)
        return with_profile(dataclasses.replace(make_comm(ranks=2), study=study, cells=tuple(cells), notes=()))

    three = ["1MB", "10MB", "100MB"]
    lists: dict[str, Sequence[object]] = {"collective": ["all_reduce", "broadcast"], "size": three, "world_size": [2]}
    cells = make_comm(lists, ranks=2).cells
    whole = gathered(cells)
    assert {fit.collective for fit in whole.profile} == {"all_reduce", "broadcast"}
    assert whole.notes == ()
    some = gathered([*cells[:5], make_failure(cells[5].spec)])
    assert {fit.collective for fit in some.profile} == {"all_reduce"}
    takes = "a line needs at least 3 timed sizes"
    assert some.notes == (f"the communication profile has no line for broadcast (nccl, fp32, 2 ranks): {takes}",)
    none = gathered(cells[:2])
    assert none.profile == ()
    assert none.notes == (f"the communication profile is empty: {takes}",)
    assert gathered([make_failure(cell.spec) for cell in cells]).notes == ()


# --- shown ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document_of", "run"),
    [
        (COMM_REPORT.document, make_comm()),
        (DDP_REPORT.document, make_ddp_run(("flat",))),
        (ATTENTION_REPORT.document, make_benchmark()),
    ],
    ids=["comm", "ddp", "attention"],
)
def test_documents_get_the_notes(document_of: Callable[[Any], Document], run: Any) -> None:
    noted = document_of(dataclasses.replace(run, notes=("of one_thing\nand another",)))
    assert "\n## Notes\n\n- of one\\_thing and another" in render(noted, "md")
    latex = render(noted, "latex")
    assert "\\section{Notes}" in latex
    assert "\\item of one\\_thing and another" in latex


def test_a_line_of_progress_has_time_and_bandwidth_or_what_went_wrong(gpus: CommRun) -> None:
    assert re.fullmatch(r"all_reduce of 1 MB, nccl, 2 ranks: 2\d\.\d µs, 3\d\.\d GB/s", comm_cell_line(gpus.cells[0]))
    failed = comm_cell_line(make_failure(gpus.cells[0].spec))
    assert failed.endswith(": out of memory: rank 1 on node1: asked for 1.00 GiB more (buffers)")


def test_a_page_has_bandwidth_and_time_over_size_with_the_fit(gpus: CommRun) -> None:
    page = render_page([gpus], title="Collectives")
    assert '<section id="communication">' in page
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 2 + 2  # bandwidth and time by world size
    first = gpus.cells[0]
    assert first.slowest is not None
    assert comm_cell_line(first).replace("µ", "µ") in page
    over_size = sure(time_over_size(gpus.cells, gpus.profile))
    assert [picture.svg.count("stroke-dasharray") for picture in over_size.pictures] == [6, 6]
    assert [picture.title for picture in over_size.pictures] == ["2 ranks", "4 ranks"]
    bare = sure(time_over_size(gpus.cells, ()))
    assert "stroke-dasharray" not in bare.pictures[0].svg


def test_the_line_of_a_fit_is_its_latency_and_the_time_of_the_bytes_on_the_wire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of 4 ranks sends 2 (4 - 1) / 4 of an all-reduce's message."""
    drawn: list[tuple[Any, ...]] = []
    plot = Axes.plot

    def seen(self: Axes, *given: Any, **options: Any) -> Any:
        if options.get("linestyle") == DASHED:
            drawn.append(given)
        return plot(self, *given, **options)

    monkeypatch.setattr(Axes, "plot", seen)
    run = make_comm({"collective": ["all_reduce"], "world_size": [4]})
    (fit,) = run.profile
    chart = sure(time_over_size(run.cells, run.profile))
    assert chart.pictures[0].svg
    ((xs, ys),) = drawn
    assert (xs[0], xs[-1]) == (1e6, pytest.approx(1e9))
    assert ys == pytest.approx([fit.alpha_s + 1.5 * x * fit.beta_s_per_byte for x in xs])


def test_a_page_explains_the_terms_that_it_uses(gpus: CommRun) -> None:
    def terms(record: Record) -> set[str]:
        page = render_page([record], title="Terms").partition('id="method"')[2]
        return set(re.findall(r"<dt>(.*?)</dt>", page))

    of_comm, of_ddp = terms(gpus), terms(make_ddp_run(("flat",)))
    steps = {"step time", "steady", "MFU", "HFU", "peak memory", "compile time"}
    assert {"algbw, busbw", "α, β, γ", "time of a call"} <= of_comm
    assert {"exposed communication", "bucket", "by formula", "95 % interval"} <= of_ddp
    assert not steps & (of_comm | of_ddp)
    assert steps <= terms(make_run())
    assert not of_comm & {"bucket"}


def test_failures_are_marked_in_pictures_and_tables() -> None:
    run = failing()
    chart = sure(time_over_size(run.cells, run.profile))
    assert "OOM" in chart.pictures[0].svg
    row = bandwidth_table(run.cells).rows[1]
    assert (row["collective"], row["1000000"]) == ("send_recv", "out of memory")
    nothing = make_comm(cells=tuple(make_failure(cell.spec) for cell in run.cells), profile=())
    assert nothing.status == "out_of_memory"
    assert "Bus bandwidth" not in render_comm(nothing)
    assert "<svg" not in render_page([nothing], title="Nothing")
    assert render_comm(make_comm(cells=(), profile=(), environment=None, libraries={}))


@pytest.mark.parametrize("told", [True, False])
def test_a_residual_is_explained_where_there_is_one(told: bool) -> None:
    run = make_comm({"size": ["1MB", "10MB", "100MB"], "world_size": [2]}, ranks=2)
    if not told:
        fits = [dataclasses.replace(fit, num_points=2, rms_relative=None, worst_relative=None) for fit in run.profile]
        run = dataclasses.replace(run, profile=tuple(fits))
    assert ("Residual" in render_comm(run)) == told
