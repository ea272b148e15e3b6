"""Where the time goes, on a terminal: the device's time, categories, top kernels, attention, what the host did."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from steplab.errors import UserError
from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report import profile_words as words
from steplab.report.attention_table import attention_grid, attention_notes, attention_rows
from steplab.report.blocks import grid_table, section
from steplab.report.profile_figures import top_kernels
from steplab.report.profile_grids import category_grid, host_call_grid, kernel_grid, phase_grid
from steplab.report.terminal import draw, plain, terminal_width

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_TOP = 10
_NAME_LENGTH = 44
_NARROW = 118  # columns


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
    yield _text(words.caution(run), "dim")
    yield Text()
    yield _text(words.time_sentence(run, profile))
    yield from section("Phases", grid_table(phase_grid(run, profile)), *_lines(words.overlap_note(run, profile)))
    told = [*words.matmul_sentences(run, profile), words.uncategorised_sentence(run, profile)]
    yield from section("Categories", grid_table(category_grid(run, profile)), *_lines(*told))
    yield from section(f"Top {words.kernels_word(profile)}", *_top_kernels(profile, width))
    yield from _attention(run, profile)
    if talk := words.communication_sentence(run, profile):
        yield from section("Communication", _text(talk))
    if profile.host_calls:
        yield from section("Host calls that wait or copy", *_host_calls(profile))
    if profile.notes:
        yield from section("Notes", *_lines(*(f"- {note}" for note in profile.notes)))


def _text(sentence: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(plain(sentence), style=style)


def _lines(*sentences: str | None, style: str = "") -> "list[Text]":
    return [_text(sentence, style) for sentence in sentences if sentence]


def _top_kernels(profile: Profile, width: int) -> "Iterator[RenderableType]":
    grid = kernel_grid(profile, top_kernels(profile)[:_TOP], _NAME_LENGTH)
    if width < _NARROW:
        grid = grid.without("category", "range", "median")
    yield from _lines(*words.top_kernel_sentences(profile))
    yield _text("")
    yield grid_table(grid)
    yield _text(grid.caption, "dim")


def _attention(run: Run, profile: Profile) -> "Iterator[RenderableType]":
    rows = attention_rows(run, profile)
    if rows:
        notes = _lines(*attention_notes(run, rows), style="dim")
        told = _lines(words.softmax_sentence(run, profile))
        yield from section("Attention", grid_table(attention_grid(rows)), *told, *notes)


def _host_calls(profile: Profile) -> "Iterator[RenderableType]":
    grid = host_call_grid(profile)
    yield grid_table(grid)
    yield from _lines(grid.caption, style="dim")
