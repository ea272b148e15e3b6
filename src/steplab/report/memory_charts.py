"""The peak by category as bars, a run each, and below a run's the hatched bar of what was predicted of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from steplab import units
from steplab.records.prediction import MemoryPrediction
from steplab.report.kit.charts import INK, MUTED, PAPER
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import LINE, fit_all, text_width, wrap
from steplab.report.memory_cells import named, watched
from steplab.report.memory_figures import Part, error_text, parts, whole
from steplab.report.memory_shapes import LETTERS, bar, color_of, legend_of, picture, text_at, titled
from steplab.report.memory_words import category_word
from steplab.report.run.cells import Cell, label, varying
from steplab.units import format_share

_WIDTH = 880
_BAR_PX, _GAP_PX, _PREDICTED_PX = 24.0, 12.0, 14.0
_NAME_PX, _MOST_LINES = 300, 3
_TOTAL_PX = 128  # at the right, for the peak and the error of its prediction
_MOST_BARS = 40
_PADDING = 14  # of a figure within its segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run's bars."""

    cell: Cell
    """The run."""
    name: str
    """What tells it apart."""
    lines: tuple[str, ...]
    """The name as it is written beside the bar."""
    prediction: MemoryPrediction | None
    """What was predicted of it."""

    @property
    def height(self) -> float:
        """Of the bars or of the name, whichever is higher."""
        bars = _BAR_PX + (_PREDICTED_PX + 2 if self.prediction else 0)
        return max(bars, len(self.lines) * LINE * LETTERS)


def peak_bars(cells: Sequence[Cell], predictions: Mapping[str, MemoryPrediction]) -> Chart | None:
    """What the peaks are made of, a bar a run; `predictions` by the runs' ids. None where there is one bar to draw.

    Imported snapshots, whose categories are others, are left out.
    """
    known = named(cells)[:_MOST_BARS]
    if len(known) + sum(1 for cell in known if cell.run.id in predictions) < 2:
        return None
    rows = _rows(known, cells, predictions)
    left = 12 + max(text_width(line, LETTERS) for row in rows for line in row.lines)
    longest = max(max(_peaks(row)) for row in rows) or 1
    per_px = longest / (_WIDTH - left - _TOTAL_PX)
    top = 4.0
    body: list[str] = []
    for row in rows:
        body += _bars(row, left, top, per_px)
        top += row.height + _GAP_PX
    shown = [part.category for row in rows for part in _parts(row)]
    note = "What the peak is made of; at the right, the peak."
    if predictions:
        note += " Hatched: what was predicted before anything was allocated, and by how much it is off."
    left_out = len(watched(cells)) - len(known)
    note += f" {left_out} more watched runs are not drawn." if left_out > 1 else ""
    note += " One more watched run is not drawn." if left_out == 1 else ""
    svg = picture("peak memory by category", _WIDTH, top, "".join(body))
    return Chart(pictures=(Picture(title="", svg=svg, width=_WIDTH),), legend=legend_of(shown), note=note)


def _rows(known: Sequence[Cell], cells: Sequence[Cell], predictions: Mapping[str, MemoryPrediction]) -> list[Row]:
    fields = varying(cells)
    names = [label(cell, fields) for cell in known]
    texts = fit_all(names, lambda name, _: "\n".join(wrap(name, _NAME_PX, LETTERS, _MOST_LINES)))
    return [
        Row(cell=cell, name=name, lines=tuple(text.split("\n")), prediction=predictions.get(cell.run.id))
        for cell, name, text in zip(known, names, texts, strict=True)
    ]


def _parts(row: Row) -> list[Part]:
    profile = row.cell.run.memory_profile
    return parts(profile, row.prediction) if profile else []


def _peaks(row: Row) -> list[int]:
    profile = row.cell.run.memory_profile
    measured = [profile.peak_bytes] if profile else []
    return measured + ([row.prediction.peak_bytes] if row.prediction else [])


def _bars(row: Row, left: float, top: float, per_px: float) -> Iterator[str]:
    """The name, the measured bar with figures in it, and the predicted one below."""
    profile = row.cell.run.memory_profile
    assert profile is not None  # chosen for it
    middle = top + row.height / 2 - (len(row.lines) - 1) / 2 * LINE * LETTERS + 4
    for index, line in enumerate(row.lines):
        yield titled(row.name, text_at(left - 10, middle + index * LINE * LETTERS, line, INK, "end"))
    x = left
    for part in _parts(row):
        width = part.num_bytes / per_px
        size = units.format_bytes(part.num_bytes)
        tip = f"{row.name}: {category_word(part.category)} {size}, {format_share(part.share)} of the peak"
        if width > 0:
            yield titled(tip, bar(x, top, width, _BAR_PX, color_of(part.category)))
        if text_width(size, LETTERS) + _PADDING <= width:
            yield text_at(x + width / 2, top + _BAR_PX / 2 + 4, size, PAPER, "middle")
        x += width
    yield text_at(x + 8, top + _BAR_PX / 2 + 4, units.format_bytes(profile.peak_bytes))
    if row.prediction:
        yield from _predicted(row, row.prediction, left, top + _BAR_PX + 2, per_px)


def _predicted(row: Row, prediction: MemoryPrediction, left: float, top: float, per_px: float) -> Iterator[str]:
    x = left
    for part in _parts(row):
        width = (part.predicted_bytes or 0) / per_px
        tip = f"{row.name}: {category_word(part.category)} predicted {units.format_bytes(part.predicted_bytes or 0)}"
        tip += "" if part.error is None else f", {error_text(part.error)}"
        if width > 0:
            yield titled(tip, bar(x, top, width, _PREDICTED_PX, color_of(part.category), hatched=True))
        x += width
    profile = row.cell.run.memory_profile
    error = whole(profile, prediction).error if profile else None
    off = "" if error is None else f", {error_text(error, 1)}"
    text = f"{units.format_bytes(prediction.peak_bytes)}{off}"
    yield text_at(x + 8, top + _PREDICTED_PX / 2 + 4, text, MUTED)
