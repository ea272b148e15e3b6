"""What a report says of attention by itself: a benchmark, and the memory that plain attention would need."""

from collections.abc import Callable, Iterator, Sequence

from steplab import units
from steplab.records.attention import AttentionAccount, AttentionCell, AttentionRun
from steplab.report.attention.charts import memory_chart, rate_chart
from steplab.report.attention.figures import PASS_WORDS, attention_rows, default_peer, notes_of, telling_pass
from steplab.report.attention.tables import account_table, cell_tables, mean_speeds, speed_table
from steplab.report.attention.verdict import attention_verdict, speed_bars
from steplab.report.kit.document import (
    MOST_IN_FULL,
    Block,
    Document,
    Section,
    Sentences,
    Verdict,
    later,
    records_in_full,
)
from steplab.report.kit.text import dotted, made, quoted_name, why_failed
from steplab.report.report import Context, RecordReport
from steplab.specs.attention import PASSES

_SYMBOLS = "B batch, H heads, G heads of keys and values, S queries, K keys, D dimension, e bytes per element"


def _title(run: AttentionRun) -> str:
    """What was benchmarked, in words that begin with attention."""
    told = run.study.description or run.study.name
    return f"{told[:1].upper()}{told[1:]}" if told.lower().startswith("attention") else f"Attention: {told}"


def attention_cell_line(cell: AttentionCell) -> str:
    """The result of one cell, for a line of progress."""
    times = [f"{name} {units.format_time(seconds)}" for name in PASSES if (seconds := cell.median_s(name)) is not None]
    failed = [why_failed(cell.failure)] if cell.failure else []
    return f"{cell.spec.label} {cell.spec.column}: {', '.join(times + failed)}"


def _sections(run: AttentionRun, peer: str | None, *, alone: bool = True) -> Iterator[Section]:
    """The sections of one benchmark; among others, without the charts of the less telling passes and of the peak."""
    if means := mean_speeds(run.cells, peer):
        yield Section.of("Speed over all shapes", speed_bars(run, peer), means)
    telling = telling_pass(run.cells)
    if telling and (speeds := speed_table(run.cells, peer, telling)):
        yield Section.of(f"Speed, {PASS_WORDS[telling]}", speeds)
    if telling:
        yield Section.of(f"FLOP/s, {PASS_WORDS[telling]}", later(rate_chart, run.cells, telling, run.device_name))
    others = [later(rate_chart, run.cells, name, run.device_name) for name in PASSES if name != telling and alone]
    yield Section.of("FLOP/s of the other passes", *others, folded=True)
    for saved, title in ((True, "Memory saved for backward"), (False, "Peak memory")):
        if saved or alone:
            yield Section.of(title, later(memory_chart, run.cells, saved))
    yield from cell_tables(run.cells, peer)
    yield Section.notes([*run.notes, *notes_of(run.cells)])


def account_document(account: AttentionAccount) -> Document:
    """The tensors that plain attention holds at its peak, compared with the device's memory."""
    total, memory = account.total_bytes, account.memory_bytes
    saved = sum(term.num_bytes for term in account.terms if term.kept)
    held = f"{units.format_bytes(total)} in {len(account.terms)} tensors; {account.memory_source} has "
    held += f"{units.format_bytes(memory)}"
    answer = f"{account.spec.label} needs {held}: {units.format_bytes(total - memory)} too little."
    if total <= memory:
        answer = f"{account.spec.label} needs {held}, of which CUDA, libraries and the allocator's gaps take a part."
    told = [f"The peak is {account.moment}. {_SYMBOLS}.", f"{units.format_bytes(saved)} of it is saved for backward."]
    if account.previous and account.previous_bytes is not None:
        told.append(f"{account.previous.label} needs {units.format_bytes(account.previous_bytes)}, and fits.")
    if account.measured:
        told.append(f"The device's error was: {account.measured.message}.")
    title = f"The smallest plain attention that does not fit: {account.spec.label}"
    if account.asked:
        title = f"Plain attention of {account.asked.label} fits; its sequence doubled until it does not: "
        title += account.spec.label
    table = account_table(account)
    return Document(
        title=title,
        verdict=Verdict(sentences=(answer,)),
        sections=(Section.of("", table, Sentences.of(told, "finding")),),
        data=table.rows,
    )


def report_against(peer: str | None) -> RecordReport:
    """The report with speeds relative to `peer`; None: the first of sdpa_flash, sdpa and plain that was measured."""

    def against(run: AttentionRun) -> str | None:
        return peer or default_peer(run.cells)

    def parts(
        runs: Sequence[AttentionRun], context: Context, section: Callable[[AttentionRun], Section]
    ) -> Iterator[Block | None]:
        """The newest first."""
        newest = runs[::-1]
        yield from records_in_full(newest[:MOST_IN_FULL], newest, section)

    return RecordReport(
        chapter="Attention",
        anchor="attention",
        title=_title,
        subtitle=lambda run: dotted(made(run, "benchmark"), run.device_name, quoted_name(run)),
        heading=lambda run: dotted(
            run.study.description or run.study.name, run.device_name, run.created_utc, f"benchmark {run.id}"
        ),
        called=lambda run: run.name or run.study.name,
        answer=lambda run: attention_verdict(run, against(run)),
        sections=lambda run: _sections(run, against(run)),
        among_others=lambda run: _sections(run, against(run), alone=False),
        rows=lambda run: attention_rows(run.cells, against(run)),
        parts=parts,
    )


REPORT = report_against(None)
