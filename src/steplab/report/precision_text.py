"""An audit of precision, the accumulation study and the timings beside them, on a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from steplab.records.numerics import Accumulation, Audit, Numerics
from steplab.records.run import Run
from steplab.report import precision_words as words
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.formats import render_rows
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import plain, reason
from steplab.report.precision_grids import (
    accumulation_grid,
    accumulation_title,
    loss_grid,
    matmul_grid,
    operation_grid,
    scaling_grid,
    type_grid,
)
from steplab.report.precision_rows import TIMING_COLUMNS, timing_rows

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_NARROW = 130  # columns
_MOST_LOSERS = 12  # rows


def render_numerics(numerics: Numerics, *, width: int | None = None, color: bool = False) -> str:
    """One record in full, without a newline at the end; width None: the terminal's."""
    columns = width or terminal_width()
    parts = [*_audit_parts(numerics, columns), *_sum_parts(numerics.accumulations, columns)]
    return draw(*parts, width=columns, color=color)


def render_precision(
    audits: Sequence[Numerics],
    accumulations: Sequence[Accumulation],
    runs: Sequence[Run],
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The audits one under the other, the sums, and the timed runs."""
    columns = width or terminal_width()
    texts = [draw(*_audit_parts(numerics, columns), width=columns, color=color) for numerics in audits]
    if accumulations:
        texts.append(draw(*_sum_parts(accumulations, columns), width=columns, color=color).lstrip("\n"))
    if runs:
        table = render_rows(timing_rows(runs), "table", columns=TIMING_COLUMNS, width=columns, color=color)
        texts.append(draw(_text("Time and memory of a step", "bold"), width=columns, color=color) + "\n" + table)
    return "\n\n".join(texts)


def _audit_parts(numerics: Numerics, width: int) -> "Iterator[RenderableType]":
    if numerics.failure:
        yield _text(f"Precision: {words.title(numerics)}", "bold")
        yield _text(words.heading(numerics), "dim")
        yield _text(reason(numerics.failure.kind, numerics.failure.message, most=None), "red")
    elif numerics.audit:
        yield _text(f"Precision: {words.title(numerics)}", "bold")
        yield _text(words.heading(numerics), "dim")
        yield _text("")
        yield _list(words.told(numerics, numerics.audit))
        yield from _tables(numerics.audit, width)
    if numerics.notes:
        yield from section("Notes", _list(numerics.notes))


def _tables(audit: Audit, width: int) -> "Iterator[RenderableType]":
    inside = width - INDENT
    yield from section("Types by module", grid_table(type_grid(audit), inside), _text(type_grid(audit).caption, "dim"))
    yield from section("Operations of the forward pass, and autocast's rule", grid_table(operation_grid(audit), inside))
    yield from section("Products of matrices, after every cast", grid_table(matmul_grid(audit), inside))
    losses = loss_grid(audit, _MOST_LOSERS)
    narrow = losses.without("below range", "largest") if width < _NARROW else losses
    yield from section("Overflow and underflow", grid_table(narrow, inside), _text(losses.caption, "dim"))
    if audit.loss_scaling:
        scaled = scaling_grid(audit.loss_scaling)
        narrow = scaled.without("below range") if width < _NARROW else scaled
        yield from section("Loss scaling: all gradients", grid_table(narrow, inside))


def _sum_parts(accumulations: Sequence[Accumulation], width: int) -> "Iterator[RenderableType]":
    if accumulations:
        yield from section(
            accumulation_title(accumulations), grid_table(accumulation_grid(accumulations), width - INDENT)
        )


def _list(sentences: Iterable[str]) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        table.add_row(_text("-"), _text(sentence))
    return table


def _text(sentence: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(plain(sentence), style=style)
