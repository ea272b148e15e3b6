"""Sections of pages that are not documents of their own yet, as sections of one."""

from collections.abc import Mapping, Sequence

from steplab.records.memory_references import MemoryReferences
from steplab.records.numerics import Numerics
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.grid import Grid
from steplab.report.kit.document import Block, Document, Section, Sentences, Table, chapter, table_of_texts
from steplab.report.memory_page import memory_part
from steplab.report.precision_page import precision_part
from steplab.report.precision_rows import tables
from steplab.report.profile_page import Block as OldBlock
from steplab.report.profile_page import ProfileSection
from steplab.report.profile_page import profile_sections as old_profiles
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


def profile_sections(run: Run) -> list[Block]:
    return [block for old in old_profiles(cells_of([run])) for block in _blocks(old)]


def profile_chapter(cells: Sequence[Cell]) -> Section | None:
    return chapter("Where the time goes", "profiles", *map(_section, old_profiles(cells)))


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


def precision_chapter(runs: Sequence[Run], numerics: Sequence[Numerics]) -> Section | None:
    part = precision_part(runs, numerics)
    if part is None:
        return None
    return chapter(
        "Precision",
        "precision",
        Section(title="One step in each precision", blocks=(as_table(part.timings, "timings"),))
        if part.timings
        else None,
        *map(_section, part.audits),
        _block(part.sums) if part.sums else None,
    )


def precision_document(records: Sequence[Numerics]) -> Document:
    found = tables(
        [record for record in records if record.spec], next((r.accumulations for r in records if r.accumulations), ())
    )
    part = precision_chapter((), records)
    return Document(
        title="Precision",
        sections=tuple(block for block in (part.blocks if part else ()) if isinstance(block, Section)),
        data=tuple(Table(name=table.key, columns=(), rows=tuple(table.rows)) for table in found),
    )
