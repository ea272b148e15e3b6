"""How each kind of record in the registry is reported: a single record, several together, and a page.

This is the one place that lists the kinds for reports; `show`, `report` and the page ask here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steplab.records.memory_references import MemoryReferences
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.report.attention.document import attention_chapter, attention_document
from steplab.report.ceilings import ceilings_chapter, ceilings_document
from steplab.report.comm import document as comm
from steplab.report.ddp import document as ddp
from steplab.report.environments import environment_section
from steplab.report.kit.document import Document, Section, Table
from steplab.report.memory import document as memory
from steplab.report.memory.facts import memory_facts
from steplab.report.precision.document import precision_chapter, precision_document
from steplab.report.profile.document import profile_chapter
from steplab.report.run import chapters as run
from steplab.report.run.attention_steps import attention_steps
from steplab.report.run.cells import RunCell, cells_of, varying
from steplab.report.run.columns import rows_document
from steplab.report.run.one_run import verdict
from steplab.report.run.words import run_subtitle, run_title

Terms = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a chapter may use besides its own records."""

    cells: Sequence[RunCell] = ()
    """The runs of the page."""
    predictions: Mapping[str, MemoryPrediction] = field(default_factory=dict)
    """Predictions of the runs' memory, by the runs' ids."""
    references: MemoryReferences | None = None
    """Further runs that the runs' memory is compared with."""

    @property
    def runs(self) -> list[Run]:
        """The cells' runs."""
        return [cell.run for cell in self.cells]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """A chapter of a page."""

    name: str
    """Name of the chapter in the message that a record is left out of it."""
    make: Callable[[Sequence[Any], Context], Section | None]
    """Makes the chapter from the records of its kind (for runs, their cells); None where there is nothing to show."""
    terms: Terms = ()
    """Terms that the chapter uses, with their definitions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """How records of one kind are reported."""

    document: Callable[[Any, Context], Document]
    """One record in full."""
    together: Callable[[Sequence[Any]], Document] | None
    """Several records in one document with one table; None: each has a document of its own."""
    chapters: tuple[Chapter, ...]
    """The chapters of a page about such records, in this order."""

    def documents(self, records: Sequence[Any]) -> list[Document]:
        """One or more records in as many documents as their kind needs."""
        return [self.together(records)] if self.together else [self.document(each, Context()) for each in records]


def _of_cells(
    make: Callable[[Sequence[RunCell]], Section | None],
) -> Callable[[Sequence[Any], Context], Section | None]:
    return lambda cells, context: make(cells)


def _summary(cells: Sequence[RunCell]) -> Section | None:
    return run.summary_chapter(cells, memory_facts(cells, varying(cells))) if len(cells) > 1 else None


def _run_document(record: Run, context: Context) -> Document:
    """All that is said of one run: the chapters of a page about it alone."""
    context = replace(context, cells=cells_of([record]))
    chapters = (part.make(context.cells, context) for part in SECTIONS["run"].chapters)
    return Document(
        title=run_title(record),
        subtitle=run_subtitle(record),
        verdict=tuple(verdict(record)),
        sections=(*filter(None, chapters), *environment_section(record.environment)),
        data=Table(name="runs", columns=(), rows=(run_row(record),)),
    )


SECTIONS: dict[str, Sections] = {
    "run": Sections(
        document=_run_document,
        together=lambda runs: rows_document([run_row(run) for run in runs]),
        chapters=(
            Chapter(name="the summary", make=_of_cells(_summary)),
            Chapter(name="the failure", make=_of_cells(run.failure_chapter)),
            Chapter(name="step time", make=_of_cells(run.step_time_chapter), terms=run.TERMS),
            Chapter(name="phases of a step", make=_of_cells(run.phases_chapter)),
            Chapter(name="where the time goes", make=_of_cells(profile_chapter)),
            Chapter(name="warm-up", make=_of_cells(run.warmup_chapter)),
            Chapter(
                name="memory",
                make=lambda cells, context: memory.memory_chapter(cells, context.predictions, context.references),
                terms=memory.TERMS,
            ),
            Chapter(name="utilization", make=_of_cells(run.utilization_chapter)),
            Chapter(name="ranks", make=_of_cells(run.ranks_chapter)),
            Chapter(name="the table of runs", make=_of_cells(run.runs_chapter), terms=run.TERMS),
            Chapter(name="what was not measured", make=_of_cells(run.missing_chapter)),
        ),
    ),
    "numerics": Sections(
        document=lambda record, context: precision_document([record]),
        together=precision_document,
        chapters=(
            Chapter(
                name="precision",
                make=lambda records, context: precision_chapter(context.runs, records),
            ),
        ),
    ),
    "attention": Sections(
        document=lambda record, context: attention_document(record),
        together=None,
        chapters=(
            Chapter(
                name="attention",
                make=lambda records, context: attention_chapter(
                    records, attention_steps([cell.run for cell in context.cells])
                ),
            ),
        ),
    ),
    "comm": Sections(
        document=lambda record, context: comm.comm_document(record),
        together=None,
        chapters=(
            Chapter(name="communication", make=lambda records, context: comm.comm_chapter(records), terms=comm.TERMS),
        ),
    ),
    "ddp": Sections(
        document=lambda record, context: ddp.ddp_document(record),
        together=None,
        chapters=(
            Chapter(name="data parallelism", make=lambda records, context: ddp.ddp_chapter(records), terms=ddp.TERMS),
        ),
    ),
    "ceilings": Sections(
        document=lambda record, context: ceilings_document(record),
        together=None,
        chapters=(Chapter(name="ceilings", make=lambda records, context: ceilings_chapter(records)),),
    ),
}
"""The sections of each kind of record, by its name in the registry."""
