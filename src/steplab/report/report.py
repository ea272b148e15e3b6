"""Defines how a kind of record is reported: as one document, as a verdict, and as chapters of a page.

A kind's report is `REPORT` in the module that `MODULES` names. A new kind needs its record, its report and a line here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import itemgetter
from typing import Any

from steplab.records.finding import Findings
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.records.step_time import PlannedStep
from steplab.report.environments import environment_section
from steplab.report.kit import document as pages
from steplab.report.kit.quantities import Quantity
from steplab.report.kit.text import dotted
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
"""Module with a kind's report, by the kind's name; modules load when needed."""

Terms = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    cells: Sequence[RunCell] = ()
    predictions: Mapping[str, MemoryPrediction] = field(default_factory=dict)
    plans: Mapping[str, PlannedStep] = field(default_factory=dict)
    references: Sequence[Run] = ()
    findings: Mapping[str, Findings] = field(default_factory=dict)
    answered: bool = False
    """True if the page is about one record: the page begins with its verdict, so the chapter omits it."""

    @property
    def runs(self) -> list[Run]:
        return [cell.run for cell in self.cells]


NOTHING = Context()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    title: str
    anchor: str
    blocks: Callable[[Sequence[Any], Context], Iterable[pages.Block | str | None]]
    terms: Terms = ()

    def make(self, records: Sequence[Any], context: Context) -> pages.Section:
        return pages.Section.of(self.title, *self.blocks(records, context), anchor=self.anchor)


@dataclass(frozen=True, kw_only=True, slots=True)
class JointReport:
    """A report of several records in one document and table."""

    chapters: tuple[Chapter, ...]
    verdict: Callable[..., pages.Verdict]
    documents: Callable[..., list[pages.Document]]


_MOST_ANSWERS = 3


def several_answers(told: Sequence[tuple[str, pages.Verdict]]) -> pages.Verdict:
    """Combine verdicts, given with their records' headings: first sentences, newest first. One alone stays whole."""
    if len(told) == 1:
        return told[0][1]
    shown = [one for one in told if one[1].sentences or one[1].cautions][-_MOST_ANSWERS:][::-1]
    doubtful = ", ".join(heading for heading, answer in shown if answer.cautions)
    return pages.Verdict(
        sentences=tuple(f"{heading}: {answer.sentences[0]}" for heading, answer in shown if answer.sentences),
        cautions=(f"Warning: figures of {doubtful} are doubtful; the chapter says why.",) if doubtful else (),
    )


def extremes(
    rows: Iterable[Row], names: Sequence[str], *wanted: tuple[str, Callable[..., Any], Quantity, str]
) -> Iterator[pages.Fact]:
    """For each wanted (key, min or max, format, words), state the extreme row, with its `names` fields."""
    for key, take, quantity, words in wanted:
        if known := [row for row in rows if isinstance(row.get(key), (int, float))]:
            row = take(known, key=itemgetter(key))
            yield pages.Fact(
                figure=quantity.show(row[key]), text=f"{words} ({', '.join(str(row[name]) for name in names)})"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordReport:
    """A report with one document per record."""

    chapter: str
    anchor: str
    title: Callable[[Any], str]
    subtitle: Callable[[Any], str]
    called: Callable[[Any], str]
    answer: Callable[[Any], pages.Verdict]
    sections: Callable[[Any], Iterable[pages.Section]]
    tiles: Callable[[Any], Iterable[pages.Fact]] = lambda record: ()
    rows: Callable[[Any], Sequence[Row | Mapping[str, Scalar]]]
    terms: Terms = ()
    where: Callable[[Any], Sequence[tuple[str, str]]] = lambda record: ()

    @property
    def chapters(self) -> tuple[Chapter, ...]:
        return (Chapter(title=self.chapter, anchor=self.anchor, blocks=self._blocks, terms=self.terms),)

    def verdict(self, records: Sequence[Any], context: Context = NOTHING) -> pages.Verdict:
        return several_answers([(self.called(record), self.answer(record)) for record in records])

    def documents(self, records: Sequence[Any], context: Context = NOTHING) -> list[pages.Document]:
        return [self.document(record) for record in records]

    def document(self, record: Any) -> pages.Document:
        environments = [record.environment] if record.environment else []
        return pages.Document(
            title=self.title(record),
            subtitle=self.subtitle(record),
            verdict=self.answer(record),
            sections=(*self.sections(record), environment_section(environments, *self.where(record))),
            data=self.rows(record),
        )

    def _blocks(self, records: Sequence[Any], context: Context) -> Iterator[pages.Block]:
        alone = len(records) == 1

        def section(record: Any) -> pages.Section:
            heading = dotted(self.title(record), self.subtitle(record))
            answer = pages.Verdict() if context.answered else self.answer(record)
            first = pages.Section.of(
                "",
                pages.Facts(facts=tuple(self.tiles(record)) if alone else ()),
                pages.Pairs(pairs=tuple(self.where(record))),
            )
            return pages.Section.of_record(
                heading, answer, (first, *self.sections(record)), title="" if alone else self.called(record)
            )

        newest = records[::-1]
        return pages.records_in_full(newest[: pages.MOST_IN_FULL], newest, section)


def report_of(kind: str) -> RecordReport | JointReport:
    report: RecordReport | JointReport = import_module(f"steplab.report.{MODULES[kind]}").REPORT
    return report
