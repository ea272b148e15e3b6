"""What a report says of a data-parallel study: time with and without communication, bucket sizes, memory."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.ddp import MOMENTS, DdpCell, DdpRun
from steplab.records.profile import PHASES
from steplab.records.rows import Row
from steplab.report.ddp import figures
from steplab.report.ddp.bars import exposed_bars, memory_bars
from steplab.report.ddp.curve import bucket_curve
from steplab.report.ddp.rows import ddp_rows
from steplab.report.ddp.timelines import timelines
from steplab.report.ddp.verdict import ddp_verdict
from steplab.report.ddp.words import MOMENT_WORDS, asked, facts, model_words, notes_of, ranks_words
from steplab.report.kit.document import RESULT, Column, Section, Sentences, Table, later
from steplab.report.kit.quantities import LABEL, SHARE, TIMES
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
    rows = ddp_rows(run)
    yield Section.of("Time and communication", _time(rows))
    yield Section.of("Bucket size", later(bucket_curve, run), Sentences.of(model_words(run)))
    held = [row for row in rows if row[f"{MOMENTS[-1]}_bytes"] is not None]
    yield Section.of("Memory per rank", memory_bars(run), _memory(held))
    yield Section.of("One step of each strategy", later(timelines, run))
    yield Section.notes(notes_of(run))


_VARIANT = Column(key="contender", header="variant")


_HEADERS = {"gradient sync": "sync", "optimizer": "opt. step"}
_TIME_COLUMNS = (
    _VARIANT,
    Column(key="step_s", header="step"),
    Column(
        key="baseline_s",
        header="without",
        rank=1,
        note="Without is the same step without communication, in turns with the variant.",
    ),
    Column(key="exposed_s", header="exposed", note="Exposed is the difference."),
    Column(
        key="exposed_low_s",
        header="exposed, min",
        rank=1,
        note="Min and max are its bounds by the 95 % interval of their ratio.",
    ),
    Column(key="exposed_high_s", header="exposed, max", rank=1),
    Column(
        key="of_best_ddp",
        header="× DDP",
        quantity=TIMES,
        rank=1,
        note="× DDP is exposed over that of torch DDP at the bucket size with the shortest step.",
    ),
    Column(
        key="alone_s", header="alone", rank=1, note="Alone is the time of the same messages with nothing beside them."
    ),
    Column(
        key="hidden",
        quantity=SHARE,
        rank=2,
        note="Hidden is 1 − exposed / alone, where those bounds are less than half of alone apart; below zero, "
        "communication slows the computation beside it by more than is hidden.",
    ),
    Column(
        key="traced_exposed_s",
        header="exposed in trace",
        rank=3,
        note="Exposed in trace is the time of messages with no computation beside them, under a profiler.",
    ),
    Column(key="num_calls", header="calls", quantity=LABEL, rank=2),
    Column(key="sent_bytes", header="messages", rank=4, note="Messages is the sum of their sizes."),
    Column(
        key="wire_bytes",
        header="on the wire",
        rank=4,
        note="On the wire is the sum of each size times nccl-tests' factor.",
    ),
    *(Column(key=f"{name.replace(' ', '_')}_s", header=_HEADERS.get(name, name), rank=5) for name in PHASES),
    Column(
        key="host_lead_s",
        header="host ahead",
        rank=3,
        note="Host ahead is how far the host was ahead of the device at the end of the phase where that was "
        "least, including the time for which the device was held before the step.",
    ),
    Column(key="rank_spread", header="spread over ranks", quantity=SHARE, rank=6),
    Column(key="first_step_s", header="first step", rank=7),
    RESULT,
)


def _time(rows: Sequence[Row]) -> Table:
    caption = "Medians of the slowest rank."
    return Table(name="time", columns=_TIME_COLUMNS, rows=tuple(rows), caption=caption)


def _memory(rows: Sequence[Row]) -> Table:
    return Table(
        name="memory",
        columns=(
            _VARIANT,
            *(Column(key=f"{moment}_bytes", header=words) for moment, words in MOMENT_WORDS.items()),
            Column(key="after_step_parameters_bytes", header="parameters", rank=2),
            Column(key="after_step_gradients_bytes", header="gradients", rank=2),
            Column(key="after_step_optimizer_bytes", header="optimizer state", rank=1),
            Column(key="after_step_other_bytes", header="other", rank=3),
            Column(
                key="after_step_formula_bytes",
                header="by formula",
                rank=2,
                note="The formula counts parameters, gradients and optimizer state, of which ZeRO divides nothing, the "
                "optimizer state (sharded), the gradients as well (sharded, peer_copy) or all (FSDP2) by the number of "
                "ranks.",
            ),
            Column(
                key="peak_bytes",
                header="peak of a step",
                rank=1,
                note="The peak is the allocator's, without the memory that peer copies share.",
            ),
        ),
        rows=tuple(rows),
        caption="Memory of the rank that holds most, at the first step, whose update creates the optimizer state; the "
        "categories are those after it.",
    )


REPORT = RecordReport(
    chapter="Data parallelism",
    anchor="ddp",
    title=lambda run: f"Data parallelism: {asked(run)}",
    subtitle=lambda run: dotted(ranks_words(run), made(run, "study"), quoted_name(run)),
    heading=lambda run: dotted(asked(run), ranks_words(run), run.created_utc, f"study {run.id}"),
    called=lambda run: run.name or asked(run),
    answer=ddp_verdict,
    sections=_sections,
    rows=ddp_rows,
    terms=TERMS,
)
