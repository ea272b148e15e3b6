"""The part of a page about attention by itself: for each benchmark its pictures and tables."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.attention import AttentionRun
from steplab.report.attention_charts import memory_chart, rate_chart
from steplab.report.attention_rows import (
    attention_tables,
    default_peer,
    notes_of,
)
from steplab.report.attention_speeds import PASS_WORDS, geometric_means, speed_grid, telling_pass
from steplab.report.profile_page import Block, ProfileSection
from steplab.report.titled_table import grid_of
from steplab.specs.attention import PASSES


def attention_sections(runs: Sequence[AttentionRun]) -> list[ProfileSection]:
    """A section a benchmark, in their order."""
    return [_section(run, titled=len(runs) > 1) for run in runs]


def _section(run: AttentionRun, *, titled: bool) -> ProfileSection:
    made = [run.study.description or run.study.name, run.device_name or "", run.created_utc, f"benchmark {run.id}"]
    failed = [cell for cell in run.cells if cell.failure]
    memory = [cell for cell in failed if cell.failure and cell.failure.kind == "out_of_memory"]
    told = [
        f"{units.counted(len(run.cells), 'cell')}, of which {len(failed)} failed, {len(memory)} of them for memory."
    ]
    return ProfileSection(
        title=(run.name or run.study.name) if titled else "",
        heading=" · ".join(part for part in made if part),
        told=(*told, *run.notes, *notes_of(run.cells)),
        blocks=tuple(_blocks(run)),
        folded=False,
    )


def _blocks(run: AttentionRun) -> Iterator[Block]:
    peer = default_peer(run.cells)
    means = geometric_means(run.cells, peer)
    if means:
        yield Block(title="Speed over all shapes", grid=means)
    telling = telling_pass(run.cells)
    if telling and (speeds := speed_grid(run.cells, peer, telling)):
        yield Block(title=f"Speed, {PASS_WORDS[telling]}", grid=speeds)
    for name in PASSES:
        chart = rate_chart(run.cells, name)
        if chart:
            yield Block(title=f"FLOP/s, {PASS_WORDS[name]}", chart=chart)
    for kept, title in ((True, "Memory kept for backward"), (False, "Peak memory")):
        chart = memory_chart(run.cells, kept=kept)
        if chart:
            yield Block(title=title, chart=chart)
    for table in attention_tables(run.cells, peer):
        yield Block(title=table.title, grid=grid_of(table))
