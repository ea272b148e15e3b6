"""Builds one document from records of any kinds, with one chapter per section of their reports."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from steplab.records.record import Record
from steplab.records.registry import KINDS, kind_of
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.report.attempts import Attempts
from steplab.report.environments import environment_section
from steplab.report.kit.document import Document, Pairs, Section, Sentences, Verdict, drawn
from steplab.report.kit.grouping import grouped
from steplab.report.kit.table import sheet
from steplab.report.kit.text import dotted
from steplab.report.report import NOTHING, Chapter, Context, Terms, report_of
from steplab.report.run.cells import RunCell, cells_of
from steplab.report.run.columns import rows_table
from steplab.specs.step import describe

_OF_ALL: Terms = (
    (
        "95 % interval",
        "Two of the sorted samples, equally far from both ends, that enclose the true median with at least that "
        "probability, for any distribution; six samples are needed. The interval covers the variation within one "
        "process, not between machines or days.",
    ),
    ("OOM", "The cell ran out of memory."),
    ("–", "Not measured, or not known; never zero."),
)


def page_document(
    records: Sequence[Record],
    *,
    title: str,
    description: str = "",
    about: Context = NOTHING,
    attempts: Attempts | None = None,
) -> Document:
    """Build the page of these records, with its charts drawn.

    `about` has predictions and findings. A record that makes a section raise is left out with a note; `attempts` holds
    the records that were already left out.
    """
    tries = attempts if attempts is not None else Attempts()
    runs = [record for record in records if isinstance(record, Run)]
    cells = tries.draw("the page", runs, cells_of)
    context = replace(about, cells=cells, answered=len(records) == 1)
    of_kind = _by_kind(records, cells)
    sections: list[Section] = []
    terms: Terms = ()
    for name, some in of_kind.items():
        for part in report_of(name).chapters:
            made = tries.draw(part.title.lower() or "the summary", some, partial(_drawn, part, context))
            if made.blocks:
                sections.append(made)
                terms += part.terms
    good = [cell.run for cell in cells] + [r for name, some in of_kind.items() if name != "run" for r in some]
    environments = tries.draw("environments", good, _environments)
    shared = tries.draw("the heading", cells, _shared)
    parts = tries.draw("the heading", good, subtitle)
    return Document(
        title=title,
        subtitle="\n".join(filter(None, (description, dotted(*(p for p in parts if p not in shared)), shared))),
        verdict=tries.draw("the verdict", good, partial(page_verdict, context=context)),
        sections=(
            Section.of("Left out", Sentences.of(tries.left_out, "finding"), anchor="left-out"),
            *sections,
            environments,
            Section.of("Method", Pairs(pairs=tuple(dict.fromkeys((*terms, *_OF_ALL)))), anchor="method"),
        ),
    )


def page_verdict(records: Sequence[Record], context: Context | None = None) -> Verdict:
    if context is None:
        context = Context(cells=cells_of([record for record in records if isinstance(record, Run)]))
    ids = {record.id for record in records}
    by_kind = _by_kind(records, [cell for cell in context.cells if cell.id in ids])
    found = {name: report_of(name).verdict(some, context) for name, some in by_kind.items()}
    if len(found) == 1:
        return next(iter(found.values()))
    told = (answer.sentences if name == "run" else answer.sentences[:1] for name, answer in found.items())
    return Verdict(
        sentences=tuple(chain.from_iterable(told)),
        cautions=tuple(answer.cautions[0] for answer in found.values() if answer.cautions),
    )


def _by_kind(records: Sequence[Record], cells: Sequence[RunCell]) -> dict[str, Sequence[Any]]:
    """Group records by kind, in the order of KINDS; runs as cells."""
    found: dict[str, Sequence[Any]] = {**grouped(records, lambda record: kind_of(record).name), "run": cells}
    return {kind: found[kind] for kind in KINDS if found.get(kind)}


def _drawn(part: Chapter, context: Context, records: Sequence[Any]) -> Section:
    return drawn(part.make(records, context))


def _shared(cells: Sequence[RunCell]) -> str:
    if len(cells) == 1:
        spec = cells[0].run.spec
        return describe(spec) if spec else ""
    return sheet(rows_table([run_row(cell.run) for cell in cells])).caption if cells else ""


def subtitle(records: Sequence[Record]) -> list[str]:
    counts = {name: sum(kind_of(record).name == name for record in records) for name in KINDS}
    days = sorted({record.created_utc[:10] for record in records})
    versions = sorted({record.steplab_version for record in records})
    return [
        *dict.fromkeys(record.device_name for record in records if record.device_name),
        " to ".join(dict.fromkeys(days[:1] + days[-1:])),
        *(f"{n} {KINDS[name].noun if n == 1 else KINDS[name].plural}" for name, n in counts.items() if n),
        f"steplab {', '.join(versions)}" if versions else "",
    ]


def _environments(records: Sequence[Record]) -> Section:
    found = environment_section([record.environment for record in records if record.environment])
    return replace(found, anchor="environment")
