"""The sections of a page about profiles: for each profiled run its sentences, pictures and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report import profile_words as words
from steplab.report.attention_table import attention_grid, attention_notes, attention_rows
from steplab.report.grid import Grid
from steplab.report.kit.document import Chart
from steplab.report.profile_charts import category_bars, device_time, kernel_bars
from steplab.report.profile_figures import top_kernels
from steplab.report.profile_grids import category_grid, host_call_grid, kernel_grid, phase_grid
from steplab.report.roofline import roofline
from steplab.report.run.cells import Cell, label, varying
from steplab.report.timeline_picture import timeline_chart

_MOST_OPEN = 6
_MOST_KERNELS = 40
_NAME_LENGTH = 72


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


def profile_sections(cells: Sequence[Cell]) -> list[ProfileSection]:
    """A section a profiled run, in the cells' order; after the sixth they start closed."""
    profiled = [(cell, cell.run.profile) for cell in cells if cell.run.profile]
    fields = varying(cells)
    return [
        ProfileSection(
            title=label(cell, fields) if len(cells) > 1 else "",
            heading=words.heading(cell.run, profile),
            told=tuple(_told(cell.run, profile)),
            blocks=tuple(_blocks(cell.run, profile)),
            folded=index >= _MOST_OPEN,
        )
        for index, (cell, profile) in enumerate(profiled)
    ]


def _told(run: Run, profile: Profile) -> Iterator[str]:
    yield from (f"Caution: {doubt}." for doubt in profile.doubts)
    yield words.time_sentence(run, profile)
    yield from words.top_kernel_sentences(profile)
    yield from words.matmul_sentences(run, profile)
    further = (words.softmax_sentence(run, profile), words.communication_sentence(run, profile))
    yield from filter(None, further)
    yield words.uncategorised_sentence(run, profile)


def _blocks(run: Run, profile: Profile) -> Iterator[Block]:
    overlap = words.overlap_note(run, profile)
    yield Block(
        title=f"{words.device_word(profile)} time by phase",
        chart=device_time(run, profile),
        grid=phase_grid(run, profile),
        notes=(overlap,) if overlap else (),
    )
    yield Block(title="Categories", chart=category_bars(run, profile), grid=category_grid(run, profile))
    kernels = top_kernels(profile)
    name = words.kernels_word(profile)
    if kernels:
        grid = kernel_grid(profile, kernels[:_MOST_KERNELS], _NAME_LENGTH)
        yield Block(title=f"Top {name}", chart=kernel_bars(profile), grid=grid)
    rows = attention_rows(run, profile)
    if rows:
        yield Block(title="Attention", grid=attention_grid(rows), notes=tuple(attention_notes(run, rows)))
    if roofs := roofline(run, profile):
        yield Block(title="Roofline", chart=roofs)
    if timeline := timeline_chart(profile):
        yield Block(title="Timeline of one step", chart=timeline)
    if profile.host_calls:
        yield Block(title="Host calls that wait or copy", grid=host_call_grid(profile))
    if notes := words.further_notes(profile):
        yield Block(title="Notes on this profile", notes=tuple(notes))
