import dataclasses
from collections.abc import Sequence
from statistics import median

import pytest
from tests.ddp_records import BYTES, LINK, TENSORS, make_ddp_run
from tests.rendering import render_page
from tests.sure import sure

from steplab.lab.ddp import overhead_model
from steplab.records.ddp import DdpCell, DdpRun
from steplab.records.registry import summary_row
from steplab.records.timing import PhaseSamples
from steplab.report.ddp import figures
from steplab.report.ddp.curve import bucket_curve
from steplab.report.ddp.document import REPORT as DDP_REPORT
from steplab.report.ddp.document import ddp_cell_line, exposed_bars, facts, memory_bars
from steplab.report.ddp.timelines import timelines
from steplab.report.kit.rendering import render


def render_ddp(run: DdpRun, format: str = "table", *, width: int | None = None) -> str:
    return render(DDP_REPORT.document(run), format, width=width)


@pytest.fixture(scope="module")
def run() -> DdpRun:
    return make_ddp_run()


def cell_of(run: DdpRun, label: str) -> DdpCell:
    return next(cell for cell in run.cells if cell.contender.label == label)


# --- figures ----------------------------------------------------------------------------------------------


def test_the_bars_are_the_exposed_communication_sorted_and_the_best_stand_out(run: DdpRun) -> None:
    bars = sure(exposed_bars(run))
    drawn = {bar.label: sum(segment.value for segment in bar.segments) for bar in bars.bars}
    exposed = {cell.contender.label: s for cell in run.cells if (s := figures.exposed_s(cell)) is not None}
    assert drawn == exposed
    assert list(drawn) == sorted(exposed, key=lambda name: exposed[name])
    theirs = sure(figures.best_ddp(run.cells))
    winner = min(exposed, key=lambda name: figures.step_s(cell_of(run, name)) or 0.0)
    assert {bar.label for bar in bars.bars if bar.strong} == {winner, theirs.contender.label}


def test_the_slowest_rank_counts_in_the_step_and_in_the_step_without(run: DdpRun) -> None:
    cell = cell_of(run, "flat")
    slow = dataclasses.replace(
        cell.ranks[1], phases=_slower(cell.ranks[1].phases, 2.0), baseline=_slower(cell.ranks[1].baseline, 2.0)
    )
    slowed = dataclasses.replace(cell, ranks=(cell.ranks[0], slow))
    own, without = median(slow.samples("step")), median(slow.samples("step", baseline=True))
    assert figures.step_s(slowed) == own
    assert figures.baseline_s(slowed) == without
    assert figures.exposed_s(slowed) == own - without
    assert figures.spread_over_ranks(slowed) == pytest.approx(own / median(cell.ranks[0].samples("step")) - 1)
    bounds = sure(figures.exposed_range_s(slowed))
    assert bounds[0] <= own - without <= bounds[1]


def test_parameters_apart_from_one_process_s_are_in_the_table_and_far_apart_a_warning(run: DdpRun) -> None:
    apart = {"flat": 1e-5, "overlap": 0.98}
    cells = [dataclasses.replace(cell, deviation=apart.get(cell.contender.kind)) for cell in run.cells]
    text = render_ddp(dataclasses.replace(run, cells=tuple(cells)), width=400)
    assert "vs one process" in text
    assert "1.0e-05" in text
    assert "Warning: parameters differ from one process's: overlap." in text
    assert "vs one process" not in render_ddp(run, width=400)


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
    row = figures.ddp_rows(unsettled)[0]
    beside = {
        phase: median(seconds for cell in run.cells[1:] if (seconds := figures.phase_s(cell, phase, baseline=True)))
        for phase in ("step", "forward", "optimizer")
    }
    assert (row["step_s"], row["forward_s"], row["optimizer_s"]) == tuple(beside.values())
    assert row["tokens_per_s"] == pytest.approx(run.study.tokens / beside["step"])
    assert float(str(row["rank_spread"])) < 0.02
    failed = dataclasses.replace(run, cells=(make_ddp_run(broken=("none",)).cells[0], *run.cells[1:]))
    assert figures.ddp_rows(failed)[0]["step_s"] is None


def test_tokens_are_not_told_of_a_model_that_sizes_its_batches_itself(run: DdpRun) -> None:
    own = dataclasses.replace(run, facts=dataclasses.replace(sure(run.facts), knows_tokens=False))
    assert {row["tokens_per_s"] for row in figures.ddp_rows(own)} == {None}
    assert None not in {row["tokens_per_s"] for row in figures.ddp_rows(run) if row["step_s"]}


def test_a_bucket_size_is_the_best_of_several_and_the_models_beside_the_best_measured(run: DdpRun) -> None:
    def told(cells: Sequence[DdpCell]) -> str:
        return " ".join(render_ddp(dataclasses.replace(run, cells=tuple(cells)), "md").split())

    theirs = [cell for cell in run.cells if cell.contender.kind == "torch_ddp"]
    others = [cell for cell in run.cells if cell.contender.kind != "torch_ddp"]
    best = sure(figures.best_ddp(theirs)).contender
    assert f" at its best bucket size, {best.bucket_size_mb:g} MB." in told(run.cells)
    assert ") at 1 MB." in told([*others, theirs[0]])
    ours = sure(figures.best(cell for cell in run.cells if cell.contender.kind == "bucketed")).contender
    model = f"the model's best bucket is {sure(run.model).best_bucket_mb:.3g} MB, the best measured "
    assert f"{model}{ours.bucket_size_mb:g} MB (bucketed)." in told(run.cells)
    assert f"{model}{best.bucket_size_mb:g} MB (torch DDP)." in told([others[0], *theirs])
    assert "the best measured" not in told(others[:1])


def test_names_with_commas_are_told_apart_and_peer_copy_is_explained() -> None:
    run = make_ddp_run(("none", "bucketed"))
    by_copies = [
        dataclasses.replace(
            cell, contender=dataclasses.replace(cell.contender, transport="peer_copy"), notes=("as noted",)
        )
        for cell in run.cells[1:3]
    ]
    text = " ".join(render_ddp(dataclasses.replace(run, cells=(run.cells[0], *by_copies)), width=400).split())
    assert "as noted (bucketed 1 MB, peer_copy; bucketed 10 MB, peer_copy)" in text
    assert "peer_copy: steplab's copies between GPUs." in text
    assert "peer_copy:" not in render_ddp(run, width=400)


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
        assert ("Hidden:" in render_ddp(dataclasses.replace(run, cells=(beside(0.104, noise),)))) == explained
    bounds = sure(figures.exposed_range_s(beside(0.104, 0.1)))
    assert bounds[0] < 0 < 0.004 < bounds[1]


# --- shown ------------------------------------------------------------------------------------------------


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


def test_pictures_leave_out_what_was_not_measured() -> None:
    bare = make_ddp_run(("naive",), broken=("none", "naive"))
    assert exposed_bars(bare) is None
    assert memory_bars(bare) is None
    assert timelines(bare) is None
    assert bucket_curve(bare) is None
    assert bare.model is None
    assert "out of memory" in str(render_page([make_ddp_run(broken=("flat",))], title="Study"))
    unfitted = dataclasses.replace(make_ddp_run(), model=None)
    curve = sure(bucket_curve(unfitted))
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
    row = figures.ddp_rows(on_cpu)[0]
    assert row["after_step_other_bytes"] is None
    assert row["peak_bytes"] is None
    chart = sure(memory_bars(on_cpu))
    assert "without the allocator's count" in chart.note


def test_the_usual_baseline_is_of_the_turns_and_not_of_the_first_steps(run: DdpRun) -> None:
    beside = [seconds for cell in run.cells if (seconds := figures.baseline_s(cell)) is not None]
    assert figures.usual_baseline_s(run) == median(beside)
    alone = dataclasses.replace(run, cells=run.cells[:1])
    assert figures.usual_baseline_s(alone) == figures.step_s(run.cells[0])


def test_a_study_cut_short_is_listed_with_as_many_contenders_as_were_asked_for(run: DdpRun) -> None:
    short = dataclasses.replace(run, cells=run.cells[:2])
    row, asked = summary_row(short), len(run.study.contenders)
    assert (row["num_cells"], row["num_ok"], row["num_failed"], row["warnings"]) == (asked, 2, 0, "interrupted")
    assert summary_row(run)["warnings"] is None
    warning = f"Warning: the benchmark was interrupted: 2 of {asked} variants had ended, and the record has only these."
    assert DDP_REPORT.document(short).verdict.cautions[0] == warning


def test_the_model_takes_the_backward_pass_of_the_turns(run: DdpRun) -> None:
    model = sure(overhead_model(run.cells, run.facts))
    beside = [figures.phase_s(cell, "backward", baseline=True) for cell in run.cells]
    assert model.backward_s == median(seconds for seconds in beside if seconds)
