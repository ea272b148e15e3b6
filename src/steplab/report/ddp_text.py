"""A data-parallel study on a terminal, and in every format that holds tables."""

from typing import TYPE_CHECKING

from steplab import units
from steplab.records.ddp import DdpCell, DdpRun
from steplab.report import ddp_figures as figures
from steplab.report.blocks import section
from steplab.report.ddp_rows import ddp_rows, ddp_tables, notes_of
from steplab.report.ddp_words import asked, model_words, ranks_words, told_of
from steplab.report.environments import condition_pairs, environment_pairs
from steplab.report.formats import render_rows
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import plain, reason
from steplab.report.titled_table import draw_table, write_notes, write_table

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_ddp(run: DdpRun, format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    """One study in a format of formats.FORMATS, without a newline at the end; width None: the terminal's."""
    if format in ("json", "csv"):
        return render_rows(ddp_rows(run), format)
    if format == "table":
        return _terminal(run, width or terminal_width(), color)
    title = f"{asked(run)}; {ranks_words(run)}"
    told = [*told_of(run), *model_words(run)]
    parts = (
        ["\n".join(f"% {line}" for line in (title, *told))] if format == "latex" else [f"# {title}", "\n\n".join(told)]
    )
    for table in ddp_tables(run):
        parts.append(write_table(table, format))
    return "\n\n".join([*parts, *write_notes(notes_of(run), format)])


def cell_line(cell: DdpCell) -> str:
    """What came of one contender, for a line of progress."""
    if cell.failure:
        return f"{cell.contender.label}: {reason(cell.failure.kind, cell.failure.message)}"
    step_s, added_s = figures.step_s(cell), figures.exposed_s(cell)
    told = [f"{units.format_time(step_s)} a step"] if step_s is not None else []
    told += [f"{units.format_time(added_s)} of it exposed"] if added_s is not None and added_s > 0 else []
    return f"{cell.contender.label}: {', '.join(told)}"


def _terminal(run: DdpRun, width: int, color: bool) -> str:
    """Title, sentences, tables, environment and notes."""
    from rich.text import Text

    made = [f"study {run.id}", run.created_utc, f"steplab {run.steplab_version}", f"'{run.name}'" if run.name else ""]
    first: list[RenderableType] = [
        Text(plain(f"Data parallelism: {asked(run)}"), style="bold"),
        Text(plain(" · ".join(part for part in (ranks_words(run), *made) if part)), style="dim"),
        *(Text(plain(sentence)) for sentence in (*told_of(run), *model_words(run))),
    ]
    texts = [draw(*first, width=width, color=color)]
    for table in ddp_tables(run):
        texts.append(draw_table(table, width, color))
    rest: list[RenderableType] = []
    if run.environment:
        pairs = [*environment_pairs(run.environment), *condition_pairs([run.environment])]
        rest += section("Environment", *(Text(plain(f"{name}: {value}")) for name, value in pairs))
    if notes := notes_of(run):
        rest += section("Notes", *(Text(f"- {plain(note)}") for note in notes))
    return "\n\n".join(texts) + ("\n" + draw(*rest, width=width, color=color) if rest else "")
