import csv
import io
import json
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from tests.rendering import render_page, rows_text, run_text, sheet_of
from tests.runs import grid, make_run, out_of_memory, recorder_run
from tests.sure import sure
from tests.unit.memory_records import watched_run

from steplab import units
from steplab.records.failure import Failure
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing, curve
from steplab.report.kit.document import Bars, Chart
from steplab.report.kit.rendering import FORMATS
from steplab.report.kit.text import ABSENT
from steplab.report.run import charts, curves
from steplab.report.run.cells import cells_of, over_size, varying
from steplab.report.run.effects import effect_bars
from steplab.report.run.one_run import phase_names, steady_words, warmup_means
from steplab.report.run.verdict import runs_verdict

HOSTILE = r"<script>alert(1)</script> | \input{x} $&%_~^ {{ 7*7 }} \x1b[31m" + "\x1b[31m"
STUDY = grid({"model": ["small", "medium"], "context": [128, 256], "precision": ["fp32", "bf16"]})
MIXED = [*STUDY, out_of_memory({"model": "xl"}), recorder_run()]


def timed(samples: list[float], warmup: list[float] | None = None) -> Run:
    before = (PhaseSamples(phase="step", host_s=tuple(warmup)),) if warmup else ()
    timing = Timing(warmup=before, back_to_back=(PhaseSamples(phase="step", host_s=tuple(samples)),))
    return recorder_run(timing=timing)


# --- rows -------------------------------------------------------------------------------------------------


def test_json_holds_the_rows_themselves() -> None:
    rows = [run_row(run) for run in MIXED]
    assert json.loads(rows_text(rows, "json")) == rows


def test_csv_holds_the_rows_themselves_and_leaves_what_is_absent_empty() -> None:
    rows = [run_row(run) for run in MIXED]
    read = list(csv.DictReader(io.StringIO(rows_text(rows, "csv"))))
    assert [list(row) for row in read] == [list(row) for row in rows]
    for row, expected in zip(read, rows, strict=True):
        for key, value in expected.items():
            assert row[key] == ("" if value is None else str(value))


@pytest.mark.parametrize("name", [HOSTILE, "a|b", "back\\|slash", "new\nline"])
def test_markdown_rows_keep_their_number_of_cells(name: str) -> None:
    lines = rows_text([run_row(replace(run, name=name)) for run in STUDY[:1]], "md").splitlines()
    counts = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines[:3]}
    assert len(counts) == 1
    assert "<script" not in "\n".join(lines)


def test_latex_escapes_what_it_would_act_on() -> None:
    text = rows_text([run_row(replace(STUDY[0], name=HOSTILE))], "latex")
    assert r"\textbackslash{}input\{x\} \$\&\%\_\textasciitilde{}\textasciicircum{}" in text
    assert r"\input" not in text
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body.splitlines() if line.endswith(r"\\")}) == 1
    assert r"\begin{longtable}" in text
    assert r"\end{longtable}" in text


def test_constants_move_to_the_caption_and_empty_columns_go() -> None:
    sheet = sheet_of([run_row(run) for run in STUDY])
    shown = [column.key for column in sheet.columns]
    assert "batch" not in shown
    assert "compile_s" not in shown
    assert {"model", "context", "precision", "step_time_s", "mfu"} <= set(shown)
    for shared in ("batch 4", "5 warm-up steps", "10 measured steps", "NVIDIA H200"):
        assert shared in sheet.caption
    assert "MFU (causal)" in [column.heading for column in sheet.columns]


def test_a_failure_is_a_row_with_its_reason() -> None:
    sheet = sheet_of([run_row(run) for run in MIXED])
    keys = [column.key for column in sheet.columns]
    failed = dict(zip(keys, sheet.rows[len(STUDY)], strict=True))
    assert failed["failure"] == "out of memory: asked 8.00 GiB"
    assert failed["step_time_s"] == failed["mfu"] == failed["peak_allocated_bytes"] == ABSENT


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_the_table_fits_and_no_figure_is_cut(width: int) -> None:
    rows = [run_row(run) for run in MIXED]
    text = rows_text(rows, "table", width=width)
    assert max(map(len, text.splitlines())) <= width
    for row in rows:
        if isinstance(row["step_time_s"], float):
            assert units.format_time(row["step_time_s"]) in text
    assert "…" not in text


def test_tables_are_plain_unless_colour_is_asked_for_and_the_record_adds_none() -> None:
    rows = [run_row(replace(run, name=HOSTILE)) for run in MIXED]
    assert "\x1b" not in rows_text(rows, "table", width=400)
    assert "\x1b[31m" in rows_text(rows, "table", width=400, color=True)


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(format: str) -> None:
    assert isinstance(rows_text([], format), str)


# --- one run ----------------------------------------------------------------------------------------------


def test_the_run_view_shows_independently_computed_statistics() -> None:
    run = make_run({"compile": "default"})
    step = sure(sure(run.timing).phase("step"))
    values = np.array(step.best_s)
    text = run_text(run, width=140)
    for figure in (np.median(values), values.mean(), values.std(ddof=1), *np.percentile(values, [25, 75])):
        assert units.format_time(float(figure)) in text
    assert units.format_percent(run.utilizations[0].value or 0) in text
    for shown in ("MFU (causal)", "MFU (full)", "HFU (as executed)", "NVIDIA H200 data sheet", "n = 10", "21.0 s"):
        assert shown in text


def test_what_is_absent_is_a_dash_and_never_zero() -> None:
    text = run_text(recorder_run(), width=120)
    assert re.search(rf"throughput\s+{ABSENT}", text)
    assert not re.search(r"(?<![\d.])0(\.0+)? (ms|B|GiB|%|FLOP)", text)
    assert "the loop did not say how many FLOPs" in text


def test_a_failed_run_says_all_that_is_known_of_it() -> None:
    failure = Failure(
        kind="crashed",
        message="the process died",
        phase="measure",
        requested_bytes=2**33,
        peak_allocated_bytes=2**35,
        signal="SIGKILL",
        last_lines=("Killed\x1b[2J",),
    )
    text = run_text(out_of_memory(failure=failure), width=100)
    for shown in ("crashed: the process died", "measure", "SIGKILL", "8.00 GiB", "32.0 GiB", "Killed"):
        assert shown in text
    assert "\x1b" not in text


def test_a_table_of_memory_keeps_the_peak_and_what_moves_it() -> None:
    runs = [
        watched_run({"precision": precision, "checkpointing": checkpointing}, name="a-name-as-long-as-names-become")
        for precision in ("fp32", "bf16")
        for checkpointing in ("none", "full")
    ]
    rows = [run_row(run) | {"compile": mode} for run, mode in zip(runs, ("off", "default") * 2, strict=True)]
    for kept in ("allocated", "reserved", "checkpointing", "compile"):
        assert kept in rows_text(rows, "table", width=92).splitlines()[0]
    unwatched = [row | {"memory_source": None} for row in rows]
    assert "reserved" not in rows_text(unwatched, "table", width=92).splitlines()[0]


# --- figures ----------------------------------------------------------------------------------------------


def test_warmup_means_equal_those_over_windows_of_the_curve() -> None:
    run = make_run()
    assert run.timing is not None
    samples = curve(run.timing)
    for count, mean_s in warmup_means(run.timing).items():
        assert mean_s == pytest.approx(np.mean(samples[count : count + 10]))


def test_warmup_means_are_missing_where_the_curve_is_too_short() -> None:
    run = timed([1.0, 1.0, 1.0], warmup=[9.0])
    assert list(warmup_means(sure(run.timing)).values()) == [pytest.approx(11 / 3), 1.0, None, None]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([9, 2, 1, 1, 1, 1, 1, 1], "steady from step 3 of 8"),
        ([1] * 6, "steady from step 1 of 6"),
        ([1, 2, 3, 4, 5, 6, 7, 8], "did not settle in 8 steps"),
        ([1, 1], "too few steps to tell"),
    ],
)
def test_steadiness_in_words(samples: list[float], words: str) -> None:
    assert steady_words(samples).startswith(words)


def test_a_users_phases_keep_their_order() -> None:
    assert phase_names(recorder_run()) == ["load batch", "forward", "update"]
    assert phase_names(make_run()) == ["forward", "backward", "optimizer"]


# --- the layout of charts ---------------------------------------------------------------------------------


def test_sizes_become_the_axis_and_the_rest_colour() -> None:
    axis, panels = sure(over_size(cells_of(STUDY)))
    assert axis == "context"
    assert list(panels) == [""]
    assert list(panels[""]) == ["small · fp32", "small · bf16", "medium · fp32", "medium · bf16"]
    assert all([cell.values["context"] for cell in line] == [128, 256] for line in panels[""].values())


def test_without_a_common_size_there_are_bars() -> None:
    runs = [make_run({"precision": "bf16"}), make_run()]
    chart = charts.step_times(cells_of(runs))
    assert isinstance(chart, Bars)
    assert [bar.label for bar in chart.bars] == ["fp32", "bf16"]
    failed = charts.step_times(cells_of([*runs, out_of_memory({"precision": "fp16"})]))
    assert isinstance(failed, Bars)
    assert [bar.bad for bar in failed.bars].count(True) == 1


def test_a_curve_of_steps_has_a_line_at_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **options: drawn.append(y))
    run = make_run()
    step = sure(sure(run.timing).phase("step"))
    chart = sure(curves.warmup_curves(cells_of([run])))
    assert chart.pictures[0].svg
    assert statistics.median(step.best_s) in drawn


@pytest.mark.parametrize(("attention", "num_panels"), [(["plain"], 1), (["plain", "sdpa"], 2)])
def test_a_panel_has_no_more_colours_than_can_be_told_apart(attention: list[object], num_panels: int) -> None:
    axes: dict[str, list[object]] = {
        "context": [128, 256],
        "precision": ["fp32", "bf16"],
        "compile": ["off", "default"],
    }
    _, panels = sure(over_size(cells_of(grid(axes | {"attention": attention}))))
    assert [len(lines) for lines in panels.values()] == [4] * num_panels


def test_many_cells_are_split_into_panels_and_none_is_lost() -> None:
    axes: dict[str, list[object]] = {
        "model": ["small", "medium", "large", "xl", "2.7b"],
        "context": [128, 256, 512, 1024],
        "precision": ["fp32", "bf16"],
        "pass": ["forward", "forward_backward", "train"],
    }
    _, panels = sure(over_size(cells_of(grid(axes))))
    assert len(panels) == 6
    assert all(len(lines) == 5 for lines in panels.values())
    found = [cell.id for lines in panels.values() for line in lines.values() for cell in line]
    assert len(found) == len(set(found)) == 120


def test_repeated_runs_are_told_apart() -> None:
    cells = cells_of([make_run(seed=seed) for seed in range(3)])
    assert varying(cells) == ["repeat"]
    assert [cell.values["repeat"] for cell in cells] == [1, 2, 3]


def test_runs_that_never_settle_are_among_the_curves_drawn() -> None:
    restless = replace(timed([float(n) for n in range(1, 30)]), id="restless")
    chosen = curves.worth_a_curve(cells_of([*(make_run(seed=seed) for seed in range(40)), restless]))
    assert len(chosen) == curves.MOST_CURVES
    assert "restless" in [cell.run.id for cell in chosen]


def test_pictures_are_the_same_for_the_same_runs_and_follow_the_page() -> None:
    first, second = (charts.step_times(cells_of([*STUDY, out_of_memory({"model": "xl"})])) for _ in range(2))
    assert isinstance(first, Chart)
    assert isinstance(second, Chart)
    assert [one.svg for one in first.pictures] == [one.svg for one in second.pictures]
    for picture in first.pictures:
        assert not re.search(r"#[0-9a-f]{6}\b", picture.svg)
        assert "var(--c1)" in picture.svg
        assert 'role="img" aria-label="' in picture.svg
        assert "OOM" in picture.svg


def test_zeros_can_be_drawn() -> None:
    assert charts.step_times(cells_of([make_run(), timed([0.0, 1.0, 0.0])])) is not None


def test_drawing_leaves_matplotlibs_settings_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    charts.step_times(cells_of(STUDY))
    assert dict(matplotlib.rcParams) == before


# --- the summary ------------------------------------------------------------------------------------------


def answer(runs: list[Run]) -> str:
    return " ".join(runs_verdict(cells_of(runs)).sentences)


def test_the_answer_names_the_range_of_gains() -> None:
    medians = {run.id: run_row(run)["step_time_s"] for run in STUDY}
    times = [time for time in medians.values() if isinstance(time, float)]
    ratios = [times[i] / times[i + 1] for i in range(0, len(times), 2)]  # fp32, bf16, fp32, ...
    told = answer(STUDY)
    assert f"bf16 instead of fp32 is faster in all 4 pairs of otherwise equal runs: {min(ratios):.2f}× at " in told
    assert f" to {max(ratios):.2f}× at " in told


def test_a_gain_among_restless_timings_says_so() -> None:
    climbing = timed([0.5 * 1.5**number for number in range(8)]).timing
    runs = grid({"context": [128, 256], "precision": ["fp32", "bf16"]})
    assert "settle" not in answer(runs)
    assert "In 1 of 2 the step time did not settle." in answer([replace(runs[0], timing=climbing), *runs[1:]])
    assert answer([replace(runs[0], timing=climbing), runs[1]]).count("The step time did not settle.") == 1
    too_few = timed([0.5, 0.9, 1.5]).timing
    assert "settle" not in answer([replace(runs[0], timing=too_few), runs[1]]), "three steps say nothing"


def test_a_gain_that_could_be_chance_is_said_to_be() -> None:
    run = make_run({"precision": "fp32"})
    same = replace(run, id="other", spec=replace(sure(run.spec), precision="bf16"))
    (bar,) = sure(effect_bars(cells_of([run, same]))).bars
    assert (bar.label, bar.figure) == ("bf16 instead of fp32", "no difference")


def test_a_gain_within_the_noise_says_so() -> None:
    noisy = [1.0, 1.3, 0.8, 1.2, 0.7, 1.25]
    run = make_run({"precision": "fp32"})
    before = replace(run, timing=timed(noisy).timing)
    after = replace(run, id="after", spec=replace(sure(run.spec), precision="bf16"), timing=timed(noisy[:3]).timing)
    assert "Starts of one step differ as much there." in answer([before, after])


def test_failures_stand_with_the_answer() -> None:
    *_, caution = runs_verdict(cells_of(MIXED)).cautions
    assert caution.startswith("1 of 10 runs ran out of memory: xl ·")


# --- the page ---------------------------------------------------------------------------------------------


PAGES: dict[str, str] = {}


def page_of(runs: list[Run]) -> str:
    key = repr(runs)
    if key not in PAGES:
        PAGES[key] = render_page(runs, title="A study", description="of something")
    return PAGES[key]


@pytest.mark.parametrize(
    "runs", [[], [make_run()], [recorder_run()], [out_of_memory()], MIXED], ids=lambda runs: str(len(runs))
)
def test_any_set_of_runs_gives_a_page_that_needs_nothing_else(runs: list[Run]) -> None:
    page = page_of(runs)
    assert page == render_page(runs, title="A study", description="of something")
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg\")[\w.]", page)
    assert "<script" not in page
    assert "@import" not in page
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    assert "None" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def test_hostile_strings_are_text_on_the_page() -> None:
    failure = Failure(kind="error", message=HOSTILE)
    runs = [
        recorder_run(name=HOSTILE, notes=(HOSTILE,)),
        out_of_memory(failure=failure),
        make_run({"precision": "bf16"}),
    ]
    page = render_page(runs, title=HOSTILE, description=HOSTILE)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "{{ 7*7 }}" in page


def test_ids_on_the_page_are_unique_where_they_are_its_own() -> None:
    page = page_of(STUDY)
    for anchor in re.findall(r'href="#(\w+)"', page):
        assert page.count(f'id="{anchor}"') >= 1
    sections = re.findall(r'<section id="(\w+)"', page)
    assert len(sections) == len(set(sections)) >= 8


def test_the_page_says_what_was_not_measured() -> None:
    page = page_of(MIXED)
    for text in ("memory clock: NVML did not say", "out of memory: asked 8.00 GiB", "did not say how many FLOPs"):
        assert text in page


@pytest.mark.release
def test_a_large_study_stays_small_enough_to_send() -> None:
    axes: dict[str, list[object]] = {
        "model": ["small", "medium", "large", "xl", "2.7b"],
        "context": [128, 256, 512, 1024],
        "precision": ["fp32", "bf16"],
        "pass": ["forward", "train"],
        "compile": ["off", "default"],
    }
    runs = grid(axes)
    assert len(runs) == 160
    assert len(render_page(runs, title="A study").encode()) < 1_500_000


def test_reporting_needs_no_torch_and_renders_lazily() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import steplab.report.page, steplab.report.kit.rendering\n"
        "print([name for name in ('matplotlib', 'rich', 'jinja2', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"
