"""Which record each cell of a grid is of, where benchmarks/attention_table.py puts it together from several."""

from collections.abc import Iterator, Sequence

from benchmarks.page_tables import table_of_texts

from steplab import units
from steplab.records.attention import AttentionCell, AttentionRun
from steplab.report.attention.figures import PASS_WORDS, median_s, scatter
from steplab.report.kit.document import Table
from steplab.specs.attention import PASSES, AttentionSpec

APART = 0.05
"""Of a time: what two records of one cell may differ by, and how far its samples may scatter, to be called the same."""


def cells_of(runs: Sequence[AttentionRun], grid: str) -> list[AttentionCell]:
    """The cells of all benchmarks of a grid, the oldest of which stands first; of one measured twice, the later."""
    found = {cell.spec: cell for run in runs if run.study.name == grid for cell in run.cells}
    return list(found.values())


def needed(runs: Sequence[AttentionRun], grid: str) -> list[AttentionRun]:
    """The newest benchmark of a grid, then those before it that measured cells which none of the later ones did."""
    seen: set[AttentionSpec] = set()
    found = []
    for run in reversed([run for run in runs if run.study.name == grid]):
        own = {cell.spec for cell in run.cells if cell.failure is None}
        if own - seen:
            found.append(run)
        seen |= own
    return found


def sources(runs: Sequence[AttentionRun], grid: str) -> Table | None:
    """A row a record: when it was made, of what code, on which GPU, and which of its cells are shown. None where one
    record has the whole grid."""
    shown = {cell.spec: run.id for run in runs if run.study.name == grid for cell in run.cells}
    own = [run for run in runs if run.id in shown.values()]
    if len(own) < 2:
        return None
    return table_of_texts(
        "table",
        headers=("record", "made, UTC", "code", "GPU", "type", "dim", "positions", "cells", "of"),
        rows=tuple(_source_row(run, [spec for spec, source in shown.items() if source == run.id]) for run in own),
        numeric=(*(False for _ in range(7)), True, True),
        caption=f"{len(shown)} cells, each once. Positions: of the cells that are shown; cells: shown, of so many in "
        "the record, the others being measured again later. +: with changes that were not committed yet.",
    )


def _source_row(run: AttentionRun, specs: Sequence[AttentionSpec]) -> tuple[str, ...]:
    env = run.environment
    commit, gpu = (env.git_commit, env.device.uuid) if env else (None, None)
    dtypes, dims = (
        ", ".join(map(str, dict.fromkeys(values))) for values in ([s.dtype for s in specs], [s.dim for s in specs])
    )
    lengths = sorted({spec.queries for spec in specs})
    positions = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
    made = run.created_utc.removesuffix("Z").replace("T", " ")
    words = made, commit or "–", (gpu or "–")[:8], dtypes, dims, positions
    return run.id, *words, str(len(specs)), str(len(run.cells))


def disagreements(runs: Sequence[AttentionRun], grid: str) -> Table | None:
    """Cells that two records have, each with hardly any scatter, and whose times differ even so; None without any."""
    rows = []
    for (earlier, cell), (later, again) in _pairs(runs, grid):
        for name in PASSES:
            both = median_s(cell, name), median_s(again, name)
            steady = all(scatter(one, name) < APART for one in (cell, again))
            if both[0] and both[1] and steady and abs(both[1] / both[0] - 1) > APART:
                what = cell.spec.sizes_label, cell.spec.dtype, cell.spec.column, PASS_WORDS[name]
                times = (units.format_time(seconds) for seconds in both if seconds)
                rows.append((*what, *times, f"{both[1] / both[0]:.2f}", earlier.id, later.id))
    if not rows:
        return None
    return table_of_texts(
        "table",
        headers=("B×H×S×D", "type", "implementation", "pass", "earlier", "later", "ratio", "of record", "of record"),
        rows=tuple(rows),
        numeric=(False, False, False, False, True, True, True, False, False),
        caption=f"Cells measured twice, more than {APART:.0%} apart though the middle half of each one's samples "
        "lies within as much. What differs is the code, the GPU or its clock; longer sequences that were measured "
        "once, with the earlier code, differ as well.",
    )


def _pairs(
    runs: Sequence[AttentionRun], grid: str
) -> Iterator[tuple[tuple[AttentionRun, AttentionCell], tuple[AttentionRun, AttentionCell]]]:
    """Each cell with the same of the record before."""
    seen: dict[AttentionSpec, tuple[AttentionRun, AttentionCell]] = {}
    for run in runs:
        for cell in run.cells if run.study.name == grid else ():
            if cell.spec in seen:
                yield seen[cell.spec], (run, cell)
            seen[cell.spec] = run, cell
