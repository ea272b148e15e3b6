"""What a report says of attention by itself: a benchmark, and the memory that plain attention would need."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.attention import AttentionAccount, AttentionCell, AttentionRun
from steplab.report.attention.charts import memory_chart, rate_chart
from steplab.report.attention.figures import PASS_WORDS, attention_rows, default_peer, median_s, notes_of, telling_pass
from steplab.report.attention.tables import account_table, cell_tables, mean_speeds, speed_table
from steplab.report.attention.verdict import attention_verdict, speed_bars
from steplab.report.environments import environment_section
from steplab.report.kit.document import (
    MOST_IN_FULL,
    Document,
    Section,
    Sentences,
    Table,
    Verdict,
    later,
    records_in_full,
)
from steplab.report.kit.text import dotted, made, quoted_name, why_failed
from steplab.specs.attention import PASSES

_SYMBOLS = "B batch, H heads, G heads of keys and values, S queries, K keys, D dimension, e bytes per element"


def attention_document(run: AttentionRun, *, against: str | None = None) -> Document:
    """The report of one benchmark.

    `against` names the implementation that speeds are relative to; None: the first of sdpa_flash, sdpa and plain that
    was measured.
    """
    peer = against or default_peer(run.cells)
    return Document(
        title=_title(run),
        subtitle=dotted(made(run, "benchmark"), run.device_name, quoted_name(run)),
        verdict=attention_verdict(run, peer),
        sections=(*_sections(run, peer), environment_section(run.environment)),
        data=attention_rows(run.cells, peer),
    )


def _title(run: AttentionRun) -> str:
    """What was benchmarked, in words that begin with attention."""
    told = run.study.description or run.study.name
    return f"{told[:1].upper()}{told[1:]}" if told.lower().startswith("attention") else f"Attention: {told}"


def attention_chapter(runs: Sequence[AttentionRun], steps: Table | None, answered: bool = False) -> Section:
    """Attention on a page: `steps`, the training steps that differ only in their attention, then the benchmarks."""

    def record(run: AttentionRun) -> Section:
        peer = default_peer(run.cells)
        return Section.of_record(
            dotted(run.study.description or run.study.name, run.device_name, run.created_utc, f"benchmark {run.id}"),
            Verdict() if answered else attention_verdict(run, peer),
            _sections(run, peer, alone=len(runs) == 1),
            title=(run.name or run.study.name) if len(runs) > 1 else "",
        )

    newest = runs[::-1]
    shown = records_in_full(newest[:MOST_IN_FULL], newest, record)
    by_step = Section.of("Training steps by attention implementation", steps)
    return Section.of("Attention", by_step, *shown, anchor="attention")


def attention_cell_line(cell: AttentionCell) -> str:
    """The result of one cell, for a line of progress."""
    times = [f"{name} {units.format_time(seconds)}" for name in PASSES if (seconds := median_s(cell, name)) is not None]
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
