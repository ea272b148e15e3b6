from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from steplab.errors import SteplabError, UserError
from steplab.lab.choosing import ReportedRecords, records_that_answer, records_to_report
from steplab.measurement.progress import OnProgress, Progress
from steplab.records.record import Record
from steplab.records.registry import KINDS
from steplab.report.attempts import Attempts
from steplab.report.kit.document import Document, Section, Verdict
from steplab.report.kit.markup import one_document
from steplab.report.kit.pictures import Beside
from steplab.report.kit.rendering import NOTEBOOK, PAGE, PICTURE, chapter_of, render
from steplab.report.report import Context, JointReport, RecordReport
from steplab.report.report import report_of as report_of_kind
from steplab.report.run.cells import cells_of
from steplab.specs.question import Derivation, load_questions
from steplab.views.view import View


def report(
    records: Sequence[Record | str] | Record | str = (),
    *,
    study: str | None = None,
    name: str | None = None,
    title: str | None = None,
    questions: str | None = None,
    chapter: str | None = None,
    store: Path | str | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> View:
    """The report of several records, as `steplab report` writes it.

        steplab.report()  # the newest measurement with its study
        steplab.report([before, after]).save("page.html")

    `records` are records, ids, names, tags, studies or git revisions; without them, the records of a `study` or `name`,
    else the newest measurement's. `questions` is a preset or a file; its answers use all records of the store if none
    are chosen. `chapter` begins the title of the one chapter, section or question to report. Raises UserError without
    records.
    """
    given = (records,) if isinstance(records, (Record, str)) else tuple(records)
    if questions:
        return answers_of(
            questions, records_that_answer(given, study=study, name=name, store=store), title, chapter, store
        )
    found = records_to_report(given, study=study, name=name, store=store)
    return report_of(found, title=title, named=bool(given), chapter=chapter, store=store, on_progress=on_progress)


def report_of(
    found: ReportedRecords,
    *,
    title: str | None = None,
    named: bool = False,
    chapter: str | None = None,
    store: Path | str | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> View:

    def write(format: str, *, color: bool, beside: Beside | None = None) -> str:
        if chapter and format in ("json", "csv"):
            raise UserError(f"{format} has no chapters")
        if beside or chapter or format in (PAGE, NOTEBOOK, PICTURE):
            page = _page(found, title or found.title, store, on_progress)
            return render(chapter_of(page, chapter) if chapter else page, format, color=color, beside=beside)
        return _tables(found, format, named=named, color=color)

    return View(write, store, pictured=True)


def answers_of(
    questions: str,
    records: Sequence[Record],
    title: str | None,
    chapter: str | None,
    store: Path | str | None,
) -> View:
    from steplab.report.questions.answers import questions_document

    document = questions_document(load_questions(questions), records, partial(derived, store), title)
    if chapter:
        document = chapter_of(document, chapter)

    return View(partial(render, document), store, pictured=True)


def derived(store: Path | str | None, asked: Derivation) -> Document:
    """Answer `plan accounting` or `attention --derive`. Raises UserError if no record allows it."""
    from steplab.lab.planning import plan_accounting
    from steplab.report.plan.accounting import accounting_document

    if not asked.model:
        from steplab.lab.attention import account_for_memory
        from steplab.report.attention.document import account_document

        return account_document(account_for_memory((), None, store=store))
    found = plan_accounting(asked.model, gpu=asked.gpu, mesh=asked.mesh)
    place = next((i for i, each in enumerate(found.questions) if each.title.startswith(asked.question)), None)
    if place is None:
        titles = " ".join(each.title for each in found.questions)
        raise UserError(f"no derivation begins with '{asked.question}'; choose one of: {titles}")
    given, *sections = accounting_document(found).sections
    _answer, *derivation = sections[place].blocks
    answer = Verdict(sentences=(found.questions[place].answer,))
    return Document(title="", verdict=answer, sections=(given, Section.of("", *derivation)))


def answer_of(found: ReportedRecords) -> str:
    from steplab.report.page import page_verdict

    document = Document(title="", verdict=Attempts().draw("the verdict", found.records, page_verdict))
    return render(document, "table").lstrip("\n")


def _page(found: ReportedRecords, title: str, store: Path | str | None, on_progress: OnProgress) -> Document:
    from steplab.lab.explaining import findings_of, memory_references
    from steplab.lab.memory import predictions_of
    from steplab.lab.planning import plans_of
    from steplab.report.memory.document import watched_in_full
    from steplab.report.page import page_document

    attempts = Attempts()
    runs = found.of("run")
    watched = attempts.draw("memory", runs, lambda some: [cell.run for cell in watched_in_full(cells_of(some))])
    about = Context(
        predictions=attempts.draw("predictions", watched, lambda some: predictions_of(some, on_progress)),
        references=attempts.draw("comparisons", watched, lambda some: memory_references(some, store)),
        plans=attempts.draw("plans", runs, plans_of),
        findings=attempts.draw("findings", runs, lambda some: findings_of(some, store)),
    )
    on_progress(Progress(stage="draw", done=0, total=0))
    return page_document(found.records, title=title, description=found.description, about=about, attempts=attempts)


def _tables(found: ReportedRecords, format: str, *, named: bool, color: bool) -> str:
    """Text of the records' tables: a document for each kind whose records share a table, else one for each record.

    JSON and CSV hold one table. Audits of precision are left out if there are runs, unless records are `named`; other
    mixtures raise UserError.
    """
    by_kind = {name: found.of(name) for name in KINDS}
    if by_kind["run"] and not named and format in ("json", "csv"):
        by_kind["numerics"] = ()
    kinds = {name: report_of_kind(name) for name, records in by_kind.items() if records}
    tables = sum(1 if isinstance(kind, JointReport) else len(by_kind[name]) for name, kind in kinds.items())
    if format in ("json", "csv") and tables > 1:
        raise UserError(
            f"--format {format} holds one table, these records need several; pass one id, or use "
            "--format table, md, latex or html"
        )
    draw = Attempts().draw

    def texts(kind: RecordReport | JointReport, records: Sequence[Any]) -> list[str]:
        return [render(document, format, color=color) for document in kind.documents(records)]

    made = [text for name, kind in kinds.items() for text in draw("the report", by_kind[name], partial(texts, kind))]
    if not made:
        raise SteplabError("no record can be reported; --debug shows the reasons")
    return one_document(made) if format == "latex" else "\n\n".join(text.rstrip("\n") for text in made)
