"""A data-parallel study stored, and shown: every figure comes from the samples."""

import csv
import dataclasses
import io
import json
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ddp_records import BYTES, LINK, TENSORS, make_ddp_run
from tests.runs import make_run
from tests.traces import AUTOGRAD, HandTrace

from steplab.errors import SteplabError
from steplab.lab.ddp_model import overhead_model
from steplab.lab.reporting import records_to_report
from steplab.reading.traces.categories import kernel_category
from steplab.reading.traces.communication import traced_steps
from steplab.records.codec import decode, encode
from steplab.records.ddp import COMMUNICATION_ROW, COMPUTE_ROW, DdpCell, DdpRun, TracedSteps, ddp_row
from steplab.records.registry import kind_of
from steplab.records.timing import PhaseSamples
from steplab.report.ddp import figures
from steplab.report.ddp.bars import exposed_bars, memory_bars
from steplab.report.ddp.curve import bucket_curve
from steplab.report.ddp.document import REPORT as DDP_REPORT
from steplab.report.ddp.document import ddp_cell_line
from steplab.report.ddp.rows import ddp_rows
from steplab.report.ddp.timelines import timelines
from steplab.report.ddp.words import facts
from steplab.report.kit.rendering import render
from steplab.report.page import render_page
from steplab.store.database import Store


def render_ddp(run: DdpRun, format: str = "table", *, width: int | None = None) -> str:
    return render(DDP_REPORT.document(run), format, width=width)


@pytest.fixture(scope="module")
def run() -> DdpRun:
    return make_ddp_run()


def cell_of(run: DdpRun, label: str) -> DdpCell:
    return next(cell for cell in run.cells if cell.contender.label == label)


# --- kept -------------------------------------------------------------------------------------------------


def test_a_study_comes_back_as_it_was_written_and_is_listed(run: DdpRun, tmp_path: Path) -> None:
    assert decode(encode(run)) == run
    assert kind_of(run).name == "ddp"
    broken = make_ddp_run(broken=("flat",))
    with Store.open(tmp_path / "store.db", write=True) as store:
        store.add(run)
        store.add(broken)
        assert store.rows() == []  # a listing of runs is of runs
        assert [(row["num_ranks"], row["num_ok"], row["num_failed"]) for row in store.rows(kind="ddp")] == [
            (2, 13, 1),
            (2, 14, 0),
        ]
        assert store.get(run.id[:6]) == run


def test_a_report_without_any_run_is_of_the_newest_study_and_ids_take_any(run: DdpRun, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db", write=True) as store:
        store.add(run)
        assert records_to_report(store=store.path).of("ddp") == (run,)
        step = make_run()
        store.add(step)
        assert records_to_report(store=store.path).of("ddp") == ()
        both = records_to_report((run.id, step.id), store=store.path)
        assert (both.of("ddp"), both.of("run")) == ((run,), (step,))


# --- figures ----------------------------------------------------------------------------------------------


def test_the_bars_are_the_exposed_communication_sorted_and_the_best_stand_out(run: DdpRun) -> None:
    bars = exposed_bars(run)
    assert bars is not None
    drawn = {bar.label: sum(segment.value for segment in bar.segments) for bar in bars.bars}
    exposed = {cell.contender.label: s for cell in run.cells if (s := figures.exposed_s(cell)) is not None}
    assert drawn == {name: max(seconds, 0.0) for name, seconds in exposed.items()}
    assert list(drawn) == sorted(exposed, key=lambda name: exposed[name])
    theirs = figures.best_ddp(run.cells)
    assert theirs is not None
    winner = min(exposed, key=lambda name: figures.step_s(cell_of(run, name)) or 0.0)
    assert {bar.label for bar in bars.bars if bar.strong} == {winner, theirs.contender.label}


def test_the_slowest_rank_counts_in_the_step_and_in_the_step_without(run: DdpRun) -> None:
    cell = cell_of(run, "flat")
    slow = dataclasses.replace(
        cell.ranks[1],
        phases=_slower(cell.ranks[1].phases, 2.0),
        baseline=_slower(cell.ranks[1].baseline, 2.0),
    )
    slowed = dataclasses.replace(cell, ranks=(cell.ranks[0], slow))
    own, without = median(slow.samples("step")), median(slow.samples("step", baseline=True))
    assert figures.step_s(slowed) == own
    assert figures.baseline_s(slowed) == without
    assert figures.exposed_s(slowed) == own - without
    assert figures.spread_over_ranks(slowed) == pytest.approx(own / median(cell.ranks[0].samples("step")) - 1)
    bounds = figures.exposed_range_s(slowed)
    assert bounds is not None
    assert bounds[0] <= own - without <= bounds[1]


def _slower(phases: tuple[PhaseSamples, ...], factor: float) -> tuple[PhaseSamples, ...]:
    return tuple(PhaseSamples(phase=p.phase, device_s=tuple(s * factor for s in p.best_s)) for p in phases)


def test_the_model_finds_the_link_the_study_was_made_with(run: DdpRun) -> None:
    assert run.model is not None
    assert run.model.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=0.02)
    assert run.model.call_s == pytest.approx(LINK.call_s, rel=0.1)
    assert run.model.best_bucket_mb == pytest.approx(LINK.best_bucket_bytes(BYTES) / 1e6, rel=0.1)
    assert run.model.curve[0].num_buckets == TENSORS  # a gradient is not divided
    assert run.model.curve[-1].num_buckets == pytest.approx(8e3 / run.model.curve[-1].bucket_mb, rel=1e-6)


def test_the_row_without_communication_is_as_it_was_beside_the_others(run: DdpRun) -> None:
    baseline = run.cells[0]
    first = dataclasses.replace(
        baseline, ranks=tuple(dataclasses.replace(r, phases=_slower(r.phases, 1.2 + r.rank)) for r in baseline.ranks)
    )
    unsettled = dataclasses.replace(run, cells=(first, *run.cells[1:]))
    row = ddp_rows(unsettled)[0]
    beside = {
        phase: median(seconds for cell in run.cells[1:] if (seconds := figures.phase_s(cell, phase, baseline=True)))
        for phase in ("step", "forward", "optimizer")
    }
    assert (row["step_s"], row["forward_s"], row["optimizer_s"]) == tuple(beside.values())
    assert row["tokens_per_s"] == pytest.approx(run.study.tokens / beside["step"])
    assert float(str(row["rank_spread"])) < 0.02
    failed = dataclasses.replace(run, cells=(make_ddp_run(broken=("none",)).cells[0], *run.cells[1:]))
    assert ddp_rows(failed)[0]["step_s"] is None


def test_tokens_are_not_told_of_a_model_that_sizes_its_batches_itself(run: DdpRun) -> None:
    assert run.facts is not None
    own = dataclasses.replace(run, facts=dataclasses.replace(run.facts, knows_tokens=False))
    assert {row["tokens_per_s"] for row in ddp_rows(own)} == {None}
    assert None not in {row["tokens_per_s"] for row in ddp_rows(run) if row["step_s"]}


def test_a_share_that_is_hidden_is_told_where_the_noise_allows_it(run: DdpRun) -> None:
    cell = cell_of(run, "flat")

    def beside(step_s: float, noise: float) -> DdpCell:
        times = tuple(step_s * (1 + noise * (index % 3 - 1)) for index in range(12))
        ranks = [
            dataclasses.replace(r, phases=(PhaseSamples(phase="step", device_s=times),), alone_s=(0.010,) * 3,
                                baseline=(PhaseSamples(phase="step", device_s=(0.100,) * 12),)) for r in cell.ranks
        ]  # fmt: skip
        return dataclasses.replace(cell, ranks=tuple(ranks))

    assert figures.hidden(beside(0.104, 0.0)) == pytest.approx(0.6)
    assert figures.hidden(beside(0.115, 0.0)) == pytest.approx(-0.5), "it costs more than it takes by itself"
    assert figures.hidden(beside(0.099, 0.0)) == 1.0, "a step cannot hide more than there is"
    assert figures.hidden(beside(0.104, 0.1)) is None, "10 ms to either side, of 10 ms"
    for noise, explained in ((0.0, True), (0.1, False)):
        assert ("Hidden is" in render_ddp(dataclasses.replace(run, cells=(beside(0.104, noise),)))) == explained
    noisy = dataclasses.replace(run, cells=(run.cells[0], beside(0.104, 0.1)), model=None)
    text = render_ddp(noisy, "md")
    assert "adds 4.00 ms (-6.40 ms to 14.4 ms) of exposed communication to a step of 100 ms" in text
    assert "exposed, min" in text


def test_rows_have_what_a_contender_adds_beside_what_torch_s_adds_at_its_best(run: DdpRun) -> None:
    rows = {str(row["contender"]): row for row in ddp_rows(run)}
    assert rows["no communication"]["exposed_s"] is None
    best = min(float(row["exposed_s"]) for row in rows.values() if row["kind"] == "torch_ddp")  # type: ignore[arg-type]
    for row in rows.values():
        if row["exposed_s"] is not None:
            assert row["of_best_ddp"] == pytest.approx(row["exposed_s"] / best)  # type: ignore[operator]
            if row["hidden"] is not None:
                whole_s = float(row["alone_s"])  # type: ignore[arg-type]
                assert row["hidden"] == pytest.approx(1 - max(float(row["exposed_s"]), 0) / whole_s)
    assert rows["sharded 25 MB"]["after_step_optimizer_bytes"] == BYTES
    assert rows["sharded 25 MB"]["after_step_formula_bytes"] == 3 * BYTES
    assert rows["FSDP2"]["after_step_formula_bytes"] == 2 * BYTES
    assert rows["flat"]["after_step_other_bytes"] == 10**8
    assert rows["flat"]["peak_bytes"] == 6 * BYTES


# --- shown ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["table", "md", "latex", "csv", "json"])
def test_every_format_names_every_contender_and_every_failure(format: str) -> None:
    broken = make_ddp_run(broken=("flat",))
    text = render_ddp(broken, format, width=150)
    for cell in broken.cells:
        assert cell.contender.label in text
    assert "8.00 GiB more" in text
    if format == "json":
        assert [row["contender"] for row in json.loads(text)] == [cell.contender.label for cell in broken.cells]
    if format == "csv":
        assert len(list(csv.DictReader(io.StringIO(text)))) == len(broken.cells)


def test_for_how_long_devices_were_held_is_told_where_it_is_known(run: DdpRun) -> None:
    assert not any("held" in text for text in facts(run))
    held = [dataclasses.replace(rank, held_s=0.1 + 0.02 * rank.rank) for rank in run.cells[1].ranks]
    cells = (run.cells[0], dataclasses.replace(run.cells[1], ranks=tuple(held)), *run.cells[2:])
    (text,) = (text for text in facts(dataclasses.replace(run, cells=cells)) if "held" in text)
    assert "held idle for 100 ms to 120 ms" in text


def test_a_line_of_progress_says_the_step_and_what_is_exposed(run: DdpRun) -> None:
    assert ddp_cell_line(cell_of(run, "naive")).startswith("naive: ")
    assert "of it exposed" in ddp_cell_line(cell_of(run, "naive"))
    assert "out of memory" in ddp_cell_line(cell_of(make_ddp_run(broken=("flat",)), "flat"))


def test_the_page_has_its_pictures(run: DdpRun) -> None:
    page = render_page([run], title="Study")
    assert 'id="ddp"' in page
    strategies = {cell.contender.family for cell in run.cells if cell.traced}
    assert page.count("<svg") == 1 + len(strategies)
    assert page.count('<ol class="bars">') == 2
    for words in ("exposed communication", "before the update", "messages", "sqrt(s w o)", "optimizer state"):
        assert words in page
    assert page == render_page([run], title="Study")


def test_pictures_leave_out_what_was_not_measured() -> None:
    bare = make_ddp_run(("naive",), broken=("none", "naive"))
    assert exposed_bars(bare) is None
    assert memory_bars(bare) is None
    assert timelines(bare) is None
    assert bucket_curve(bare) is None
    assert bare.model is None
    assert "out of memory" in str(render_page([make_ddp_run(broken=("flat",))], title="Study"))
    unfitted = dataclasses.replace(make_ddp_run(), model=None)
    curve = bucket_curve(unfitted)
    assert curve is not None
    assert "too little was measured" in curve.note


def test_where_the_allocator_keeps_no_count_the_rest_is_absent(run: DdpRun) -> None:
    def uncounted(cell: DdpCell) -> DdpCell:
        ranks = [
            dataclasses.replace(
                rank, memory=tuple(dataclasses.replace(held, allocated_bytes=None) for held in rank.memory), peak=None
            )
            for rank in cell.ranks
        ]
        return dataclasses.replace(cell, ranks=tuple(ranks))

    on_cpu = dataclasses.replace(run, cells=tuple(map(uncounted, run.cells)))
    row = ddp_rows(on_cpu)[0]
    assert row["after_step_other_bytes"] is None
    assert row["peak_bytes"] is None
    chart = memory_bars(on_cpu)
    assert chart is not None
    assert "keeps no count" in chart.note


def test_the_usual_baseline_is_of_the_turns_and_not_of_the_first_steps(run: DdpRun) -> None:
    beside = [seconds for cell in run.cells if (seconds := figures.baseline_s(cell)) is not None]
    assert figures.usual_baseline_s(run) == median(beside)
    alone = dataclasses.replace(run, cells=run.cells[:1])
    assert figures.usual_baseline_s(alone) == figures.step_s(run.cells[0])


def test_a_study_cut_short_is_listed_with_as_many_contenders_as_were_asked_for(run: DdpRun) -> None:
    short = dataclasses.replace(run, cells=run.cells[:2])
    row, asked = ddp_row(short), len(run.study.contenders)
    assert (row["num_cells"], row["num_ok"], row["num_failed"], row["warnings"]) == (asked, 2, 0, "interrupted")
    assert ddp_row(run)["warnings"] is None
    warning = f"Warning: the benchmark was interrupted: 2 of {asked} variants had ended, and the record has only these."
    assert DDP_REPORT.document(short).verdict.cautions[0] == warning


def test_the_model_takes_the_backward_pass_of_the_turns(run: DdpRun) -> None:
    model = overhead_model(run.cells, run.facts)
    assert model is not None
    beside = [figures.phase_s(cell, "backward", baseline=True) for cell in run.cells]
    assert model.backward_s == median(seconds for seconds in beside if seconds)


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
GEMM = "nvjet_tst_128x128_NNT"
END = 40
pairs = st.tuples(st.integers(0, END), st.integers(0, END)).map(sorted).filter(lambda pair: pair[0] < pair[1])
intervals = st.lists(pairs, max_size=6)


def covered(spans: list[list[int]]) -> set[int]:
    return {instant for start, end in spans for instant in range(start, end)}


@given(intervals.filter(bool), intervals)
def test_on_a_gpu_kernels_of_the_library_are_messages(computed: list[list[int]], sent: list[list[int]]) -> None:
    trace = HandTrace()
    trace.range("step", 0, 100)
    trace.range("backward", 0, 90)
    for name, stream, spans in ((GEMM, 7, computed), (NCCL, 20, sent)):
        for start, end in spans:
            trace.kernel(name, 50 + start, 50 + end, launch=(1, 2), stream=stream)
    found = traced_steps(trace.build())
    both = covered(computed) & covered(sent)
    assert found.communication_s == pytest.approx(len(covered(sent)) * 1e-6)
    assert found.overlapped_s == pytest.approx(len(both) * 1e-6)
    assert found.exposed_s == pytest.approx(len(covered(sent) - covered(computed)) * 1e-6)
    first = min(start for start, _ in (*computed, *sent))  # a GPU's step begins with its first piece of work
    assert drawn(found, COMMUNICATION_ROW, -first) == covered(sent)
    assert drawn(found, COMPUTE_ROW, -first) == covered(computed)


@given(intervals.filter(bool), intervals)
def test_on_a_cpu_they_are_what_gloo_marks_on_its_own_threads(computed: list[list[int]], sent: list[list[int]]) -> None:
    trace = HandTrace()
    trace.range("step", 0, 100)
    trace.range("backward", 5, 70)
    for thread, (start, end) in enumerate(computed):
        trace.op("aten::mm", 20 + start, 20 + end, thread=10 + thread)
    trace.op("c10d::allreduce_", 6, 8)
    for thread, (start, end) in enumerate(sent):
        trace.range("gloo:all_reduce", 20 + start, 20 + end, thread=20 + thread)
    found = traced_steps(trace.build())
    assert found.communication_s == pytest.approx(len(covered(sent)) * 1e-6)
    assert found.overlapped_s == pytest.approx(len(covered(sent) & covered(computed)) * 1e-6)
    assert drawn(found, COMPUTE_ROW, 20) == covered(computed)
    assert found.timeline.phases == (("backward", 5000, 70000),)


def drawn(found: TracedSteps, row: int, zero: int) -> set[int]:
    """The microseconds that a row of the picture covers, counted from `zero`."""
    timeline = found.timeline
    pieces = zip(timeline.stream, timeline.start_ns, timeline.duration_ns, strict=True)
    spans = [(start, start + lasts) for on, start, lasts in pieces if on == row]
    return {instant // 1000 - zero for start, end in spans for instant in range(start, end, 1000)}


def two_steps() -> HandTrace:
    """Two steps on a GPU, the messages of each half under its backward pass; a warm-up step that is not told."""
    trace = HandTrace()
    for number, name in enumerate(("warmup step", "step", "step")):
        zero = 1000 * number
        trace.range(name, zero, zero + 900)
        for phase, start, end in (("forward", 10, 200), ("backward", 200, 500), ("optimizer", 600, 700)):
            trace.range(phase, zero + start, zero + end)
            trace.kernel(GEMM, zero + start + 100, zero + end + 100, launch=(zero + start, zero + start + 1))
        trace.kernel(NCCL, zero + 400, zero + 700, launch=(zero + 300, zero + 301), stream=20, thread=AUTOGRAD)
    return trace


def test_figures_are_a_step_s_and_the_last_step_is_drawn_from_its_beginning() -> None:
    found = traced_steps(two_steps().build())
    assert found.num_steps == 2
    assert found.communication_s == pytest.approx(300e-6)
    assert found.overlapped_s == pytest.approx(200e-6)
    assert found.timeline.start_ns[0] == 0
    assert found.timeline.phases[0][0] == "forward"
    assert [name for name, *_ in found.timeline.phases] == ["forward", "backward", "optimizer"]


def test_the_time_between_two_steps_for_which_a_gpu_was_held_is_no_part_of_them() -> None:
    # From the first kernel at 110 to the last at 800; the steps begin 1000 apart, and what lies between is nobody's.
    assert traced_steps(two_steps().build()).step_s == pytest.approx(690e-6)


def test_copies_are_drawn_and_hide_nothing() -> None:
    trace = two_steps()
    trace.kernel("Memcpy DtoD (Device -> Device)", 2600, 2700, launch=(2302, 2303), stream=7)
    with_copy, without = traced_steps(trace.build()), traced_steps(two_steps().build())
    assert with_copy.exposed_s == without.exposed_s
    assert "copy" in with_copy.timeline.categories


def test_what_runs_on_a_stream_of_messages_is_part_of_them() -> None:
    """Gradients that are copied to the other GPUs are averaged there, between two signals."""
    trace = two_steps()
    # Between two GPUs, and yet a copy within one to the profiler, as it may be for mapped memory.
    for stream, name, start, end in (
        (21, "Memcpy DtoD (Device -> Device)", 2600, 2610),
        (22, "mean_kernel", 2700, 2800),
    ):
        trace.kernel(name, start, end, launch=(2302, 2303), stream=stream)
    found = traced_steps(trace.build())
    assert found.communication_s == pytest.approx((2 * 300 + 100) / 2 * 1e-6)  # the copy lies within a message
    assert found.exposed_s == pytest.approx((2 * 100 + 0) / 2 * 1e-6)  # the optimizer runs above the mean


def test_a_copy_between_gpus_is_a_message() -> None:
    assert kernel_category("Memcpy PtoP (Device -> Device)") == "communication"
    assert kernel_category("c10d::symmetric_memory::wait_signal_kernel(unsigned int**)") == "communication"
    assert kernel_category("Memcpy DtoD (Device -> Device)") == "copy"


def test_a_trace_without_steps_or_work_is_refused() -> None:
    with pytest.raises(SteplabError, match="marks no steps"):
        traced_steps(HandTrace().build())
    trace = two_steps().build()
    nothing = dataclasses.replace(trace, ranges=HandTrace().build().ranges)
    with pytest.raises(SteplabError, match="marks no steps"):
        traced_steps(nothing)
