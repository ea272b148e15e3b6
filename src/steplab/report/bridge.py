"""Sections of pages that are not documents of their own yet, as sections of one."""

from collections.abc import Mapping, Sequence

from steplab.records.memory_references import MemoryReferences
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.grid import Grid
from steplab.report.kit.document import Block, Section, Sentences, Table, chapter, table_of_texts
from steplab.report.memory_page import Block as OldBlock
from steplab.report.memory_page import ProfileSection, memory_part
from steplab.report.run.cells import Cell, cells_of
from steplab.report.run.charts import peak_memory


def as_table(grid: Grid, name: str) -> Table:
    return table_of_texts(
        name, grid.headers, grid.rows, numeric=grid.numeric, caption=grid.caption, failures=grid.bad_rows
    )


def _block(block: OldBlock) -> Section:
    found: list[Block] = []
    if block.chart:
        found.append(block.chart)
    if block.grid:
        found.append(as_table(block.grid, block.title))
    if block.notes:
        found.append(Sentences(texts=block.notes, role="note"))
    return Section(title=block.title, blocks=tuple(found))


def _section(old: ProfileSection) -> Section:
    return Section(title=old.title, folded=old.folded, blocks=tuple(_blocks(old)))


def _blocks(old: ProfileSection) -> list[Block]:
    return [
        Sentences(texts=(old.heading,), role="note"),
        *([Sentences(texts=old.told, role="finding")] if old.told else []),
        *map(_block, old.blocks),
    ]


def memory_sections(run: Run, *, references: MemoryReferences | None = None) -> list[Block]:
    part = memory_part(cells_of([run]), {}, references)
    return [block for old in part.records for block in _blocks(old)] if part else []


def memory_chapter(
    cells: Sequence[Cell], predictions: Mapping[str, MemoryPrediction], references: MemoryReferences | None
) -> Section | None:
    part = memory_part(cells, predictions, references)
    return chapter(
        "Memory",
        "memory",
        peak_memory(cells),
        *([*map(_block, part.across), *map(_section, part.records)] if part else ()),
    )
