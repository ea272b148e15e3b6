"""What a report says of a data-parallel study: time with and without communication, bucket sizes, memory."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.ddp import MOMENTS, DdpCell, DdpRun
from steplab.records.figure import Figure
from steplab.records.rows import Row
from steplab.report.ddp import figures
from steplab.report.ddp.bars import exposed_bars, memory_bars
from steplab.report.ddp.curve import bucket_curve
from steplab.report.ddp.timelines import timelines
from steplab.report.ddp.verdict import ddp_verdict
from steplab.report.ddp.words import asked, facts, model_words, notes_of, ranks_words
from steplab.report.kit.document import RESULT, Column, Section, Sentences, Table, later
from steplab.report.kit.text import dotted, made, quoted_name, why_failed
from steplab.report.report import RecordReport

TERMS = (
    (
        "without communication",
        "The same step on the same ranks with nothing sent, measured in turns with each variant: some steps of one, "
        "then some of the other. Where the study says so, the device is held idle before each step until the host is "
        "ahead. The figures of the step without communication are the medians of those turns.",
    ),
    (
        "exposed communication",
        "Time that communication adds to a step: the step minus the same step without communication, measured in "
        "turns. It includes the slowdown of the computation that runs beside communication. Its bounds come "
        "from the 95 % interval of the ratio of both steps, which are compared pair by pair.",
    ),
    (
        "alone, hidden",
        "Alone is the time of the same messages with nothing beside them. Hidden is 1 − exposed / alone, where the "
        "bounds of what is exposed allow it.",
    ),
    (
        "bucket",
        "Gradients that are sent together, in one collective, once the last of them is there. 1 MB is 1,000,000 bytes.",
    ),
    (
        "by formula",
        "P parameters of e bytes, with an optimizer that keeps k values for each, on N ranks: eP bytes of parameters, "
        "eP of gradients and keP of optimizer state on every rank. The sharded optimizer has keP/N of the state (ZeRO "
        "stage 1) and by peer copies eP/N of the gradients (stage 2), and FSDP2 the N-th part of all three (stage 3).",
    ),
)
"""Terms of this section, and what they mean."""


def ddp_cell_line(cell: DdpCell) -> str:
    """The result of one variant, for a line of progress."""
    if cell.failure:
        return f"{cell.contender.label}: {why_failed(cell.failure)}"
    step_s, added_s = figures.step_s(cell), figures.exposed_s(cell)
    told = [f"{units.format_time(step_s)} per step"] if step_s is not None else []
    told += [f"{units.format_time(added_s)} of it exposed"] if added_s is not None and added_s > 0 else []
    return f"{cell.contender.label}: {', '.join(told)}"


def _sections(run: DdpRun) -> Iterator[Section]:
    yield Section.of("Exposed communication", exposed_bars(run), Sentences.of(facts(run), "note"))
    rows = figures.ddp_rows(run)
    yield Section.of(
        "Time and communication",
        _table("time", figures.time_figures(run), rows, "Medians of the slowest rank.", RESULT),
    )
    yield Section.of("Bucket size", later(bucket_curve, run), Sentences.of(model_words(run)))
    held = [row for row in rows if row[f"{MOMENTS[-1]}_bytes"] is not None]
    yield Section.of("Memory per rank", memory_bars(run), _table("memory", figures.MEMORY, held, _MEMORY_CAPTION))
    yield Section.of("One step of each strategy", later(timelines, run))
    yield Section.notes(notes_of(run))


_VARIANT = Column(key="contender", header="variant")
_MEMORY_CAPTION = (
    "Memory of the rank that holds most, at the first step, whose update creates the optimizer state; the categories "
    "are those after it."
)


def _table(name: str, shown: Sequence[Figure[DdpCell]], rows: Sequence[Row], caption: str, *last: Column) -> Table:
    return Table(name=name, columns=(_VARIANT, *Column.of(shown), *last), rows=tuple(rows), caption=caption)


REPORT = RecordReport(
    chapter="Data parallelism",
    anchor="ddp",
    title=lambda run: f"Data parallelism: {asked(run)}",
    subtitle=lambda run: dotted(ranks_words(run), made(run, "study"), quoted_name(run)),
    heading=lambda run: dotted(asked(run), ranks_words(run), run.created_utc, f"study {run.id}"),
    called=lambda run: run.name or asked(run),
    answer=ddp_verdict,
    sections=_sections,
    rows=figures.ddp_rows,
    terms=TERMS,
)
