"""The part of a page about data-parallel studies: for each its pictures and tables."""

from collections.abc import Iterator, Sequence

from steplab.records.ddp import DdpRun
from steplab.report.ddp_bars import memory_bars, step_bars
from steplab.report.ddp_curve import bucket_curve
from steplab.report.ddp_rows import ddp_tables, notes_of
from steplab.report.ddp_timelines import timelines
from steplab.report.ddp_words import asked, model_words, ranks_words, told_of
from steplab.report.profile_page import Block, ProfileSection
from steplab.report.titled_table import grid_of


def ddp_sections(runs: Sequence[DdpRun]) -> list[ProfileSection]:
    """A section a study, in their order."""
    return [_section(run, titled=len(runs) > 1) for run in runs]


def _section(run: DdpRun, *, titled: bool) -> ProfileSection:
    made = [asked(run), ranks_words(run), run.created_utc, f"study {run.id}"]
    return ProfileSection(
        title=(run.name or asked(run)) if titled else "",
        heading=" · ".join(part for part in made if part),
        told=(*told_of(run), *notes_of(run)),
        blocks=tuple(_blocks(run)),
        folded=False,
    )


def _blocks(run: DdpRun) -> Iterator[Block]:
    if bars := step_bars(run):
        yield Block(title="Time of a step", chart=bars)
    if curve := bucket_curve(run):
        yield Block(title="Size of a bucket", chart=curve, notes=tuple(model_words(run)))
    if memory := memory_bars(run):
        yield Block(title="Memory of a rank", chart=memory)
    if drawn := timelines(run):
        yield Block(title="One step of each", chart=drawn)
    for table in ddp_tables(run):
        yield Block(title=table.title, grid=grid_of(table))
