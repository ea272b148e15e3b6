"""The part of a page about watched memory: what tells runs apart, then each with its words, picture and tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from steplab.records.memory_profile import MemoryProfile
from steplab.records.memory_references import MemoryReferences
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report import memory_words as words
from steplab.report.grid import Grid
from steplab.report.kit.document import Chart
from steplab.report.memory_cells import alike_but_for, watched
from steplab.report.memory_charts import peak_bars
from steplab.report.memory_compare import comparison_sentences
from steplab.report.memory_figures import capacity
from steplab.report.memory_grids import category_grid, largest_grid, phase_grid, saved_grid
from steplab.report.memory_picture import Shown, memory_timelines
from steplab.report.memory_places import short_line
from steplab.report.memory_tradeoff import checkpointing_tradeoff
from steplab.report.run.cells import Cell, label, said, varying
from steplab.report.run.figures import spread

_MOST_OPEN = 6
_MOST_ROWS, _OPEN_ALLOCATIONS = 40, 8
_MOST_BESIDE = 6
_LINE_LETTERS = 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A picture, a table and words under one heading."""

    title: str
    """The heading."""
    chart: Chart | None = None
    """The picture."""
    grid: Grid | None = None
    """The table."""
    notes: tuple[str, ...] = ()
    """What to say of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSection:
    """What a page shows of one profiled run."""

    title: str
    """What tells the run apart; empty where it is the only one."""
    heading: str
    """What was profiled, where, and by what."""
    told: tuple[str, ...]
    """Sentences."""
    blocks: tuple[Block, ...]
    """Pictures and tables."""
    folded: bool
    """Whether it starts closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """What a page shows of memory beyond the peaks that the allocator counted."""

    across: tuple[Block, ...]
    """What several runs show together."""
    records: tuple[ProfileSection, ...]
    """A section a watched run."""


def memory_part(
    cells: Sequence[Cell], predictions: Mapping[str, MemoryPrediction], references: MemoryReferences | None = None
) -> MemoryPart | None:
    """The part for these cells, with predictions by the runs' ids, and what their memory is compared with beyond each
    other; None where nothing is there to show."""
    across = tuple(_across(cells, predictions))
    records = tuple(_records(cells, predictions, references))
    return MemoryPart(across=across, records=records) if across or records else None


def _across(cells: Sequence[Cell], predictions: Mapping[str, MemoryPrediction]) -> Iterator[Block]:
    if bars := peak_bars(cells, predictions):
        yield Block(title="What the peaks are made of", chart=bars)
    for group in alike_but_for(watched(cells), "context"):
        shown = [_shown(cell, said("context", cell.values["context"])) for cell in spread(group, _MOST_BESIDE)]
        if timelines := memory_timelines(shown):
            fields = [field for field in varying(cells) if field != "context"]
            yield Block(title=f"Over time, by context: {label(group[0], fields)}", chart=timelines)
    if tradeoff := checkpointing_tradeoff(cells):
        yield Block(title="Checkpointing: memory against time", chart=tradeoff)


def _shown(cell: Cell, title: str) -> Shown:
    profile = cell.run.memory_profile
    assert profile is not None  # only watched cells are drawn
    return Shown(title=title, profile=profile, capacity=capacity(cell.run))


def _records(
    cells: Sequence[Cell], predictions: Mapping[str, MemoryPrediction], references: MemoryReferences | None
) -> Iterator[ProfileSection]:
    """A section a watched run, in the cells' order; after the sixth they start closed."""
    fields = varying(cells)
    for index, cell in enumerate(watched(cells)):
        profile, prediction = cell.run.memory_profile, predictions.get(cell.run.id)
        assert profile is not None  # watched
        yield ProfileSection(
            title=label(cell, fields) if len(cells) > 1 else "",
            heading=words.heading(cell.run, profile),
            told=tuple(_told(cell, cells, profile, prediction, references)),
            blocks=tuple(_blocks(cell, profile, prediction)),
            folded=index >= _MOST_OPEN,
        )


def _told(
    cell: Cell,
    cells: Sequence[Cell],
    profile: MemoryProfile,
    prediction: MemoryPrediction | None,
    references: MemoryReferences | None,
) -> Iterator[str]:
    yield words.peak_sentence(profile)
    yield words.parts_sentence(profile)
    yield from words.check_sentences(profile, cell.run.memory)
    if prediction:
        yield words.prediction_sentence(profile, prediction)
    yield from comparison_sentences(cell, cells, references)
    if stream := words.residual_sentence(cell.run, profile):
        yield stream
    yield from words.largest_sentences(cell.run, profile)
    yield from words.saved_sentences(cell.run, profile)
    yield from words.around_sentences(profile)


def _blocks(cell: Cell, profile: MemoryProfile, prediction: MemoryPrediction | None) -> Iterator[Block]:
    if timeline := memory_timelines([_shown(cell, "")]):
        yield Block(title="Memory over time", chart=timeline)
    yield Block(title="Peak by category", grid=category_grid(profile, prediction))
    if phases := phase_grid(cell.run, profile):
        yield Block(title="Peaks by phase", grid=phases)
    yield from _allocations(cell.run, profile)
    if profile.saved:
        kept = saved_grid(profile.saved, _MOST_ROWS, left_out=profile.saved_left_out)
        yield from _shown_and_folded(kept, "Kept for backward", words.MOST_SAVED)
    notes = (*profile.notes, *(f"prediction: {note}" for note in (prediction.notes if prediction else ())))
    if notes:
        yield Block(title="Notes on this memory", notes=notes)


def _allocations(run: Run, profile: MemoryProfile) -> Iterator[Block]:
    """Those alive at the peak, and closed those that were not."""
    line = partial(short_line, most=_LINE_LETTERS)
    alive = [made for made in profile.largest if made.at_peak]
    others = [made for made in profile.largest if not made.at_peak]
    if alive:
        grid = largest_grid(run, alive, hidden=("at peak",), most=_MOST_ROWS, line=line)
        grid = grid.remarking(words.untold_sentence(profile) or "")
        yield from _shown_and_folded(grid, "Largest allocations alive at the peak", _OPEN_ALLOCATIONS)
    if others:
        grid = largest_grid(run, others, hidden=("at peak",), most=_MOST_ROWS, line=line)
        yield Block(title="Large allocations not alive at the peak", grid=replace(grid, open_rows=0))


def _shown_and_folded(grid: Grid, title: str, num_open: int) -> Iterator[Block]:
    """The first rows of a table, and the rest of them closed."""
    rest = replace(grid, rows=grid.rows[num_open:], open_rows=0)
    first = replace(grid, rows=grid.rows[:num_open], caption="" if rest.rows else grid.caption)
    yield Block(title=title, grid=first)
    if rest.rows:
        yield Block(title=f"{title}, further down", grid=rest)
