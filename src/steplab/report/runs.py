from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.report.environments import environment_section
from steplab.report.kit.document import Document, Facts, Section, Verdict
from steplab.report.memory import document as memory
from steplab.report.memory.document import memory_verdict
from steplab.report.profile.document import profile_chapter, profile_verdict
from steplab.report.profile.verdict import findings_section, saving_facts
from steplab.report.report import NOTHING, Chapter, Context
from steplab.report.run import chapters
from steplab.report.run.cells import RunCell, cells_of
from steplab.report.run.columns import attention_steps
from steplab.report.run.effects import effect_bars
from steplab.report.run.one_run import run_subtitle, run_title
from steplab.report.run.verdict import facts, facts_of_one, runs_verdict
from steplab.units import counted


def _of_cells(make: Callable[[Sequence[RunCell]], Section]) -> Callable[[Sequence[Any], Context], Section]:
    return lambda cells, context: make(cells)


def _summary(cells: Sequence[RunCell], context: Context) -> Section:
    if len(cells) == 1:  # its own document opens with them in sentences
        found = context.findings.get(cells[0].id)
        tiles = (*facts_of_one(cells[0].run), *(saving_facts(found) if found else ()))
        return Section.of(
            "", Facts(facts=tiles if context.answered else ()), findings_section(found) if found else None
        )
    return Section.of("", Facts(facts=tuple(facts(cells))), effect_bars(cells))


def _planning(cells: Sequence[RunCell], context: Context) -> Section:
    if not context.plans:
        return Section(title="")
    from steplab.report.plan.steps import planning_chapter

    planned = [cell for cell in cells if cell.id in context.plans] if len(cells) > 1 else []
    return planning_chapter([context.plans[cell.id] for cell in planned], [run_row(cell.run) for cell in planned])


def _attention_of_steps(cells: Sequence[RunCell], context: Context) -> Section:
    steps = attention_steps([cell.run for cell in cells])
    return Section.of("Training steps by attention implementation", steps, anchor="attention-of-steps")


def _runs_document(runs: Sequence[Run], context: Context) -> Document:
    context = replace(context, cells=cells_of(runs))
    sections = [part.make(context.cells, context) for part in _CHAPTERS]
    alone = runs[0] if len(runs) == 1 else None
    return Document(
        title=run_title(alone) if alone else counted(len(runs), "run"),
        subtitle=run_subtitle(alone) if alone else "",
        verdict=_runs_verdict(context.cells, context),
        sections=(*sections, environment_section(alone.environment if alone else None)),
        data=list(map(run_row, runs)),
    )


def _runs_verdict(cells: Sequence[RunCell], context: Context) -> Verdict:
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


_CHAPTERS = (
    Chapter(name="the summary", make=_summary),
    Chapter(name="the failure", make=_of_cells(chapters.failure_chapter)),
    Chapter(name="step time", make=_of_cells(chapters.step_time_chapter), terms=chapters.TERMS),
    Chapter(name="phases of a step", make=_of_cells(chapters.phases_chapter)),
    Chapter(name="choices by size", make=_of_cells(chapters.effects_chapter)),
    Chapter(
        name="where the time goes",
        make=lambda cells, context: profile_chapter(cells, context.findings if len(cells) > 1 else {}),
    ),
    Chapter(name="warm-up", make=_of_cells(chapters.warmup_chapter)),
    Chapter(
        name="memory", make=lambda cells, context: memory.memory_chapter(cells, context.predictions), terms=memory.TERMS
    ),
    Chapter(name="planning", make=_planning),
    Chapter(name="attention of steps", make=_attention_of_steps),
    Chapter(name="utilization", make=_of_cells(chapters.utilization_chapter)),
    Chapter(name="ranks", make=_of_cells(chapters.ranks_chapter)),
    Chapter(name="the table of runs", make=_of_cells(chapters.runs_chapter), terms=chapters.TERMS),
    Chapter(name="not measured", make=_of_cells(chapters.missing_chapter)),
)


class _RunReport:
    is_joint = True

    @property
    def chapters(self) -> tuple[Chapter, ...]:
        return _CHAPTERS

    def verdict(self, records: Sequence[RunCell], context: Context = NOTHING) -> Verdict:
        return _runs_verdict(records, context)

    def documents(self, records: Sequence[Run], context: Context = NOTHING) -> list[Document]:
        return [_runs_document(records, context)]


REPORT = _RunReport()
