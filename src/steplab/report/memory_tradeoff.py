"""What recomputation saves in memory and costs in time: a point a checkpointing setting of one cell."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steplab import units
from steplab.report.kit import charts as ax
from steplab.report.kit.charts import GRID, INK, MUTED, SERIES, css_color
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import text_width
from steplab.report.memory_cells import alike_but_for
from steplab.report.memory_figures import peak_of
from steplab.report.memory_shapes import LETTERS, Box, dot, picture, text_at, text_box, titled
from steplab.report.run.cells import Cell, label, said, varying
from steplab.report.run.figures import step_median

_FIELD = "checkpointing"
_WIDTH, _HEIGHT = 500.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 16.0, 14.0, 30.0
_MARGIN = 0.16  # of the range of times, left and right of the points
_BESIDE, _LINE_PX = 10, 13  # from a point to its label, and from one place for it to the next above or below
_PLACES = (
    *((_BESIDE - 3, -6, "start"), (_BESIDE, 4, "start"), (-_BESIDE, 4, "end"), (0, -_BESIDE, "middle")),
    *(
        (side * _BESIDE, 4 + away * _LINE_PX, anchor)
        for step in range(1, 5)
        for away in (-step, step)
        for side, anchor in ((1, "start"), (-1, "end"))
    ),
)
"""Where a point's label may stand: offset and anchor; the first that is free is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One setting."""

    setting: str
    """none, full, every_4, selective."""
    time_s: float
    """Median step time."""
    peak_bytes: int
    """Peak of allocated memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Where times and bytes stand."""

    first_s: float
    """At the left edge."""
    last_s: float
    """At the right edge."""
    scale: ax.Scale
    """Of the bytes."""

    def x(self, time_s: float) -> float:
        """Place of a time."""
        return _LEFT + (time_s - self.first_s) / (self.last_s - self.first_s) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, num_bytes: float) -> float:
        """Place of a size."""
        return _HEIGHT - _BOTTOM - num_bytes / self.scale.high * (_HEIGHT - _BOTTOM - _TOP)


def checkpointing_tradeoff(cells: Sequence[Cell]) -> Chart | None:
    """A picture for each cell measured with several settings; None without such a cell."""
    fields = [field for field in varying(cells) if field != _FIELD]
    pictures = []
    for group in alike_but_for(cells, _FIELD):
        points = _points(group)
        if len(points) > 1:
            name = label(group[0], fields)
            title = name if len(fields) > 0 else ""
            svg = _picture(points, f"memory and time by checkpointing, {name}")
            pictures.append(Picture(title=title, svg=svg, width=_WIDTH, subtitle=_verdict(points)))
    if not pictures:
        return None
    note = "Peak of allocated memory over median step time, a point a setting; lower and further left is better. "
    note += "Bytes start at zero, times do not."
    return Chart(pictures=tuple(pictures), note=note)


def _points(group: Sequence[Cell]) -> list[Point]:
    """Settings with both figures, the fastest first."""
    found = []
    for cell in group:
        time_s, peak_bytes = step_median(cell.run), peak_of(cell.run)
        if time_s and peak_bytes:
            found.append(Point(setting=str(cell.values[_FIELD]), time_s=time_s, peak_bytes=peak_bytes))
    return sorted(found, key=lambda point: point.time_s)


def _verdict(points: Sequence[Point]) -> str:
    """The setting with the lowest peak against none."""
    plain = next((point for point in points if point.setting == "none"), None)
    least = min(points, key=lambda point: point.peak_bytes)
    return "" if plain is None or least is plain else f"{least.setting}: {_against(least, plain)}"


def _against(point: Point, plain: Point) -> str:
    memory, time = point.peak_bytes / plain.peak_bytes - 1, point.time_s / plain.time_s - 1
    return f"{100 * memory:+.0f} % memory, {100 * time:+.0f} % time"


def _picture(points: Sequence[Point], title: str) -> str:
    first_s, last_s = points[0].time_s, points[-1].time_s
    margin_s = _MARGIN * ((last_s - first_s) or first_s)
    scale = ax.bytes_scale([point.peak_bytes for point in points], None)
    frame = Frame(first_s=first_s - margin_s, last_s=last_s + margin_s, scale=scale)
    body = [*_axes(frame), *_line(points, frame), *_labelled(points, frame)]
    return picture(title, _WIDTH, _HEIGHT, "".join(body))


def _axes(frame: Frame) -> Iterator[str]:
    for tick in frame.scale.ticks:
        y = frame.y(tick)
        yield f'<path d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}" stroke="{css_color(GRID)}"/>'
        yield text_at(_LEFT - 8, y + 4, ax.tidy(frame.scale.show(tick)), MUTED, "end")
    ticks = round_ticks(frame.first_s, frame.last_s)
    for tick in ticks:
        x, text = frame.x(tick), ax.tidy(units.format_time(tick))
        yield f'<path d="M{x:.1f} {_HEIGHT - _BOTTOM:g}v5" stroke="{css_color(MUTED)}"/>'
        yield text_at(min(x, _WIDTH - text_width(text, LETTERS) / 2), _HEIGHT - _BOTTOM + 19, text, MUTED, "middle")


def round_ticks(low: float, high: float) -> list[float]:
    """Two to five round values within a range: multiples of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(high - low))
    step = next(size * factor for factor in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (size * factor) <= 5)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(points: Sequence[Point], frame: Frame) -> Iterator[str]:
    """The settings that no other beats in both, joined: what one can choose from."""
    best = [p for p in points if not any(q.time_s <= p.time_s and q.peak_bytes < p.peak_bytes for q in points)]
    path = "L".join(f"{frame.x(point.time_s):.1f} {frame.y(point.peak_bytes):.1f}" for point in best)
    yield f'<path d="M{path}" fill="none" stroke="{css_color(SERIES[0])}" stroke-opacity="0.5"/>'


def _labelled(points: Sequence[Point], frame: Frame) -> Iterator[str]:
    plain = next((point for point in points if point.setting == "none"), None)
    for point, (x, y, anchor) in zip(points, label_places(points, frame), strict=True):
        mark_x, mark_y = frame.x(point.time_s), frame.y(point.peak_bytes)
        tip = (
            f"{said(_FIELD, point.setting)}: {units.format_bytes(point.peak_bytes)}, {units.format_time(point.time_s)}"
        )
        tip += f" ({_against(point, plain)})" if plain and point is not plain else ""
        yield titled(tip, dot(mark_x, mark_y, SERIES[0], radius=5.5))
        yield text_at(x, y, point.setting, INK, anchor)


def label_places(points: Sequence[Point], frame: Frame) -> list[tuple[float, float, str]]:
    """Where each label stands: beside its point, on no other point and no other label as long as there is room."""
    marks = [(frame.x(point.time_s), frame.y(point.peak_bytes)) for point in points]
    taken = [Box(left=x - 6, top=y - 6, right=x + 6, bottom=y + 6) for x, y in marks]
    inside = Box(left=_LEFT, top=0, right=_WIDTH, bottom=_HEIGHT - _BOTTOM)
    places = []
    for (x, y), point in zip(marks, points, strict=True):
        options = [(x + dx, y + dy, anchor) for dx, dy, anchor in _PLACES]
        boxes = [text_box(*option[:2], point.setting, option[2]) for option in options]
        free = [i for i, box in enumerate(boxes) if _within(box, inside) and not any(box.meets(b) for b in taken)]
        chosen = free[0] if free else 0
        taken.append(boxes[chosen])
        places.append(options[chosen])
    return places


def _within(box: Box, frame: Box) -> bool:
    return box.left >= frame.left and box.top >= frame.top and box.right <= frame.right and box.bottom <= frame.bottom
