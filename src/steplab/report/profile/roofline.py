"""Draws a roofline: each operator's FLOP/s over its arithmetic intensity, below the device's peaks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab import units
from steplab.costs.roofline import Roofline
from steplab.records.profile import OpStats, Profile
from steplab.records.run import Run
from steplab.report.kit.charts import INK, MUTED, PAPER, Drawing, category_color, category_legend, drawing
from steplab.report.kit.document import Chart
from steplab.report.kit.kernel_names import last_part
from steplab.specs.hardware import find_hardware

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def find_roofs(run: Run) -> Roofline:
    """Peak FLOP/s and bandwidth by the data sheet of exactly this device; empty if it is unknown."""
    return Roofline(hardware=find_hardware(run.device_name) if run.device_name else None)


def why_no_roof(run: Run) -> str:
    if run.device_name is None:
        return "the record does not name its device"
    return f"no data sheet's figures are known for {run.device_name}"


def roof_dtype(run: Run, profile: Profile, op: OpStats) -> str:
    """Number format whose peak applies to an operator; '' if unknown.

    TF32's peak applies to float32 matmuls if the run, or a kernel's name, shows TF32.
    """
    if op.dtype != "fp32" or op.category not in ("matmul", "attention"):
        return op.dtype
    asked = run.spec is not None and run.spec.precision == "tf32"
    return "tf32" if asked or (run.spec is None and _runs_tf32(profile)) else "fp32"


def _runs_tf32(profile: Profile) -> bool:
    products = (kernel.name for kernel in profile.kernels if kernel.category in ("matmul", "attention"))
    return any("tf32" in name or "_s1688" in name for name in products)


_WIDTH, _HEIGHT = 680, 400
_LEAST_SHARE = 0.001  # of the operators' time; a point below it is a speck
_AREA = 1600  # square pixels of a point with half the time
_LABELLED = 9
_GREY = 7
_LETTER_PX = 6.5
_MARKERS = {
    "forward": ("o", "●"),
    "backward": ("s", "■"),
    "gradient sync": ("v", "▼"),
    "optimizer": ("^", "▲"),
    "outside": ("D", "◆"),
}
_LOW_INTENSITY, _HIGH_INTENSITY = 0.05, 200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    op: OpStats
    intensity: float
    flops_per_s: float
    share: float
    ceiling_share: float | None
    """FLOP/s over the roofline at this intensity; None without a known roofline."""
    dtype: str


def roofline_points(run: Run, profile: Profile) -> list[Point]:
    roofs = find_roofs(run)
    total_s = sum(op.device_s for op in profile.ops)
    points = []
    for op in sorted(profile.ops, key=lambda op: -op.device_s):
        if not (op.flops and op.moved_bytes and op.device_s > 0):
            continue
        dtype = roof_dtype(run, profile, op)
        least_s = roofs.least_time_s(op.flops, op.moved_bytes, dtype)
        points.append(
            Point(
                op=op,
                intensity=op.flops / op.moved_bytes,
                flops_per_s=op.flops / op.device_s,
                share=op.device_s / total_s,
                ceiling_share=None if least_s is None else least_s / op.device_s,
                dtype=dtype,
            )
        )
    return points


def roofline(run: Run, profile: Profile) -> Chart | None:
    every = roofline_points(run, profile)
    points = [point for point in every if point.share >= _LEAST_SHARE]
    if not points:
        return None
    roofs = find_roofs(run)
    dtypes = dict.fromkeys(point.dtype for point in points if point.dtype)
    peaks = [(dtype, peak) for dtype in dtypes if (peak := roofs.peak(dtype))]
    with drawing(_WIDTH, _HEIGHT, "roofline of the step's operators") as picture:
        axes = _frame(picture, points, peaks)
        _draw_roofs(axes, roofs, peaks)
        for point in points:
            _draw_point(picture, axes, point)
        _name_largest(axes, points)
    phases = {point.op.phase for point in points}
    marks = tuple((_GREY, glyph, phase) for phase, (_, glyph) in _MARKERS.items() if phase in phases)
    return Chart(
        pictures=(picture.picture(),),
        legend=(*category_legend({point.op.category for point in points}), *marks),
        note=_note(run, every, points, roofs, peaks),
    )


def _frame(picture: Drawing, points: Sequence[Point], peaks: Sequence[tuple[str, float]]) -> "Axes":
    axes = picture.axes(84, 40, 14, 10)
    axes.set_xscale("log")
    axes.set_yscale("log")
    intensities = [point.intensity for point in points]
    rates = [point.flops_per_s for point in points] + [peak for _, peak in peaks]
    low, high = min(*intensities, _LOW_INTENSITY), max(*intensities, _HIGH_INTENSITY)
    axes.set_xlim(low / 1.5, high * 2)
    bottom, top = math.floor(math.log10(min(rates) / 2)), max(rates) * 2.2
    axes.set_ylim(10.0**bottom, top)
    axes.minorticks_off()
    exponents = range(math.ceil(math.log10(low / 1.5)), math.floor(math.log10(high * 2)) + 1)
    axes.set_xticks([10.0**e for e in exponents], [f"{10.0**e:g}" for e in exponents], fontsize=11)
    rules = [10.0**e for e in range(bottom, math.floor(math.log10(top)) + 1)]
    axes.set_yticks(rules, [units.format_rate(rule, "FLOP/s").replace(".00", "").replace(".0", "") for rule in rules],
                    fontsize=11)  # fmt: skip
    axes.grid()
    axes.set_xlabel("intensity, FLOP per byte moved", fontsize=11)
    return axes


def _draw_roofs(axes: "Axes", roofs: Roofline, peaks: Sequence[tuple[str, float]]) -> None:
    bandwidth = roofs.bandwidth()
    if bandwidth is None or not peaks:
        return
    low, high = axes.get_xlim()
    highest = max(peak for _, peak in peaks)
    axes.plot([low, highest / bandwidth], [low * bandwidth, highest], color=MUTED, linewidth=1.5)
    for dtype, peak in peaks:
        axes.plot([peak / bandwidth, high], [peak, peak], color=MUTED, linewidth=1.5)
        axes.text(high, peak * 1.1, f"{dtype} {units.format_rate(peak, 'FLOP/s')} ", ha="right", va="bottom",
                  fontsize=11, color=INK)  # fmt: skip
    corner = max(low, axes.get_ylim()[0] / bandwidth) * 1.15
    start, rise = axes.transData.transform(((corner, corner * bandwidth), (2 * corner, 2 * corner * bandwidth)))
    angle = math.degrees(math.atan2(rise[1] - start[1], rise[0] - start[0]))
    axes.text(corner, corner * bandwidth * 1.25, units.format_rate(bandwidth, "B/s"), rotation=angle,
              rotation_mode="anchor", va="bottom", fontsize=11, color=INK)  # fmt: skip


def _draw_point(picture: Drawing, axes: "Axes", point: Point) -> None:
    op = point.op
    marker = _MARKERS[op.phase][0]
    (mark,) = axes.plot(
        [point.intensity], [point.flops_per_s], marker, color=category_color(op.category), alpha=0.75,
        markersize=_size(point), markeredgecolor=PAPER, markeredgewidth=0.8,
    )  # fmt: skip
    ceiling = "" if point.ceiling_share is None else f", {units.format_percent(point.ceiling_share)} of the ceiling"
    picture.tip(
        mark,
        f"{op.name} {op.inputs}, {op.phase}{', ' + op.range if op.range else ''}: "
        f"{units.format_percent(point.share)} of the operators' time, {units.three_digits(point.intensity)} FLOP/B, "
        f"{units.format_rate(point.flops_per_s, 'FLOP/s')}{ceiling}",
    )


def _name_largest(axes: "Axes", points: Sequence[Point]) -> None:
    placed: list[tuple[float, float, float]] = []  # left, right, height, in pixels
    centers = [axes.transData.transform((point.intensity, point.flops_per_s)) for point in points]
    for point, (x, y) in zip(points, centers, strict=True):
        name = last_part(point.op.range) or point.op.name.removeprefix("aten::")
        radius = _size(point) / 2
        left, right = x - radius, x + radius + 6 + _LETTER_PX * len(name)
        covers = any(x + radius < other_x < right and abs(y - other_y) < 9 for other_x, other_y in centers)
        if covers or any(left < r and right > other and abs(y - height) < 14 for other, r, height in placed):
            continue
        placed.append((left, right, y))
        axes.annotate(name, (point.intensity, point.flops_per_s), (radius + 3, 0), textcoords="offset points",
                      va="center", fontsize=11, color=INK)  # fmt: skip
        if len(placed) == _LABELLED:
            return


def _size(point: Point) -> float:
    return max(math.sqrt(2 * _AREA * point.share), 5)


def _note(
    run: Run, every: Sequence[Point], points: Sequence[Point], roofs: Roofline, peaks: Sequence[tuple[str, float]]
) -> str:
    shown = units.format_percent(sum(point.share for point in points))
    note = "One point per operator with inputs of one shape in one place of the model; its area is its time; "
    note += f"the points are {shown} of the operators' time. "
    if len(every) > len(points):
        note += f"{len(every) - len(points)} operators below {units.format_percent(_LEAST_SHARE)} are left out. "
    if roofs.hardware is None:
        return note + f"No roof is drawn: {why_no_roof(run)}."
    if not peaks:
        return note + "No roof is drawn: no peak is stated for the number formats of these operators."
    return note + f"Roofs of {roofs.hardware.name}: {'; '.join(roofs.citations([dtype for dtype, _ in peaks]))}."
