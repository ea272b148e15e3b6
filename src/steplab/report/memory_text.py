"""Where the memory goes, on a terminal: the peak by category and its moment, allocations, what autograd kept."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from steplab.errors import UserError
from steplab.records.memory_profile import MemoryProfile
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report import memory_words as words
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.cells import cells_of
from steplab.report.memory_compare import comparison_sentences
from steplab.report.memory_grids import category_grid, largest_grid, phase_grid, saved_grid
from steplab.report.terminal import draw, plain, terminal_width

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_TOP = 10
_MOST_SAVED = 8
_WIDTHS = ((180, ("op",)), (160, ("shape", "dtype")), (130, ("module", "at peak")), (90, ("phase", "together")))
"""Below that many columns these go from the table of allocations, one after the other."""


def render_memory(
    run: Run,
    *,
    prediction: MemoryPrediction | None = None,
    others: Sequence[Run] = (),
    width: int | None = None,
    color: bool = False,
) -> str:
    """What the memory profile of a run says, without a newline at the end; width None: the terminal's.

    `others` are runs among which the same cell in fp32, or without checkpointing, is looked for, to say why the peak
    differs. Raises UserError for a run that has no memory profile.
    """
    if run.memory_profile is None:
        raise UserError(f"run {run.id} has no memory profile; `steplab memory` makes a run that has one")
    columns = width or terminal_width()
    parts = memory_parts(run, run.memory_profile, columns, prediction=prediction, others=others)
    return draw(*parts, width=columns, color=color)


def memory_parts(
    run: Run,
    profile: MemoryProfile,
    width: int,
    *,
    prediction: MemoryPrediction | None = None,
    others: Sequence[Run] = (),
) -> "Iterator[RenderableType]":
    """The parts of the text, one under the other, for a terminal of `width` columns."""
    from rich.text import Text

    yield Text("Where the memory goes", style="bold")
    yield _text(words.heading(run, profile))
    yield Text()
    yield _text(words.peak_sentence(profile))
    yield from _lines(*words.check_sentences(profile), *words.around_sentences(profile))
    told = [words.prediction_sentence(profile, prediction)] if prediction else []
    grid = category_grid(profile, prediction)
    grid = grid.without("predicted bytes") if width < _WIDTHS[2][0] else grid
    yield from section(
        "Peak by category", grid_table(grid, width - INDENT), *_lines(grid.caption, style="dim"), *_lines(*told)
    )
    if phases := phase_grid(run, profile):
        yield from section("Phases", grid_table(phases, width - INDENT))
    if why := [*_comparisons(run, others)]:
        yield from section("Why", *_lines(*why))
    sizes = _lines(words.residual_sentence(run, profile), *words.largest_sentences(run, profile))
    yield from section("Largest allocations", *_largest(run, profile, width), *sizes)
    if profile.saved:
        yield from section("Kept for backward", *_saved(run, profile, width))
    if profile.notes:
        yield from section("Notes", *_lines(*(f"- {note}" for note in profile.notes)))
    if prediction and prediction.notes:
        yield from section("Notes on the prediction", *_lines(*(f"- {note}" for note in prediction.notes)))


def _comparisons(run: Run, others: Sequence[Run]) -> Iterator[str]:
    """Why the run's precision and checkpointing move the peak, against the same cell without them among `others`."""
    cells = cells_of([run, *(other for other in others if other.id != run.id)])
    own = next(cell for cell in cells if cell.run.id == run.id)
    return comparison_sentences(own, cells)


def _text(sentence: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(plain(sentence), style=style)


def _lines(*sentences: str | None, style: str = "") -> "list[Text]":
    return [_text(sentence, style) for sentence in sentences if sentence]


def _largest(run: Run, profile: MemoryProfile, width: int) -> "Iterator[RenderableType]":
    if not profile.largest:
        return
    grid = largest_grid(run, profile.largest[:_TOP]).without("what it is")
    for columns, left_out in _WIDTHS:
        grid = grid.without(*left_out) if width < columns else grid
    yield grid_table(grid, width - INDENT)
    yield _text("")


def _saved(run: Run, profile: MemoryProfile, width: int) -> "Iterator[RenderableType]":
    grid = saved_grid(profile.saved, _MOST_SAVED)
    grid = grid.without("category") if width < _WIDTHS[2][0] else grid
    grid = grid.without("count", "dtype") if width < _WIDTHS[3][0] else grid
    yield from _lines(*words.saved_sentences(run, profile))
    yield _text("")
    yield grid_table(grid, width - INDENT)
    yield from _lines(grid.caption, style="dim")
