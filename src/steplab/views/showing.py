"""Shows one record or prediction in full, and a record in a notebook in short."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from steplab.errors import UserError
from steplab.lab.explaining import findings_of, memory_references, run_to_explain
from steplab.lab.keeping import has_store, load
from steplab.records.codec import encode_with_summary
from steplab.records.comparison import Comparison, Series
from steplab.records.finding import Findings
from steplab.records.layout_plan import LayoutPlan
from steplab.records.prediction import MemoryPrediction
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.run import Run
from steplab.records.step_time import PlannedStep, StepTimePrediction
from steplab.report.kit.document import Bars, Block, Chart, Deferred, Document, Section, Table
from steplab.report.kit.rendering import NOTEBOOK, render
from steplab.report.report import Context, report_of
from steplab.report.run.one_run import annotations
from steplab.views.view import View

Shown = (
    Record
    | Findings
    | Comparison
    | tuple[Series, ...]
    | PlannedStep
    | MemoryPrediction
    | StepTimePrediction
    | LayoutPlan
)


def show(shown: Shown | str = "last", *, store: Path | str | None = None) -> View:
    """Everything about one record, as `steplab show` prints it; also for findings, comparisons and predictions.

        steplab.show(run)  # text at a prompt, tables and pictures in a notebook
        steplab.show("last").save("run.html")
        steplab.show(steplab.plan("small", context=512, gpu="H100 SXM"))

    `shown` is a record, a result of `explain`, `compare`, `history` or a `plan` function, or a stored record's id, its
    beginning, or `last`. Profiles are compared with the store's records. Raises UserError without such a record.
    """
    if isinstance(shown, str):
        shown = load(shown, store=store)
    if isinstance(shown, Record):
        return View(partial(_record_text, shown, store), store)
    return View(_writer(_document(shown, store), msgspec.json.format(msgspec.json.encode(shown)).decode()), store)


def in_short(record: Record) -> str:
    """A record as HTML for notebooks: verdict, first picture and first table."""
    (document,) = report_of(kind_of(record).name).documents([record])
    blocks = [block for section in document.sections for block in _blocks(section)]
    table = next((block for block in blocks if isinstance(block, Table)), None)
    made = (block.draw() if isinstance(block, Deferred) else block for block in blocks)
    picture = next((block for block in made if isinstance(block, (Chart, Bars))), None)
    first = tuple(block for block in (picture, table) if block)
    return render(replace(document, sections=(Section(title="", blocks=first),)), NOTEBOOK)


def _record_text(record: Record, store: Path | str | None, format: str, color: bool) -> str:
    if format == "json":
        return encode_with_summary(record).decode()
    context = Context()
    if isinstance(record, Run) and has_store(store):
        context = Context(references=memory_references([record], store), findings=findings_of([record], store))
    (document,) = report_of(kind_of(record).name).documents([record], context)
    document = replace(document, subtitle="\n".join((document.subtitle, *annotations(record))))
    return render(document, format, color=color)


def _writer(document: Document, json: str) -> Callable[[str, bool], str]:
    def write(format: str, color: bool) -> str:
        return json if format == "json" else render(document, format, color=color)

    return write


def _document(shown: Any, store: Path | str | None) -> Document:
    match shown:
        case Findings():
            from steplab.report.profile.verdict import findings_document

            return findings_document(run_to_explain(shown.run_id, store=store), shown)
        case Comparison():
            from steplab.report.compare.document import compare_document

            return compare_document(shown)
        case (Series(), *_):
            from steplab.report.history.document import history_document

            return history_document(shown)
        case PlannedStep():
            from steplab.report.plan.steps import planned_document

            return planned_document([shown])
        case LayoutPlan():
            from steplab.report.plan.layouts import layouts_document

            return layouts_document(shown)
        case MemoryPrediction(spec=spec) if spec:
            from steplab.report.plan.document import plan_document

            return plan_document(spec, shown)
        case StepTimePrediction(spec=spec) if spec:
            from steplab.report.plan.time import time_document

            return time_document(spec, shown)
    raise UserError(
        f"{type(shown).__name__} cannot be shown; pass a record, its id, or a result of explain, compare or plan"
    )


def _blocks(section: Section) -> Iterator[Block]:
    for block in section.blocks:
        if isinstance(block, Section):
            yield from _blocks(block)
        else:
            yield block
