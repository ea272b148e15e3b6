import random
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle, StepPatch
from tests.sure import sure
from tests.unit.memory_records import MIB, cpu_run, imported_snapshot, prediction_of, watched_run

from steplab import units
from steplab.records.memory_profile import MEMORY_CATEGORIES, MemoryPhase, MemoryProfile, MemoryTimeline
from steplab.records.run import Run
from steplab.report.kit.charts import css_color
from steplab.report.kit.labels import text_width
from steplab.report.memory.categories import category_word, color_of, legend_of
from steplab.report.memory.charts import peak_bars
from steplab.report.memory.timeline import NUM_COLUMNS, fullest_moments, memory_timeline
from steplab.report.run.cells import cells_of

FP32, BF16 = watched_run({"context": 512}), watched_run({"context": 512, "precision": "bf16"})
CHECKPOINTED = watched_run({"context": 512, "checkpointing": "full"}, checkpointed=True)
ALL = {"fp32": FP32, "bf16": BF16, "checkpointed": CHECKPOINTED, "imported": imported_snapshot(), "cpu": cpu_run()}


def profile_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None
    return run.memory_profile


def axes_of(profile: MemoryProfile, *, capacity: int | None = None) -> Axes:
    (axes,) = sure(memory_timeline(profile, capacity)).pictures[0].drawing.figure.axes
    return axes


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


def areas_of(axes: Axes) -> list[tuple[str, list[float]]]:
    found = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    return [(to_hex(patch.get_facecolor()), list(patch.get_data()[0])) for patch in found]


@pytest.mark.parametrize("case", [*ALL, *range(5)])
def test_stacked_areas_are_the_records_bytes_at_every_moment(case: str | int) -> None:
    profile = random_profile(case) if isinstance(case, int) else profile_of(ALL[case])
    timeline, axes = profile.timeline, axes_of(profile)
    moments = fullest_moments(timeline, *axes.get_xlim(), NUM_COLUMNS)
    below = [0] * NUM_COLUMNS
    expected: list[tuple[str, list[int]]] = []
    for name, sizes in zip(timeline.categories, timeline.allocated_bytes, strict=True):
        below = [low + (0 if at is None else sizes[at]) for low, at in zip(below, moments, strict=True)]
        if any(sizes):
            expected.insert(0, (color_of(name), below))
    assert areas_of(axes) == expected


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
    axes = axes_of(profile)
    (dot,) = axes.lines
    assert np.array(dot.get_xydata()).tolist() == [[profile.peak_s, profile.peak_bytes]]
    assert max(areas_of(axes)[0][1]) == pytest.approx(profile.peak_bytes, rel=0.003)


def test_phases_are_shaded_where_they_were() -> None:
    profile = profile_of(FP32)
    (picture,) = sure(memory_timeline(profile)).pictures
    spans = [patch.get_extents() for patch in picture.drawing.figure.axes[0].patches if isinstance(patch, Rectangle)]
    left, right = picture.drawing.figure.axes[0].bbox.intervalx
    for span, phase in zip(spans, profile.phases, strict=True):
        start_px, end_px = (
            left + at / profile.phases[-1].end_s * (right - left) for at in (phase.start_s, phase.end_s)
        )
        assert (span.x0, span.x1) == (pytest.approx(start_px, abs=0.1), pytest.approx(end_px, abs=0.1))
        assert f"<title>{phase.name}: peak {units.format_bytes(phase.peak_bytes)}</title>" in picture.svg


def test_the_devices_memory_is_drawn_where_the_peak_comes_near_it() -> None:
    profile = profile_of(FP32)
    capacity = int(profile.peak_bytes / 0.7)
    near = axes_of(profile, capacity=capacity)
    assert f"device memory {units.format_bytes(capacity)}" in [text.get_text() for text in near.texts]
    assert np.array(near.lines[0].get_ydata()).tolist() == [capacity, capacity]
    far = axes_of(profile, capacity=int(profile.peak_bytes / 0.5))
    assert "device memory" not in " ".join(text.get_text() for text in far.texts)


# --- labels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "phase " + "x" * 80])
def test_a_phase_is_named_where_its_name_fits(name: str) -> None:
    phases = tuple(replace(phase, name=name) for phase in profile_of(FP32).phases)
    axes = axes_of(replace(profile_of(FP32), phases=phases))
    width = axes.bbox.width / axes.get_xlim()[1]
    fitting = [phase for phase in phases if text_width(name, 11) + 8 <= (phase.end_s - phase.start_s) * width]
    assert [text.get_text() for text in axes.texts] == [name] * len(fitting)


# --- bounds -------------------------------------------------------------------------------------------------------


def test_however_long_the_history_the_picture_stays_small() -> None:
    rng = random.Random(3)
    num = 60_000
    sizes = tuple(tuple(rng.randrange(10**9) for _ in range(num)) for _ in MEMORY_CATEGORIES)
    timeline = MemoryTimeline(
        time_s=tuple(1e-5 * i for i in range(num)), categories=MEMORY_CATEGORIES, allocated_bytes=sizes
    )
    profile = replace(profile_of(FP32), timeline=timeline, peak_s=0.1)
    assert len(sure(memory_timeline(profile)).pictures[0].svg) < 70_000


def test_a_history_of_nothing_is_no_picture_and_one_of_one_moment_is_one() -> None:
    profile = profile_of(FP32)
    nothing = MemoryTimeline(time_s=(), categories=(), allocated_bytes=())
    assert memory_timeline(replace(profile, timeline=nothing)) is None
    moment = MemoryTimeline(time_s=(0.0,), categories=("parameters",), allocated_bytes=((7,),))
    alone = replace(profile, timeline=moment, phases=(), peak_s=0.0, peak_bytes=7)
    assert sure(memory_timeline(alone)).pictures[0].svg
    empty = replace(alone, timeline=replace(moment, allocated_bytes=((0,),)), peak_bytes=0)
    assert sure(memory_timeline(empty)).pictures[0].svg


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
            assert any(f": {category_word(name)} {units.format_bytes(size)}, " in s.tip for s in bar.segments)
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
