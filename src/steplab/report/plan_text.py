"""A predicted peak of memory: on a terminal, and its summands as rows for programs and for tables."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.prediction import MemoryPrediction, Term
from steplab.records.rows import Row, Scalar
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.columns import Column, figure_column
from steplab.report.formats import render_rows
from steplab.report.grid import Grid
from steplab.report.memory_words import category_word, exactly
from steplab.report.run_text import describe
from steplab.report.terminal import draw, plain, terminal_width
from steplab.specs.hardware import catalogue
from steplab.specs.step import StepSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

_NARROW = 100
"""Columns below which the bytes of one tensor are left out."""


def render_prediction(
    spec: StepSpec, prediction: MemoryPrediction, *, width: int | None = None, color: bool = False
) -> str:
    """What a step's peak will be made of, without a newline at the end; width None: the terminal's."""
    columns = width or terminal_width()
    return draw(*_parts(spec, prediction, columns), width=columns, color=color)


def _parts(spec: StepSpec, prediction: MemoryPrediction, width: int) -> "Iterator[RenderableType]":
    from rich.text import Text

    inside = width - INDENT
    yield Text("What the memory will go to", style="bold")
    yield Text(plain(f"{describe(spec)}, predicted"))
    yield Text()
    yield Text(
        f"Peak {exactly(prediction.peak_bytes)} allocated, in {prediction.peak_phase}: {plain(prediction.peak_where)}."
    )
    yield from section("Peak by category", grid_table(_categories(prediction), inside))
    if prediction.phase_peaks:
        yield from section("Phases", grid_table(_phases(prediction), inside))
    yield from section("Summands", grid_table(_terms(prediction, width), inside), Text(_symbols(spec), style="dim"))
    yield from section("Cards", grid_table(_cards(prediction), inside))
    if prediction.notes:
        yield from section("Notes", *(Text(f"- {plain(note)}") for note in prediction.notes))


def _categories(prediction: MemoryPrediction) -> Grid:
    rows = [
        (
            category_word(category),
            units.format_bytes(size),
            f"{size:,}",
            units.format_percent(size / prediction.peak_bytes),
        )
        for category, size in prediction.at_peak.items()
    ]
    total = ("peak", units.format_bytes(prediction.peak_bytes), f"{prediction.peak_bytes:,}", "")
    return Grid(headers=("category", "size", "bytes", "share"), numeric=(False, True, True, True), rows=(*rows, total))


def _phases(prediction: MemoryPrediction) -> Grid:
    rows = tuple((name, units.format_bytes(size), f"{size:,}") for name, size in prediction.phase_peaks.items())
    return Grid(headers=("phase", "peak", "bytes"), numeric=(False, True, True), rows=rows)


def _terms(prediction: MemoryPrediction, width: int) -> Grid:
    rows = tuple(
        (category_word(t.category), t.what, t.formula, f"{t.num_bytes:,}", str(t.count), units.format_bytes(_total(t)))
        for t in prediction.terms
    )
    headers = ("category", "what", "formula", "bytes of one", "number", "together")
    grid = Grid(headers=headers, numeric=(False, False, False, True, True, True), rows=rows)
    return grid.without("bytes of one") if width < _NARROW else grid


def _symbols(spec: StepSpec) -> str:
    shape = spec.model.shape
    assert shape is not None  # no other model is predicted
    sizes = {"B": spec.batch, "T": spec.context, "d": shape.d_model, "f": shape.d_ff, "h": shape.num_heads}
    sizes |= {"L": shape.num_layers, "V": shape.vocab_size}
    said = " · ".join(f"{symbol} {size}" for symbol, size in sizes.items())
    return f"bytes of one tensor, by formula: {said}"


def _cards(prediction: MemoryPrediction) -> Grid:
    """What of each listed GPU's memory the peak is. A little of it is taken before any tensor is made."""
    rows = tuple(
        (
            spec.name,
            units.format_bytes(spec.memory_bytes),
            units.format_percent(prediction.peak_bytes / spec.memory_bytes),
            "yes" if prediction.peak_bytes < spec.memory_bytes else "no",
        )
        for spec in sorted(catalogue(), key=lambda spec: (-spec.memory_bytes, spec.name))
    )
    return Grid(headers=("GPU", "memory", "peak is", "fits"), numeric=(False, True, True, False), rows=rows)


def _total(term: Term) -> int:
    return term.num_bytes * term.count


def _size(value: Scalar) -> str:
    return units.format_bytes(value) if isinstance(value, (int, float)) else str(value)


TERM_COLUMNS: tuple[Column, ...] = (
    Column(key="category", header="category", show=lambda value: category_word(str(value)), shared=False),
    Column(key="what", header="what", shared=False, wraps_from=24),
    Column(key="formula", header="formula", shared=False),
    figure_column("num_bytes", "one", _size, 1),
    figure_column("count", "number", str, 0),
    figure_column("total_bytes", "together", _size, 0),
    Column(key="peak_bytes", header="peak", show=_size, numeric=True, caption="peak {}", rank=2),
    Column(key="peak_phase", header="phase of the peak", caption="in {}", rank=3),
    Column(key="peak_where", header="moment of the peak", caption="{}", rank=4),
)


def term_rows(prediction: MemoryPrediction) -> list[Row]:
    """A row a summand; `total_bytes`, num_bytes x count, sum to `peak_bytes`."""
    return [
        {
            "category": term.category,
            "what": term.what,
            "formula": term.formula,
            "num_bytes": term.num_bytes,
            "count": term.count,
            "total_bytes": _total(term),
            "peak_bytes": prediction.peak_bytes,
            "peak_phase": prediction.peak_phase,
            "peak_where": prediction.peak_where,
        }
        for term in prediction.terms
    ]


def render_terms(prediction: MemoryPrediction, format: str, *, width: int | None = None, color: bool = False) -> str:
    """The summands in one of formats.FORMATS, without a newline at the end; UserError for another format."""
    return render_rows(term_rows(prediction), format, columns=TERM_COLUMNS, width=width, color=color)
