"""A benchmark of attention on a terminal, and in every format that holds tables; the accounting of what did not fit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.attention import AttentionAccount, AttentionCell, AttentionRun
from steplab.report.attention_rows import (
    attention_rows,
    attention_tables,
    default_peer,
    median_s,
    notes_of,
)
from steplab.report.attention_speeds import PASS_WORDS, geometric_means, markdown, speed_grid, telling_pass
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.environments import condition_pairs, environment_pairs
from steplab.report.formats import render_rows
from steplab.report.grid import Grid
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import plain, reason
from steplab.report.titled_table import draw_table, headed, write_notes, write_table
from steplab.specs.attention import PASSES

if TYPE_CHECKING:
    from rich.console import RenderableType

_SYMBOLS = "B batch, H heads, G heads of keys and values, S queries, K keys, D dimension, e bytes an element"


def render_attention(
    run: AttentionRun,
    format: str = "table",
    *,
    against: str | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """One benchmark in a format of formats.FORMATS, without a newline at the end; width None: the terminal's.

    `against` names whom the others are compared with; None: the first of sdpa_flash, sdpa and plain there is.
    """
    peer = against or default_peer(run.cells)
    if format in ("json", "csv"):
        return render_rows(attention_rows(run.cells, peer), format)
    if format == "table":
        return _terminal(run, peer, width or terminal_width(), color)
    parts = []
    if format == "md":
        parts += [headed(title, markdown(grid), format) for title, grid in _at_a_glance(run, peer)]
    for table in attention_tables(run.cells, peer):
        parts.append(write_table(table, format))
    return "\n\n".join([*parts, *write_notes(_notes(run), format)])


def cell_line(cell: AttentionCell) -> str:
    """What came of one cell, for a line of progress."""
    times = [f"{name} {units.format_time(seconds)}" for name in PASSES if (seconds := median_s(cell, name)) is not None]
    failed = [reason(cell.failure.kind, cell.failure.message)] if cell.failure else []
    return f"{cell.spec.label} {cell.spec.column}: {', '.join(times + failed)}"


def _terminal(run: AttentionRun, peer: str | None, width: int, color: bool) -> str:
    """Title, means over the shapes, speeds shape by shape; then tables of everything, environment and notes."""
    from rich.text import Text

    inside = width - INDENT
    first = list(_title(run))
    for title, grid in _at_a_glance(run, peer):
        first += section(title, grid_table(grid, inside), Text(grid.caption, style="dim"))
    texts = [draw(*first, width=width, color=color)]
    for table in attention_tables(run.cells, peer):
        texts.append(draw_table(table, width, color))
    rest: list[RenderableType] = []
    if run.environment:
        pairs = [*environment_pairs(run.environment), *condition_pairs([run.environment])]
        rest += section("Environment", *(Text(plain(f"{name}: {value}")) for name, value in pairs))
    if notes := _notes(run):
        rest += section("Notes", *(Text(f"- {plain(note)}") for note in notes))
    return "\n\n".join(texts) + ("\n" + draw(*rest, width=width, color=color) if rest else "")


def _notes(run: AttentionRun) -> list[str]:
    return [*run.notes, *notes_of(run.cells)]


def _at_a_glance(run: AttentionRun, peer: str | None) -> Iterator[tuple[str, Grid]]:
    """The answer: how they compare over all shapes, and on each."""
    if means := geometric_means(run.cells, peer):
        yield "Speed over all shapes", means
    name = telling_pass(run.cells)
    if name and (speeds := speed_grid(run.cells, peer, name)):
        yield f"Speed, {PASS_WORDS[name]}", speeds


def _title(run: AttentionRun) -> "Iterator[RenderableType]":
    from rich.text import Text

    yield Text(plain(f"Attention: {run.study.description or run.study.name}"), style="bold")
    made = [f"benchmark {run.id}", run.created_utc, f"steplab {run.steplab_version}"]
    named = [run.device_name or "", f"'{run.name}'" if run.name else ""]
    yield Text(plain(" · ".join(part for part in (*made, *named) if part)), style="dim")


def render_account(account: AttentionAccount, *, width: int | None = None, color: bool = False) -> str:
    """What plain attention holds at its highest moment, tensor by tensor, against the device's memory."""
    from rich.text import Text

    columns = width or terminal_width()
    total, memory = account.total_bytes, account.memory_bytes
    kept = [term for term in account.terms if term.kept]
    told = [
        f"Most at once: {account.moment}. {_SYMBOLS}.",
        f"{units.format_bytes(total)} in {len(account.terms)} tensors; {account.memory_source} has "
        f"{units.format_bytes(memory)}: {units.format_bytes(total - memory)} too much"
        if total > memory
        else f"{units.format_bytes(total)} in {len(account.terms)} tensors; {account.memory_source} has "
        f"{units.format_bytes(memory)}, of which CUDA, libraries and the allocator's gaps take the rest",
        f"{units.format_bytes(sum(term.num_bytes for term in kept))} of it are kept from forward until backward.",
    ]
    if account.previous and account.previous_bytes is not None:
        told.append(f"{account.previous.label} needs {units.format_bytes(account.previous_bytes)}, and fits.")
    if account.measured:
        told.append(f"The device said: {account.measured.message}.")
    title = f"The smallest plain attention that does not fit: {account.spec.label}"
    if account.asked:
        title = f"Plain attention of {account.asked.label} fits; its sequence doubled until it does not: "
        title += account.spec.label
    return draw(
        Text(plain(title), style="bold"),
        Text(),
        grid_table(account_grid(account), columns),
        *(Text(plain(f"- {sentence}")) for sentence in told),
        width=columns,
        color=color,
    )


def account_grid(account: AttentionAccount) -> Grid:
    """A row a tensor, and the sum."""
    rows = [
        (
            term.what,
            term.formula,
            "×".join(map(str, term.shape)),
            str(term.element_bytes),
            f"{term.num_bytes:,}",
            units.format_bytes(term.num_bytes),
            "until backward" if term.kept else "",
        )
        for term in account.terms
    ]
    total = account.total_bytes
    rows.append(("sum", "", "", "", f"{total:,}", units.format_bytes(total), ""))
    return Grid(
        headers=("tensor", "bytes in symbols", "shape", "e", "bytes", "size", "kept"),
        rows=tuple(rows),
        numeric=(False, False, False, True, True, True, False),
    )
