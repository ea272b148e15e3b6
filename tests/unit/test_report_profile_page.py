"""The pictures and the page of a profile: what is drawn is as long, as large and as coloured as the record says."""

import random
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.profiles import cpu_run, imported_run, launch_bound_run, profiled_run
from tests.runs import make_run, out_of_memory

import steplab
from steplab import units
from steplab.records.profile import CATEGORIES, OpStats, Profile, Timeline
from steplab.records.run import Run
from steplab.report.kit.charts import CATEGORY_COLORS, SERIES, category_legend, css_color
from steplab.report.kit.document import Bars, Section
from steplab.report.kit.timelines import column_shares
from steplab.report.page import render_page
from steplab.report.profile.charts import category_bars, device_time, kernel_bars
from steplab.report.profile.document import profile_chapter
from steplab.report.profile.figures import passes, spans, top_kernels
from steplab.report.profile.roofline import roofline, roofline_points
from steplab.report.profile.timeline import close_ups, timeline_chart
from steplab.report.run import charts
from steplab.report.run.cells import cells_of

LARGE, SMALL, CPU, IMPORTED = profiled_run(), launch_bound_run(), cpu_run(), imported_run()
ALL = [LARGE, SMALL, CPU, IMPORTED]
NAMES = ["large", "small", "cpu", "imported"]
CSS = ((Path(steplab.__file__).parent / "report") / "kit" / "page.css").read_text(encoding="utf-8")
HOSTILE = "<script>alert(1)</script>\x1b[31m$&|{{7*7}}"


def profile_of(run: Run) -> Profile:
    assert run.profile is not None
    return run.profile


def timeline_of(run: Run) -> Timeline:
    timeline = profile_of(run).timeline
    assert timeline is not None
    return timeline


def bar_tips(bars: Bars) -> list[str]:
    return [segment.tip for bar in bars.bars for segment in bar.segments]


def tips(svg: str) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", svg)


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
def test_the_category_bars_are_the_shares_of_each_pass(run: Run) -> None:
    chart = category_bars(run, profile_of(run))
    assert chart is not None
    said = bar_tips(chart)
    expected = []
    for name, span in passes(run, profile_of(run)):
        for category in CATEGORIES:
            if seconds := span.categories[category]:
                share = units.format_percent(seconds / span.busy_s)
                expected.append(f"{name}: {category} {units.format_time(seconds)}, {share} of the busy time")
    assert said == expected
    assert [label for _, _, label in chart.legend] == [c for c in CATEGORIES if profile_of(run).category_s(c)]


def test_the_bars_of_kernels_are_the_largest_of_each_phase() -> None:
    charts = dict(kernel_bars(profile_of(LARGE)))
    assert list(charts) == ["forward", "backward", "optimizer"]
    for phase, chart in charts.items():
        kernels = top_kernels(profile_of(LARGE), (phase,))
        told = [f"{units.format_time(kernel.time_s)}, {units.format_percent(kernel.share)}" for kernel in kernels[:8]]
        assert [bar.figure for bar in chart.bars] == told
        if len(kernels) > 8:
            rest = 1 - sum(kernel.share for kernel in kernels[:8])
            assert chart.note.endswith(f" {len(kernels) - 8} more take {units.format_percent(rest)}.")


# --- colours ----------------------------------------------------------------------------------------------


def palettes() -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Background and the categories' colours, linear RGB: of the light scheme, then of the dark one."""

    def linear(text: str) -> NDArray[np.float64]:
        value = np.array([int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)

    papers = re.findall(r"--paper: (#\w{6})", CSS)
    colors = {index: re.findall(rf"--c{index}: (#\w{{6}})", CSS) for index in range(9, 21)}
    assert len(papers) == 2
    assert len(CATEGORY_COLORS) == len(CATEGORIES) == len(colors)
    return [(linear(papers[i]), np.array([linear(found[i]) for found in colors.values()])) for i in range(2)]


# Machado, Oliveira and Fernandes 2009, severity 1: what a protanope and a deuteranope see.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def oklab(color: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ottosson 2020."""
    to_lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
              [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
              [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    lms = np.cbrt(np.clip(color, 0, None) @ np.array(to_lms).T)
    return np.asarray(lms @ np.array(to_lab).T)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_categories_can_be_told_apart_by_everyone_and_from_the_page(vision: str, scheme: int) -> None:
    paper, colors = palettes()[scheme]
    seen = oklab(np.clip(colors @ VISIONS[vision].T, 0, 1))
    distances = np.linalg.norm(seen[:, None] - seen[None], axis=-1)[np.triu_indices(len(seen), 1)]
    assert distances.min() > 0.075  # 0.02 is about what can just be told apart side by side
    luminance = colors @ np.array([0.2126, 0.7152, 0.0722])
    background = paper @ np.array([0.2126, 0.7152, 0.0722])
    contrast = (np.maximum(luminance, background) + 0.05) / (np.minimum(luminance, background) + 0.05)
    assert contrast.min() >= 3  # WCAG 2.1, 1.4.11


def test_a_category_has_one_colour_everywhere() -> None:
    colors = [css_color(color) for color in CATEGORY_COLORS]
    assert colors == [f"var(--c{number})" for number, _, _ in category_legend(CATEGORIES)]
    assert not {css_color(color) for color in SERIES} & set(colors)
    assert all(CSS.count(f"--c{number}:") == 2 for number in range(1, 21))


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


def test_the_roofline_states_its_roofs_and_where_they_are_from() -> None:
    chart = roofline(LARGE, profile_of(LARGE))
    assert chart is not None
    assert "fp32 67.0 TFLOP/s" in chart.pictures[0].svg
    assert "4.80 TB/s" in chart.pictures[0].svg
    assert "Roofs of H200 SXM: NVIDIA H200 product page" in chart.note
    shown = [p for p in roofline_points(LARGE, profile_of(LARGE)) if p.share >= 0.001]
    assert len(tips(chart.pictures[0].svg)) == len(shown)
    assert f"{units.format_percent(sum(p.share for p in shown))} of the operators' time" in chart.note


def test_without_figures_of_the_device_no_roof_is_drawn_and_it_says_why() -> None:
    chart = roofline(CPU, profile_of(CPU))
    assert chart is not None
    assert "No roof is drawn: no data sheet's figures are known for Intel Xeon" in chart.note
    assert "TFLOP/s" not in re.sub(r"<title>.*?</title>", "", chart.pictures[0].svg)
    ops = tuple(replace(op, dtype="fp64") for op in profile_of(LARGE).ops)
    unknown = roofline(LARGE, replace(profile_of(LARGE), ops=ops))
    assert unknown is not None
    assert "No roof is drawn: no peak is stated" in unknown.note
    assert roofline(IMPORTED, profile_of(IMPORTED)) is None


def test_a_lone_operator_can_be_drawn() -> None:
    op = OpStats(name="aten::mm", category="matmul", phase="outside", range="", inputs="", dtype="bf16", calls=1,
                 kernels=1, device_s=1e-3, flops=1e9, moved_bytes=1e3)  # fmt: skip
    chart = roofline(LARGE, replace(profile_of(LARGE), ops=(op,)))
    assert chart is not None
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


@pytest.mark.parametrize("seed", range(20))
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


def areas(svg: str) -> dict[str, float]:
    """Area of each category's path, by the colour it is filled with."""
    found: dict[str, float] = defaultdict(float)
    for path, number in re.findall(r'<path d="([^"]*)" fill="var\(--c(\d+)\)"/>', svg):
        for width, height in re.findall(r"h([\d.]+)v([\d.]+)h-", path):
            found[CATEGORIES[int(number) - 9]] += float(width) * float(height)
    return found


@pytest.mark.parametrize("run", ALL, ids=NAMES)
def test_areas_of_the_picture_are_times_of_the_record(run: Run) -> None:
    chart, timeline = timeline_chart(profile_of(run)), timeline_of(run)
    assert chart is not None
    times: dict[str, int] = defaultdict(int)
    for kernel, lasts in zip(timeline.kernel, timeline.duration_ns, strict=True):
        times[timeline.categories[kernel]] += lasts
    drawn = areas(chart.pictures[0].svg)
    end_ns = max(end for _, _, end in timeline.phases)
    row_px = 64 if len(set(timeline.stream)) == 1 else 40
    for category, ns in times.items():
        share = drawn[category] / row_px / (1040 - 76 - 10)
        assert share == pytest.approx(ns / end_ns, rel=0.02, abs=0.003)
        assert f"<title>{category}, " in chart.pictures[0].svg


def test_a_row_a_stream_and_the_phases_named() -> None:
    (imported,) = timeline_chart(profile_of(IMPORTED)).pictures  # type: ignore[union-attr]
    assert ">stream 7<" in imported.svg
    assert ">stream 20<" in imported.svg
    large = timeline_chart(profile_of(LARGE))
    assert large is not None
    for name, start, end in timeline_of(LARGE).phases:
        assert f"<title>{name}, {units.format_time((end - start) / 1e9)}</title>" in large.pictures[0].svg
    assert ">forward</text>" in large.pictures[0].svg
    assert ">thread 0<" in timeline_chart(profile_of(CPU)).pictures[0].svg  # type: ignore[union-attr]


def test_however_many_kernels_the_picture_stays_small() -> None:
    crowded = random_timeline(1, num_kernels=60_000, num_streams=12)
    chart = timeline_chart(replace(profile_of(LARGE), timeline=crowded))
    assert chart is not None
    assert len(chart.pictures[0].svg) < 300_000
    assert "4 more streams with less time are not drawn" in chart.note
    for run in ALL:
        drawn = timeline_chart(profile_of(run))
        assert drawn is not None
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


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


@pytest.mark.parametrize(
    "runs", [[LARGE], [IMPORTED], [*ALL, make_run(), out_of_memory({"model": "xl"})]], ids=["one", "trace", "all"]
)
def test_a_page_with_profiles_is_whole_and_needs_nothing_else(runs: list[Run]) -> None:
    page = render_page(runs, title="Profiles")
    assert page == render_page(runs, title="Profiles")
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert page.count('<section id="profiles">') == 1
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)
    assert "<script" not in page
    assert "None" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    for heading in ("time by phase", "Categories", "Timeline of one step"):
        assert len(re.findall(rf"{heading}</h\d>", page)) == sum(run.profile is not None for run in runs)


def test_without_profiles_the_page_does_not_speak_of_them() -> None:
    page = render_page([make_run(), out_of_memory({"model": "xl"})], title="No profile")
    assert 'id="profiles"' not in page
    assert "of the busy time" not in page


def test_six_profiles_from_the_first_to_the_last_are_shown_in_full() -> None:
    runs = [replace(IMPORTED, id=f"{index:012x}", name=f"rank{index}") for index in range(8)]
    chapter = profile_chapter(cells_of(runs))
    assert chapter is not None
    sections = [block for block in chapter.blocks if isinstance(block, Section)]
    assert [section.title for section in sections] == [f"rank{index}" for index in (0, 1, 3, 4, 6, 7)]
    assert f"shows each: {runs[2].id}, {runs[5].id}." in render_page(runs, title="x").replace("\u00a0", " ")


def test_hostile_names_are_text_on_the_page() -> None:
    profile, timeline = profile_of(LARGE), timeline_of(LARGE)
    hostile = replace(
        profile,
        kernels=tuple(replace(k, name=HOSTILE + k.name, range=HOSTILE) for k in profile.kernels),
        ops=tuple(replace(op, name=HOSTILE, inputs=HOSTILE, range=f"{HOSTILE}.scores") for op in profile.ops),
        host_calls=tuple(replace(call, name=HOSTILE, range=HOSTILE) for call in profile.host_calls),
        timeline=replace(
            timeline,
            names=tuple(HOSTILE for _ in timeline.names),
            ranges=tuple((f"{name}.{HOSTILE}", *rest) for name, *rest in timeline.ranges),  # type: ignore[misc]
        ),
        notes=(HOSTILE,),
        file=HOSTILE,
    )
    page = render_page([replace(LARGE, profile=hostile)], title="x")
    assert "<script" not in page
    assert "\x1b[31m<" not in page
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


def test_a_page_of_a_trace_names_the_gpu_that_the_trace_names() -> None:
    named = replace(IMPORTED, profile=replace(profile_of(IMPORTED), device_name="NVIDIA Something"))
    assert "1 run · NVIDIA Something · " in render_page([named], title="page").replace("\u00a0", " ")


def test_a_trace_without_timing_leaves_no_hole_in_the_pictures_of_steps() -> None:
    timed = [make_run({"context": context}) for context in (128, 256)]
    for picture in (charts.step_times, charts.peak_memory, charts.mfu):
        assert picture(cells_of([*timed, IMPORTED])) == picture(cells_of(timed))
        assert picture(cells_of([timed[0], IMPORTED])) is None


def test_bars_have_the_colours_of_their_legend() -> None:
    bars = device_time(SMALL, profile_of(SMALL))
    assert {segment.color for bar in bars.bars for segment in bar.segments} == {number for number, *_ in bars.legend}
