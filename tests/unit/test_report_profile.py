"""What is said of a profile equals what follows from its kernels, counted here in the plainest way."""

import csv
import io
import json
import re
from collections import defaultdict
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from tests.profiles import (
    Kernel,
    cpu_run,
    imported_kernels,
    imported_run,
    launch_bound_run,
    profiled_run,
    total_up,
    training_kernels,
)
from tests.rendering import run_text
from tests.runs import make_run

from steplab import units
from steplab.errors import UserError
from steplab.records.profile import KernelStats, OpStats, PhaseTime, Profile
from steplab.records.run import Run
from steplab.report.kit.document import Section, Sentences, Table
from steplab.report.kit.kernel_names import last_part, short_kernel, short_kernels
from steplab.report.kit.rendering import FORMATS, render
from steplab.report.kit.table import sheet
from steplab.report.profile import words
from steplab.report.profile.attention import attention_notes, attention_rows
from steplab.report.profile.document import profile_chapter, profile_document
from steplab.report.profile.figures import Span, passes, spans, top_kernels, whole
from steplab.report.profile.roofline import find_roofs, roof_dtype, why_no_roof
from steplab.report.profile.tables import attention_table, category_table, kernel_rows, kernel_table, phase_table
from steplab.report.run.cells import cells_of

STEPS = 3
LARGE, SMALL, CPU, IMPORTED = profiled_run(), launch_bound_run(), cpu_run(), imported_run()
KERNELS = training_kernels(LARGE.spec, launch_ns=4_500, num_steps=STEPS) if LARGE.spec else []
H200_FP32_FLOPS_PER_S, H200_BYTES_PER_S = 67e12, 4.8e12
HOSTILE = "void evil<script>alert(1)</script>\x1b[31m\x00$&|{{7*7}}"


DOCUMENTS = {run.id: profile_document(run) for run in (LARGE, SMALL, CPU, IMPORTED)}
"""Made once: pictures take their time."""


def render_profile(run: Run, format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    known = run in (LARGE, SMALL, CPU, IMPORTED)
    return render(DOCUMENTS[run.id] if known else profile_document(run), format, width=width, color=color)


def shown(table: Table) -> list[dict[str, str]]:
    """Texts of a table by their headings, a row each; of columns with one heading the last."""
    found = sheet(table)
    return [dict(zip([column.heading for column in found.columns], row, strict=True)) for row in found.rows]


def profile_of(run: Run) -> Profile:
    assert run.profile is not None
    return run.profile


def duration_s(kernels: list[Kernel]) -> float:
    return sum(k.end_ns - k.start_ns for k in kernels) / 1e9


def where(*, phase: str | None = None, category: str | None = None, part: str | None = None) -> list[Kernel]:
    """The raw kernels of the large run that fit."""
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
    by_name: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
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


def test_over_all_phases_a_kernel_is_one_entry() -> None:
    found = top_kernels(profile_of(LARGE), by_phase=False)
    assert len({k.name for k in found}) == len(found)
    calls = {name: sum(k.job.name == name for k in KERNELS) / STEPS for name in {k.job.name for k in KERNELS}}
    assert {k.name: k.calls for k in found} == calls


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
    chosen: list[Kernel] = []
    for name, phase in (("forward", "forward"), ("forward + backward", "backward"), ("train", "optimizer")):
        chosen += where(phase=phase)
        products = [k for k in chosen if k.job.category == "matmul"]
        assert found[name] == pytest.approx(duration_s(products) / duration_s(chosen))
    assert len(found) == 3


def test_a_backward_pass_that_updates_completes_a_training_step() -> None:
    assert LARGE.spec is not None
    overlapped = replace(LARGE, spec=replace(LARGE.spec, update="overlapped"))
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
        (span_of(0.103, 0.0, 0.0, 0.100), True, "agrees, +3.0 %"),
        (
            span_of(0.100, 0.300, 0.01, 0.200),
            False,
            # As `steplab explain` counts it: what the device does not work, whatever the gaps were under the profiler.
            "launch-bound: idle about 100 ms of 200 ms without the profiler, too",
        ),
        (
            # More gaps under the profiler than without: never "about 0 s", for -5.6 % is somewhere.
            span_of(0.0528, 0.013, 0.006, 0.0559),
            False,
            "-5.5 %: launch-bound: idle about 3.10 ms of 55.9 ms without the profiler, too",
        ),
        (span_of(0.100, 0.001, 0.02, 0.121), False, "with the 20.0 ms of gaps between kernels it agrees, -0.8 %"),
        # The gaps do not make up for the difference, so they are not named as its reason.
        (
            span_of(0.100, 0.001, 0.02, 0.150),
            False,
            "-33.3 %: no kernel runs for 21.0 ms of 121 ms under the profiler, about 50.0 ms of 150 ms without",
        ),
        (span_of(0.100, 0.0, 0.0, 0.110), False, "-9.1 %: the GPU was busy throughout"),
        (span_of(0.120, 0.0, 0.0, 0.100), False, "+20.0 %: kernels are slower under the profiler"),
        (span_of(0.820, 0.0, 0.0, 0.100), False, "+720 %: kernels are slower under the profiler"),
        (span_of(0.120, 0.0, 0.0, None), None, None),
    ],
)
def test_busy_time_agrees_with_the_unprofiled_or_it_says_why(span: Span, agrees: bool | None, said: str | None) -> None:
    found = words.agreement(span, profile_of(LARGE))
    assert agrees is (found.startswith("agrees") if found else None)
    assert said is found if said is None else said in (found or "")


def test_the_unprofiled_median_stands_beside_the_busy_time() -> None:
    for run in (LARGE, SMALL):
        assert run.timing is not None
        rows = {row["phase"]: row for row in shown(phase_table(run, profile_of(run)))}
        for phase in ("forward", "backward", "optimizer", "step"):
            samples = run.timing.phase(phase)
            assert samples is not None
            assert units.format_time(median(samples.best_s)) == rows[phase]["unprofiled"]
    assert "launch-bound" in rows["forward"]["busy against unprofiled"]
    assert "agrees" in rows["optimizer"]["busy against unprofiled"]


# --- sentences --------------------------------------------------------------------------------------------


def test_why_the_matmul_share_drops_adds_up() -> None:
    run = SMALL
    (first, *_, last) = [span for _, span in passes(run, profile_of(run))]
    before, after = first.share("matmul"), last.share("matmul")
    assert before is not None
    assert after is not None
    shares, why = words.matmul_sentences(run, profile_of(run))
    assert f"{units.format_percent(before)} of forward" in shares
    assert f"{units.format_percent(after)} of the whole step" in shares
    optimizer = profile_of(run).phase("optimizer")
    assert optimizer is not None
    assert f"optimizer spends 0.0 % of its {units.format_time(optimizer.busy_s / STEPS)} on it" in why
    points = [float(text) for text in re.findall(r"\(([-+][\d.]+) points\)", why)]
    backward = profile_of(run).phase("backward")
    assert backward is not None
    gained = (backward.categories["matmul"] - before * backward.busy_s) / STEPS / last.busy_s  # it has a higher share
    assert sum(points) + 100 * gained == pytest.approx(100 * (after - before), abs=0.1)


def test_a_drop_is_laid_to_what_grew_and_not_to_what_is_largest() -> None:
    shares = {"matmul": 0.5, "elementwise": 0.4, "normalisation": 0.1}
    forward = PhaseTime(phase="forward", window_s=1, busy_s=1, host_bound_s=0, idle_s=0, categories=shares)
    grown = {"matmul": 0.3, "elementwise": 0.4, "normalisation": 0.3}
    profile = replace(profile_of(LARGE), phases=(forward, replace(forward, phase="backward", categories=grown)))
    _, why = words.matmul_sentences(LARGE, profile)
    assert "and 30.0 % on normalisation, of which forward has 10.0 %" in why


def test_a_share_that_does_not_drop_is_not_explained() -> None:
    forward = (PhaseTime(phase="forward", window_s=1, busy_s=1, host_bound_s=0, idle_s=0, categories={"matmul": 0.5}),)
    backward = replace(forward[0], phase="backward", categories={"matmul": 0.6})
    profile = replace(profile_of(LARGE), phases=(*forward, backward))
    (sentence,) = words.matmul_sentences(LARGE, profile)
    assert "50.0 % of forward, 55.0 % of forward + backward" in sentence


def test_products_inside_fused_attention_are_said_to_be_missing() -> None:
    phase = replace(profile_of(LARGE).phases[0], categories={"matmul": 0.5, "attention": 0.25}, busy_s=1.0)
    told = " ".join(words.matmul_sentences(LARGE, replace(profile_of(LARGE), phases=(phase,))))
    assert "fused attention (25.0 % of forward)" in told


def test_the_top_kernel_is_named_with_calls_time_and_share() -> None:
    told = words.top_kernel_sentences(profile_of(LARGE))
    assert [sentence.split(":")[0] for sentence in told] == [
        "Top kernel of the forward pass",
        "Top kernel of the backward pass",
        "Top kernel of the step",
    ]
    forward = where(phase="forward")
    names = {k.job.name for k in forward}
    top = max(names, key=lambda name: duration_s([k for k in forward if k.job.name == name]))
    ran = [k for k in forward if k.job.name == top]
    time, share = units.format_time(duration_s(ran) / STEPS), duration_s(ran) / duration_s(forward)
    assert f"{len(ran) // STEPS} calls, {time}, {units.format_percent(share)} of the kernel time" in told[0]


def test_softmax_against_the_score_product() -> None:
    soft = where(phase="forward", part="softmax")
    product = where(phase="forward", category="matmul", part="scores")
    sentence = words.softmax_sentence(LARGE, profile_of(LARGE))
    assert sentence is not None
    assert f"Softmax takes {units.format_time(duration_s(soft) / STEPS)} of forward" in sentence
    assert f"{duration_s(soft) / duration_s(product):.2f} times the" in sentence
    assert f"1/{sum(k.job.flops or 0 for k in product) / sum(k.job.flops or 0 for k in soft):.0f} " in sentence
    assert f"below {H200_FP32_FLOPS_PER_S / H200_BYTES_PER_S:.1f} the memory's bandwidth is the limit" in sentence


@pytest.mark.parametrize(
    ("product_dtype", "product_intensity", "said"),
    [
        ("fp32", 10.0, "; below 14.0 {}: it limits both."),
        ("fp32", 49.2, "; below 14.0 {}: it limits the softmax alone."),
        ("bf16", 49.2, "; below 14.0 (softmax, in fp32) and 206 (product, in bf16) {}: it limits both."),
        ("bf16", 300.0, "; below 14.0 (softmax, in fp32) and 206 (product, in bf16) {}: it limits the softmax alone."),
        ("fp64", 49.2, "; below 14.0 {}: it limits the softmax."),  # no peak is stated for the product
    ],
)
def test_softmax_and_product_are_each_held_to_the_ridge_of_their_own_dtype(
    product_dtype: str, product_intensity: float, said: str
) -> None:
    soft = replace(OP, name="aten::_softmax", category="softmax", range="a.softmax", flops=1e10, moved_bytes=3e10)
    product = replace(OP, range="a.scores", dtype=product_dtype, flops=1e12, moved_bytes=1e12 / product_intensity)
    sentence = words.softmax_sentence(LARGE, with_ops(soft, product))
    assert sentence is not None
    assert sentence.endswith(said.format("the memory's bandwidth is the limit, not the arithmetic"))


def test_the_number_format_is_that_of_the_flops_and_not_of_the_time() -> None:
    cast = replace(OP, name="aten::copy_", category="copy", flops=0.0, device_s=0.5)
    product = replace(OP, dtype="bf16")
    (row,) = attention_rows(LARGE, with_ops(cast, product))
    assert row.work.dtype == "bf16"


def test_communication_by_brute_force() -> None:
    kernels = imported_kernels()
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
    side_by_side = words.overlap_note(IMPORTED, profile_of(IMPORTED))
    assert side_by_side is not None
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
    (texts,) = shown(attention_table([row]))
    assert texts["time"] == units.format_time(time_s / STEPS)
    assert texts["of the ceiling"] == units.format_percent(flops / time_s / ceiling)


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
    counted = attention_notes(LARGE, attention_rows(LARGE, with_ops(OP)))
    assert not any("No FLOPs" in note for note in counted)


def test_bytes_are_binary_and_rates_decimal_as_everywhere() -> None:
    (row,) = shown(attention_table(attention_rows(LARGE, with_ops(replace(OP, moved_bytes=3 * 1.5 * 1024**3)))))
    assert row["bytes"] == "1.50 GiB"
    assert row["moving"] == "16.1 GB/s"


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
    assert roofs.ridge("fp32") == pytest.approx(H200_FP32_FLOPS_PER_S / H200_BYTES_PER_S)
    assert "no data sheet" in why_no_roof(CPU)
    assert "does not say" in why_no_roof(IMPORTED)
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
@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_the_text_fits_and_has_no_colour_of_its_own(run: Run, width: int) -> None:
    text = render_profile(run, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "None" not in text


@pytest.mark.parametrize("run", [LARGE, SMALL, CPU, IMPORTED], ids=["large", "small", "cpu", "imported"])
@pytest.mark.parametrize("width", [60, 80, 99])
def test_a_narrow_terminal_gets_fewer_figures_and_each_of_them_whole(run: Run, width: int) -> None:
    profile = profile_of(run)
    text = render_profile(run, width=width)
    told = " ".join(text.split())
    for row in shown(phase_table(run, profile)):
        assert row["busy"] in told
        assert {*row.get("busy against unprofiled", "").split()} <= {*told.split()}
    for row in shown(category_table(run, profile)):
        assert f"{row['step']}" in told
    assert not any(re.fullmatch(r"[ %]*", line) and "%" in line for line in text.splitlines())
    for row in shown(attention_table(attention_rows(run, profile))):
        assert row["time"] in told
        assert row.get("of the ceiling", "") in told


def test_what_a_narrow_terminal_leaves_out_is_said() -> None:
    assert "Not shown at this width: FLOPs, bytes" in " ".join(render_profile(LARGE, width=80).split())
    assert "Not shown" not in render_profile(LARGE, width=160)


def test_the_text_states_all_that_was_asked_of_it() -> None:
    text = render_profile(LARGE, width=160)
    told = " ".join(text.split())
    step = whole(LARGE, profile_of(LARGE))
    for shown in (
        "so only shares, kernels and gaps count here. Step time is measured without it.",
        "3 steps on NVIDIA H200, profiled with torch.profiler",
        f"the GPU is busy {units.format_time(step.busy_s)} ({units.format_percent(step.busy_s / step.window_s)})",
        f"waits for the host {units.format_time(step.host_bound_s)}",
        f"Uncategorised: {units.format_percent(step.share('uncategorised') or 0)} of the busy time",
        "cudaStreamSynchronize",
        "lengthened by the profiler's own timestamps",
        "Ceiling: min(peak, FLOP/B x bandwidth) of H200 SXM: 67.0 TFLOP/s in fp32",
    ):
        assert shown in told
    titles = ("GPU time by phase", "Categories", "Top kernels", "Attention", "Host calls that wait or copy", "Notes")
    for title in titles:
        assert f"\n  {title}\n" in text
    assert "Communication" not in text
    assert "Communication" in render_profile(IMPORTED, width=160)
    assert "No step was timed without it" in render_profile(IMPORTED, width=160)


def test_damage_stands_before_all_figures_and_once() -> None:
    damaged = replace(profile_of(IMPORTED), doubts=("the file ends early",), notes=("the file ends early", "a remark"))
    text = render_profile(replace(IMPORTED, profile=damaged), width=100)
    assert text.index("Caution: the file ends early") < text.index("GPU time by phase")
    assert text.count("the file ends early") == 1
    assert "- a remark" in text
    chapter = profile_chapter(cells_of([replace(IMPORTED, profile=damaged), LARGE]))
    assert chapter is not None
    warned = [
        block.texts
        for record in chapter.blocks
        if isinstance(record, Section)
        for block in record.blocks
        if isinstance(block, Sentences) and block.role == "warning"
    ]
    assert warned == [("Caution: the file ends early.",)]


def test_categories_and_kernels_of_the_text_are_the_raw_ones() -> None:
    *rows, total = category_table(LARGE, profile_of(LARGE)).rows
    for row in rows:
        for phase in ("forward", "backward", "optimizer", "step"):
            inside = where(phase=None if phase == "step" else phase)
            part_s = duration_s([k for k in inside if k.job.category == row["category"]])
            assert row.get(phase, 0.0) == pytest.approx(part_s / STEPS)
            assert row.get(f"{phase}_share", 0.0) == pytest.approx(part_s / duration_s(inside))
    assert total["step"] == pytest.approx(duration_s(KERNELS) / STEPS)
    text = " ".join(render_profile(LARGE, width=240).split())
    for row in shown(kernel_table(profile_of(LARGE)))[:10]:
        assert " ".join(row.values()) in text


def test_show_gives_the_run_and_then_its_profile() -> None:
    text = run_text(LARGE, width=120)
    assert text.index("throughput") < text.index("Where the time goes")
    profiled = render_profile(LARGE, width=120)
    assert profiled[profiled.index("Where the time goes") :] in text
    assert "Where the time goes" not in run_text(make_run(), width=120)
    imported = run_text(IMPORTED, width=120)
    assert imported.startswith("rank0 (imported trace)")
    assert "Memory" not in imported
    assert "an imported trace has only profiled steps" in imported


@pytest.mark.parametrize("run", [LARGE, IMPORTED], ids=["large", "imported"])
def test_a_profile_has_the_same_title_as_its_run(run: Run) -> None:
    lines = render_profile(run, width=120).splitlines()
    assert lines[:2] == run_text(run, width=120).splitlines()[:2]
    assert run.id in lines[1]


def test_a_run_without_a_profile_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="has no profile; `steplab profile` makes") as caught:
        render_profile(make_run())
    assert "\n" not in str(caught.value)


def test_names_from_a_trace_steer_nothing() -> None:
    profile = profile_of(LARGE)
    kernel = replace(profile.kernels[0], name=HOSTILE, range=HOSTILE)
    calls = tuple(replace(call, name=HOSTILE, range=HOSTILE) for call in profile.host_calls)
    run = replace(LARGE, profile=replace(profile, kernels=(kernel,), host_calls=calls, notes=(HOSTILE,), file=HOSTILE))
    assert "\x1b" not in render_profile(run, width=120)
    assert "\x00" not in render_profile(run, width=120)
    assert "\x1b[1m" in render_profile(run, width=120, color=True)


def test_a_profile_of_nothing_is_shown() -> None:
    phase = PhaseTime(phase="outside", window_s=0.0, busy_s=0.0, host_bound_s=0.0, idle_s=0.0, categories={})
    empty = replace(profile_of(LARGE), window_s=0.0, phases=(phase,), kernels=(), ops=(), host_calls=(), timeline=None)
    text = render_profile(replace(LARGE, profile=empty), width=100)
    assert "Uncategorised: 0.0 %" in text
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
    assert sum(float(row["share"]) for row in read) == pytest.approx(1)
    for row in rows:
        ran = [
            k
            for k in KERNELS
            if (k.job.name, k.job.phase, k.job.range) == (row["name"], row["phase"], row["range"] or "")
        ]
        times = [(k.end_ns - k.start_ns) / 1e9 for k in ran]
        assert (row["calls"], row["max_s"]) == (len(ran), max(times))
        assert row["median_s"] == pytest.approx(median(times))


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_every_kernel(format: str) -> None:
    text = render_profile(LARGE, format, width=240)
    names = {kernel.name for kernel in profile_of(LARGE).kernels}
    if format not in ("json", "csv"):
        names = {kernel.short for kernel in top_kernels(profile_of(LARGE))[: 10 if format == "table" else None]}
    told = text.replace(r"\textless{}", "<").replace(r"\textgreater{}", ">").replace("&lt;", "<").replace("&gt;", ">")
    told = told.replace("\\", "").replace("ldots{}", "…")
    assert all(name in told for name in names)
    empty = replace(profile_of(LARGE), kernels=())
    assert isinstance(render_profile(replace(LARGE, profile=empty), format), str)
    with pytest.raises(UserError, match="format 'xml'"):
        render_profile(LARGE, "xml")


def test_durations_of_kernels_side_by_side_add_up_to_more_than_the_busy_time() -> None:
    kernels = imported_kernels()
    profile = total_up(kernels)
    totals = [row["total_s"] for row in kernel_rows(profile)]
    assert sum(total for total in totals if isinstance(total, float)) == pytest.approx(duration_s(kernels))
    assert duration_s(kernels) > 1.1 * profile.busy_s


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "aten::mm"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>(cutlass_80::Params)",
         "cutlass_80_simt_sgemm_128x64_8x5_tn_align1"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false>(float*, float const*, int)",
         "softmax_warp_forward<float,float,float,10,false>"),
        ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::(anonymous namespace)::"
         "masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() const::"
         "{lambda(float, bool)#1}> >(int, at::native::X)", "elementwise_kernel<gpu_kernel_impl<masked_fill_kernel>>"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "TensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
         "(at::native::ADAM_MODE)1, false>, float const*, double>(int)",
         "multi_tensor_apply_kernel<Ten…Metadata,FusedAdamMathFunctor>"),
        ("std::enable_if<!(false), void>::type gemvx::kernel<int, float>(int)", "kernel<int,float>"),
        ("", ""),
        ("()", "()"),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_kernel(name) == short
    assert len(short_kernel(name, 20)) <= 20


SGEMM = "cutlass_80_simt_sgemm_of_{}_with_a_long_name_that_all_of_them_share_to_its_very_end"


@pytest.mark.parametrize(
    "names",
    [
        [SGEMM.format(tile) for tile in ("128x64", "64x128", "256x128_split_k")],
        [f"void fill<{kind}, std::array<char*, 1ul>, a_long_argument_of_the_template_{kind}>()" for kind in "ab"],
        ["void at::kernel<int>(int)", "void at::native::kernel<int>(int)", "void at::kernel<int>(float)"],
        ["k" * 5000 + "a", "k" * 5000 + "b"],  # not even their beginnings differ
        ["x…y", "x", ""],
    ],
)
@pytest.mark.parametrize("most", [16, 44, 60])
def test_different_kernels_have_different_short_names(names: list[str], most: int) -> None:
    short = short_kernels(names, most)
    assert list(short) == names
    assert len(set(short.values())) == len(names)
    assert max(map(len, short.values())) <= most
    assert short_kernels([names[0]], most) == {names[0]: short_kernel(names[0], most)}


def test_names_alike_show_where_they_differ() -> None:
    names = [SGEMM.format(tile) for tile in ("128x64", "64x128")]
    assert [("128x64" in text, "64x128" in text) for text in short_kernels(names, 40).values()] == [
        (True, False),
        (False, True),
    ]


def test_a_gigantic_name_is_cut_quickly() -> None:
    assert len(short_kernel("k<" + "(" * 500_000 + ")" * 500_000, 60)) <= 60


@pytest.mark.parametrize(
    ("range", "part"),
    [("blocks.*.attention.scores", "scores"), ("blocks.*", "blocks"), ("loss", "loss"), ("", "")],
)
def test_last_part_of_a_range(range: str, part: str) -> None:
    assert last_part(range) == part
