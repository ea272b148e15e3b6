"""The part of a page about collectives: for each benchmark its pictures and tables."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.comm import CommRun
from steplab.report.comm_charts import backends_side_by_side, time_over_ranks, time_over_size
from steplab.report.comm_rows import bandwidth_grid, comm_tables
from steplab.report.comm_text import processes_of
from steplab.report.profile_page import Block, ProfileSection
from steplab.report.titled_table import grid_of


def comm_sections(runs: Sequence[CommRun]) -> list[ProfileSection]:
    """A section a benchmark, in their order; then, where backends were measured in different ones, them together."""
    sections = [_section(run, titled=len(runs) > 1) for run in runs]
    cells = [cell for run in runs for cell in run.cells]
    together = backends_side_by_side(cells)
    if len(runs) > 1 and together and not any(backends_side_by_side(run.cells) for run in runs):
        return [*sections, _together(runs, Block(title="Backends", chart=together))]
    return sections


def _section(run: CommRun, *, titled: bool) -> ProfileSection:
    libraries = [f"{name.upper()} {version}" for name, version in run.libraries.items()]
    made = [run.device_name or "", *libraries, run.created_utc, f"benchmark {run.id}"]
    failed = sum(cell.failure is not None for cell in run.cells)
    told = [f"{units.counted(len(run.cells), 'cell')}, of which {failed} failed."]
    told += [f"{processes_of(run)}."] if run.ranks else []
    return ProfileSection(
        title=(run.name or run.study.name) if titled else "",
        heading=" · ".join(part for part in made if part),
        told=(*told, *run.notes),
        blocks=tuple(_blocks(run)),
        folded=False,
    )


def _blocks(run: CommRun) -> Iterator[Block]:
    if glance := bandwidth_grid(run.cells):
        yield Block(title="Bus bandwidth", grid=glance)
    pictures = {
        "Time over size": time_over_size(run.cells, run.profile),
        "Time over ranks": time_over_ranks(run.cells),
        "Backends": backends_side_by_side(run.cells),
    }
    for title, chart in pictures.items():
        if chart:
            yield Block(title=title, chart=chart)
    for table in comm_tables(run):
        yield Block(title=table.title, grid=grid_of(table))


def _together(runs: Sequence[CommRun], block: Block) -> ProfileSection:
    return ProfileSection(
        title="Backends side by side",
        heading=" · ".join(f"benchmark {run.id}" for run in runs),
        told=(),
        blocks=(block,),
        folded=False,
    )
