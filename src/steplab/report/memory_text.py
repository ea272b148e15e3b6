"""Where the memory goes, on a terminal: the peak by category and its moment, allocations, what autograd kept."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from steplab.errors import UserError
from steplab.records.memory_profile import MemoryProfile
from steplab.records.memory_references import MemoryReferences
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report import memory_words as words
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.fitting import first_fitting, fit, flowed
from steplab.report.grid import Grid
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import plain
from steplab.report.memory_compare import comparison_sentences
from steplab.report.memory_grids import category_grid, largest_grid, phase_grid, saved_grid
from steplab.report.memory_places import short_line, short_module
from steplab.report.run.cells import cells_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_TOP = 10
_MOST_SAVED = 8
_ALLOCATIONS_HIDE = ("op", "dtype", "shape", "module", "phase", "together", "count", "line")
_ALLOCATION_FORMS = ((0, 60), (0, 31), (1, 31), (2, 31), (3, 31), (4, 31), (5, 31), (5, 20), (6, 20), (7, 16), (8, 0))
"""How many of the columns above are hidden, and how many letters a source line may have: the widest form first."""
_SAVED_HIDE = ("category", "dtype", "count", "share", "module")
_SAVED_FORMS = ((0, 60), (0, 26), (1, 26), (2, 26), (3, 26), (4, 26), (4, 19), (5, 0))
"""Likewise, with the letters that a module's name may have."""


def render_memory(
    run: Run,
    *,
    prediction: MemoryPrediction | None = None,
    references: MemoryReferences | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """What the memory profile of a run says, without a newline at the end; width None: the terminal's.

    `references` are what it is set against, to say why the peak differs: the same cell in fp32, and without
    checkpointing. Raises UserError for a run that has no memory profile.
    """
    if run.memory_profile is None:
        raise UserError(f"run {run.id} has no memory profile; `steplab memory` makes a run that has one")
    columns = width or terminal_width()
    parts = memory_parts(run, run.memory_profile, columns, prediction=prediction, references=references)
    return draw(*parts, width=columns, color=color)


def memory_parts(
    run: Run,
    profile: MemoryProfile,
    width: int,
    *,
    prediction: MemoryPrediction | None = None,
    references: MemoryReferences | None = None,
) -> "Iterator[RenderableType]":
    """The parts of the text, one under the other, for a terminal of `width` columns."""
    from rich.text import Text

    def lines(*sentences: str | None, style: str = "", inside: int = INDENT) -> "list[Text]":
        return [Text(flowed(plain(told), width - inside), style=style) for told in sentences if told]

    yield Text("Where the memory goes", style="bold")
    yield from lines(words.heading(run, profile), inside=0)
    yield Text()
    yield from lines(words.peak_sentence(profile), inside=0)
    yield from lines(*words.check_sentences(profile, run.memory), *words.around_sentences(profile), inside=0)
    told = [words.prediction_sentence(profile, prediction)] if prediction else []
    grid = fit(category_grid(profile, prediction), width - INDENT, "predicted bytes", "share", "bytes")
    yield from section(
        "Peak by category", grid_table(grid, width - INDENT), *lines(grid.caption, style="dim"), *lines(*told)
    )
    if phases := phase_grid(run, profile):
        phases = fit(phases, width - INDENT, "bytes", "unwatched, bytes")
        yield from section("Phases", grid_table(phases, width - INDENT), *lines(phases.caption, style="dim"))
    if why := [*_comparisons(run, references)]:
        yield from section("Why", *lines(*why))
    if profile.largest:
        grid = _allocations(run, profile, width - INDENT)
        sizes = lines(words.residual_sentence(run, profile), *words.largest_sentences(run, profile))
        table, caption = grid_table(grid, width - INDENT), lines(grid.caption, style="dim")
        yield from section("Largest allocations alive at the peak", table, *caption, Text(), *sizes)
    if profile.saved:
        grid = _saved(profile, width - INDENT)
        table, caption = grid_table(grid, width - INDENT), lines(grid.caption, style="dim")
        yield from section("Kept for backward", *lines(*words.saved_sentences(run, profile)), Text(), table, *caption)
    if profile.notes:
        yield from section("Notes", *lines(*(f"- {note}" for note in profile.notes)))
    if prediction and prediction.notes:
        yield from section("Notes on the prediction", *lines(*(f"- {note}" for note in prediction.notes)))


def _comparisons(run: Run, references: MemoryReferences | None) -> Iterator[str]:
    """Why the run's precision and checkpointing move the peak, against the same cell without them."""
    (own,) = cells_of([run])
    return comparison_sentences(own, (), references)


def _allocations(run: Run, profile: MemoryProfile, width: int) -> Grid:
    """The largest groups of allocations alive at the peak, with as many columns as there is room for."""
    alive = [made for made in profile.largest if made.at_peak]
    untold = words.untold_sentence(profile)

    def grid(hidden: Sequence[str], most_letters: int) -> Grid:
        line = partial(short_line, most=most_letters)
        found = largest_grid(run, alive, hidden=("at peak", "what it is", *hidden), line=line, most=_TOP)
        return found.remarking(untold) if untold else found

    return _widest(grid, _ALLOCATIONS_HIDE, _ALLOCATION_FORMS, width)


def _saved(profile: MemoryProfile, width: int) -> Grid:
    """What autograd kept, with as many columns as there is room for."""

    def grid(hidden: Sequence[str], most_letters: int) -> Grid:
        module = partial(short_module, most=most_letters)
        return saved_grid(profile.saved, _MOST_SAVED, left_out=profile.saved_left_out, hidden=hidden, module=module)

    return _widest(grid, _SAVED_HIDE, _SAVED_FORMS, width)


def _widest(
    grid: Callable[[Sequence[str], int], Grid], hide: Sequence[str], forms: Sequence[tuple[int, int]], width: int
) -> Grid:
    """The first form of a table that fits; its caption says which columns went."""
    every = grid((), 0).headers

    def shown(num_hidden: int, most_letters: int) -> Grid:
        gone = [name for name in hide[:num_hidden] if name in every]
        found = grid(hide[:num_hidden], most_letters)
        return found.remarking(f"Left out for want of width: {', '.join(gone)}.") if gone else found

    return first_fitting((shown(*form) for form in forms), width)
