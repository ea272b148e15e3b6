import random
import re
from dataclasses import replace

import pytest
from tests.sure import sure
from tests.unit.memory_records import MIB, cpu_run, imported_snapshot, prediction_of, watched_run

from steplab import units
from steplab.records.memory_profile import MEMORY_CATEGORIES, MemoryPhase, MemoryProfile, MemoryTimeline
from steplab.records.run import Run
from steplab.report.kit.charts import css_color
from steplab.report.kit.labels import text_width
from steplab.report.memory.categories import color_of, legend_of
from steplab.report.memory.charts import peak_bars
from steplab.report.memory.timeline import WIDTH, fullest_moments, memory_timeline
from steplab.report.run.cells import cells_of

FP32, BF16 = watched_run({"context": 512}), watched_run({"context": 512, "precision": "bf16"})
CHECKPOINTED = watched_run({"context": 512, "checkpointing": "full"}, checkpointed=True)
ALL = {"fp32": FP32, "bf16": BF16, "checkpointed": CHECKPOINTED, "imported": imported_snapshot(), "cpu": cpu_run()}
HALF_A_STEP = 0.35  # pixels: edges are drawn at half pixels, the rules that the scale is read off at tenths
Point = tuple[float, float]


def profile_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None
    return run.memory_profile


def svg_of(profile: MemoryProfile, *, capacity: int | None = None) -> str:
    return sure(memory_timeline(profile, capacity)).pictures[0].svg


def random_profile(seed: int, num_moments: int = 400, num_phases: int = 3) -> MemoryProfile:
    rng = random.Random(seed)
    categories = tuple(sorted(rng.sample(MEMORY_CATEGORIES, rng.randrange(1, 7)), key=MEMORY_CATEGORIES.index))
    times = [0.0]
    for _ in range(num_moments - 1):
        times.append(times[-1] + rng.choice([0.0, 1e-6, 1e-5, 3e-4]))
    sizes = [[rng.choice([0, 10, 500, rng.randrange(1, 9000)]) * MIB for _ in times] for _ in categories]
    totals = [sum(column) for column in zip(*sizes, strict=True)]
    peak = totals.index(max(totals))
    edges = sorted(rng.choice(times) for _ in range(num_phases - 1))
    bounds = [0.0, *edges, times[-1]]
    names = ("forward", "backward", "optimizer", "zero_grad", "a_phase_with_a_long_name", "x")[:num_phases]
    return MemoryProfile(
        source="cuda allocator",
        peak_bytes=totals[peak],
        at_peak={name: column[peak] for name, column in zip(categories, sizes, strict=True)},
        peak_s=times[peak],
        timeline=MemoryTimeline(
            time_s=tuple(times), categories=categories, allocated_bytes=tuple(tuple(column) for column in sizes)
        ),
        phases=tuple(
            MemoryPhase(name=name, start_s=start, end_s=end, peak_bytes=1)
            for name, start, end in zip(names, bounds, bounds[1:], strict=False)
        ),
    )


# --- the areas over time --------------------------------------------------------------------------------------


def edges_of(svg: str) -> dict[str, list[Point]]:
    found = {}
    for path, color in re.findall(r'<path d="(M62 [^"]*z)" fill="(var\(--c\d+\))"><title>', svg):
        x, zero = map(float, re.match(r"M(\S+) ([\d.]+)", path).groups())  # type: ignore[union-attr]
        corners = []
        for kind, value in re.findall(r"([HV])([\d.]+)", path):
            x, y = (float(value), None) if kind == "H" else (x, float(value))
            if y is not None:
                corners.append((x, zero - y))
        found[color] = corners[:-1]  # without the way back to zero
    return found


def height_at(corners: list[Point], x: float) -> float:
    return next((height for at, height in reversed(corners) if at <= x), 0.0)


def bytes_per_px(svg: str) -> float:
    ticks = re.findall(r'y="([\d.]+)" font-size="11" text-anchor="end"[^>]*>([\d.]+) ([KMG]i)?B<', svg)
    scale = {"": 1, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3}
    (low_y, *_), (high_y, number, unit) = ticks[0], ticks[-1]
    return float(number) * scale[unit] / (float(low_y) - float(high_y))


@pytest.mark.parametrize("case", [*ALL, *range(5)])
def test_stacked_areas_are_the_records_bytes_at_every_moment(case: str | int) -> None:
    profile = random_profile(case) if isinstance(case, int) else profile_of(ALL[case])
    timeline, svg = profile.timeline, svg_of(profile)
    edges, per_px = edges_of(svg), bytes_per_px(svg)
    ends = [profile.timeline.time_s[-1], profile.peak_s, *(phase.end_s for phase in profile.phases)]
    columns = round((WIDTH - 72) / _column_px(svg))
    moments = fullest_moments(timeline, 0.0, max(ends), columns)
    there = [name for name, sizes in zip(timeline.categories, timeline.allocated_bytes, strict=True) if any(sizes)]
    assert list(edges) == [css_color(color_of(name)) for name in reversed(there)]
    for column, moment in enumerate(moments):
        x = 62 + (column + 0.5) * (WIDTH - 72) / columns
        drawn, below = 0.0, 0
        for name, sizes in zip(timeline.categories, timeline.allocated_bytes, strict=True):
            if name in there and moment is not None:
                below += sizes[moment]
                height = height_at(edges[css_color(color_of(name))], x)
                assert height * per_px == pytest.approx(below, abs=HALF_A_STEP * per_px)
                drawn = height
        total = sum(sizes[moment] for sizes in timeline.allocated_bytes) if moment is not None else 0
        assert drawn * per_px == pytest.approx(total, abs=HALF_A_STEP * per_px)


def _column_px(svg: str) -> float:
    corners = {x for edge in edges_of(svg).values() for x, _ in edge}
    return max(
        px
        for px in (1.0, 2.0, 4.0, 8.0)
        if all(
            abs(
                (x - 62) * int((WIDTH - 72) / px) / (WIDTH - 72)
                - round((x - 62) * int((WIDTH - 72) / px) / (WIDTH - 72))
            )
            < 0.3
            for x in corners
        )
    )


@pytest.mark.parametrize("seed", range(15))
def test_a_column_shows_the_fullest_moment_in_it(seed: int) -> None:
    timeline = random_profile(seed, num_moments=60).timeline
    end, num_columns = timeline.time_s[-1] or 1.0, 17
    totals = [sum(sizes) for sizes in zip(*timeline.allocated_bytes, strict=True)]
    found = fullest_moments(timeline, 0.0, end, num_columns)
    until = [*timeline.time_s[1:], end]
    for column, moment in enumerate(found):
        left, right = end * column / num_columns, end * (column + 1) / num_columns
        last = column == num_columns - 1
        lasting = [
            i
            for i, (begins, ends) in enumerate(zip(timeline.time_s, until, strict=True))
            if (begins < right or last) and (ends > left or left <= begins)
        ]
        assert moment is not None
        assert totals[moment] == pytest.approx(max(totals[i] for i in lasting))
    assert max(totals) == max(totals[m] for m in found if m is not None)


@pytest.mark.parametrize("case", [*ALL, *range(8)])
def test_the_dot_is_at_the_peak(case: str | int) -> None:
    profile = random_profile(case) if isinstance(case, int) else profile_of(ALL[case])
    svg = svg_of(profile)
    x, y = dots(svg)[0]
    end = max(profile.timeline.time_s[-1], *(phase.end_s for phase in profile.phases), profile.peak_s)
    assert x == pytest.approx(62 + profile.peak_s / end * (WIDTH - 72), abs=0.06)
    zero = 322
    assert (zero - y) * bytes_per_px(svg) == pytest.approx(profile.peak_bytes, rel=0.003)
    highest = max(height for edge in edges_of(svg).values() for _, height in edge)
    assert zero - y == pytest.approx(highest, abs=0.2)
    assert f">peak {units.format_bytes(profile.peak_bytes)}</text>" in svg


def dots(svg: str) -> list[Point]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]


def test_phases_are_shaded_where_they_were() -> None:
    profile = profile_of(FP32)
    svg, end = svg_of(profile), profile.phases[-1].end_s
    shaded = re.findall(r"<title>(\w+): peak ([^<]*)</title><path d=\"M([\d.]+) 0H([\d.]+)V", svg)
    assert [(name, size) for name, size, *_ in shaded] == [
        (phase.name, units.format_bytes(phase.peak_bytes)) for phase in profile.phases
    ]
    for (*_, left, right), phase in zip(shaded, profile.phases, strict=True):
        assert float(left) == pytest.approx(62 + phase.start_s / end * 968, abs=0.06)
        assert float(right) == pytest.approx(62 + phase.end_s / end * 968, abs=0.06)


def test_the_devices_memory_is_drawn_where_the_peak_comes_near_it() -> None:
    profile = profile_of(FP32)
    near = svg_of(profile, capacity=int(profile.peak_bytes / 0.7))
    assert f"device memory {units.format_bytes(profile.peak_bytes / 0.7)}" in near
    (line,) = re.findall(r'd="M62 ([\d.]+)H1030" stroke="var\(--muted\)" stroke-dasharray', near)
    assert (322 - float(line)) * bytes_per_px(near) == pytest.approx(profile.peak_bytes / 0.7, rel=0.005)
    assert "device memory" not in svg_of(profile, capacity=int(profile.peak_bytes / 0.5))


# --- labels ------------------------------------------------------------------------------------------------------


def label_boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    found = []
    for attributes, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        x, y = (float(re.search(rf'\b{axis}="([-\d.]+)"', attributes)[1]) for axis in "xy")  # type: ignore[index]
        anchor = re.search(r"text-anchor[:=][ \"]*(\w+)", attributes)
        size = sure(re.search(r"font-size[:=][ \"]*(\d+)", attributes))
        width = text_width(text, float(size[1]))
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor[1] if anchor else "start"]
        found.append((text, left, y - 9, left + width, y + 2))
    return found


def assert_labels_fit(svg: str) -> None:
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    boxes = label_boxes(svg)
    assert len(boxes) == svg.count("<text ")
    for index, (text, left, top, right, bottom) in enumerate(boxes):
        assert left >= -0.5, text
        assert right <= width + 0.5, text
        assert top >= -0.5, text
        assert bottom <= height + 0.5, text
        for other, its_left, its_top, its_right, its_bottom in boxes[index + 1 :]:
            apart = right <= its_left + 0.5 or its_right <= left + 0.5 or bottom <= its_top or its_bottom <= top
            assert apart, f"{text} / {other}"


@pytest.mark.parametrize("fullness", [None, 0.6, 0.98])
@pytest.mark.parametrize("case", [*ALL, *range(6)])
def test_no_label_over_time_is_cut_or_runs_into_another(case: str | int, fullness: float | None) -> None:
    profile = random_profile(case, num_phases=1 + case % 6) if isinstance(case, int) else profile_of(ALL[case])
    capacity = int(profile.peak_bytes / fullness) if fullness else None
    assert_labels_fit(svg_of(profile, capacity=capacity))


def test_a_phase_with_a_name_of_any_length_is_named_within_the_picture() -> None:
    phases = tuple(replace(phase, name="phase " + "x" * 80) for phase in profile_of(FP32).phases)
    assert_labels_fit(svg_of(replace(profile_of(FP32), phases=phases)))


# --- bounds -------------------------------------------------------------------------------------------------------


def test_however_long_the_history_the_picture_stays_small() -> None:
    rng = random.Random(3)
    num = 60_000
    sizes = tuple(tuple(rng.randrange(10**9) for _ in range(num)) for _ in MEMORY_CATEGORIES)
    timeline = MemoryTimeline(
        time_s=tuple(1e-5 * i for i in range(num)), categories=MEMORY_CATEGORIES, allocated_bytes=sizes
    )
    profile = replace(profile_of(FP32), timeline=timeline, peak_s=0.1)
    assert len(svg_of(profile)) < 70_000


def test_a_history_of_nothing_is_no_picture_and_one_of_one_moment_is_one() -> None:
    profile = profile_of(FP32)
    nothing = MemoryTimeline(time_s=(), categories=(), allocated_bytes=())
    assert memory_timeline(replace(profile, timeline=nothing)) is None
    moment = MemoryTimeline(time_s=(0.0,), categories=("parameters",), allocated_bytes=((7,),))
    alone = replace(profile, timeline=moment, phases=(), peak_s=0.0, peak_bytes=7)
    assert_labels_fit(svg_of(alone))
    empty = replace(alone, timeline=replace(moment, allocated_bytes=((0,),)), peak_bytes=0)
    assert_labels_fit(svg_of(empty))


def test_hostile_names_are_text_in_the_picture() -> None:
    hostile = "<script>alert(1)</script>\"'&"
    phases = tuple(replace(phase, name=hostile) for phase in profile_of(FP32).phases)
    chart = sure(memory_timeline(replace(profile_of(FP32), phases=phases)))
    assert "<script" not in chart.pictures[0].svg
    assert "&lt;script&gt;" in chart.pictures[0].svg


# --- bars --------------------------------------------------------------------------------------------------------


def test_the_bars_are_as_long_as_the_bytes_and_a_stroke_marks_the_prediction() -> None:
    runs = [FP32, BF16, CHECKPOINTED]
    prediction = prediction_of(profile_of(BF16), 1.03)
    chart = sure(peak_bars(cells_of(runs), {BF16.id: prediction}))
    for cell, bar in zip(cells_of(runs), chart.bars, strict=True):
        sizes = {name: size for name, size in profile_of(cell.run).at_peak.items() if size}
        assert sorted(segment.value for segment in bar.segments) == sorted(sizes.values())
        for name, size in sizes.items():
            assert any(f": {name.replace('_', ' ')} {units.format_bytes(size)}, " in s.tip for s in bar.segments)
        assert bar.mark == (prediction.peak_bytes if cell.run is BF16 else None)
    (told,) = [bar.detail for bar in chart.bars if bar.detail]
    assert told == f"predicted {units.format_bytes(prediction.peak_bytes)}, +3.0 %"
    assert chart.width == max(*(profile_of(run).peak_bytes for run in runs), prediction.peak_bytes)


def test_one_bar_or_none_is_no_chart_and_a_snapshots_categories_are_left_out() -> None:
    assert peak_bars(cells_of([FP32]), {}) is None
    assert peak_bars(cells_of([FP32]), {FP32.id: prediction_of(profile_of(FP32))}) is not None
    assert peak_bars(cells_of([ALL["imported"], ALL["imported"]]), {}) is None
    chart = sure(peak_bars(cells_of([FP32, BF16, ALL["imported"]]), {}))
    assert chart.note.endswith(" 1 more watched run is not drawn.")
    assert all("before" not in segment.tip for bar in chart.bars for segment in bar.segments)


def test_a_category_has_a_colour_of_its_own() -> None:
    colors = [color_of(name) for name in MEMORY_CATEGORIES]
    assert len(set(colors)) == len(MEMORY_CATEGORIES)
    assert [f"var(--c{number})" for number, *_ in legend_of(MEMORY_CATEGORIES)] == [css_color(c) for c in colors]
    assert len({color_of(name) for name in ("before", "during", "rounding")}) == 3
