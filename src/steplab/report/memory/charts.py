"""Pictures that compare the memory of several runs: peaks by category, and peak against time by checkpointing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.memory_profile import MemoryProfile
from steplab.records.prediction import MemoryPrediction
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import GLYPHS, INK, MARKERS, MUTED, PAPER, SERIES, Drawing, drawing
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import LINE, fit_all, text_width, wrap
from steplab.report.memory.categories import category_word, color_of, legend_of
from steplab.report.memory.figures import error_text, parts, peak_of, whole
from steplab.report.memory.pairs import alike_but_for, profile_of, watched, with_owners
from steplab.report.run.cells import RunCell, label, said, varying
from steplab.report.run.figures import step_median
from steplab.units import format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 880
_BAR_PX, _GAP_PX, _PREDICTED_PX = 24.0, 12.0, 14.0
_LETTERS = 11
_NAME_PX, _MOST_LINES = 300, 3
_TOTAL_PX = 128  # at the right, for the peak and the error of its prediction
_MOST_BARS = 40
_PADDING = 14  # of a figure within its segment


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """The bars of one run."""

    name: str
    """What tells it apart."""
    lines: tuple[str, ...]
    """The name as it stands beside the bar."""
    profile: MemoryProfile
    """What was measured."""
    prediction: MemoryPrediction | None
    """What was predicted."""

    @property
    def height(self) -> float:
        """Pixels of the bars or of the name, whichever is higher."""
        bars = _BAR_PX + (_PREDICTED_PX + 2 if self.prediction else 0)
        return max(bars, len(self.lines) * LINE * _LETTERS)


def peak_bars(cells: Sequence[RunCell], predictions: Mapping[str, MemoryPrediction]) -> Chart | None:
    """What the peaks are made of, one bar per run, and below it one of its prediction; `predictions` by the runs' ids.

    None where there are fewer than two bars. Imported snapshots, whose categories are others, are left out.
    """
    known = with_owners(cells)[:_MOST_BARS]
    rows = _rows(known, varying(cells), predictions)
    peaks = [row.profile.peak_bytes for row in rows] + [row.prediction.peak_bytes for row in rows if row.prediction]
    if len(peaks) < 2:
        return None
    left = 12 + max(text_width(line, _LETTERS) for row in rows for line in row.lines)
    height = 4 + sum(row.height + _GAP_PX for row in rows)
    per_px = (max(peaks) or 1) / (_WIDTH - left - _TOTAL_PX)
    with drawing(_WIDTH, height, "peak memory by category") as picture:
        axes = picture.axes(left, 0, _TOTAL_PX, 0)
        axes.set(xlim=(0, max(peaks) or 1), ylim=(height, 0))
        axes.set_axis_off()
        top = 4.0
        for row in rows:
            _bars(picture, axes, row, top, per_px)
            top += row.height + _GAP_PX
        svg = picture.to_svg()
    shown = [part.category for row in rows for part in parts(row.profile, row.prediction)]
    note = "Bytes allocated at the peak, by category; the peak is at the right."
    if predictions:
        note += " Hatched bars are predictions, with the error of the peak."
    if left_out := len(watched(cells)) - len(known):
        note += f" {units.counted(left_out, 'more watched run')} {'is' if left_out == 1 else 'are'} not drawn."
    return Chart(pictures=(Picture(title="", svg=svg, width=_WIDTH),), legend=legend_of(shown), note=note)


def _rows(known: Sequence[RunCell], fields: Sequence[str], predictions: Mapping[str, MemoryPrediction]) -> list[_Row]:
    names = [label(cell, fields) for cell in known]
    texts = fit_all(names, lambda name, _: "\n".join(wrap(name, _NAME_PX, _LETTERS, _MOST_LINES)))
    return [
        _Row(
            name=name, lines=tuple(text.split("\n")), profile=profile_of(cell), prediction=predictions.get(cell.run.id)
        )
        for cell, name, text in zip(known, names, texts, strict=True)
    ]


def _bars(picture: Drawing, axes: "Axes", row: _Row, top: float, per_px: float) -> None:
    """The name, the measured bar with its figures, and the predicted one below."""
    _text(axes, (0, top + row.height / 2), "\n".join(row.lines), (-10, 0), INK, ha="right")
    middle, start = top + _BAR_PX / 2, 0
    for part in parts(row.profile, row.prediction):
        size = units.format_bytes(part.num_bytes)
        if part.num_bytes:
            (bar,) = axes.barh(middle, part.num_bytes, _BAR_PX, start, color=color_of(part.category))
            tip = f"{row.name}: {category_word(part.category)} {size}, {format_share(part.share)} of the peak"
            picture.tip(bar, tip)
        if text_width(size, _LETTERS) + _PADDING <= part.num_bytes / per_px:
            _text(axes, (start + part.num_bytes / 2, middle), size, (0, 0), PAPER, ha="center")
        start += part.num_bytes
    _text(axes, (start, middle), units.format_bytes(row.profile.peak_bytes), (8, 0), INK)
    if row.prediction:
        _predicted(picture, axes, row, row.prediction, top + _BAR_PX + 2 + _PREDICTED_PX / 2)


def _predicted(picture: Drawing, axes: "Axes", row: _Row, prediction: MemoryPrediction, middle: float) -> None:
    start = 0
    for part in parts(row.profile, prediction):
        size, color = part.predicted_bytes or 0, color_of(part.category)
        if size:
            axes.barh(middle, size, _PREDICTED_PX, start, color=(color, 0.18))
            (bar,) = axes.barh(middle, size, _PREDICTED_PX, start, facecolor="none", edgecolor=color, hatch="////")
            tip = f"{row.name}: {category_word(part.category)} predicted {units.format_bytes(size)}"
            picture.tip(bar, tip + ("" if part.error is None else f", {error_text(part.error)}"))
        start += size
    error = whole(row.profile, prediction).error
    off = "" if error is None else f", {error_text(error, 1)}"
    _text(axes, (start, middle), f"{units.format_bytes(prediction.peak_bytes)}{off}", (8, 0), MUTED)


def _text(
    axes: "Axes", at: tuple[float, float], text: str, offset: tuple[float, float], color: str, ha: str = "left"
) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", ha=ha, va="center", fontsize=_LETTERS, color=color,
                  linespacing=LINE, annotation_clip=False)  # fmt: skip


_FIELD = "checkpointing"
_PANEL_WIDTH, _PANEL_HEIGHT = 500.0, 300.0
_MARGIN = 0.16  # of the range of times, left and right of the points


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """One checkpointing setting of a cell."""

    setting: str
    """none, full, every_4, selective."""
    time_s: float
    """Median step time."""
    peak_bytes: int
    """Peak of allocated memory."""


def checkpointing_tradeoff(cells: Sequence[RunCell]) -> Chart | None:
    """Peak against step time, one panel per cell measured with several settings; None without such a cell."""
    fields = [field for field in varying(cells) if field != _FIELD]
    groups = [(label(group[0], fields), _points(group)) for group in alike_but_for(cells, _FIELD)]
    groups = [(name, points) for name, points in groups if len(points) > 1]
    used = {point.setting for _, points in groups for point in points}
    settings = [name for name in dict.fromkeys(str(cell.values[_FIELD]) for cell in cells) if name in used]
    pictures = tuple(
        Picture(
            title=name if fields else "", svg=_panel(points, settings, name), width=_PANEL_WIDTH,
            subtitle=_verdict(points),
        )
        for name, points in groups
    )  # fmt: skip
    if not pictures:
        return None
    return Chart(
        pictures=pictures,
        legend=tuple(
            (index % len(SERIES) + 1, GLYPHS[index % len(GLYPHS)], said(_FIELD, setting))
            for index, setting in enumerate(settings)
        ),
        note="Peak of allocated memory against median step time, one mark per setting; lower and further left is "
        "better. The bytes start at zero, the times do not.",
    )


def _points(group: Sequence[RunCell]) -> list[_Point]:
    """Settings with both figures, the fastest first."""
    found = []
    for cell in group:
        time_s, peak_bytes = step_median(cell.run), peak_of(cell.run)
        if time_s and peak_bytes:
            found.append(_Point(setting=str(cell.values[_FIELD]), time_s=time_s, peak_bytes=peak_bytes))
    return sorted(found, key=lambda point: point.time_s)


def _verdict(points: Sequence[_Point]) -> str:
    """The setting with the lowest peak against none."""
    plain = next((point for point in points if point.setting == "none"), None)
    least = min(points, key=lambda point: point.peak_bytes)
    return "" if plain is None or least is plain else f"{least.setting}: {_against(least, plain)}"


def _against(point: _Point, plain: _Point) -> str:
    memory, time = point.peak_bytes / plain.peak_bytes - 1, point.time_s / plain.time_s - 1
    return f"{100 * memory:+.0f} % memory, {100 * time:+.0f} % time"


def _panel(points: Sequence[_Point], settings: Sequence[str], name: str) -> str:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    first_s, last_s = points[0].time_s, points[-1].time_s
    margin_s = _MARGIN * ((last_s - first_s) or first_s)
    scale = kit.bytes_scale([point.peak_bytes for point in points], None)
    plain = next((point for point in points if point.setting == "none"), None)
    with drawing(_PANEL_WIDTH, _PANEL_HEIGHT, f"memory and time by checkpointing, {name}") as picture:
        axes = picture.axes(66, 34, 34, 14)
        axes.set(xlim=(first_s - margin_s, last_s + margin_s), ylim=(0, scale.high))
        axes.set_yticks(scale.ticks, [kit.tidy(scale.show(tick)) for tick in scale.ticks])
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: kit.tidy(units.format_time(time_s))))
        axes.tick_params(axis="x", pad=8)
        axes.grid(axis="y")
        best = [p for p in points if not any(q.time_s <= p.time_s and q.peak_bytes < p.peak_bytes for q in points)]
        axes.plot([p.time_s for p in best], [p.peak_bytes for p in best], color=MUTED, linewidth=1, zorder=1)
        for point in points:
            index = settings.index(point.setting)
            (mark,) = axes.plot(
                [point.time_s], [point.peak_bytes], color=SERIES[index % len(SERIES)],
                marker=MARKERS[index % len(MARKERS)], markersize=9, markeredgewidth=0,
            )  # fmt: skip
            tip = f"{said(_FIELD, point.setting)}: {units.format_bytes(point.peak_bytes)}, "
            tip += units.format_time(point.time_s)
            picture.tip(mark, tip + (f" ({_against(point, plain)})" if plain and point is not plain else ""))
        return picture.to_svg()
