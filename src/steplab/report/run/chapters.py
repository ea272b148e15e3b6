"""The chapters about measured steps, each a function of the cells: the same for one run and for several, on a terminal
and on a page.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from steplab import stats, units
from steplab.records.rows import Row, run_row
from steplab.records.run import Run
from steplab.records.timing import curve
from steplab.report.kit.document import (
    Block,
    Column,
    Fact,
    Facts,
    Section,
    Sentences,
    Table,
    chapter,
    later,
    named_section,
)
from steplab.report.kit.grouping import told_once
from steplab.report.kit.quantities import FLOPS_PER_S, SHARE, TIME, TIMES
from steplab.report.kit.text import reason
from steplab.report.run import charts
from steplab.report.run.by_size import MOST_ROWS, effects_sections, passes_table
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.columns import rows_table
from steplab.report.run.curves import relative, settling, warmup_curves, worth_a_curve
from steplab.report.run.figures import WARMUP_COUNTS, achieved_flops_per_s, steady_sentence, steady_words, warmup_study
from steplab.report.run.first_steps import first_steps_reasons, first_steps_table
from steplab.report.run.gaps import choices, doubts, gaps
from steplab.report.run.narrative import facts
from steplab.report.run.one_run import (
    failure_blocks,
    phase_blocks,
    step_time_pairs,
    utilization_blocks,
    warmup_effects,
)
from steplab.report.run.phases import phases
from steplab.report.run.ranks import rank_blocks

TERMS = (
    (
        "step time",
        "Time of a whole step among steps run back to back, as training runs them: between events on the GPU's "
        "stream, or on the host's clock where the host is the device. The headline is the median; mean and standard "
        "deviation are in each record.",
    ),
    (
        "steady",
        "From the first step that lies, with the median of every three later steps, within 5 % of the median of the "
        "curve's second half.",
    ),
    (
        "MFU",
        "Model FLOPs per second over the dense peak of the data type, without recomputation. With N parameters, E of "
        "them only looked up, L layers, attention width d and context T, a token of a training step costs: causal, "
        "6(N−E) + 6LdT, only the attention that is needed; full, 6(N−E) + 12LdT; params, 6N, the rule of thumb. A "
        "forward pass alone costs a third. For a model of one's own, counted: three times the products that torch "
        "counts in its forward pass. For a loop, given: the FLOPs that its recorder was told.",
    ),
    (
        "HFU",
        "The same share for the FLOPs that the implementation executes, with recomputation and masked attention.",
    ),
    (
        "peak memory",
        "Most bytes in live tensors (allocated), and most bytes that the allocator held from the device (reserved), "
        "during one step, with all that was alive before it.",
    ),
    (
        "compile time",
        "Time of the first, compiling step minus that of a later one. No step time includes it.",
    ),
)
"""Terms of these chapters, and what they mean."""

_MANY = 4  # runs, more of which are listed apart


def summary_chapter(cells: Sequence[RunCell], of_others: Iterable[Fact]) -> Section | None:
    """The most important figures, including those of findings and memory profiles."""
    found = tuple(facts(cells, of_others))
    return Section(title="", blocks=(Facts(facts=found),)) if found else None


def failure_chapter(cells: Sequence[RunCell]) -> Section | None:
    """The circumstances of a single run's failure. Reasons of several runs are in `missing_chapter`."""
    failure = cells[0].run.failure if len(cells) == 1 else None
    return chapter("Failure", "failure", *failure_blocks(failure)) if failure else None


def step_time_chapter(cells: Sequence[RunCell]) -> Section | None:
    """Step time of every cell: as a chart, or of a single run the statistics."""
    if not any(cell.run.median_s is not None for cell in cells):
        return None
    if len(cells) > 1:
        return chapter("Step time", "time", later(charts.step_times, cells))
    run = cells[0].run
    chosen = Sentences(texts=tuple(choices(run)), role="note") if choices(run) else None
    return chapter("Step time", "time", step_time_pairs(run, run.timing) if run.timing else None, chosen)


def phases_chapter(cells: Sequence[RunCell]) -> Section | None:
    """Parts of a step: a bar per run, and of a single run a table."""
    blocks: list[Block] = [bars] if (bars := phases(cells)) else []
    if len(cells) == 1 and (timing := cells[0].run.timing) and cells[0].run.median_s is not None:
        blocks += phase_blocks(cells[0].run, timing)
    if len(cells) > 1 and (table := passes_table(cells)):
        blocks.append(table)
    return chapter("Phases of a step", "phases", *blocks)


def effects_chapter(cells: Sequence[RunCell]) -> Section | None:
    """Each choice against its baseline, by size: fp32 and bf16, eager and compiled."""
    return chapter("Choices by size", "choices", *effects_sections(cells)) if len(cells) > 1 else None


def warmup_chapter(cells: Sequence[RunCell]) -> Section | None:
    """When the step time settles, and what fewer warm-up steps would have changed."""
    timings = [cell.run.timing for cell in cells if cell.run.timing and cell.run.median_s is not None]
    if not timings:
        return None
    if len(cells) == 1:
        told = Sentences(texts=(steady_sentence(curve(timings[0])),))
        effects = warmup_effects(timings[0])
        return chapter("Warm-up", "warmup", told, later(warmup_curves, cells), effects, *_first_steps(cells))
    counts = [(words, units.counted(count, "run")) for words, count in settling(cells)]
    steady = ", ".join(f"{words} in {runs}" for words, runs in counts if words.startswith("from"))
    restless = [f"The step time did not settle in {runs}." for words, runs in counts if not words.startswith("from")]
    sentences = ([f"The step time is steady {steady}."] if steady else []) + restless
    table = warmup_table(cells)
    return chapter(
        "Warm-up",
        "warmup",
        Sentences(texts=tuple(sentences)) if sentences else None,
        later(warmup_curves, cells),
        named_section("Fewer warm-up steps", table) if table else None,
        *_first_steps(cells),
    )


def _first_steps(cells: Sequence[RunCell]) -> list[Block]:
    """What the first steps spend their time on, and why."""
    table, reasons = first_steps_table(worth_a_curve(cells)), first_steps_reasons(cells)
    told = Sentences(texts=tuple(reasons), role="finding") if reasons else None
    return [named_section("The first steps", table, told)] if table else []


def warmup_table(cells: Sequence[RunCell]) -> Table | None:
    """Means after 0, 1, 2 and 5 warm-up steps, for the runs whose curves are drawn."""
    chosen, fields = worth_a_curve(cells), varying(cells)
    rows: list[Row] = []
    for cell in chosen:
        timing = cell.run.timing
        assert timing is not None  # chosen for its curve
        row: Row = {"run": label(cell, fields), "steady": steady_words(curve(timing))}
        for effect in warmup_study(timing):
            row |= {f"{effect.count}_s": effect.mean_s, f"{effect.count}": relative(effect.mean_s, cell.run)}
        rows.append(row)
    columns = [
        column
        for count in WARMUP_COUNTS
        for column in (
            Column(key=f"{count}_s", header=f"after {count}", quantity=TIME),
            Column(key=f"{count}", header="×", quantity=TIMES, rank=1),
        )
    ]
    return Table(
        name="warmup",
        columns=(
            Column(key="run", header="run", wraps_from=20),
            *columns,
            Column(key="steady", header="steady state", wraps_from=16),
        ),
        rows=tuple(rows),
        caption="Mean of as many steps as were measured, after leaving out the first 0, 1, 2 or 5 steps of the same "
        "curve. × is the multiple of the run's own median. Compile time is not among these steps.",
    ) if rows else None  # fmt: skip


def ranks_chapter(cells: Sequence[RunCell]) -> Section | None:
    """What each process of a run of several measured."""
    several, fields = [cell for cell in cells if cell.run.ranks], varying(cells)
    if len(cells) == 1 and several:
        return chapter("Ranks", "ranks", *rank_blocks(several[0].run.ranks))
    named = (named_section(label(cell, fields), *rank_blocks(cell.run.ranks)) for cell in several)
    return chapter("Ranks", "ranks", *named)


def utilization_chapter(cells: Sequence[RunCell]) -> Section | None:
    """MFU and HFU under each convention."""
    if len(cells) == 1:
        run = cells[0].run
        return chapter("Utilization", "utilization", *(utilization_blocks(run) if run.utilizations else ()))
    table = utilization_table(cells)
    if table is None:
        return None
    return chapter("Utilization", "utilization", later(charts.mfu, cells), table, *_told_once(cells, doubts))


def utilization_table(cells: Sequence[RunCell]) -> Table | None:
    """One row per run, one column per convention, and the peak that the shares are relative to."""
    fields = varying(cells)
    rows: list[Row] = []
    kinds: dict[str, str] = {}
    for cell in cells:
        if not cell.run.utilizations:
            continue
        first = cell.run.utilizations[0]
        row: Row = {"run": label(cell, fields), "peak": first.peak_flops_per_s, "dtype": first.dtype}
        row["source"] = first.peak_source
        for used in cell.run.utilizations:
            kinds[f"{used.kind} {used.convention}"] = f"{used.kind.upper()} ({used.convention.replace('_', ' ')})"
            row[f"{used.kind} {used.convention}"] = used.value
            if (used.kind, used.convention) == ("mfu", "causal"):
                row["achieved"] = achieved_flops_per_s(used)
        rows.append(row)
    return Table(
        name="utilization",
        columns=(
            Column(key="run", header="run", wraps_from=20),
            *(Column(key=key, header=header, quantity=SHARE) for key, header in kinds.items()),
            Column(key="achieved", header="achieved (causal)", quantity=FLOPS_PER_S),
            Column(key="peak", header="dense peak", quantity=FLOPS_PER_S),
            Column(key="dtype", header="type"),
            Column(key="source", header="source of the peak", shared="source of the peak: {}", wraps_from=20, rank=9),
        ),
        rows=tuple(rows),
        first=MOST_ROWS,
    ) if rows else None  # fmt: skip


def runs_chapter(cells: Sequence[RunCell]) -> Section | None:
    """The table of several runs with their choices."""
    return chapter("Runs", "runs", runs_table(cells), *_told_once(cells, choices)) if len(cells) > 1 else None


def runs_table(cells: Sequence[RunCell]) -> Table:
    """One row per run, with interval, mean and deviation of its step time."""
    table = rows_table([run_row(cell.run) | _spread(cell.run) for cell in cells])
    at = next(index + 1 for index, column in enumerate(table.columns) if column.key == "step_time_s")
    spread = tuple(Column(key=key, header=header, quantity=TIME, rank=5) for key, header in _SPREAD.items())
    caption = (
        f"{table.caption} Low and high are the 95 % interval of the median, or the range of fewer than six steps."
        if table.caption
        else ""
    )
    return replace(table, columns=(*table.columns[:at], *spread, *table.columns[at:]), caption=caption, first=MOST_ROWS)


_SPREAD = {"low_s": "low", "high_s": "high", "mean_s": "mean", "stdev_s": "sd"}


def _spread(run: Run) -> Row:
    """Interval of the median, mean and standard deviation of a run's step time."""
    samples = run.samples_s
    if not samples:
        return {}
    summary = stats.summarize(samples)
    return {"low_s": summary.low, "high_s": summary.high, "mean_s": summary.mean, "stdev_s": summary.stdev}


def missing_chapter(cells: Sequence[RunCell]) -> Section | None:
    """What was not measured and why."""
    return chapter("Not measured", "missing", *_told_once(cells, _missing if len(cells) > 1 else gaps))


def _missing(run: Run) -> list[str]:
    """What was not measured and why, the reason of a failure included."""
    return gaps(run) + ([reason(run.failure.kind, run.failure.message)] if run.failure else [])


def _told_once(cells: Sequence[RunCell], told: Callable[[Run], list[str]]) -> list[Block]:
    """Notes of the runs, each text once, with the cells that it concerns."""
    fields = varying(cells)
    found = told_once((label(cell, fields), text) for cell in cells for text in told(cell.run))
    if len(cells) == 1:
        return [Sentences(texts=tuple(found), role="finding")] if found else []
    blocks: list[Block] = []
    for text, names in found.items():
        blocks.append(Sentences(texts=(text,), role="finding"))
        if len(names) == len(cells):
            blocks.append(Sentences(texts=("all runs",), role="note"))
        elif len(names) > _MANY:
            listed = Sentences(texts=("; ".join(names),), role="note")
            blocks.append(Section(title=units.counted(len(names), "run"), blocks=(listed,), folded=True))
        else:
            blocks.append(Sentences(texts=("; ".join(names),), role="note"))
    return blocks
