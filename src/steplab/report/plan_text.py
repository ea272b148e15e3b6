"""A predicted peak of memory on a terminal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.fitting import fit
from steplab.report.grid import Grid
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import plain
from steplab.report.memory_words import category_word, exactly
from steplab.report.plan_rows import total_bytes
from steplab.report.run.words import describe
from steplab.specs.step import StepSpec
from steplab.units import format_share

if TYPE_CHECKING:
    from rich.console import RenderableType

_NARROW = 100
"""Columns below which the bytes of one tensor are left out."""
_NARROWEST = 72
"""Columns below which the category of a summand is left out, and told by the order alone."""
_SMALL = 0.001
"""Share of the peak below which summands are shown as one."""
_ABOUT = {"dry_run": "", "estimate": "about ", "at_least": "at least "}


def render_prediction(
    spec: StepSpec, prediction: MemoryPrediction, *, width: int | None = None, color: bool = False
) -> str:
    """What a step's peak will be made of, without a newline at the end; width None: the terminal's."""
    columns = width or terminal_width()
    return draw(*_parts(spec, prediction, columns), width=columns, color=color)


def _parts(spec: StepSpec, prediction: MemoryPrediction, width: int) -> "Iterator[RenderableType]":
    from rich.text import Text

    inside = width - INDENT
    about = _ABOUT[prediction.kind]
    yield Text("What the memory will go to", style="bold")
    yield Text(plain(f"{describe(spec)}, predicted"))
    yield Text()
    yield Text(
        f"Peak {about}{exactly(prediction.peak_bytes)} allocated, in {prediction.peak_phase}: "
        f"{plain(prediction.peak_where)}."
    )
    if prediction.notes:
        yield from section("Notes", *(Text(f"- {plain(note)}") for note in prediction.notes))
    yield from section("Peak by category", *_fitted(_categories(prediction), inside))
    if prediction.phase_peaks:
        yield from section("Phases", *_fitted(_phases(prediction), inside))
    yield from section("Summands", *_summands(spec, prediction, width))
    if prediction.cards:
        yield from section("Cards", grid_table(_cards(prediction), inside), *map(Text, _needs(prediction)))


def _fitted(grid: Grid, width: int) -> "Iterator[RenderableType]":
    """The table, without exact bytes where they have no room, which is said under it."""
    from rich.text import Text

    grid = fit(grid, width, "bytes")
    yield grid_table(grid, width)
    if grid.caption:
        yield Text(grid.caption, style="dim")


def _categories(prediction: MemoryPrediction) -> Grid:
    rows = [
        (
            category_word(category),
            units.format_bytes(size),
            f"{size:,}",
            format_share(size / prediction.peak_bytes),
        )
        for category, size in prediction.at_peak.items()
    ]
    name = "peak, at least" if prediction.kind == "at_least" else "peak"
    total = (name, units.format_bytes(prediction.peak_bytes), f"{prediction.peak_bytes:,}", format_share(1))
    return Grid(headers=("category", "size", "bytes", "share"), numeric=(False, True, True, True), rows=(*rows, total))


def _phases(prediction: MemoryPrediction) -> Grid:
    rows = tuple((name, units.format_bytes(size), f"{size:,}") for name, size in prediction.phase_peaks.items())
    return Grid(headers=("phase", "peak", "bytes"), numeric=(False, True, True), rows=rows)


def _summands(spec: StepSpec, prediction: MemoryPrediction, width: int) -> "Iterator[RenderableType]":
    from rich.text import Text

    shown = [term for term in prediction.terms if total_bytes(term) >= _SMALL * prediction.peak_bytes]
    rows = [
        (
            category_word(term.category),
            term.what,
            term.formula,
            f"{term.num_bytes:,}",
            str(term.count),
            units.format_bytes(total_bytes(term)),
        )
        for term in shown
    ]
    if len(shown) < len(prediction.terms):
        rest = prediction.peak_bytes - sum(map(total_bytes, shown))
        others = f"{len(prediction.terms) - len(shown)} smaller ones"
        rows.append(("", others, "", "", "", units.format_bytes(rest)))
    headers = ("category", "what", "formula", "bytes of one", "number", "together")
    grid = Grid(headers=headers, numeric=(False, False, False, True, True, True), rows=tuple(rows))
    gone = [name for name, least in (("bytes of one", _NARROW), ("category", _NARROWEST)) if width < least]
    yield grid_table(grid.without(*gone), width - INDENT)
    if gone:
        told = f"left out at {width} columns: {', '.join(gone)}; a wider terminal or --format csv has them"
        yield Text(told, style="dim")
    yield Text(_symbols(spec), style="dim")
    if len(shown) < len(prediction.terms):
        yield Text(f"smaller: below {100 * _SMALL:g} % of the peak; --format csv has each", style="dim")


def _symbols(spec: StepSpec) -> str:
    shape = spec.model.shape
    assert shape is not None  # no other model is predicted
    sizes = {"B": spec.batch, "T": spec.context, "d": shape.d_model, "f": shape.d_ff, "h": shape.num_heads}
    sizes |= {"L": shape.num_layers, "V": shape.vocab_size}
    said = " · ".join(f"{symbol} {size}" for symbol, size in sizes.items() if size)  # a planning size has no h, no V
    return f"bytes of one tensor, by formula: {said}"


def _cards(prediction: MemoryPrediction) -> Grid:
    rows = tuple((card.gpu, _usable(card), card.verdict) for card in prediction.cards)
    return Grid(headers=("GPU", "usable", "verdict"), numeric=(False, True, False), rows=rows)


def _usable(card: CardFit) -> str:
    size = units.format_bytes(card.usable_bytes)
    return size if card.usable_is_known else f"≈ {size}"


def _needs(prediction: MemoryPrediction) -> Iterator[str]:
    """What the verdicts are of, with the figures."""
    peak, least, safe = prediction.peak_bytes, prediction.least_device_bytes, prediction.safe_device_bytes
    size = units.format_bytes
    if least is not None:
        yield (
            f"Below {size(least)} it does not fit: the peak, and {size(least - peak)} that CUDA takes outside of the "
            "allocator."
        )
    if least is not None and safe is not None and prediction.reserved_bytes is not None:
        reserved = prediction.reserved_bytes
        yield (
            f"From {size(safe)} it fits: {size(reserved)} that the allocator would hold, cache and gaps included, "
            f"{size(safe - reserved - (least - peak))} for gaps that the dry run does not see, and those "
            f"{size(least - peak)}. Between the two it depends on how the memory comes to be divided."
        )
    if any(not card.usable_is_known for card in prediction.cards):
        yield "≈: a part of the data sheet's capacity, for nobody has read from that card what a program is given."
