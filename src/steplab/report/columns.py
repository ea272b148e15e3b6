"""The columns of a table of runs: one definition each, whatever the format.

A row (`records.rows.run_row`) holds figures in base units. JSON and CSV have those as they are. The formats for people
show `Column.text` of them, omit columns without information, and say once in the caption what all rows share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from steplab import units
from steplab.records.rows import Row, Scalar
from steplab.report.shares import format_share
from steplab.specs.step import STEP_FIELDS
from steplab.specs.step_fields import StepField

ABSENT = "–"
"""Shown where a figure was not measured; a zero would be a claim."""

_REASON_LENGTH = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """How one field of a row is shown to people."""

    key: str
    """Field of the row."""
    header: str
    """Heading, with the convention where one is needed to read the figure."""
    show: Callable[[Scalar], str] = str
    """Text of a value that is there."""
    numeric: bool = False
    """Aligned to the right."""
    caption: str | Callable[[Scalar], str] = "{}"
    """How the caption says it when all rows share the value: around its text, {s} being the plural's, or of the value;
    empty: not at all."""
    shared: bool = True
    """Whether a value that all rows share moves to the caption; figures measured for each row never do."""
    quiet: str | None = None
    """Text that is not worth a column or a word of the caption where no row has another."""
    rank: int = 0
    """Columns of the highest rank are the first to go where the terminal is too narrow, of one rank the last;
    0 always stays."""
    wraps_from: int | None = None
    """Least width a long text may be wrapped to on a terminal; None: it stays on one line."""

    def text(self, row: Row) -> str:
        """The cell as people read it."""
        value = row.get(self.key)
        return ABSENT if value is None or value == "" else self.show(value)


def _number(format_number: Callable[[float], str]) -> Callable[[Scalar], str]:
    return lambda value: format_number(value) if isinstance(value, (int, float)) else str(value)


show_time = _number(units.format_time)
show_percent = _number(units.format_percent)
_share = _number(format_share)
_bytes = _number(units.format_bytes)
_tokens = _number(lambda value: units.format_rate(value, "").rstrip())


def figure_column(key: str, header: str, show: Callable[[Scalar], str], rank: int) -> Column:
    """A column of figures measured for each row."""
    return Column(key=key, header=header, show=show, numeric=True, shared=False, rank=rank)


def _field_column(field: StepField) -> Column:
    return Column(
        key=field.column,
        header=field.header,
        show=field.text,
        numeric=field.type in (int, float),
        caption="" if field.about.role == "device" else field.say,
        quiet=str(field.default) if field.about.quiet else None,
        rank=field.about.rank,
    )


def _day(value: Scalar) -> str:
    return str(value)[:10]


def reason(kind: str, message: str, most: int | None = _REASON_LENGTH) -> str:
    """Why a cell failed, short, its kind said once: 'out of memory: asked 8.00 GiB'; whole where `most` is None."""
    words = kind.replace("_", " ")
    text = " ".join(message.split())
    text = text if text.lower().startswith(words) else f"{words}: {text}" if text else words
    return text if most is None or len(text) <= most else text[:most].rpartition(" ")[0] + " …"


COLUMNS: tuple[Column, ...] = (
    Column(key="id", header="id", shared=False),
    Column(key="name", header="name", caption="{}", rank=1),
    Column(key="description", header="description", rank=3),
    figure_column("num_ranks", "ranks", str, 0),
    Column(key="backend", header="backend", rank=1),
    Column(key="collectives", header="collectives", caption="collectives: {}", rank=1, wraps_from=16),
    Column(key="contenders", header="contenders", caption="contenders: {}", rank=1, wraps_from=20),
    figure_column("num_cells", "cells", str, 0),
    figure_column("num_ok", "ok", str, 0),
    figure_column("num_failed", "failed", str, 0),
    Column(key="created_utc", header="measured", show=_day, caption="measured {}", rank=9),
    # How a step was measured stands behind what it computes.
    *map(_field_column, sorted(STEP_FIELDS, key=lambda field: field.about.role in ("how", "device"))),
    Column(key="device", header="device", rank=6),
    figure_column("step_time_s", "step", show_time, 0),
    figure_column("forward_s", "forward", show_time, 5),
    figure_column("backward_s", "backward", show_time, 5),
    figure_column("gradient_sync_s", "sync", show_time, 5),
    figure_column("optimizer_s", "opt. step", show_time, 5),
    figure_column("compile_s", "compile time", show_time, 6),
    figure_column("tokens_per_s", "tokens/s", _tokens, 3),
    figure_column("mfu", "MFU", _share, 1),
    Column(key="mfu_convention", header="convention", shared=False, rank=4),
    figure_column("hfu", "HFU", _share, 4),
    Column(
        key="peak_flops_per_s",
        header="dense peak",
        show=_number(lambda value: units.format_rate(value, "FLOP/s")),
        numeric=True,
        caption="dense peak {}",
        rank=10,
    ),
    Column(key="peak_source", header="source of the peak", caption="source of the peak: {}", rank=11),
    figure_column("peak_allocated_bytes", "allocated", _bytes, 2),
    figure_column("peak_reserved_bytes", "reserved", _bytes, 5),
    figure_column("host_peak_bytes", "host peak", _bytes, 7),
    Column(key="failure", header="result", shared=False, wraps_from=30),
)
"""Every column a table for people can have, of runs and of studies, in its order. `status` is told together with
`failure`."""


_MEMORY_RANKS = {
    "peak_allocated_bytes": 0,
    **dict.fromkeys(("batch", "pass", "compile", "checkpointing", "peak_reserved_bytes"), 1),
    **dict.fromkeys(("name", "attention"), 2),
    "mfu": 3,
}
"""What stays the longest where a table is of memory: the peak, and what moves it."""


def columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """COLUMNS; where most of the runs were watched for their memory, ranked for that."""
    watched = sum(row.get("memory_source") is not None for row in rows)
    if 2 * watched <= len(rows):
        return COLUMNS
    return tuple(replace(column, rank=_MEMORY_RANKS.get(column.key, column.rank)) for column in COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A table ready to be written down in any syntax."""

    columns: tuple[Column, ...]
    """The columns that say something."""
    cells: tuple[tuple[str, ...], ...]
    """Texts, a tuple a row."""
    caption: str
    """What all the rows share, and what the figures are."""


def make_sheet(rows: Sequence[Row], known: Sequence[Column] = COLUMNS) -> Sheet:
    """Choose the columns of `rows` worth showing, move what they share to the caption, write the cells."""
    columns: list[Column] = []
    captions: list[str] = []
    for column in known:
        texts = [_cell(column, row) for row in rows]
        if all(text in (ABSENT, column.quiet) for text in texts):
            continue
        if column.key == "failure" and all(row.get("status") == "ok" for row in rows):
            continue
        if column.shared and len(rows) > 1 and _is_shared(column, rows):
            captions += filter(None, [_shared_words(column, rows)])
        else:
            columns.append(column)
    named = _name_conventions(columns, rows)
    cells = tuple(tuple(_cell(column, row) for column in named) for row in rows)
    if any(column.key == "step_time_s" for column in named):
        captions.append("times are medians")
    if any(isinstance(share := row.get(key), float) and share > 1 for row in rows for key in ("mfu", "hfu")):
        captions.append("a share above 100 % means that the peak or the FLOP count is wrong: see `steplab show ID`")
    return Sheet(columns=tuple(named), cells=cells, caption=" · ".join(captions))


def _cell(column: Column, row: Row) -> str:
    if column.key != "failure":
        return column.text(row)
    status = row.get("status")
    if status is None:  # a row of a study, say, which has no one result
        return ABSENT
    return "ok" if status == "ok" else reason(str(status), str(row.get("failure") or ""))


def _is_shared(column: Column, rows: Sequence[Row]) -> bool:
    """One value in all rows; a row that failed before it could say (its device, its peak) does not count.

    A row without a status is of many results, or older than the column: what it does not say is not known.
    """
    known = [row for row in rows if row.get(column.key) is not None]
    silent_failures = all(row.get("status", "ok") != "ok" for row in rows if row.get(column.key) is None)
    return len({column.text(row) for row in known}) == 1 and silent_failures


def _shared_words(column: Column, rows: Sequence[Row]) -> str:
    """What the caption says of a value that all rows share."""
    row = next(row for row in rows if column.text(row) != ABSENT)
    if isinstance(column.caption, str):
        return column.caption.format(column.text(row), s="" if column.text(row) == "1" else "s")
    return column.caption(row[column.key])


def _name_conventions(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Say beside MFU and HFU how FLOPs were counted: in the heading, where one convention serves all."""
    conventions = {row["mfu_convention"] for row in rows if row.get("mfu_convention") is not None}
    headings = {"hfu": "HFU (as executed)"}
    if len(conventions) == 1:
        headings["mfu"] = f"MFU ({conventions.pop()})"
    return [
        replace(column, header=headings.get(column.key, column.header))
        for column in columns
        if not (column.key == "mfu_convention" and "mfu" in headings)
    ]
