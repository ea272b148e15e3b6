"""A predicted peak of memory for programs and for tables: the whole record as JSON, its sums and summands as rows."""

import json
from collections.abc import Iterator

import msgspec

from steplab import units
from steplab.records.prediction import CardFit, MemoryPrediction, Term
from steplab.records.rows import Row, Scalar
from steplab.report.columns import Column, figure_column
from steplab.report.formats import render_rows
from steplab.report.memory_words import category_word


def render_prediction_as(
    prediction: MemoryPrediction, format: str, *, width: int | None = None, color: bool = False
) -> str:
    """The prediction in one of formats.FORMATS, without a newline at the end; UserError for another format.

    JSON is the record whole; the others have rows as `prediction_rows`.
    """
    if format == "json":
        return json.dumps(msgspec.to_builtins(prediction), indent=2, ensure_ascii=False)
    return render_rows(prediction_rows(prediction), format, columns=_COLUMNS, width=width, color=color)


def prediction_rows(prediction: MemoryPrediction) -> list[Row]:
    """A row each of the peak, of what a device must have, of phases, categories, summands, cards, and of the notes.

    `row` tells them apart. The `total_bytes` of the categories, and of the summands (num_bytes x count), sum to the
    peak's; a card's is what a program has of its memory, and `verdict` whether the step fits. `bound` is at_least where
    the prediction is a lower bound, estimate where it is one, dry_run else.
    """
    return [
        *_totals(prediction),
        *(_summand(term, prediction) for term in prediction.terms),
        *(_card(card, prediction) for card in prediction.cards),
        *(_row("note", note, None, prediction) for note in prediction.notes),
    ]


def total_bytes(term: Term) -> int:
    """Of all tensors of a summand."""
    return term.num_bytes * term.count


def _totals(prediction: MemoryPrediction) -> Iterator[Row]:
    yield _row("peak", f"in {prediction.peak_phase}: {prediction.peak_where}", prediction.peak_bytes, prediction)
    for what, size in (
        ("reserved by the allocator", prediction.reserved_bytes),
        ("a device must have at the least", prediction.least_device_bytes),
        ("a device must have to be sure", prediction.safe_device_bytes),
    ):
        if size is not None:
            yield _row("device", what, size, prediction)
    for phase, size in prediction.phase_peaks.items():
        yield _row("phase", phase, size, prediction)
    for category, size in prediction.at_peak.items():
        yield {**_row("category", "", size, prediction), "category": category}


def _row(row: str, what: str, size: int | None, prediction: MemoryPrediction) -> Row:
    return {
        "row": row,
        "category": None,
        "what": what,
        "formula": None,
        "num_bytes": None,
        "count": None,
        "total_bytes": size,
        "verdict": None,
        "bound": prediction.kind,
    }


def _summand(term: Term, prediction: MemoryPrediction) -> Row:
    return {
        **_row("summand", term.what, total_bytes(term), prediction),
        "category": term.category,
        "formula": term.formula,
        "num_bytes": term.num_bytes,
        "count": term.count,
    }


def _card(card: CardFit, prediction: MemoryPrediction) -> Row:
    source = "read from such a card" if card.usable_is_known else "part of the data sheet's capacity"
    return {**_row("card", card.gpu, card.usable_bytes, prediction), "formula": source, "verdict": card.verdict}


def _size(value: Scalar) -> str:
    return units.format_bytes(value) if isinstance(value, (int, float)) else str(value)


_BOUNDS = {"at_least": "at least", "estimate": "estimates", "dry_run": "from a dry run"}
_COLUMNS: tuple[Column, ...] = (
    Column(key="row", header="row", shared=False),
    Column(key="category", header="category", show=lambda value: category_word(str(value)), shared=False),
    Column(key="what", header="what", shared=False, wraps_from=24),
    Column(key="formula", header="formula", shared=False),
    figure_column("num_bytes", "one", _size, 1),
    figure_column("count", "number", str, 0),
    figure_column("total_bytes", "together", _size, 0),
    Column(key="verdict", header="verdict", shared=False),
    Column(
        key="bound", header="bound", show=lambda value: _BOUNDS.get(str(value), str(value)), caption="bytes: {}", rank=2
    ),
)
