"""The report of a kind of record: one document, its answer among others, and its chapters of a page.

Each kind's report is `REPORT` in the module that `MODULES` names; a new kind is its record, its report and a line here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from steplab.records.finding import Findings
from steplab.records.memory_references import MemoryReferences
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.records.step_time import PlannedStep
from steplab.report.environments import environment_section
from steplab.report.kit.document import Block, Document, Section, Verdict
from steplab.report.run.cells import RunCell

MODULES = {
    "run": "runs",
    "advice": "advice.document",
    "numerics": "precision.document",
    "attention": "attention.document",
    "comm": "comm.document",
    "ddp": "ddp.document",
    "ceilings": "ceilings",
}
"""Each kind's report module, by the kind's name in the registry; only needed ones load."""

Terms = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Further input of a report, besides its records."""

    cells: Sequence[RunCell] = ()
    """The runs of the page."""
    predictions: Mapping[str, MemoryPrediction] = field(default_factory=dict)
    """Predictions of the runs' memory, by the runs' ids."""
    plans: Mapping[str, PlannedStep] = field(default_factory=dict)
    """Predictions of the memory and the time of runs, by the runs' ids."""
    references: MemoryReferences | None = None
    """Further runs that the runs' memory is compared with."""
    findings: Mapping[str, Findings] = field(default_factory=dict)
    """Findings on the profiled runs, by the runs' ids."""
    answered: bool = False
    """True if the page is about one record, whose whole answer opens it, so that its chapter need not repeat it."""

    @property
    def runs(self) -> list[Run]:
        """The cells' runs."""
        return [cell.run for cell in self.cells]


NOTHING = Context()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """A chapter of a page."""

    name: str
    """Name of the chapter in the message that a record is left out of it."""
    make: Callable[[Sequence[Any], Context], Section]
    """Makes the chapter from the records of its kind (for runs, their cells)."""
    terms: Terms = ()
    """Terms that the chapter uses, with their definitions."""


class Report(Protocol):
    """The report of records of one kind."""

    @property
    def chapters(self) -> tuple[Chapter, ...]:
        """The chapters of a page about such records, in this order."""
        ...

    @property
    def is_joint(self) -> bool:
        """True if several records have one document with one table."""
        ...

    def verdict(self, records: Sequence[Any], context: Context = NOTHING) -> Verdict:
        """The answer that one or more records (for runs, their cells) give together."""
        ...

    def documents(self, records: Sequence[Any], context: Context = NOTHING) -> list[Document]:
        """One or more records in full: in one document each, or in one that is joint."""
        ...


def report_of(kind: str) -> Report:
    """The report of a kind, by its name in the registry."""
    report: Report = import_module(f"steplab.report.{MODULES[kind]}").REPORT
    return report


_MOST_ANSWERS = 3
"""Records of one kind whose answers open a page."""


def several_answers(told: Sequence[tuple[str, Verdict]]) -> Verdict:
    """The first sentence of each answer behind its record's name, the newest first; of a single one all of it."""
    if len(told) == 1:
        return told[0][1]
    shown = [one for one in told if one[1].sentences or one[1].cautions][-_MOST_ANSWERS:][::-1]
    doubtful = ", ".join(heading for heading, answer in shown if answer.cautions)
    return Verdict(
        sentences=tuple(f"{heading}: {answer.sentences[0]}" for heading, answer in shown if answer.sentences),
        cautions=(f"Warning: figures of {doubtful} are doubtful; the chapter says why.",) if doubtful else (),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordReport:
    """The report of a kind whose records each have a document of their own."""

    chapter: str
    """Title of the chapter."""
    anchor: str
    title: Callable[[Any], str]
    """Title of a record's document."""
    subtitle: Callable[[Any], str]
    heading: Callable[[Any], str]
    """Line under a record's name on a page."""
    called: Callable[[Any], str]
    """Name of a record among others."""
    answer: Callable[[Any], Verdict]
    sections: Callable[[Any], Iterable[Section]]
    among_others: Callable[[Any], Iterable[Section]] | None = None
    """The sections of one of several; None: the same."""
    rows: Callable[[Any], Sequence[Row | Mapping[str, Scalar]]]
    """The record's table for programs."""
    terms: Terms = ()
    where: Callable[[Any], Sequence[tuple[str, str]]] = lambda record: ()
    """Facts that stand beside the environment."""
    names_one: bool = False
    """True if a page names a record that is the only one of its kind."""
    parts: Callable[[Sequence[Any], Context, Callable[[Any], Section]], Iterable[Block | None]] = (
        lambda records, context, section: map(section, records)
    )
    """The blocks of the chapter, by what makes a record's section."""
    is_joint: bool = False

    @property
    def chapters(self) -> tuple[Chapter, ...]:
        return (Chapter(name=self.chapter.lower(), make=self._chapter, terms=self.terms),)

    def verdict(self, records: Sequence[Any], context: Context = NOTHING) -> Verdict:
        return several_answers([(self.called(record), self.answer(record)) for record in records])

    def documents(self, records: Sequence[Any], context: Context = NOTHING) -> list[Document]:
        return [self.document(record) for record in records]

    def document(self, record: Any) -> Document:
        """One record in full."""
        return Document(
            title=self.title(record),
            subtitle=self.subtitle(record),
            verdict=self.answer(record),
            sections=(*self.sections(record), environment_section(record.environment, *self.where(record))),
            data=self.rows(record),
        )

    def _chapter(self, records: Sequence[Any], context: Context) -> Section:
        sections = self.among_others if self.among_others and len(records) > 1 else self.sections

        def section(record: Any) -> Section:
            answer = Verdict() if context.answered else self.answer(record)
            title = self.called(record) if self.names_one or len(records) > 1 else ""
            return Section.of_record(self.heading(record), answer, sections(record), title=title)

        return Section.of(self.chapter, *self.parts(records, context, section), anchor=self.anchor)
