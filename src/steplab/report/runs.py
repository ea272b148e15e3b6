from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.report.environments import environment_section
from steplab.report.kit.document import Block, Document, Facts, Verdict
from steplab.report.memory import document as memory
from steplab.report.memory.document import memory_verdict
from steplab.report.profile import document as profile
from steplab.report.profile.document import profile_verdict
from steplab.report.profile.verdict import findings_section, saving_facts
from steplab.report.report import NOTHING, Chapter, Context, JointReport, Terms
from steplab.report.run import chapters
from steplab.report.run.cells import RunCell, cells_of
from steplab.report.run.effects import effect_bars, effects_table
from steplab.report.run.one_run import run_subtitle, run_title
from steplab.report.run.verdict import facts, runs_verdict
from steplab.units import counted


def _summary(cells: Sequence[RunCell], context: Context) -> Iterator[Block | None]:
    if len(cells) == 1:  # its own document opens with them in sentences
        found = context.findings.get(cells[0].id)
        tiles = (*facts(cells), *(saving_facts(found) if found else ()))
        yield Facts(facts=tiles if context.answered else ())
        yield findings_section(found) if found else None
    else:
        yield Facts(facts=tuple(facts(cells)))
        yield effect_bars(cells)


def _planning(cells: Sequence[RunCell], context: Context) -> Iterable[Block]:
    planned = [cell for cell in cells if cell.id in context.plans] if len(cells) > 1 else []
    if not planned:
        return ()
    from steplab.report.plan.steps import planning_blocks

    return planning_blocks([context.plans[cell.id] for cell in planned], [run_row(cell.run) for cell in planned])


def _runs_documents(runs: Sequence[Run], context: Context = NOTHING) -> list[Document]:
    context = replace(context, cells=cells_of(runs))
    sections = [part.make(context.cells, context) for part in _CHAPTERS]
    alone = runs[0] if len(runs) == 1 else None
    environments = [alone.environment] if alone and alone.environment else []
    document = Document(
        title=run_title(alone) if alone else counted(len(runs), "run"),
        subtitle=run_subtitle(alone) if alone else "",
        verdict=_runs_verdict(context.cells, context),
        sections=(*sections, environment_section(environments)),
        data=list(map(run_row, runs)),
    )
    return [document]


def _runs_verdict(cells: Sequence[RunCell], context: Context = NOTHING) -> Verdict:
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


def _chapter(
    title: str, anchor: str, blocks: Callable[[Sequence[RunCell]], Iterable[Block | str | None]], terms: Terms = ()
) -> Chapter:
    return Chapter(title=title, anchor=anchor, blocks=lambda cells, context: blocks(cells), terms=terms)


_CHAPTERS = (
    Chapter(title="", anchor="", blocks=_summary),
    _chapter("Failure", "failure", chapters.failure),
    _chapter("Step time", "time", chapters.step_time, chapters.TERMS),
    _chapter("Phases of a step", "phases", chapters.phases_of_steps),
    _chapter("Choices by size", "choices", lambda cells: [effects_table(cells)]),
    Chapter(
        title=profile.TITLE,
        anchor="profiles",
        blocks=lambda cells, context: profile.profile_blocks(cells, context.findings if len(cells) > 1 else {}),
    ),
    _chapter("Warm-up", "warmup", chapters.warmup),
    Chapter(
        title="Memory",
        anchor="memory",
        blocks=lambda cells, context: memory.memory_chapter_blocks(cells, context.predictions),
        terms=memory.TERMS,
    ),
    Chapter(title="Planning", anchor="planning", blocks=_planning),
    _chapter("Utilization", "utilization", chapters.utilization),
    _chapter("Ranks", "ranks", chapters.ranks),
    _chapter("Runs", "runs", chapters.runs, chapters.TERMS),
    _chapter("Not measured", "missing", chapters.missing),
)


REPORT = JointReport(chapters=_CHAPTERS, verdict=_runs_verdict, documents=_runs_documents)
