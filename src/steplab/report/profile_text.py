"""Where the time goes, on a terminal: the device's time, categories, top kernels, attention, what the host did."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from steplab.errors import UserError
from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report import profile_words as words
from steplab.report.attention_table import attention_grid, attention_notes, attention_rows
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.fitting import fit
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import plain
from steplab.report.profile_figures import top_kernels
from steplab.report.profile_grids import category_grid, host_call_grid, kernel_grid, phase_grid

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_TOP = 10
_NAME_LENGTH = 44
_NARROW = 118  # columns
_WIDE_ENOUGH = 100  # for sentences beside the figures of the phases


def render_profile(run: Run, *, width: int | None = None, color: bool = False) -> str:
    """What the profile of a run says, without a newline at the end; width None: the terminal's.

    Raises UserError for a run that has no profile.
    """
    columns = width or terminal_width()
    return draw(*profile_parts(run, profile_of(run), columns), width=columns, color=color)


def profile_of(run: Run) -> Profile:
    """The run's profile; UserError if it has none."""
    if run.profile is None:
        raise UserError(f"run {run.id} has no profile; `steplab profile` makes a run that has one")
    return run.profile


def profile_parts(run: Run, profile: Profile, width: int) -> "Iterator[RenderableType]":
    """The parts of the text, one under the other, for a terminal of `width` columns."""
    from rich.text import Text

    yield Text("Where the time goes", style="bold")
    yield _text(words.heading(run, profile))
    yield from _lines(*(f"Caution: {doubt}" for doubt in profile.doubts), style="bold")
    yield _text(words.caution(run), "dim")
    yield Text()
    yield _text(words.time_sentence(run, profile))
    yield from section("Phases", *_phases(run, profile, width - INDENT), *_lines(words.overlap_note(run, profile)))
    told = [*words.matmul_sentences(run, profile), words.uncategorised_sentence(run, profile)]
    categories = fit(category_grid(run, profile), width - INDENT, *(phase.phase for phase in profile.phases))
    yield from section("Categories", grid_table(categories, width - INDENT), *_lines(categories.caption, *told))
    yield from section(f"Top {words.kernels_word(profile)}", *_top_kernels(profile, width))
    yield from _attention(run, profile, width - INDENT)
    if talk := words.communication_sentence(run, profile):
        yield from section("Communication", _text(talk))
    if profile.host_calls:
        yield from section("Host calls that wait or copy", *_host_calls(profile, width - INDENT))
    if notes := words.further_notes(profile):
        yield from section("Notes", *_lines(*(f"- {note}" for note in notes)))


def _text(sentence: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(plain(sentence), style=style)


def _lines(*sentences: str | None, style: str = "") -> "list[Text]":
    return [_text(sentence, style) for sentence in sentences if sentence]


def _phases(run: Run, profile: Profile, width: int) -> "Iterator[RenderableType]":
    """The table of phases; on a narrow terminal what its last column says stands under it, a line a phase."""
    grid = phase_grid(run, profile)
    if width + INDENT >= _WIDE_ENOUGH:
        yield grid_table(grid, width)
        return
    figures = fit(grid.without("busy time"), width, "kernels", "window", "idle")
    yield grid_table(figures, width)
    yield from _lines(figures.caption, style="dim")
    yield from _lines(*(f"Busy time of {row[0]}: {row[-1]}." for row in grid.rows))


def _top_kernels(profile: Profile, width: int) -> "Iterator[RenderableType]":
    grid = kernel_grid(profile, top_kernels(profile)[:_TOP], _NAME_LENGTH)
    if width < _NARROW:
        grid = fit(grid.without("category", "range", "median"), width - INDENT, "phase", "calls")
    yield from _lines(*words.top_kernel_sentences(profile))
    yield _text("")
    yield grid_table(grid, width - INDENT)
    yield _text(grid.caption, "dim")


def _attention(run: Run, profile: Profile, width: int) -> "Iterator[RenderableType]":
    rows = attention_rows(run, profile)
    if rows:
        grid = fit(attention_grid(rows), width, "bytes", "FLOPs", "moving", "achieved", "FLOP/B")
        notes = _lines(grid.caption, *attention_notes(run, rows), style="dim")
        told = _lines(words.softmax_sentence(run, profile))
        yield from section("Attention", grid_table(grid, width), *told, *notes)


def _host_calls(profile: Profile, width: int) -> "Iterator[RenderableType]":
    grid = fit(host_call_grid(profile), width, "range", "phase")
    yield grid_table(grid, width)
    yield from _lines(grid.caption, style="dim")
