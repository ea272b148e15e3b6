"""How each kind of record in the registry is reported: a single record, several together, and a page.

This is the one place that lists the kinds for reports; `show`, `report` and the page ask here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steplab.records.finding import Findings
from steplab.records.memory_references import MemoryReferences
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.step_time import PlannedStep
from steplab.report.advice.document import advice_chapter, advice_document, advice_title, advice_verdict
from steplab.report.attention.document import attention_chapter, attention_document
from steplab.report.attention.figures import default_peer
from steplab.report.attention.verdict import attention_verdict
from steplab.report.ceilings import ceilings_chapter, ceilings_document, ceilings_verdict
from steplab.report.comm import document as comm
from steplab.report.comm.verdict import comm_name, comm_verdict
from steplab.report.ddp import document as ddp
from steplab.report.ddp.verdict import ddp_verdict
from steplab.report.ddp.words import asked
from steplab.report.environments import environment_section
from steplab.report.kit.document import Document, Facts, Section, Verdict
from steplab.report.memory import document as memory
from steplab.report.memory.facts import memory_facts
from steplab.report.memory.verdict import memory_verdict
from steplab.report.plan.steps import planning_chapter
from steplab.report.precision.document import precision_chapter, precision_document
from steplab.report.precision.verdict import precision_verdict
from steplab.report.precision.words import title
from steplab.report.profile.document import profile_chapter, profile_verdict
from steplab.report.profile.verdict import saving_facts
from steplab.report.run import chapters as run
from steplab.report.run.attention_steps import attention_steps
from steplab.report.run.cells import RunCell, cells_of, varying
from steplab.report.run.narrative import facts
from steplab.report.run.verdict import runs_verdict
from steplab.report.run.words import run_subtitle, run_title
from steplab.units import counted

Terms = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a chapter may use besides its own records."""

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
    """Whether the page is about one record, whose whole answer opens it, so that its chapter need not repeat it."""

    @property
    def runs(self) -> list[Run]:
        """The cells' runs."""
        return [cell.run for cell in self.cells]


_NOTHING = Context()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """A chapter of a page."""

    name: str
    """Name of the chapter in the message that a record is left out of it."""
    make: Callable[[Sequence[Any], Context], Section]
    """Makes the chapter from the records of its kind (for runs, their cells)."""
    terms: Terms = ()
    """Terms that the chapter uses, with their definitions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """How records of one kind are reported."""

    document: Callable[[Any, Context], Document]
    """One record in full."""
    verdict: Callable[[Sequence[Any], Context], Verdict]
    """The answer that one or more records (for runs, their cells) give together."""
    chapters: tuple[Chapter, ...]
    """The chapters of a page about such records, in this order."""
    together: Callable[[Sequence[Any]], Document] | None = None
    """Several records in one document with one table; None: each has a document of its own."""

    def documents(self, records: Sequence[Any]) -> list[Document]:
        """One or more records in as many documents as their kind needs."""
        return [self.together(records)] if self.together else [self.document(each, Context()) for each in records]


def _of_cells(
    make: Callable[[Sequence[RunCell]], Section],
) -> Callable[[Sequence[Any], Context], Section]:
    return lambda cells, context: make(cells)


def _summary(cells: Sequence[RunCell], context: Context) -> Section:
    """The most important figures of several runs, including those of findings and memory profiles."""
    several = cells if len(cells) > 1 else ()
    fields = varying(several)
    found = (*facts(several), *saving_facts(several, context.findings, fields), *memory_facts(several, fields))
    return Section.of("", Facts(facts=found))


def _planning(cells: Sequence[RunCell], context: Context) -> Section:
    """What the different steps of several runs were predicted to need, beside what they needed."""
    planned = [cell for cell in cells if cell.id in context.plans] if len(cells) > 1 else []
    return planning_chapter([context.plans[cell.id] for cell in planned], [run_row(cell.run) for cell in planned])


def _runs_document(runs: Sequence[Run], context: Context = _NOTHING) -> Document:
    """The chapters of a page about these runs, without what only a page can show; of a single one also where it ran."""
    context = replace(context, cells=cells_of(runs))
    chapters = [part.make(context.cells, context) for part in SECTIONS["run"].chapters]
    alone = runs[0] if len(runs) == 1 else None
    return Document(
        title=run_title(alone) if alone else counted(len(runs), "run"),
        subtitle=run_subtitle(alone) if alone else "",
        verdict=_runs_verdict(context.cells, context),
        sections=(*chapters, environment_section(alone.environment if alone else None)),
        data=list(map(run_row, runs)),
    )


def _runs_verdict(cells: Sequence[RunCell], context: Context) -> Verdict:
    """The answer of what the runs were made for: a profile, a memory profile, or the step time."""
    if len(cells) != 1:
        return runs_verdict(cells)
    (record,) = (cell.run for cell in cells)
    if record.profile:
        return profile_verdict(record, record.profile, context.findings.get(record.id))
    answer = runs_verdict(cells)
    if record.memory_profile:
        of_memory = memory_verdict(record, context.predictions.get(record.id), context.references)
        return Verdict(sentences=(*of_memory.sentences, *answer.sentences[:1]), cautions=answer.cautions)
    return answer


_MOST_ANSWERS = 3
"""Records of one kind whose answers open a page."""


def _of_each(make: Callable[[Any], Verdict], name: Callable[[Any], str]) -> Callable[[Sequence[Any], Context], Verdict]:
    """The answer of a record; of several, the first sentence of each, the newest first, after its name."""

    def verdict(records: Sequence[Any], context: Context) -> Verdict:
        if len(records) == 1:
            return make(records[0])
        told = [(name(record), make(record)) for record in records[-_MOST_ANSWERS:][::-1]]
        doubtful = ", ".join(heading for heading, answer in told if answer.cautions)
        return Verdict(
            sentences=tuple(f"{heading}: {answer.sentences[0]}" for heading, answer in told if answer.sentences),
            cautions=(f"Warning: figures of {doubtful} are doubtful; the chapter says why.",) if doubtful else (),
        )

    return verdict


SECTIONS: dict[str, Sections] = {
    "run": Sections(
        document=lambda run, context: _runs_document([run], context),
        together=_runs_document,
        verdict=_runs_verdict,
        chapters=(
            Chapter(name="the summary", make=_summary),
            Chapter(name="the failure", make=_of_cells(run.failure_chapter)),
            Chapter(name="step time", make=_of_cells(run.step_time_chapter), terms=run.TERMS),
            Chapter(name="phases of a step", make=_of_cells(run.phases_chapter)),
            Chapter(name="choices by size", make=_of_cells(run.effects_chapter)),
            Chapter(
                name="where the time goes",
                make=lambda cells, context: profile_chapter(cells, context.findings),
            ),
            Chapter(name="warm-up", make=_of_cells(run.warmup_chapter)),
            Chapter(
                name="memory",
                make=lambda cells, context: memory.memory_chapter(cells, context.predictions, context.references),
                terms=memory.TERMS,
            ),
            Chapter(name="planning", make=_planning),
            Chapter(name="utilization", make=_of_cells(run.utilization_chapter)),
            Chapter(name="ranks", make=_of_cells(run.ranks_chapter)),
            Chapter(name="the table of runs", make=_of_cells(run.runs_chapter), terms=run.TERMS),
            Chapter(name="what was not measured", make=_of_cells(run.missing_chapter)),
        ),
    ),
    "advice": Sections(
        document=lambda record, context: advice_document(record),
        verdict=_of_each(advice_verdict, lambda record: record.name or advice_title(record)),
        chapters=(Chapter(name="advice", make=lambda records, context: advice_chapter(records, context.answered)),),
    ),
    "numerics": Sections(
        document=lambda record, context: precision_document([record]),
        together=precision_document,
        verdict=_of_each(precision_verdict, title),
        chapters=(
            Chapter(
                name="precision",
                make=lambda records, context: precision_chapter(context.runs, records, context.answered),
            ),
        ),
    ),
    "attention": Sections(
        document=lambda record, context: attention_document(record),
        verdict=_of_each(
            lambda run: attention_verdict(run, default_peer(run.cells)), lambda run: run.name or run.study.name
        ),
        chapters=(
            Chapter(
                name="attention",
                make=lambda records, context: attention_chapter(
                    records, attention_steps([cell.run for cell in context.cells]), context.answered
                ),
            ),
        ),
    ),
    "comm": Sections(
        document=lambda record, context: comm.comm_document(record),
        verdict=_of_each(comm_verdict, comm_name),
        chapters=(
            Chapter(
                name="communication",
                make=lambda records, context: comm.comm_chapter(records, context.answered),
                terms=comm.TERMS,
            ),
        ),
    ),
    "ddp": Sections(
        document=lambda record, context: ddp.ddp_document(record),
        verdict=_of_each(ddp_verdict, lambda run: run.name or asked(run)),
        chapters=(
            Chapter(
                name="data parallelism",
                make=lambda records, context: ddp.ddp_chapter(records, context.answered),
                terms=ddp.TERMS,
            ),
        ),
    ),
    "ceilings": Sections(
        document=lambda record, context: ceilings_document(record),
        verdict=_of_each(ceilings_verdict, lambda record: record.environment.device.name),
        chapters=(Chapter(name="ceilings", make=lambda records, context: ceilings_chapter(records, context.answered)),),
    ),
}
"""The sections of each kind of record, by its name in the registry."""
