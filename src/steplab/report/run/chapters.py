from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from steplab import stats, units
from steplab.records.rows import Row, run_row
from steplab.records.run import RankSamples, Run
from steplab.records.timing import PhaseSamples, Timing, curve, find_phase, lead_s
from steplab.report.kit.document import MOST_ROWS, Block, Column, Pairs, Section, Sentences, Table, later
from steplab.report.kit.grouping import told_once
from steplab.report.kit.quantities import LABEL, SHARE, TIME, TIMES, quotient
from steplab.report.kit.text import why_failed
from steplab.report.run import charts, one_run
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.columns import rows_table
from steplab.report.run.curves import steady_step, warmup_curves, worth_a_curve
from steplab.report.run.first_steps import first_steps_table
from steplab.report.run.phases import phases

TERMS = (
    (
        "step time",
        "Time of a whole step among steps run back to back, as training runs them: between events on the GPU's "
        "stream, or on the host's clock where the host is the device. The headline is the median; mean and standard "
        "deviation are in each record.",
    ),
    (
        "steady",
        "From the first step that is within 5 % of the median of the curve's second half, if the median of any three "
        "consecutive later steps is so too.",
    ),
    (
        "MFU",
        "Model FLOPs per second over the dense peak of the data type, without recomputation. With N parameters, E of "
        "them only looked up, L layers, attention width d and context T, a token of a training step costs: causal, "
        "6(N−E) + 6LdT, only the attention that is needed; full, 6(N−E) + 12LdT; params, 6N, the rule of thumb. A "
        "forward pass alone costs a third. For a model of one's own, counted: three times the products that torch "
        "counts in its forward pass. For a loop, given: its recorder's FLOPs.",
    ),
    ("HFU", "The same share for the FLOPs that the implementation executes, with recomputation and masked attention."),
    (
        "peak memory",
        "Most bytes in live tensors (allocated), and most bytes that the allocator held from the device (reserved), "
        "during one step, including earlier tensors.",
    ),
    ("compile time", "Time of the first, compiling step minus a later step's. No step time includes it."),
)

_MANY = 4  # runs; more are listed separately


def failure(cells: Sequence[RunCell]) -> Iterator[Block]:
    if len(cells) != 1 or not (why := cells[0].run.failure):
        return
    sizes = (("requested", why.requested_bytes), ("peak allocated before", why.peak_allocated_bytes))
    known = [(name, units.format_bytes(size)) for name, size in sizes if size is not None]
    yield Pairs.of(("during", why.phase), *known, ("signal", why.signal))
    yield Section.of("Last lines it wrote", Sentences(texts=why.last_lines, role="code"))


def step_time(cells: Sequence[RunCell]) -> Iterator[Block]:
    if not any(cell.run.median_s is not None for cell in cells):
        return
    if len(cells) > 1:
        yield later(charts.step_times, cells)
    elif timing := cells[0].run.timing:
        yield one_run.step_time_pairs(cells[0].run, timing)
        yield Sentences.of(one_run.choices(cells[0].run), "note")


def phases_of_steps(cells: Sequence[RunCell]) -> Iterator[Block | None]:
    yield phases(cells)
    if len(cells) == 1 and (timing := cells[0].run.timing) and cells[0].run.median_s is not None:
        yield from _phases_of_one(cells[0].run, timing)


_NOTICEABLY = 1.02
"""Ratio of phases' summed medians to the step's above which shares visibly exceed 100 %."""


def _phases_of_one(run: Run, timing: Timing) -> Iterator[Block]:
    whole_s = run.median_s

    def alone(name: str) -> PhaseSamples | None:
        return find_phase(timing.synchronised, name)

    def time_s(name: str) -> float | None:
        return _median(timing.phase(name), "best_s")

    yield Table.of(
        "phases",
        (*one_run.phase_names(run), "step"),
        (
            Column(key="phase", value=str),
            Column(key="time_s", header="back to back", value=time_s),
            Column(key="share", quantity=SHARE, value=lambda name: quotient(time_s(name), whole_s)),
            Column(
                key="lead_s",
                header="host ahead",
                note="host ahead: GPU time still queued once Python has launched the phase; of the step, the least.",
                value=lambda name: lead_s(timing.back_to_back, name),
            ),
            Column(
                key="device_s",
                header="alone, device",
                note="alone: synchronised before and after each phase; by the GPU's (device) or CPU's (host) clock.",
                value=lambda name: _median(alone(name), "device_s"),
            ),
            Column(key="host_s", header="alone, host", value=lambda name: _median(alone(name), "host_s")),
        ),
        "Medians.",
    )
    parts_s = [seconds for name in one_run.phase_names(run) if (seconds := time_s(name)) is not None]
    ratio = sum(parts_s) / whole_s if whole_s else 1.0
    if ratio > _NOTICEABLY or (run.spec and parts_s and ratio < 1 / _NOTICEABLY):
        share = units.format_percent(ratio)
        yield Sentences.of([f"The steps vary so much that the phases' medians add up to {share} of the step's median."])


def _median(phase: PhaseSamples | None, clock: str) -> float | None:
    samples = getattr(phase, clock, None)
    return median(samples) if samples else None


def warmup(cells: Sequence[RunCell]) -> Iterator[Block]:
    timings = [cell.run.timing for cell in cells if cell.run.timing and cell.run.median_s is not None]
    if not timings:
        return
    if len(cells) == 1:
        yield Sentences.of([one_run.steady_sentence(curve(timings[0]))])
    else:
        long_enough = [c.run for c in cells if c.run.timing and len(curve(c.run.timing)) >= stats.FEWEST_FOR_STEADY]
        firsts = Counter(map(steady_step, long_enough))
        restless = firsts.pop(None, 0)
        steady = [f"from step {step} in {units.counted(firsts[step], 'run')}" for step in sorted(filter(None, firsts))]
        yield Sentences.of(
            [
                f"The step time is steady {', '.join(steady)}." if steady else None,
                f"The step time did not settle in {units.counted(restless, 'run')}." if restless else None,
            ]
        )
    yield later(warmup_curves, cells)
    yield Section.of("Mean by warm-up", warmup_table(cells))
    yield Section.of("The first steps", first_steps_table(worth_a_curve(cells)))


def warmup_table(cells: Sequence[RunCell]) -> Table:
    chosen, fields = worth_a_curve(cells), varying(cells)
    rows: list[Row] = []
    for cell in chosen:
        timing = cell.run.timing
        assert timing is not None  # chosen for its curve
        row: Row = {"run": label(cell, fields), "steady": one_run.steady_words(curve(timing))}
        for count, mean_s in one_run.warmup_means(timing).items():
            row |= {f"{count}_s": mean_s, f"{count}": quotient(mean_s, cell.run.median_s)}
        rows.append(row)
    columns = [
        column
        for count in one_run.WARMUP_COUNTS
        for column in (
            Column(key=f"{count}_s", header=f"after {count}"),
            Column(key=f"{count}", header="ratio", quantity=TIMES, rank=1, note="Ratio: to the median step."),
        )
    ]
    if len(cells) > 1:
        steady = Column(key="steady", header="steady state", wraps_from=16)
        columns = [Column(key="run", wraps_from=20), *columns, steady]
    return Table(
        name="warmup",
        columns=tuple(columns),
        rows=tuple(rows),
        caption="After N: mean of as many steps as were measured, after the first N; without compile time.",
    )


def ranks(cells: Sequence[RunCell]) -> Iterator[Block]:
    if len(cells) != 1 or not (found := cells[0].run.ranks):
        return
    yield Table.of(
        "ranks",
        found,
        (
            Column(key="rank", quantity=LABEL),
            Column(key="host", shared="{}"),
            Column(key="device_name", header="device", shared="{}", wraps_from=16),
            Column(key="step_s", header="step", value=lambda rank: _median(rank.phase("step"), "best_s")),
            Column(key="waiting_s", header=_SYNC, value=lambda rank: _median(rank.phase(_SYNC), "best_s")),
            Column(key="peak_bytes", header="peak allocated", value=_peak_bytes),
            Column(key="host_peak_bytes", header="host peak", rank=1),
        ),
        "Medians.",
    )
    if told := one_run.spread_words(found):
        yield Sentences.of([f"{told}."])


_SYNC = "gradient sync"


def _peak_bytes(rank: RankSamples) -> int | None:
    peak = rank.peak("step")
    return peak.peak_allocated_bytes if peak else None


def utilization(cells: Sequence[RunCell]) -> Iterable[Block]:
    """Show one run's MFU and HFU by FLOP convention; of several runs only the doubts, since their table has both."""
    if len(cells) > 1:
        return _told_once(cells, one_run.doubts)
    run = cells[0].run
    return (*one_run.utilization_blocks(run.utilizations), Sentences.of(one_run.doubts(run), "warning"))


def runs(cells: Sequence[RunCell]) -> Iterable[Block]:
    return (runs_table(cells), *_told_once(cells, one_run.choices)) if len(cells) > 1 else ()


def runs_table(cells: Sequence[RunCell]) -> Table:
    table = rows_table([run_row(cell.run) | _spread(cell.run) for cell in cells])
    at = next(index + 1 for index, column in enumerate(table.columns) if column.key == "step_time_s")
    return replace(table, columns=(*table.columns[:at], *_SPREAD, *table.columns[at:]), first=MOST_ROWS)


_SPREAD = tuple(
    Column(key=key, header=header, quantity=TIME, rank=5, note=note)
    for key, header, note in (
        ("low_s", "low", "Low and high: the 95 % interval of the median, or the range of fewer than six steps."),
        ("high_s", "high", ""),
        ("mean_s", "mean", ""),
        ("stdev_s", "SD", ""),
    )
)


def _spread(run: Run) -> Row:
    samples = run.samples_s
    if not samples:
        return {}
    summary = stats.summarize(samples)
    return {"low_s": summary.low, "high_s": summary.high, "mean_s": summary.mean, "stdev_s": summary.stdev}


def missing(cells: Sequence[RunCell]) -> list[Block]:
    return _told_once(cells, _missing if len(cells) > 1 else one_run.gaps)


def _missing(run: Run) -> list[str]:
    return one_run.gaps(run) + ([why_failed(run.failure)] if run.failure else [])


def _told_once(cells: Sequence[RunCell], told: Callable[[Run], list[str]]) -> list[Block]:
    fields = varying(cells)
    found = told_once((label(cell, fields), text) for cell in cells for text in told(cell.run))
    if len(cells) == 1:
        return [Sentences.of(found, "finding")]
    blocks: list[Block] = []
    for text, names in found.items():
        about = Sentences.of(["all runs" if len(names) == len(cells) else f"runs: {'; '.join(names)}"], "note")
        folded = _MANY < len(names) < len(cells)
        blocks.append(Sentences.of([text], "finding"))
        blocks.append(Section.of(units.counted(len(names), "run"), about, folded=True) if folded else about)
    return blocks
