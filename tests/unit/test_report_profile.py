import csv
import io
import json
import random
import re
from collections import defaultdict
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch
from numpy.typing import NDArray
from tests import profiles
from tests.rendering import assert_whole, render_page
from tests.runs import make_run, out_of_memory
from tests.sure import sure

from steplab import units
from steplab.errors import UserError
from steplab.records.profile import CATEGORIES, KernelStats, OpStats, PhaseTime, Profile, Timeline
from steplab.records.run import Run
from steplab.report.kit.charts import CATEGORY_COLORS
from steplab.report.kit.document import Bars, Chart, Document, Picture, Section, Table
from steplab.report.kit.rendering import render
from steplab.report.kit.table import sheet
from steplab.report.kit.timelines import ROW, column_shares
from steplab.report.profile import words
from steplab.report.profile.attention import attention_notes, attention_rows
from steplab.report.profile.charts import device_time
from steplab.report.profile.document import profile_blocks, profile_document
from steplab.report.profile.figures import Span, passes, spans, top_kernels
from steplab.report.profile.roofline import find_roofs, roof_dtype, roofline, roofline_points, why_no_roof
from steplab.report.profile.tables import attention_table, category_table, kernel_rows, kernel_table, phase_table
from steplab.report.profile.timeline import close_ups, timeline_chart
from steplab.report.run import charts
from steplab.report.run.cells import cells_of

STEPS = 3
LARGE, SMALL, CPU, IMPORTED = (
    profiles.profiled_run(),
    profiles.launch_bound_run(),
    profiles.cpu_run(),
    profiles.imported_run(),
)
KERNELS = profiles.training_kernels(LARGE.spec, launch_ns=4_500, num_steps=STEPS) if LARGE.spec else []
H200_FP32_FLOPS_PER_S, H200_BYTES_PER_S = 67e12, 4.8e12


DOCUMENTS = {run.id: profile_document(run) for run in (LARGE, SMALL, CPU, IMPORTED)}


def render_profile(run: Run, format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    known = run in (LARGE, SMALL, CPU, IMPORTED)
    return render(DOCUMENTS[run.id] if known else profile_document(run), format, width=width, color=color)


def shown(table: Table) -> list[dict[str, str]]:
    found = sheet(table)
    return [dict(zip([column.heading for column in found.columns], row, strict=True)) for row in found.rows]


def profile_of(run: Run) -> Profile:
    assert run.profile is not None
    return run.profile


def duration_s(kernels: list[profiles.Kernel]) -> float:
    return sum(k.end_ns - k.start_ns for k in kernels) / 1e9


def where(*, phase: str | None = None, category: str | None = None, part: str | None = None) -> list[profiles.Kernel]:
    return [
        k
        for k in KERNELS
        if (phase is None or k.job.phase == phase)
        and (category is None or k.job.category == category)
        and (part is None or k.job.range.endswith(f".{part}"))
    ]


# --- figures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phases", [("forward",), ("backward",), None])
def test_top_kernels_are_those_of_the_raw_kernels(phases: tuple[str, ...] | None) -> None:
    chosen = [k for k in KERNELS if phases is None or k.job.phase in phases]
    by_name: dict[tuple[str, str], list[profiles.Kernel]] = defaultdict(list)
    for kernel in chosen:
        by_name[kernel.job.name, kernel.job.phase].append(kernel)
    expected = sorted(by_name.items(), key=lambda item: -duration_s(item[1]))
    found = top_kernels(profile_of(LARGE), phases)
    assert [(k.name, k.phase) for k in found] == [key for key, _ in expected]
    for top, (_, ran) in zip(found, expected, strict=True):
        assert top.calls == len(ran) / STEPS
        assert top.time_s == pytest.approx(duration_s(ran) / STEPS)
        assert top.share == pytest.approx(duration_s(ran) / duration_s(chosen))
        assert set(top.ranges) == {k.job.range for k in ran}
    assert sum(k.share for k in found) == pytest.approx(1)


def test_a_median_is_exact_in_one_range_and_of_the_medians_in_several() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        parts = [(int(rng.integers(1, 9)), float(rng.uniform(1, 2))) for _ in range(rng.integers(1, 6))]
        kernels = tuple(
            KernelStats(name="k", category="matmul", phase="forward", range=f"r{i}", stream=7, calls=calls,
                        total_s=calls * middle, median_s=middle, max_s=middle)
            for i, (calls, middle) in enumerate(parts)
        )  # fmt: skip
        (found,) = top_kernels(replace(profile_of(LARGE), kernels=kernels))
        assert found.median_is_exact == (len(parts) == 1)
        assert found.median_s == median(np.repeat([m for _, m in parts], [c for c, _ in parts]).tolist())


def test_without_known_modules_a_kernel_has_no_number_of_ranges() -> None:
    profile = profile_of(LARGE)
    told = render(Document(title="", sections=(Section.of("", kernel_table(profile)),)), "md")
    assert "| ranges |" in told
    assert "Ranges: how many" in told
    one_each = {(kernel.name, kernel.phase): replace(kernel, range="") for kernel in profile.kernels}
    bare = kernel_table(replace(profile, kernels=tuple(one_each.values())))
    told = render(Document(title="", sections=(Section.of("", bare),)), "md")
    assert "ange" not in told
    assert "Median: of a call." in told


def test_spans_are_sums_over_the_raw_kernels_a_step() -> None:
    found = {span.phase: span for span in spans(LARGE, profile_of(LARGE))}
    assert list(found) == ["forward", "backward", "optimizer", "step"]
    for phase, span in found.items():
        chosen = where(phase=None if phase == "step" else phase)
        assert span.busy_s == pytest.approx(duration_s(chosen) / STEPS)  # one stream: no two at once
        assert span.num_kernels == len(chosen) / STEPS
        for category, seconds in span.categories.items():
            inside = [k for k in chosen if k.job.category == category]
            assert seconds == pytest.approx(duration_s(inside) / STEPS)
        assert sum(span.categories.values()) == pytest.approx(span.busy_s)
        assert span.busy_s + span.host_bound_s + span.idle_s == pytest.approx(span.window_s)
    whole_s = (max(k.end_ns for k in KERNELS) - min(k.start_ns for k in KERNELS)) / 1e9
    assert found["step"].window_s == pytest.approx(whole_s / STEPS)


def test_matmul_share_in_forward_and_in_training() -> None:
    found = {name: span.share("matmul") for name, span in passes(LARGE, profile_of(LARGE))}
    chosen: list[profiles.Kernel] = []
    for name, phase in (("forward", "forward"), ("forward + backward", "backward"), ("train", "optimizer")):
        chosen += where(phase=phase)
        products = [k for k in chosen if k.job.category == "matmul"]
        assert found[name] == pytest.approx(duration_s(products) / duration_s(chosen))
    assert len(found) == 3


def test_a_backward_pass_that_updates_completes_a_training_step() -> None:
    overlapped = replace(LARGE, spec=replace(sure(LARGE.spec), update="overlapped"))
    profile = replace(profile_of(LARGE), phases=tuple(p for p in profile_of(LARGE).phases if p.phase != "optimizer"))
    assert [name for name, _ in passes(overlapped, profile)] == ["forward", "train"]


def test_a_trace_without_phases_is_one_span_and_what_is_outside_joins_the_passes() -> None:
    profile = profile_of(IMPORTED)
    assert [span.phase for span in spans(IMPORTED, profile)] == ["step"]
    assert [name for name, _ in passes(IMPORTED, profile)] == ["everything"]
    phases = profile_of(LARGE).phases + profile.phases
    told = passes(LARGE, replace(profile_of(LARGE), phases=phases))
    assert [name for name, _ in told] == ["forward", "forward + backward", "train", "everything"]


def test_a_cpu_never_waits_for_itself() -> None:
    phase = PhaseTime(phase="forward", window_s=4, busy_s=1, host_bound_s=2, idle_s=1, categories={"matmul": 1.0})
    profile = replace(profile_of(CPU), phases=(phase,), num_steps=1)
    (span,) = spans(CPU, profile)
    assert (span.host_bound_s, span.idle_s) == (0, 3)
    assert "wait" not in words.time_sentence(CPU, profile)
    assert not any("wait" in column.heading for column in phase_table(CPU, profile).columns)


# --- agreement with the unprofiled step -------------------------------------------------------------------


def span_of(busy_s: float, host_bound_s: float, idle_s: float, timed_s: float | None) -> Span:
    window_s = busy_s + host_bound_s + idle_s
    return Span(phase="forward", window_s=window_s, busy_s=busy_s, host_bound_s=host_bound_s, idle_s=idle_s,
                categories={}, num_kernels=1, timed_s=timed_s)  # fmt: skip


@pytest.mark.parametrize(
    ("span", "agrees", "said"),
    [
        (span_of(0.100, 0.0, 0.0, 0.103), True, "agrees, -2.9 %"),
        (
            span_of(0.100, 0.300, 0.01, 0.200),
            False,
            # As `steplab explain` counts it: what the device does not work, whatever the gaps were under the profiler.
            "waits for host, at most 100 ms of 200 ms unprofiled",
        ),
        (
            # More gaps under the profiler than without: never "about 0 s", for -5.6 % is somewhere.
            span_of(0.0528, 0.013, 0.006, 0.0559),
            False,
            "-5.5 %: waits for host, at most 3.10 ms of 55.9 ms unprofiled",
        ),
        (span_of(0.100, 0.001, 0.02, 0.121), False, "with the 20.0 ms of gaps between kernels it agrees, -0.8 %"),
        # The gaps do not make up for the difference, so they are not named as its reason.
        (
            span_of(0.100, 0.001, 0.02, 0.150),
            False,
            "-33.3 %: no kernel runs for 21.0 ms of 121 ms under the profiler, unprofiled about 50.0 ms of 150 ms",
        ),
        (span_of(0.100, 0.0, 0.0, 0.110), False, "-9.1 %: the GPU was busy throughout"),
        (span_of(0.120, 0.0, 0.0, 0.100), False, "+20.0 %: profiled steps do more, or run slower"),
        (span_of(0.120, 0.0, 0.0, None), None, None),
    ],
)
def test_busy_time_agrees_with_the_unprofiled_or_it_says_why(span: Span, agrees: bool | None, said: str | None) -> None:
    found = words.agreement(span, profile_of(LARGE))
    assert agrees is (found.startswith("agrees") if found else None)
    assert said is found if said is None else said in (found or "")


# --- sentences --------------------------------------------------------------------------------------------


def test_softmax_against_the_score_product() -> None:
    soft = where(phase="forward", part="softmax")
    product = where(phase="forward", category="matmul", part="scores")
    sentence = sure(words.softmax_sentence(LARGE, profile_of(LARGE)))
    assert f"Softmax takes {units.format_time(duration_s(soft) / STEPS)} of forward" in sentence
    assert f"{duration_s(soft) / duration_s(product):.2f} times the" in sentence
    assert f"1/{sum(k.job.flops or 0 for k in product) / sum(k.job.flops or 0 for k in soft):.0f} " in sentence


def test_the_number_format_is_that_of_the_flops_and_not_of_the_time() -> None:
    cast = replace(OP, name="aten::copy_", category="copy", flops=0.0, device_s=0.5)
    product = replace(OP, dtype="bf16")
    (row,) = attention_rows(LARGE, with_ops(cast, product))
    assert row.work.dtype == "bf16"


def test_communication_by_brute_force() -> None:
    kernels = profiles.imported_kernels()
    length = max(k.end_ns for k in kernels)
    talking, computing = (np.zeros(length, dtype=bool) for _ in range(2))
    for k in kernels:
        (talking if k.job.category == "communication" else computing)[k.start_ns : k.end_ns] = True
    sentence = words.communication_sentence(IMPORTED, profile_of(IMPORTED))
    total, hidden = talking.sum() / 1e9, (talking & computing).sum() / 1e9
    assert sentence is not None
    for seconds in (total, hidden, total - hidden):
        assert units.format_time(seconds) in sentence
    assert total > hidden > 0
    assert words.communication_sentence(LARGE, profile_of(LARGE)) is None
    side_by_side = sure(words.overlap_note(IMPORTED, profile_of(IMPORTED)))
    assert units.format_time(duration_s(kernels)) in side_by_side
    assert units.format_time((talking | computing).sum() / 1e9) in side_by_side
    assert words.overlap_note(LARGE, profile_of(LARGE)) is None


# --- attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("part", ["scores", "softmax", "values"])
def test_the_attention_table_is_sums_over_the_raw_kernels(phase: str, part: str) -> None:
    (row,) = [r for r in attention_rows(LARGE, profile_of(LARGE)) if (r.phase, r.part) == (phase, part)]
    ran = where(phase=phase, part=part)
    time_s = duration_s(ran)
    flops, moved = sum(k.job.flops or 0 for k in ran), sum(k.job.moved_bytes or 0 for k in ran)
    assert row.work.time_s == pytest.approx(time_s / STEPS)
    assert row.work.flops == pytest.approx(flops / STEPS)
    assert row.work.moved_bytes == pytest.approx(moved / STEPS)
    assert row.work.intensity == pytest.approx(flops / moved)
    assert row.work.flops_per_s == pytest.approx(flops / time_s)
    assert row.work.bytes_per_s == pytest.approx(moved / time_s)
    ceiling = min(H200_FP32_FLOPS_PER_S, flops / moved * H200_BYTES_PER_S)
    assert row.work.ceiling_share == pytest.approx(flops / time_s / ceiling)


def with_ops(*ops: OpStats) -> Profile:
    return replace(profile_of(LARGE), ops=ops)


OP = OpStats(
    name="aten::bmm",
    category="matmul",
    phase="forward",
    range="blocks.*.attention.scores",
    inputs="",
    dtype="fp32",
    calls=3,
    kernels=3,
    device_s=0.3,
    flops=9e12,
    moved_bytes=3e11,
)


def test_what_is_not_counted_is_a_dash() -> None:
    rows = attention_rows(LARGE, with_ops(replace(OP, flops=None, moved_bytes=None)))
    assert shown(attention_table(rows)) == [{"phase": "forward", "part": "scores", "time": units.format_time(0.3 / 3)}]
    assert any("No FLOPs for forward scores" in note and "aten::bmm" in note for note in attention_notes(LARGE, rows))
    assert not any("bytes" in note or "Rates" in note for note in attention_notes(LARGE, rows))  # which has no column
    counted = attention_notes(LARGE, attention_rows(LARGE, with_ops(OP)))
    assert not any("No FLOPs" in note for note in counted)


def test_rates_are_of_the_operators_that_are_counted_and_it_says_so() -> None:
    rows = attention_rows(LARGE, with_ops(OP, replace(OP, name="aten::triu", device_s=0.1, flops=None)))
    (row,) = rows
    assert row.work.time_s == pytest.approx(0.4 / 3)
    assert row.work.flops_per_s == pytest.approx(9e12 / 0.3)
    assert any("part of the time only: 75.0 % of forward scores." in note for note in attention_notes(LARGE, rows))


def test_more_than_the_ceiling_is_explained_where_it_happens() -> None:
    # 3e11 bytes in 62.5 ms at 4.8e12 B/s, and it took half as long.
    quick = replace(OP, device_s=0.5 * OP.moved_bytes / H200_BYTES_PER_S if OP.moved_bytes else 0.0, flops=1e9)
    rows = attention_rows(LARGE, with_ops(quick))
    assert shown(attention_table(rows))[0]["of the ceiling"] == "200.0 %"
    assert any("L2 cache" in note and "forward scores" in note for note in attention_notes(LARGE, rows))
    usual = attention_rows(LARGE, with_ops(OP))
    assert not any("L2 cache" in note for note in attention_notes(LARGE, usual))


def test_fused_attention_is_one_row() -> None:
    fused = replace(OP, name="aten::_flash_attention_forward", category="attention", range="blocks.*.attention")
    elsewhere = replace(OP, range="blocks.*.attention.query")
    (row,) = attention_rows(LARGE, with_ops(fused, elsewhere))
    assert (row.part, row.work.flops) == ("fused", 3e12)
    assert attention_rows(LARGE, with_ops(elsewhere)) == []


def test_roofs_are_the_devices_own_or_none() -> None:
    roofs = find_roofs(LARGE)
    assert (roofs.peak("fp32"), roofs.bandwidth()) == (H200_FP32_FLOPS_PER_S, H200_BYTES_PER_S)
    assert "no data sheet" in why_no_roof(CPU)
    assert "does not name" in why_no_roof(IMPORTED)
    for run in (CPU, IMPORTED):
        assert find_roofs(run).least_time_s(1.0, 1.0, "fp32") is None
    notes = attention_notes(CPU, attention_rows(CPU, profile_of(CPU)))
    assert any("No ceiling" in note and "Xeon" in note for note in notes)
    assert all("of the ceiling" not in row for row in shown(attention_table(attention_rows(CPU, profile_of(CPU)))))


def test_tf32_products_have_the_peak_of_tf32() -> None:
    profile = profile_of(LARGE)
    assert roof_dtype(LARGE, profile, OP) == "fp32"
    assert roof_dtype(make_run({"precision": "tf32"}), profile, OP) == "tf32"
    assert roof_dtype(make_run({"precision": "tf32"}), profile, replace(OP, category="softmax")) == "fp32"
    assert roof_dtype(make_run({"precision": "tf32"}), profile, replace(OP, dtype="bf16")) == "bf16"
    assert roof_dtype(IMPORTED, profile, OP) == "fp32"
    named = replace(profile.kernels[0], name="sm80_xmma_gemm_tf32f32_f32")
    assert roof_dtype(IMPORTED, replace(profile, kernels=(named,)), OP) == "tf32"


# --- the terminal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [LARGE, SMALL, CPU, IMPORTED], ids=["large", "small", "cpu", "imported"])
@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_gets_fewer_figures_each_of_them_whole_and_no_colour(run: Run, width: int) -> None:
    profile = profile_of(run)
    text = render_profile(run, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "None" not in text
    told = " ".join(text.split())
    for row in shown(phase_table(run, profile)):
        assert row["busy"] in told
        assert {*row.get("busy vs unprofiled", "").split()} <= {*told.split()}
    for row in shown(category_table(run, profile)):
        assert f"{row['step']}" in told
    assert not any(re.fullmatch(r"[ %]*", line) and "%" in line for line in text.splitlines())
    for row in shown(attention_table(attention_rows(run, profile))):
        assert row["time"] in told
        assert row.get("of the ceiling", "") in told


def test_damage_stands_before_all_figures_and_once() -> None:
    damaged = replace(profile_of(IMPORTED), doubts=("the file ends early",), notes=("the file ends early", "a remark"))
    text = render_profile(replace(IMPORTED, profile=damaged), width=100)
    assert text.index("Caution: the file ends early") < text.index("GPU time by phase")
    assert text.count("the file ends early") == 1
    assert "- a remark" in text


def test_categories_and_kernels_of_the_text_are_the_raw_ones() -> None:
    *rows, total = category_table(LARGE, profile_of(LARGE)).rows
    for row in rows:
        for phase in ("forward", "backward", "optimizer", "step"):
            inside = where(phase=None if phase == "step" else phase)
            part_s = duration_s([k for k in inside if k.job.category == row["category"]])
            assert row.get(phase, 0.0) == pytest.approx(part_s / STEPS)
            assert row.get(f"{phase}_share", 0.0) == pytest.approx(part_s / duration_s(inside))
    assert total["step"] == pytest.approx(duration_s(KERNELS) / STEPS)


def test_a_run_without_a_profile_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="has no profile; `steplab profile` makes") as caught:
        render_profile(make_run())
    assert "\n" not in str(caught.value)


def test_a_profile_of_nothing_is_shown() -> None:
    phase = PhaseTime(phase="outside", window_s=0.0, busy_s=0.0, host_bound_s=0.0, idle_s=0.0, categories={})
    empty = replace(profile_of(LARGE), window_s=0.0, phases=(phase,), kernels=(), ops=(), host_calls=(), timeline=None)
    text = render_profile(replace(LARGE, profile=empty), width=100)
    assert "(uncategorised): 0.0 %" in text
    assert "nan" not in text
    assert "Matrix multiplication" not in text


# --- rows -------------------------------------------------------------------------------------------------


def test_kernel_rows_are_the_record() -> None:
    rows = kernel_rows(profile_of(LARGE))
    assert json.loads(render_profile(LARGE, "json")) == rows
    read = list(csv.DictReader(io.StringIO(render_profile(LARGE, "csv"))))
    totals = [float(row["total_s"]) for row in read]
    assert totals == sorted(totals, reverse=True)
    assert sum(int(row["calls"]) for row in read) == len(KERNELS)
    assert sum(float(row["total_s"]) for row in read) == pytest.approx(duration_s(KERNELS))
    assert sum(float(row["per_step_s"]) for row in read) == pytest.approx(duration_s(KERNELS) / STEPS)
    for row in rows:
        ran = [
            k
            for k in KERNELS
            if (k.job.name, k.job.phase, k.job.range) == (row["name"], row["phase"], row["range"] or "")
        ]
        times = [(k.end_ns - k.start_ns) / 1e9 for k in ran]
        assert (row["calls"], row["max_s"]) == (len(ran), max(times))
        assert row["median_s"] == pytest.approx(median(times))


ALL = [LARGE, SMALL, CPU, IMPORTED]
NAMES = ["large", "small", "cpu", "imported"]


def timeline_of(run: Run) -> Timeline:
    return sure(profile_of(run).timeline)


def bar_tips(bars: Bars) -> list[str]:
    return [segment.tip for bar in bars.bars for segment in bar.segments]


# --- bars -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ALL, ids=NAMES)
def test_the_bars_of_time_say_busy_waiting_and_idle(run: Run) -> None:
    chart = device_time(run, profile_of(run))
    said = bar_tips(chart) + [bar.mark_tip for bar in chart.bars if bar.mark is not None]
    for span in spans(run, profile_of(run)):
        parts = {"busy": span.busy_s, "waits for the host": span.host_bound_s, "idle": span.idle_s}
        for name, seconds in parts.items():
            share = units.format_percent(seconds / span.window_s)
            tip = f"{span.phase}: {name} {units.format_time(seconds)}, {share} of the window"
            assert (tip in said) == (seconds > 0 and (name != "waits for the host" or run is not CPU))
        unprofiled = [tip for tip in said if tip.startswith(f"{span.phase}, unprofiled")]
        assert unprofiled == ([f"{span.phase}, unprofiled: {units.format_time(span.timed_s)}"] if span.timed_s else [])


@pytest.mark.parametrize("run", ALL, ids=NAMES)
def test_the_category_bars_are_the_shares_of_the_step(run: Run) -> None:
    (lengths,) = sheet(category_table(run, profile_of(run))).bars.values()
    step = spans(run, profile_of(run))[-1]
    shares = [share for category in CATEGORIES if (share := step.share(category))]
    assert lengths == pytest.approx([*(share / max(shares) for share in shares), 0.0])  # the last row is the sum


def test_a_table_of_kernels_has_bars_as_long_as_their_shares() -> None:
    shown = sheet(kernel_table(profile_of(LARGE)))
    (lengths,) = shown.bars.values()
    shares = [kernel.share for kernel in top_kernels(profile_of(LARGE))]
    assert lengths == pytest.approx([share / max(shares) for share in shares])
    page = render_page([LARGE], title="t")
    categories = sheet(category_table(LARGE, profile_of(LARGE))).rows
    assert page.count('style="--bar: ') == len(shares) + len(categories)
    assert 'style="--bar: 100.00%"' in page


# --- the roofline -----------------------------------------------------------------------------------------


def test_points_lie_where_flops_bytes_and_time_put_them() -> None:
    points = roofline_points(LARGE, profile_of(LARGE))
    counted = [op for op in profile_of(LARGE).ops if op.flops and op.moved_bytes]
    assert len(points) == len(counted)
    total_s = sum(op.device_s for op in profile_of(LARGE).ops)
    for point in points:
        assert point.op.flops is not None
        assert point.op.moved_bytes is not None
        assert point.intensity == point.op.flops / point.op.moved_bytes
        assert point.flops_per_s == point.op.flops / point.op.device_s
        assert point.share == point.op.device_s / total_s
        assert point.ceiling_share == pytest.approx(point.flops_per_s / min(67e12, point.intensity * 4.8e12))


def test_a_roofline_has_a_point_for_each_operator_with_a_share_worth_seeing_and_says_whose_roofs_it_has() -> None:
    chart = sure(roofline(LARGE, profile_of(LARGE)))
    assert "Roofs of H200 SXM: NVIDIA H200 product page" in chart.note
    seen = [point for point in roofline_points(LARGE, profile_of(LARGE)) if point.share >= 0.001]
    assert chart.pictures[0].svg.count("<title>") == len(seen)
    assert f"{units.format_percent(sum(point.share for point in seen))} of the operators' time" in chart.note


def test_without_figures_of_the_device_no_roof_is_drawn_and_it_says_why() -> None:
    chart = sure(roofline(CPU, profile_of(CPU)))
    assert "No roof is drawn: no data sheet's figures are known for Intel Xeon" in chart.note
    assert "TFLOP/s" not in re.sub(r"<title>.*?</title>", "", chart.pictures[0].svg)
    ops = tuple(replace(op, dtype="fp64") for op in profile_of(LARGE).ops)
    unknown = sure(roofline(LARGE, replace(profile_of(LARGE), ops=ops)))
    assert "No roof is drawn: no peak is stated" in unknown.note
    assert roofline(IMPORTED, profile_of(IMPORTED)) is None


def test_a_lone_operator_can_be_drawn() -> None:
    op = OpStats(name="aten::mm", category="matmul", phase="outside", range="", inputs="", dtype="bf16", calls=1,
                 kernels=1, device_s=1e-3, flops=1e9, moved_bytes=1e3)  # fmt: skip
    chart = sure(roofline(LARGE, replace(profile_of(LARGE), ops=(op,))))
    assert "bf16 990 TFLOP/s" in chart.pictures[0].svg


# --- the timeline -----------------------------------------------------------------------------------------


def random_timeline(seed: int, num_kernels: int = 60, num_streams: int = 2) -> Timeline:
    rng = random.Random(seed)
    ends = [0] * num_streams
    rows = []
    for _ in range(num_kernels):
        stream = rng.randrange(num_streams)
        start = ends[stream] + rng.choice([0, 1, 7, 300])
        ends[stream] = start + rng.choice([0, 1, 5, 40, 900])
        rows.append((start, ends[stream] - start, rng.randrange(3), stream))
    rows.sort()
    return Timeline(
        names=("a", "b", "c"),
        categories=("matmul", "softmax", "copy"),
        kernel=tuple(row[2] for row in rows),
        stream=tuple(row[3] for row in rows),
        start_ns=tuple(row[0] for row in rows),
        duration_ns=tuple(row[1] for row in rows),
        phases=(("forward", 0, max(ends)),),
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_columns_of_a_timeline_hold_each_nanosecond_once(seed: int) -> None:
    timeline = random_timeline(seed)
    start, end = 0, timeline.phases[0][2]
    for stream in (0, 1):
        ran: dict[str, NDArray[np.bool_]] = defaultdict(lambda: np.zeros(end, dtype=bool))
        columns = zip(timeline.kernel, timeline.stream, timeline.start_ns, timeline.duration_ns, strict=True)
        for kernel, on, begin, lasts in columns:
            if on == stream:
                ran[timeline.categories[kernel]][begin : begin + lasts] = True
        num_columns = 16
        shares = column_shares(timeline, stream, start, end, num_columns)
        edges = np.linspace(0, end, num_columns + 1)
        assert set(shares) == {category for category, busy in ran.items() if busy.any()}
        for category, share in shares.items():
            exact = np.interp(edges, np.arange(end + 1), np.concatenate(([0], ran[category].cumsum())))
            assert share == pytest.approx(np.diff(exact) * num_columns / end, abs=1e-9)


def areas(picture: Picture) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    patches = [patch for patch in picture.drawing.figure.axes[0].patches if isinstance(patch, StepPatch)]
    for patch, under in zip(patches, [*patches[1:], None], strict=True):
        values, _, floor = patch.get_data()
        own = floor - values
        if under and under.get_data()[2] == floor:
            own = own - (floor - under.get_data()[0])
        found[CATEGORIES[CATEGORY_COLORS.index(to_hex(patch.get_facecolor()))]] += own.sum() / own.size
    return found


@pytest.mark.parametrize("run", ALL, ids=NAMES)
def test_areas_of_the_picture_are_times_of_the_record(run: Run) -> None:
    chart, timeline = timeline_chart(profile_of(run)), timeline_of(run)
    assert chart is not None
    times: dict[str, int] = defaultdict(int)
    for kernel, lasts in zip(timeline.kernel, timeline.duration_ns, strict=True):
        times[timeline.categories[kernel]] += lasts
    drawn = areas(chart.pictures[0])
    end_ns = max(end for _, _, end in timeline.phases)
    for category, ns in times.items():
        share = drawn[category] / ROW
        assert share == pytest.approx(ns / end_ns, rel=0.02, abs=0.003)
        assert f"<title>{category}, " in chart.pictures[0].svg


def test_a_row_a_stream_and_the_phases_named() -> None:
    (imported,) = timeline_chart(profile_of(IMPORTED)).pictures  # type: ignore[union-attr]
    assert ">stream 7<" in imported.svg
    assert ">stream 20<" in imported.svg
    large = sure(timeline_chart(profile_of(LARGE)))
    for name, start, end in timeline_of(LARGE).phases:
        assert f"<title>{name}, {units.format_time((end - start) / 1e9)}</title>" in large.pictures[0].svg
    assert ">forward</text>" in large.pictures[0].svg
    assert ">thread 0<" in timeline_chart(profile_of(CPU)).pictures[0].svg  # type: ignore[union-attr]


def test_however_many_kernels_the_picture_stays_small() -> None:
    crowded = random_timeline(1, num_kernels=20_000, num_streams=12)
    chart = sure(timeline_chart(replace(profile_of(LARGE), timeline=crowded)))
    assert len(chart.pictures[0].svg) < 300_000
    assert "4 more streams with less time are not drawn" in chart.note
    for run in ALL:
        drawn = sure(timeline_chart(profile_of(run)))
        assert max(len(picture.svg) for picture in drawn.pictures) < 300_000


def test_the_close_up_is_one_block_of_the_model() -> None:
    timeline = timeline_of(LARGE)
    forward, backward = close_ups(timeline)
    assert forward.title == "one block of 36, forward"
    assert backward.title == "one block of 36, backward"
    for window in (forward, backward):
        names = [timeline.names[timeline.kernel[k]] for k in window.kernels]
        assert len(names) > 30
        everything = [k for k, start in enumerate(timeline.start_ns) if window.start_ns <= start < window.end_ns]
        assert list(window.kernels) == everything
        entered = [name.removeprefix("blocks.*.") for name, _, _ in window.ranges]
        for once in ("attention.query", "attention.softmax", "feed_forward.down"):
            assert entered.count(once) == 1
    assert close_ups(timeline_of(IMPORTED)) == []
    assert close_ups(replace(timeline, ranges=timeline.ranges[:3])) == []


def test_a_timeline_of_nothing_is_no_picture() -> None:
    empty = replace(timeline_of(LARGE), kernel=(), stream=(), start_ns=(), duration_ns=())
    assert timeline_chart(replace(profile_of(LARGE), timeline=empty)) is None
    assert timeline_chart(replace(profile_of(LARGE), timeline=None)) is None
    instant = replace(random_timeline(0, 1), duration_ns=(0,), start_ns=(0,), phases=())
    assert timeline_chart(replace(profile_of(LARGE), timeline=instant)) is not None


# --- the page ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs", [[LARGE], [IMPORTED], [*ALL, make_run(), out_of_memory({"model": "xl"})]], ids=["one", "trace", "all"]
)
def test_a_page_with_profiles_is_whole_and_needs_nothing_else(runs: list[Run]) -> None:
    page = render_page(runs, title="Profiles")
    assert page == render_page(runs, title="Profiles")
    assert_whole(page)
    assert page.count('<section id="profiles">') == 1
    for heading in ("time by phase", "Categories", "Timeline of one step"):
        assert len(re.findall(rf"{heading}</h\d>", page)) == sum(run.profile is not None for run in runs)


def test_six_profiles_from_the_first_to_the_last_are_shown_in_full() -> None:
    runs = [replace(IMPORTED, id=f"{index:012x}", name=f"rank{index}") for index in range(8)]
    sections = [block for block in profile_blocks(cells_of(runs)) if isinstance(block, Section)]
    assert [section.title for section in sections] == [f"rank{index}" for index in (0, 1, 3, 4, 6, 7)]


def test_a_page_of_a_trace_names_the_gpu_that_the_trace_names() -> None:
    named = replace(IMPORTED, profile=replace(profile_of(IMPORTED), device_name="NVIDIA Something"))
    assert 'NVIDIA Something · <span class="nb">2026' in render_page([named], title="page").replace("\u00a0", " ")


def test_a_trace_without_timing_leaves_no_hole_in_the_pictures_of_steps() -> None:
    timed = [make_run({"context": context}) for context in (128, 256)]
    for picture in (charts.step_times, charts.peak_memory):
        both, alone = sure(picture(cells_of([*timed, IMPORTED]))), sure(picture(cells_of(timed)))
        assert isinstance(both, Chart)
        assert isinstance(alone, Chart)
        assert [one.svg for one in both.pictures] == [one.svg for one in alone.pictures]
        assert picture(cells_of([timed[0], IMPORTED])) is None


def test_bars_have_the_colours_of_their_legend() -> None:
    bars = device_time(SMALL, profile_of(SMALL))
    assert {segment.color for bar in bars.bars for segment in bar.segments} == {number for number, *_ in bars.legend}
