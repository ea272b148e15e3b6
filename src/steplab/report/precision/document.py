"""The report of precision: each audit with its answer and tables, the sums, and the timed runs side by side."""

from collections.abc import Iterator, Sequence

from steplab.records.numerics import Accumulation, Audit, Numerics
from steplab.records.run import Run
from steplab.report.kit.document import Document, Section, Sentences, Verdict
from steplab.report.kit.text import why_failed
from steplab.report.precision import words
from steplab.report.precision.sums import title_of_sums
from steplab.report.precision.tables import (
    data_tables,
    loss_table,
    matmul_table,
    operation_table,
    scaling_table,
    sum_table,
    timing_table,
    type_table,
)
from steplab.report.precision.verdict import precision_verdict
from steplab.report.report import NOTHING, Chapter, Context, several_answers

_MOST_ANSWERS = 3
"""Audits whose answers open a report of several."""


def precision_document(records: Sequence[Numerics], runs: Sequence[Run] = (), *, with_sums: bool = True) -> Document:
    """The report of these audits, of the sums of the first of them, and of the timed `runs`."""
    audits = [record for record in records if record.spec]
    accumulations = _accumulations(records) if with_sums else ()
    further = _sums(accumulations), Section.of("Time and memory of a step", timing_table(runs))
    data = data_tables(audits, accumulations, runs)
    if len(audits) != 1:
        parts = [_part(numerics) for numerics in audits]
        told = ((words.title(numerics), precision_verdict(numerics)) for numerics in audits)
        first = tuple(f"{name}: {answer.sentences[0]}" for name, answer in told if answer.sentences)
        answer = Verdict(sentences=first[:_MOST_ANSWERS])
        return Document(title="Precision", verdict=answer, sections=(*parts, *further), data=data)
    (numerics,) = audits
    return Document(
        title=f"Precision: {words.title(numerics)}",
        subtitle=words.heading(numerics),
        verdict=precision_verdict(numerics),
        sections=(*_sections(numerics), *further),
        data=data,
    )


def _accumulations(records: Sequence[Numerics]) -> tuple[Accumulation, ...]:
    return next((record.accumulations for record in records if record.accumulations), ())


def _part(numerics: Numerics, answered: bool = False) -> Section:
    answer = Verdict() if answered else precision_verdict(numerics)
    return Section.of_record(words.heading(numerics), answer, _sections(numerics), title=words.title(numerics))


def _sections(numerics: Numerics) -> Iterator[Section]:
    if numerics.failure:
        message = why_failed(numerics.failure, most=None)
        yield Section.of("", Sentences.of([message], "warning"))
    if numerics.audit:
        yield from _of_audit(numerics, numerics.audit)
    yield Section.notes(numerics.notes)


def _of_audit(numerics: Numerics, audit: Audit) -> Iterator[Section]:
    yield Section.of("Whether norms need fp32", Sentences.of(words.norm_answers(numerics)))
    yield Section.of("What was seen", Sentences.of(words.told(numerics, audit), "finding"))
    yield Section.of("Types by module", type_table(audit))
    yield Section.of("Operations of the forward pass, and autocast's rule for each", operation_table(numerics))
    yield Section.of("Matrix products, after every cast", matmul_table(audit))
    yield Section.of("Overflow and underflow", loss_table(audit))
    if audit.loss_scaling:
        yield Section.of("Loss scaling: all gradients", scaling_table(audit.loss_scaling))


def _sums(accumulations: Sequence[Accumulation]) -> Section:
    return Section.of(title_of_sums(accumulations), sum_table(accumulations))


class _PrecisionReport:
    """Audits are reported together, because their tables have a row or a column for each."""

    is_joint = True

    @property
    def chapters(self) -> tuple[Chapter, ...]:
        return (Chapter(name="precision", make=_chapter),)

    def verdict(self, records: Sequence[Numerics], context: Context = NOTHING) -> Verdict:
        return several_answers([(words.title(record), precision_verdict(record)) for record in records])

    def documents(self, records: Sequence[Numerics], context: Context = NOTHING) -> list[Document]:
        return [precision_document(records)]


def _chapter(numerics: Sequence[Numerics], context: Context) -> Section:
    """The timed runs of the audited steps, each audit, and the sums."""
    studies = {record.study for record in numerics if record.study}
    timed = [run for run in context.runs if run.study in studies]
    return Section.of(
        "Precision",
        Section.of("One step in each precision", timing_table(timed)),
        *(_part(record, context.answered) for record in numerics if record.spec),
        _sums(_accumulations(numerics)),
        anchor="precision",
    )


REPORT = _PrecisionReport()
