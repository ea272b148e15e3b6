"""Pictures that compare the memory of several runs: peaks by category, and peak against time by checkpointing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steplab import units
from steplab.records.prediction import MemoryPrediction
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import MUTED, color_number, drawing, put_mark, series_legend
from steplab.report.kit.document import Bar, Bars, Chart, Picture, Segment
from steplab.report.memory.categories import category_word, color_of, legend_of
from steplab.report.memory.figures import (
    alike_but_for,
    error_text,
    parts,
    peak_of,
    profile_of,
    watched,
    whole,
    with_owners,
)
from steplab.report.run.cells import RunCell, label, said, varying

_FIRST = 12


def peak_bars(cells: Sequence[RunCell], predictions: Mapping[str, MemoryPrediction]) -> Bars | None:
    """The peaks' parts, one bar per run, with a mark at the predicted peak; `predictions` by the runs' ids.

    None without a comparison: one run without a prediction. Imported snapshots, with other categories, are left out.
    """
    known = with_owners(cells)
    if len(known) + len([cell for cell in known if cell.run.id in predictions]) < 2:
        return None
    fields = varying(known)
    bars = tuple(_peak_bar(cell, fields, predictions.get(cell.run.id)) for cell in known)
    shown = [part.category for cell in known for part in parts(profile_of(cell)) if part.num_bytes]
    note = "Bytes allocated at the peak, by category; the peak is at the right."
    if any(bar.mark is not None for bar in bars):
        note += " The stroke marks the predicted peak, with its error under the name."
    if left_out := len(watched(cells)) - len(known):
        note += f" {units.counted(left_out, 'more watched run')} {'is' if left_out == 1 else 'are'} not drawn."
    return Bars(bars=bars, legend=legend_of(shown), note=note, first=_FIRST)


def _peak_bar(cell: RunCell, fields: Sequence[str], prediction: MemoryPrediction | None) -> Bar:
    profile, name = profile_of(cell), label(cell, fields)
    segments = []
    for part in parts(profile):
        if part.num_bytes:
            tip = f"{name}: {category_word(part.category)} {units.format_bytes(part.num_bytes)}"
            tip += f", {units.format_share(part.share)} of the peak"
            segments.append(Segment(value=part.num_bytes, color=color_number(color_of(part.category)), tip=tip))
    error = whole(profile, prediction).error if prediction else None
    predicted = f"predicted {units.format_bytes(prediction.peak_bytes)}" if prediction else ""
    return Bar(
        label=name,
        figure=units.format_bytes(profile.peak_bytes),
        segments=tuple(segments),
        mark=prediction.peak_bytes if prediction else None,
        mark_tip=predicted,
        detail=predicted if error is None else f"{predicted}, {error_text(error, 1)}",
    )


_FIELD = "checkpointing"
_PANEL_WIDTH, _PANEL_HEIGHT = 500.0, 300.0
_MARGIN = 0.16  # of the range of times, left and right of the points


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    setting: str
    """For example every_4."""
    time_s: float
    peak_bytes: int


def checkpointing_tradeoff(cells: Sequence[RunCell]) -> Chart | None:
    """Peak against step time, one panel per cell measured with several settings; None without one."""
    fields = [field for field in varying(cells) if field != _FIELD]
    groups = [(label(group[0], fields), _points(group)) for group in alike_but_for(cells, _FIELD)]
    groups = [(name, points) for name, points in groups if len(points) > 1]
    used = {point.setting for _, points in groups for point in points}
    settings = [name for name in dict.fromkeys(str(cell.values[_FIELD]) for cell in cells) if name in used]
    pictures = tuple(_panel(points, settings, name, title=name if fields else "") for name, points in groups)
    if not pictures:
        return None
    return Chart(
        pictures=pictures,
        legend=series_legend(said(_FIELD, setting) for setting in settings),
        note="Peak of allocated memory against median step time, one mark per setting; lower and further left is "
        "better. The bytes start at zero, the times do not.",
    )


def _points(group: Sequence[RunCell]) -> list[_Point]:
    found = []
    for cell in group:
        time_s, peak_bytes = cell.run.median_s, peak_of(cell.run)
        if time_s and peak_bytes:
            found.append(_Point(setting=str(cell.values[_FIELD]), time_s=time_s, peak_bytes=peak_bytes))
    return sorted(found, key=lambda point: point.time_s)


def _verdict(points: Sequence[_Point]) -> str:
    plain = next((point for point in points if point.setting == "none"), None)
    least = min(points, key=lambda point: point.peak_bytes)
    return "" if plain is None or least is plain else f"{least.setting}: {_against(least, plain)}"


def _against(point: _Point, plain: _Point) -> str:
    memory, time = point.peak_bytes / plain.peak_bytes - 1, point.time_s / plain.time_s - 1
    return f"{100 * memory:+.0f} % memory, {100 * time:+.0f} % time"


def _panel(points: Sequence[_Point], settings: Sequence[str], name: str, *, title: str) -> Picture:
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
            mark = put_mark(axes, point.time_s, point.peak_bytes, settings.index(point.setting), size=9)
            tip = f"{said(_FIELD, point.setting)}: {units.format_bytes(point.peak_bytes)}, "
            tip += units.format_time(point.time_s)
            picture.tip(mark, tip + (f" ({_against(point, plain)})" if plain and point is not plain else ""))
        return picture.picture(title, subtitle=_verdict(points))
