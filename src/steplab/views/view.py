"""Shows a record or prediction in full at a prompt, in a notebook or in a file, and a record in short."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from steplab.errors import UserError
from steplab.lab.explaining import findings_of, memory_references, run_to_explain
from steplab.lab.files import Destination, format_of, packed
from steplab.lab.keeping import has_store, load
from steplab.printing import leaving
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
from steplab.report.kit.pictures import Beside
from steplab.report.kit.rendering import FORMATS as TEXT_FORMATS
from steplab.report.kit.rendering import NOTEBOOK, PAGE, PICTURE, PICTURED, render
from steplab.report.report import Context, report_of
from steplab.report.run.one_run import annotations

FORMATS = (*TEXT_FORMATS, PAGE, PICTURE)
"""Formats of `View.render` and `View.save`: table is terminal text, html a self-contained page, svg its first picture.
"""


@dataclass(frozen=True, slots=True, repr=False)
class View:
    """A report that is written when displayed: text at a prompt, HTML in a notebook."""

    write: Callable[..., str]
    """write(format, color=) returns the text; the format may also be 'notebook'.

    If `pictured`, a further argument, `beside`, collects pictures and long tables.
    """
    store: Path | str | None = None
    """Store of the records, which `save` never replaces; None: the default store."""
    pictured: bool = False
    """True if Markdown and LaTeX have pictures and long tables in separate files."""

    def __repr__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return leaving(self.write(NOTEBOOK, color=False), "html")

    def render(self, format: str = "table", *, color: bool = False) -> str:
        """Return the report in one of FORMATS. Raises UserError for an unknown or unsuitable format."""
        if format not in FORMATS:
            raise UserError(f"unknown format '{format}'; use one of {', '.join(FORMATS)}")
        return leaving(self.write(format, color=color), format, colored=color)

    def save(self, path: Path | str, format: str | None = None, *, force: bool = False) -> Path:
        """Write the report to a file; without `format`, its suffix decides (page.html, rows.csv.gz).

        Markdown's and LaTeX's pictures and long tables go to a folder NAME_md or NAME_tex beside it. Files not written
        by steplab are replaced only with `force`, the store never. Raises UserError for these, SteplabError if writing
        fails.
        """
        target = Path(path)
        chosen = format or format_of(target)
        if chosen is None:
            raise UserError(f"unknown format for {target.name}; use one of {', '.join(FORMATS)}")
        destination = Destination(path=target, store=self.store, force=force)
        destination.check()
        suffix, kind = ("tex", "pdf") if chosen == "latex" else ("md", "svg")
        beside = Beside(f"{target.name.partition('.')[0]}_{suffix}", kind)
        own = force or target.exists()  # what lies beside a file of steplab's is steplab's
        if self.pictured and chosen in PICTURED and not destination.is_written_to:
            text = leaving(self.write(chosen, color=False, beside=beside), chosen)
        else:
            text = self.render(chosen)
        with ExitStack() as undo:  # what a failure leaves half done
            for name, content in beside.files.items():
                path = target.parent / name
                if not path.parent.exists():
                    path.parent.mkdir()
                    undo.callback(path.parent.rmdir)
                if not path.exists():
                    undo.callback(path.unlink, missing_ok=True)
                Destination(path=path, store=self.store, force=own).write(content)
            with destination.writing() as file, packed(file, target) as written:
                written.write(f"{text.rstrip(chr(10))}\n".encode())
            undo.pop_all()
        return target


Planned = PlannedStep | MemoryPrediction | StepTimePrediction | LayoutPlan | tuple[LayoutPlan, ...]
Shown = Record | Findings | Comparison | tuple[Series, ...] | Planned


def show(shown: Shown | str = "last", *, store: Path | str | None = None) -> View:
    """Everything about one record, as `steplab show` prints it; also for findings, comparisons and predictions.

        steplab.show(run)  # text at a prompt, tables and pictures in a notebook
        steplab.show("last").save("run.html")
        steplab.show(steplab.plan("small", context=512, gpu="H100 SXM"))

    `shown` is a record, a result of `explain`, `compare`, `history` or a `plan` function, or a stored record's id, its
    beginning, or `last`. A run's profile and memory are compared with the store's records. Raises UserError without
    such a record.
    """
    if isinstance(shown, str):
        shown = load(shown, store=store)
    if isinstance(shown, Record):
        return View(partial(_record_text, shown, store), store)
    document, json = _document(shown, store), msgspec.json.format(msgspec.json.encode(shown)).decode()

    def write(format: str, *, color: bool) -> str:
        return json if format == "json" else render(document, format, color=color)

    return View(write, store)


def in_short(record: Record) -> str:
    """HTML of a record for notebooks: verdict, first picture and first table."""
    (document,) = report_of(kind_of(record).name).documents([record])
    blocks = [block for section in document.sections for block in _blocks(section)]
    table = next((block for block in blocks if isinstance(block, Table)), None)
    made = (block.draw() if isinstance(block, Deferred) else block for block in blocks)
    picture = next((block for block in made if isinstance(block, (Chart, Bars))), None)
    first = tuple(block for block in (picture, table) if block)
    return render(replace(document, sections=(Section(title="", blocks=first),)), NOTEBOOK)


def _record_text(record: Record, store: Path | str | None, format: str, *, color: bool) -> str:
    if format == "json":
        return encode_with_summary(record).decode()
    context = Context()
    if isinstance(record, Run) and has_store(store):
        context = Context(references=memory_references([record], store), findings=findings_of([record], store))
    (document,) = report_of(kind_of(record).name).documents([record], context)
    document = replace(document, subtitle="\n".join((document.subtitle, *annotations(record))))
    return render(document, format, color=color)


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
        case (LayoutPlan(), *_):
            from steplab.report.plan.compared_layouts import compared_layouts_document

            return compared_layouts_document(shown)
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
