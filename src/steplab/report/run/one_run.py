from collections.abc import Iterator, Sequence
from statistics import fmean, median

from steplab import stats, units
from steplab.records.record import Record
from steplab.records.run import NOT_FINITE, RankSamples, Run, Utilization
from steplab.records.timing import Timing, curve
from steplab.report.kit.document import Block, Column, Pairs, Sentences, Table
from steplab.report.kit.quantities import COUNT, FLOPS_PER_S, SHARE
from steplab.report.kit.text import ABSENT, dotted, made, quoted_name
from steplab.report.run.columns import CONVENTIONS
from steplab.specs.step import describe
from steplab.stats import Summary

WARMUP_COUNTS = (0, 1, 2, 5)

PARTS = ("forward", "backward", "pipeline", "gradient sync", "optimizer")


def warmup_means(timing: Timing) -> dict[int, float | None]:
    """By number of warm-up steps, the mean seconds of the steps that would be timed after them; None: too few recorded.

    One run gives all means, because a process's first steps do not depend on how many are counted as warm-up.
    """
    samples, step = curve(timing), timing.phase("step")
    steps = len(step.best_s) if step else 0
    windows = {count: samples[count : count + steps] for count in WARMUP_COUNTS}
    return {count: fmean(window) if steps and len(window) == steps else None for count, window in windows.items()}


def steady_words(samples: Sequence[float]) -> str:
    if len(samples) < stats.FEWEST_FOR_STEADY:
        return f"too few steps to tell when it settles ({len(samples)}; at least {stats.FEWEST_FOR_STEADY} are needed)"
    first = stats.steady_from(samples)
    if first is None:
        return f"did not settle in {len(samples)} steps"
    return f"steady from step {first + 1} of {len(samples)}"


def steady_sentence(samples: Sequence[float]) -> str:
    words = steady_words(samples)
    if len(samples) < stats.FEWEST_FOR_STEADY:
        return f"There are {words}."
    return f"The step time {'is ' if words.startswith('steady') else ''}{words}."


def phase_names(run: Run) -> list[str]:
    """Phases in execution order; for a user's loop, in recorded order."""
    timing = run.timing
    timed = [samples.phase for samples in timing.back_to_back if samples.best_s] if timing else []
    parts = [name for name in timed if name != "step"]
    return [name for name in PARTS if name in parts] if set(parts) <= set(PARTS) else parts


def achieved_flops_per_s(used: Utilization) -> float | None:
    if used.value is None or used.peak_flops_per_s is None:
        return None
    return used.value * used.peak_flops_per_s * used.num_devices


def run_title(run: Run) -> str:
    if run.spec:
        return describe(run.spec)
    if run.profile and run.profile.file:
        return f"{run.name or run.profile.file} (imported trace)"
    if run.memory_profile:
        return f"{run.name or run.memory_profile.file or 'a snapshot'} (imported snapshot)"
    return f"{run.name or 'a loop of your own'} (recorded loop)"


def interval_words(summary: Summary) -> str:
    """Example: '95 % interval 12.1 ms to 12.9 ms, n = 10'; the range if samples are too few."""
    show = units.format_time
    if summary.count == 1:
        return "a single sample"
    low, middle, high = show(summary.low), show(summary.median), show(summary.high)
    if low == middle == high:
        between = f"± {show(max(summary.high - summary.median, summary.median - summary.low))}"
    else:
        between = f"{low} to {high}"
    return f"{'95 % interval' if summary.is_interval else 'range'} {between}, n = {summary.count}"


def annotations(record: Record) -> list[str]:
    tags = [f"Tags: {', '.join(record.tags)}."] if record.tags else []
    return tags + ([f"Note: {record.comment}"] if record.comment else [])


def run_subtitle(run: Run) -> str:
    return dotted(made(run, "run"), quoted_name(run))


_PRECISIONS = {
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast",
    "bf16_master": "bf16 autocast over bf16 weights with fp32 masters",
    "bf16_pure": "bf16 throughout",
    "fp8": "fp8 products in blocks, bf16 elsewhere",
    "fp8_torchao": "fp8 products in blocks by torchao, bf16 elsewhere",
    "tf32": "tf32 matmuls",
}


def precision_words(precision: str) -> str:
    return _PRECISIONS.get(precision, precision)


_DOUBTS = ("MFU over ", "HFU over ", "MFU and HFU over ")
_CHOICE = "attention auto: "


def gaps(run: Run) -> list[str]:
    told = [note for note in run.notes if not note.startswith((*_DOUBTS, NOT_FINITE, _CHOICE))]
    told += run.environment.gaps if run.environment else ()
    return told + _utilization_gaps(run, told)


def doubts(run: Run) -> list[str]:
    return [note for note in run.notes if note.startswith(_DOUBTS)]


def headline_doubts(run: Run) -> list[str]:
    """Notes that results are not finite, and doubts about the MFU of the causal convention."""
    told = run.utilization("mfu", "causal")
    of_numbers = [note for note in run.notes if note.startswith(NOT_FINITE)]
    return of_numbers + doubts(run) if told and told.exceeds_peak else of_numbers


def choices(run: Run) -> list[str]:
    return [note for note in run.notes if note.startswith(_CHOICE)]


def _utilization_gaps(run: Run, told: list[str]) -> list[str]:
    """Reasons why a timed built-in step has no MFU or HFU, unless a note has the reason."""
    if run.spec is None or run.failure or run.timing is None:
        return []
    reasons = []
    kinds = {used.kind for used in run.utilizations}
    if "mfu" not in kinds and not _has_note_on(told, "MFU"):
        reasons.append(f"MFU: {_why_no_mfu(run)}")
    if "hfu" not in kinds and not _has_note_on(told, "HFU") and not _has_note_on(told, "MFU and HFU"):
        reasons.append("HFU: the FLOPs that the step executes were not counted")
    absent = [used for used in run.utilizations if used.value is None]
    for source in dict.fromkeys(used.peak_source for used in absent):
        names = dict.fromkeys(used.kind.upper() for used in absent if used.peak_source == source)
        reasons.append(f"{' and '.join(names)}: {source}")
    return reasons


def _why_no_mfu(run: Run) -> str:
    if run.spec is None or run.spec.model.kind != "factory":
        return "the sizes of the model are not known"
    if run.model is None:
        return "its factory returns a whole step, in which the forward pass is not told apart"
    return "the FLOPs that the model needs were not counted"


def _has_note_on(told: list[str], kind: str) -> bool:
    return any(text.startswith(kind) for text in told)


def spread_words(ranks: Sequence[RankSamples]) -> str | None:
    columns = [samples.best_s for rank in ranks if (samples := rank.phase("step"))]
    if len(columns) < len(ranks) or len({len(column) for column in columns}) != 1 or not columns[0]:
        return None
    medians = sorted(median(column) for column in columns)
    apart = median(max(step) - min(step) for step in zip(*columns, strict=True))
    share = units.format_share(apart / medians[0]) if medians[0] > 0 else ABSENT
    low, high = units.format_time(medians[0]), units.format_time(medians[-1])
    return (
        f"Median steps last from {low} to {high} over {units.counted(len(ranks), 'rank')}; within a step "
        f"the ranks are {units.format_time(apart)} ({share}) apart (median)"
    )


def step_time_pairs(run: Run, timing: Timing) -> Pairs:
    summary, show, tokens = stats.summarize(run.samples_s), units.format_time, run.tokens_per_step
    first_s, host_s, energy = timing.first_step_s, timing.back_to_back_host_s, timing.energy
    throughput = "" if run.spec else f"{ABSENT} (the loop named no tokens_per_step)"
    if tokens:
        throughput = f"{units.format_rate(tokens / summary.median, ' tokens/s')} ({tokens} tokens per step)"
    between = "median from the end of a step to the beginning of the next; it is not in the step time"
    compiling = "extra time of the step that compiles, before all others; in no other figure"
    pairs = [
        ("median", show(summary.median)),
        ("95 % interval", f"{show(summary.low)} to {show(summary.high)}" if summary.is_interval else ""),
        ("mean", show(summary.mean) + (f" (SD {show(summary.stdev)})" if summary.stdev is not None else "")),
        ("quartiles", f"{show(summary.quartile_1)} to {show(summary.quartile_3)}"),
        ("range", f"{show(summary.minimum)} to {show(summary.maximum)}"),
        ("throughput", throughput),
        ("parameters", units.format_count(run.model.num_parameters) if run.model else ""),
        ("between steps", f"{show(median(timing.between_s))}, {between}" if timing.between_s else ""),
        ("compile", f"{show(first_s - summary.median)}, {compiling}" if first_s is not None else ""),
        ("host clock", f"{show(host_s / summary.count)} per step over the whole loop, as a check" if host_s else ""),
    ]
    if energy:
        of_tokens = f", {units.three_digits(tokens / energy.per_step_j)} tokens/J" if tokens else ""
        told = f"{units.format_rate(energy.mean_power_w, 'W')} on average over {show(energy.seconds)}"
        pairs.append(("energy", f"{units.format_rate(energy.per_step_j, 'J')} a step{of_tokens}; {told}"))
        if energy.limited_share is not None:
            pairs.append(("power limit", f"lowered the clock {units.format_share(energy.limited_share)} of that time"))
    return Pairs.of(*pairs)


def utilization_blocks(utilizations: Sequence[Utilization]) -> Iterator[Block]:
    counted = [used.convention for used in utilizations if used.convention in CONVENTIONS]
    told = [f"{name.replace('_', ' ')}, {CONVENTIONS[name]}" for name in counted]
    yield Table.of(
        "utilization",
        utilizations,
        (
            Column(key="label", header=""),
            Column(key="value", quantity=SHARE),
            Column(key="achieved", quantity=FLOPS_PER_S, value=achieved_flops_per_s),
            Column(key="flops", header="FLOPs per step", quantity=COUNT),
            Column(key="peak_flops_per_s", header="dense peak"),
            Column(key="num_devices", header="devices", quantity=COUNT, quiet="1"),
            Column(key="dtype", header="type"),
        ),
        f"FLOPs: {'; '.join(told)}." if told else "",
    )
    yield Sentences.of(dict.fromkeys(f"Peak: {used.peak_source}." for used in utilizations), "note")


def memory_blocks(run: Run) -> Iterator[Block]:
    if run.memory is None:
        yield Sentences.of(["Memory was not measured."])
        return
    if run.memory_profile:
        pass  # its own tables have the peaks
    elif run.memory.peaks:
        yield Table.of(
            "peaks",
            run.memory.peaks,
            (
                Column(key="phase"),
                Column(key="peak_allocated_bytes", header="peak allocated"),
                Column(key="peak_reserved_bytes", header="peak reserved"),
            ),
        )
    else:
        yield Sentences.of(["Peaks of live tensors are not known: this device's allocator does not count them."])
    total, host = run.memory.total_bytes, run.memory.host_peak_bytes
    yield Pairs.of(
        ("device memory", None if total is None else units.format_bytes(total)),
        ("host peak", None if host is None else f"{units.format_bytes(host)} resident, libraries included"),
    )
