"""What is said of one run: its step time, phases, utilization, memory and failure."""

from collections.abc import Iterator, Sequence
from statistics import median

from steplab import stats, units
from steplab.records.failure import Failure
from steplab.records.rows import Row
from steplab.records.run import Run, Utilization
from steplab.records.timing import HARDLY_AHEAD, PhaseSamples, Timing, find_phase, lead_s, waits_for_host
from steplab.report.kit.document import Block, Column, Pairs, Section, Sentences, Table
from steplab.report.kit.quantities import COUNT, FLOPS_PER_S, SHARE, TIME
from steplab.report.kit.text import ABSENT
from steplab.report.run.figures import achieved_flops_per_s, phase_names, warmup_study

_NOTICEABLY = 1.02
"""Sum of the phases' medians over the step's median, from which rounded shares no longer sum to 100 %."""


def failure_blocks(failure: Failure) -> Iterator[Block]:
    """The circumstances of a failure, and the last lines that the process wrote."""
    pairs = [
        ("during", failure.phase),
        ("asked for", failure.requested_bytes is not None and units.format_bytes(failure.requested_bytes)),
        (
            "allocated before",
            failure.peak_allocated_bytes is not None and units.format_bytes(failure.peak_allocated_bytes),
        ),
        ("signal", failure.signal),
    ]
    yield Pairs(pairs=tuple((name, value) for name, value in pairs if value))
    yield Section.of("Last lines it wrote", Sentences(texts=failure.last_lines, role="code"))


def step_time_pairs(run: Run, timing: Timing) -> Pairs:
    """Mean, quartiles and range of a step's samples, and the figures that follow from it."""
    summary, show = stats.summarize(run.samples_s), units.format_time
    pairs = [
        ("median", show(summary.median)),
        ("mean", show(summary.mean) + (f" ± {show(summary.stdev)}" if summary.stdev is not None else "")),
        ("quartiles", f"{show(summary.quartile_1)} to {show(summary.quartile_3)}"),
        ("range", f"{show(summary.minimum)} to {show(summary.maximum)}"),
    ]
    if summary.is_interval:
        pairs.insert(1, ("95 % interval", f"{show(summary.low)} to {show(summary.high)}"))
    if run.tokens_per_step:
        rate = units.format_rate(run.tokens_per_step / summary.median, " tokens/s")
        pairs.append(("throughput", f"{rate} ({run.tokens_per_step} tokens per step)"))
    elif run.spec is None:
        pairs.append(("throughput", f"{ABSENT} (the loop did not say how many tokens a step has)"))
    if timing.between_s:
        told = "median from the end of a step to the beginning of the next; it is not in the step time"
        pairs.append(("between steps", f"{show(median(timing.between_s))}, {told}"))
    if timing.first_step_s is not None:
        compiling = timing.first_step_s - summary.median
        told = "by which the compiling step, before warm-up, exceeds a later one; it is not in the step time"
        pairs.append(("compile", f"{show(compiling)}, {told}"))
    if timing.back_to_back_host_s is not None:
        per_step = timing.back_to_back_host_s / summary.count
        pairs.append(("host clock", f"{show(per_step)} per step: the same loop from end to end, as a check"))
    return Pairs(pairs=tuple(pairs))


def phase_blocks(run: Run, timing: Timing) -> Iterator[Block]:
    """Median of every phase back to back, and, where phases were also timed alone, by both clocks."""
    whole = run.median_s
    rows: list[Row] = []
    for name in (*phase_names(run), "step"):
        together, alone = timing.phase(name), find_phase(timing.synchronised, name)
        time_s = _median(together.best_s if together else None)
        rows.append(
            {
                "phase": name,
                "time_s": time_s,
                "share": time_s / whole if time_s is not None and whole else None,
                "lead_s": lead_s(timing.back_to_back, name),
                "device_s": _median(alone.device_s if alone else None),
                "host_s": _median(alone.host_s if alone else None),
            }
        )
    yield Table(
        name="phases",
        columns=(
            Column(key="phase"),
            Column(key="time_s", header="back to back"),
            Column(key="share", quantity=SHARE),
            Column(key="lead_s", header="host ahead"),
            Column(key="device_s", header="alone, device"),
            Column(key="host_s", header="alone, host"),
        ),
        rows=tuple(rows),
        caption="Medians.",
    )
    told = [waiting_words(timing.back_to_back)]
    parts_s = [phase.best_s for phase in map(timing.phase, phase_names(run)) if phase and phase.best_s]
    ratio = sum(map(median, parts_s)) / whole if whole else 1.0
    if ratio > _NOTICEABLY or (run.spec and parts_s and ratio < 1 / _NOTICEABLY):
        told.append(
            f"The steps differ so much that the medians of the phases add up to {units.format_percent(ratio)} of the "
            "median of the step."
        )
    yield Sentences.of(told)


def _median(samples: Sequence[float] | None) -> float | None:
    return median(samples) if samples else None


def warmup_effects(timing: Timing) -> Table:
    """The figures as they would be after fewer warm-up steps."""
    effects = warmup_study(timing)
    mean: Row = {"figure": "mean of the next steps"} | {str(effect.count): effect.mean_s for effect in effects}
    middle: Row = {"figure": "median of the next steps"} | {str(effect.count): effect.median_s for effect in effects}
    counts = tuple(Column(key=str(effect.count), header=str(effect.count), quantity=TIME) for effect in effects)
    return Table(
        name="warmup", columns=(Column(key="figure", header="warm-up steps left out"), *counts), rows=(mean, middle)
    )


def utilization_blocks(utilizations: Sequence[Utilization]) -> Iterator[Block]:
    """MFU and HFU of a measured or predicted step under each convention, with the peak that they are relative to."""
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
    )
    yield Sentences.of(dict.fromkeys(f"Peak: {used.peak_source}." for used in utilizations), "note")


def memory_blocks(run: Run) -> Iterator[Block]:
    """Peaks by phase that the allocator counted, the device's memory, and the host's peak."""
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
    pairs = []
    if run.memory.total_bytes is not None:
        pairs.append(("device memory", units.format_bytes(run.memory.total_bytes)))
    if run.memory.host_peak_bytes is not None:
        pairs.append(("host peak", f"{units.format_bytes(run.memory.host_peak_bytes)} resident, libraries included"))
    yield Pairs(pairs=tuple(pairs))


def waiting_words(phases: Sequence[PhaseSamples]) -> str | None:
    """A sentence for a step that is nearly launch-bound; None for any other."""
    if not waits_for_host(phases):
        return None
    step = find_phase(phases, "step")
    assert step is not None
    parts = [samples.phase for samples in phases if samples.phase != "step"]
    leads = {name: found for name in parts if (found := lead_s(phases, name)) is not None}
    late = [name for name, found in leads.items() if found < HARDLY_AHEAD * median(step.best_s)]
    where = f" of {' and '.join(late)}" if late else ""
    least = units.format_time(lead_s(phases) or 0.0)
    return (
        f"Nearly launch-bound: the host lead at the end{where} is {least}, under 1 % of the step, so the device waits "
        "for the host at times. If launching kernels is slow, larger batches, compiling or CUDA graphs give the device "
        "more work per launch; if the host waits for a result, that can be deferred. `steplab profile` shows which."
    )
