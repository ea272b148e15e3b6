"""One run on a terminal: the headline first, then what it is made of, then what was not measured."""

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from steplab import stats, units
from steplab.records.environment import Environment
from steplab.records.memory_references import MemoryReferences
from steplab.records.run import Failure, Run
from steplab.records.timing import Timing, curve, find_phase
from steplab.report.blocks import figure_table, pairs_table, section
from steplab.report.columns import show_bucket
from steplab.report.environments import condition_pairs, environment_pairs
from steplab.report.figures import phase_names, steady_words, step_median, warmup_study
from steplab.report.gaps import choices, doubts, gaps
from steplab.report.host_lead import lead_s, waiting_words
from steplab.report.kit.terminal import draw, render_sections, terminal_width
from steplab.report.kit.text import ABSENT, plain, reason
from steplab.report.memory.document import memory_sections
from steplab.report.profile_text import profile_of, profile_parts
from steplab.report.ranks_text import rank_parts
from steplab.specs.layout_fit import num_microbatches
from steplab.specs.step import StepSpec
from steplab.units import format_share

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_NOTICEABLY = 1.02
"""Phases that together take so many times their step: rounded shares no longer sum to 100 %."""


def render_run(
    run: Run, *, references: MemoryReferences | None = None, width: int | None = None, color: bool = False
) -> str:
    """Everything a record says about one run, without a newline at the end; width None: the terminal's.

    `references` are what its memory is set against: the same cell in fp32, or without checkpointing.
    """
    columns = width or terminal_width()
    return draw(*_parts(run, references, columns), width=columns, color=color)


def render_profiled(run: Run, *, width: int | None = None, color: bool = False) -> str:
    """What the profile of a run says, under the same two lines as everything about it has."""
    from rich.text import Text

    columns = width or terminal_width()
    return draw(*_title(run), Text(), *profile_parts(run, profile_of(run), columns), width=columns, color=color)


def _title(run: Run) -> "Iterator[RenderableType]":
    """What was measured; which record it is, of when, and by which version; what was chosen for it."""
    from rich.text import Text

    yield Text(plain(run_title(run)), style="bold")
    made = [f"run {run.id}", run.created_utc, f"steplab {run.steplab_version}"]
    yield Text(plain(" · ".join(made + ([f"'{run.name}'"] if run.name else []))), style="dim")
    yield from (Text(plain(choice), style="dim") for choice in choices(run))


def _parts(run: Run, references: MemoryReferences | None, width: int) -> "Iterator[RenderableType]":
    from rich.text import Text

    yield from _title(run)
    if run.failure:
        yield Text()
        yield from _failure(run.failure)
    if run.timing and step_median(run) is not None:
        yield Text()
        yield from _headline(run, run.timing)
        yield from section("Phases", _phases(run, run.timing), *_about_phases(run, run.timing))
        yield from section("Warm-up", _warmup(run.timing), Text(steady_words(curve(run.timing))))
    if run.ranks:
        yield from section("Ranks", *rank_parts(run.ranks))
    if run.utilizations:
        yield from section("Utilization", _utilization(run))
    if run.failure is None and (run.timing or run.memory):  # an imported trace has neither
        yield from section("Memory", _memory(run))
    if run.environment:
        yield from section("Environment", _environment(run.environment))
    if missing := gaps(run):
        yield from section("Not measured", *(Text(f"- {plain(note)}") for note in missing))
    if run.profile:
        yield Text()
        yield from profile_parts(run, run.profile, width)
    if run.memory_profile:
        yield Text(render_sections(memory_sections(run, references=references), width=width))


def run_title(run: Run) -> str:
    """What was measured, on one line."""
    if run.spec:
        return describe(run.spec)
    if run.profile and run.profile.file:
        return f"{run.name or run.profile.file} (imported trace)"
    if run.memory_profile:
        return f"{run.name or run.memory_profile.file or 'a snapshot'} (imported snapshot)"
    return f"{run.name or 'a loop of your own'} (recorded loop)"


def describe(spec: StepSpec) -> str:
    """Every choice of a spec that decides what its step computes."""
    words = [
        spec.model.label,
        f"batch {spec.batch}",
        f"context {spec.context}",
        spec.pass_name,
        spec.precision,
    ]
    words.append("eager" if spec.compile == "off" else f"compile {spec.compile}")
    if spec.model.kind != "factory":  # its model brings its own
        words.append(f"attention {spec.attention}")
    if spec.checkpoints_apply and spec.checkpointing != "none":
        words.append(f"checkpointing {spec.checkpointing}")
    words += [spec.optimizer] if spec.pass_name == "train" else []
    return " · ".join(words + _spread(spec))


def _spread(spec: StepSpec) -> list[str]:
    """How it is spread over several processes; nothing of one."""
    if spec.layout.world_size == 1:
        return []
    words = [f"layout {spec.layout}"]
    if spec.strategy:
        words.append(f"{spec.strategy}{f' {show_bucket(spec.bucket_mb)}' if spec.bucket_mb else ''}")
    if spec.layout.pp > 1:
        words.append(f"{spec.pipeline_schedule}, {num_microbatches(spec)} microbatches")
    if spec.layout.fsdp > 1 and spec.reshard_after_forward != "auto":
        words.append(f"reshard after forward {spec.reshard_after_forward}")
    return words


def _failure(failure: Failure) -> "Iterator[RenderableType]":
    from rich.text import Text

    yield Text(plain(reason(failure.kind, failure.message, most=None)), style="bold red")
    table = pairs_table()
    if failure.phase:
        table.add_row("during", Text(plain(failure.phase)))
    if failure.requested_bytes is not None:
        table.add_row("asked for", units.format_bytes(failure.requested_bytes))
    if failure.peak_allocated_bytes is not None:
        table.add_row("allocated before", units.format_bytes(failure.peak_allocated_bytes))
    if failure.signal:
        table.add_row("signal", Text(plain(failure.signal)))
    if table.row_count:
        yield table
    if failure.last_lines:
        yield from section("Last lines it wrote", *(Text(plain(line)) for line in failure.last_lines))


def _headline(run: Run, timing: Timing) -> "Iterator[RenderableType]":
    from rich.text import Text

    step = timing.phase("step")
    summary = stats.summarize(step.best_s if step else ())
    show = units.format_time
    table = pairs_table()
    interval = f"  [{show(summary.low)}, {show(summary.high)}]"
    note = f"  median and its 95 % interval, n = {summary.count}"
    table.add_row("step", Text.assemble((show(summary.median), "bold green"), interval, (note, "dim")))
    spread = f" ± {show(summary.stdev)}" if summary.stdev is not None else ""
    table.add_row(
        "",
        f"mean {show(summary.mean)}{spread} · quartiles {show(summary.quartile_1)} to "
        f"{show(summary.quartile_3)} · range {show(summary.minimum)} to {show(summary.maximum)}",
    )
    if run.tokens_per_step:
        rate = units.format_rate(run.tokens_per_step / summary.median, " tokens/s")
        table.add_row("throughput", f"{' '.join(rate.split())}  ({run.tokens_per_step} tokens a step)")
    else:
        table.add_row("throughput", f"{ABSENT}  the loop did not say how many tokens a step has")
    if timing.first_step_s is not None:
        compiling = timing.first_step_s - summary.median
        table.add_row(
            "compile", f"{show(compiling)}, by which the first step exceeds a later one; not in the step time"
        )
    if timing.back_to_back_host_s is not None:
        per_step = timing.back_to_back_host_s / summary.count
        table.add_row("host clock", f"{show(per_step)} a step: the same loop from end to end, as a check")
    yield table


def _phases(run: Run, timing: Timing) -> "Table":
    """Medians of every phase: as training runs them, then, where they were also timed alone, by both clocks."""
    # Nothing is timed alone where the host is the device: each phase has then ended when the next begins.
    headers = ("alone, device", "alone, host") if timing.synchronised else ()
    known = lead_s(timing.back_to_back) is not None
    table = figure_table("phase", "back to back", "share", *(["host ahead"] if known else []), *headers)
    whole = step_median(run)
    for name in (*phase_names(run), "step"):
        together, alone = timing.phase(name), find_phase(timing.synchronised, name)
        time_s = _median(together.best_s if together else None)
        share = format_share(time_s / whole) if time_s is not None and whole else ABSENT
        device, host = (alone.device_s, alone.host_s) if alone else (None, None)
        ahead = [_time(lead_s(timing.back_to_back, name))] if known else []
        table.add_row(name, _time(time_s), share, *ahead, *(_time(_median(s)) for s in (device, host)[: len(headers)]))
    return table


def _about_phases(run: Run, timing: Timing) -> "Iterator[RenderableType]":
    """Whether the step waits for Python; and where phases seem to take longer than their step, that the steps in the
    middle differ from phase to phase."""
    from rich.text import Text

    if waiting := waiting_words(timing.back_to_back):
        yield Text(waiting)

    parts_s = [phase.best_s for phase in map(timing.phase, phase_names(run)) if phase and phase.best_s]
    whole_s = step_median(run)
    if whole_s and sum(map(median, parts_s)) > _NOTICEABLY * whole_s:
        yield Text("medians, each over the steps by itself: with steps this uneven they add up to more than the step")


def _median(samples: tuple[float, ...] | None) -> float | None:
    return median(samples) if samples else None


def _time(seconds: float | None) -> str:
    return ABSENT if seconds is None else units.format_time(seconds)


def _warmup(timing: Timing) -> "Table":
    """What the figures would have been after fewer warm-up steps."""
    effects = warmup_study(timing)
    table = figure_table("warm-up steps left out", *(str(effect.count) for effect in effects))
    table.add_row("mean of the next steps", *(_time(effect.mean_s) for effect in effects))
    table.add_row("median of the next steps", *(_time(effect.median_s) for effect in effects))
    return table


def _utilization(run: Run) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    table = figure_table("", "value", "FLOPs a step", "dense peak", "dtype")
    for used in run.utilizations:
        peak = used.peak_flops_per_s
        table.add_row(
            f"{used.kind.upper()} ({used.convention.replace('_', ' ')})",
            ABSENT if used.value is None else format_share(used.value),
            units.format_count(used.flops).rstrip(),
            ABSENT if peak is None else _of_all(units.format_rate(peak, "FLOP/s"), used.num_devices),
            used.dtype,
        )
    sources = dict.fromkeys(used.peak_source for used in run.utilizations)
    told = [Text(f"peak: {plain(source)}") for source in sources]
    return Group(table, *told, *(Text(plain(doubt), style="red") for doubt in doubts(run)))


def _of_all(peak: str, num_devices: int) -> str:
    return peak if num_devices == 1 else f"{num_devices} × {peak}"


def _memory(run: Run) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    if run.memory is None:
        return Text(f"{ABSENT}  not measured")
    parts: list[RenderableType] = []
    if run.memory.peaks:
        table = figure_table("phase", "peak allocated", "peak reserved")
        for peak in run.memory.peaks:
            sizes = (
                units.format_bytes(peak.peak_allocated_bytes),
                units.format_bytes(peak.peak_reserved_bytes),
            )
            table.add_row(peak.phase, *sizes)
        parts.append(table)
    else:
        parts.append(Text("no peaks of live tensors: this device's allocator keeps no count"))
    pairs = pairs_table()
    if run.memory.total_bytes is not None:
        pairs.add_row("device memory", units.format_bytes(run.memory.total_bytes))
    if run.memory.host_peak_bytes is not None:
        pairs.add_row("host peak", f"{units.format_bytes(run.memory.host_peak_bytes)} resident, libraries included")
    return Group(*parts, pairs) if pairs.row_count else Group(*parts)


def _environment(env: Environment) -> "Table":
    from rich.text import Text

    table = pairs_table()
    for name, value in environment_pairs(env) + condition_pairs([env]):
        table.add_row(name, Text(plain(value)))
    return table
