"""A memory profile as rows, for programs and for tables: the peak by category, and the largest allocations."""

from steplab import units
from steplab.records.memory_profile import MemoryProfile
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import Row, Scalar
from steplab.report.columns import Column, figure_column
from steplab.report.formats import render_rows
from steplab.report.memory_figures import error_text, parts, whole
from steplab.report.memory_words import category_word
from steplab.report.shares import format_share


def _size(value: Scalar) -> str:
    return units.format_bytes(value) if isinstance(value, (int, float)) else str(value)


def _share(value: Scalar) -> str:
    return format_share(value) if isinstance(value, (int, float)) else str(value)


def _error(value: Scalar) -> str:
    return error_text(value) if isinstance(value, (int, float)) else str(value)


def _word(value: Scalar) -> str:
    return category_word(str(value))


CATEGORY_COLUMNS: tuple[Column, ...] = (
    Column(key="category", header="category", show=_word, shared=False),
    figure_column("bytes", "size", _size, 0),
    figure_column("share", "share", _share, 0),
    figure_column("predicted_bytes", "predicted", _size, 0),
    figure_column("error", "error", _error, 0),
    Column(key="peak_bytes", header="peak", show=_size, numeric=True, caption="peak {}", rank=2),
    Column(
        key="predicted_peak_bytes", header="predicted peak", show=_size, numeric=True, caption="predicted {}", rank=3
    ),
    Column(key="peak_phase", header="phase of the peak", caption="in {}", rank=4),
)

ALLOCATION_COLUMNS: tuple[Column, ...] = (
    figure_column("requested_bytes", "size", _size, 0),
    figure_column("count", "count", str, 0),
    Column(key="at_peak", header="at peak", shared=False, rank=3),
    Column(key="category", header="category", show=_word, shared=False),
    Column(key="phase", header="phase", shared=False, rank=1),
    Column(key="module", header="module", shared=False, rank=4, wraps_from=16),
    Column(key="op", header="op", shared=False, rank=5),
    Column(key="source", header="line", shared=False, wraps_from=16),
    Column(key="shape", header="shape", shared=False, rank=2),
    Column(key="dtype", header="dtype", shared=False, rank=6),
)


def category_rows(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> list[Row]:
    """A row a category with anything at the peak, measured or predicted; `bytes` sum to `peak_bytes`.

    With a prediction also predicted_bytes, which sum to predicted_peak_bytes, and error, of the predicted against
    the measured (None where nothing was measured).
    """
    rows: list[Row] = []
    for part in parts(profile, prediction):
        row: Row = {"category": part.category, "bytes": part.num_bytes, "share": part.share}
        if prediction:
            row |= {"predicted_bytes": part.predicted_bytes, "error": part.error}
        row |= {"peak_bytes": profile.peak_bytes}
        row |= {"predicted_peak_bytes": whole(profile, prediction).predicted_bytes} if prediction else {}
        rows.append(row | {"peak_phase": profile.peak_phase})
    return rows


def allocation_rows(profile: MemoryProfile) -> list[Row]:
    """A row a group of allocations alike, as the record has them; sizes are of one."""
    return [
        {
            "requested_bytes": made.requested_bytes,
            "block_bytes": made.block_bytes,
            "count": made.count,
            "at_peak": "yes" if made.at_peak else "no",
            "category": made.category,
            "phase": made.phase,
            "module": made.module,
            "op": made.op,
            "source": made.source,
            "shape": None if made.shape is None else "x".join(map(str, made.shape)),
            "dtype": made.dtype,
        }
        for made in profile.largest
    ]


def render_memory_rows(
    profile: MemoryProfile,
    format: str,
    *,
    prediction: MemoryPrediction | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The peak by category in one of formats.FORMATS, without a newline at the end; UserError for another format."""
    rows = category_rows(profile, prediction)
    return render_rows(rows, format, columns=CATEGORY_COLUMNS, empty="nothing was allocated", width=width, color=color)


def render_allocations(profile: MemoryProfile, format: str, *, width: int | None = None, color: bool = False) -> str:
    """The largest allocations in one of formats.FORMATS, without a newline at the end; UserError for another."""
    rows = allocation_rows(profile)
    return render_rows(rows, format, columns=ALLOCATION_COLUMNS, empty="no allocations", width=width, color=color)
