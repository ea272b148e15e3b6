"""Tabulates a profile per step; rows for programs also hold totals."""

from collections.abc import Sequence
from functools import partial

from steplab import units
from steplab.records.profile import KernelStats, Profile, TracedRanks
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.report.kit.document import Chart, Column, Section, Table, later, row_of
from steplab.report.kit.quantities import DIGITS, FLOPS, PERCENT, TIME, Quantity
from steplab.report.kit.timelines import steps_chart
from steplab.report.profile import words
from steplab.report.profile.attention import AttentionRow
from steplab.report.profile.figures import Span, TopKernel, shown_categories, spans, top_kernels

_MOST_MEETINGS = 20
_ROWS = {0: "compute", 1: "messages"}


def ranks_section(seen: TracedRanks) -> Section:
    times = Table.of(
        "ranks",
        seen.ranks,
        (
            Column(key="rank"),
            *(Column(key=f"{name}_s", header=name) for name in ("compute", "exposed", "hidden", "idle", "step")),
            Column(key="num_last", header="last"),
            Column(key="late_s", header="late"),
        ),
        caption="Per step. exposed: communication without computation. last: collectives to which it came last; "
        "late: time that the middle of the others waits for it, with nothing to compute.",
    )
    meetings = Table.of(
        "collectives",
        seen.meetings[:_MOST_MEETINGS],
        (
            Column(key="collective"),
            Column(key="number"),
            Column(key="group", wraps_from=20),
            Column(key="last_rank", header="last rank"),
            Column(key="late_s", header="late"),
            Column(key="transfer_s", header="transfer"),
            Column(key="exposed_s", header="exposed"),
            Column(key="size_bytes", header="size"),
            Column(key="bus_bytes_per_s", header="bus bandwidth"),
        ),
        caption="Medians over the steps. transfer: from the last rank's arrival.",
    )
    return Section.of("Ranks", _told(seen), times, meetings, later(_timelines, seen))


def _told(seen: TracedRanks) -> str:
    path = ", ".join(f"rank {part.rank} {part.what} {units.format_time(part.time_s)}" for part in seen.path[:12])
    clocks = (
        "clocks not aligned, for lack of a common collective"
        if seen.clock_error_s is None
        else f"clocks aligned on {len(seen.meetings)} collectives of a step, to {units.format_time(seen.clock_error_s)}"
    )
    return (
        f"{len(seen.ranks)} ranks, {seen.num_steps} steps; {clocks}. The longest computation is "
        f"{units.format_percent(seen.imbalance)} above the mean. Critical path of the last step: {path}."
    )


def _timelines(seen: TracedRanks) -> Chart | None:
    note = "The last step of each rank, on one axis of time from its own beginning."
    steps = [
        (f"rank {rank.rank}", rank.timeline, _ROWS, "") for rank in seen.ranks if rank.timeline and rank.timeline.kernel
    ]
    return steps_chart(steps, note) if steps else None


_TOP = 10  # rows shown before the rest
_MOST_HOST_CALLS = 12  # the same
_CALLS = Quantity(words.calls_text)


def phase_table(run: Run, profile: Profile) -> Table:
    waits = [("host_bound", "waits for host")] if words.has_host(profile) else []
    parts = [("busy", "busy"), *waits, ("idle", "idle")]

    return Table.of(
        "phases",
        spans(run, profile),
        (
            Column(key="phase"),
            *(
                column
                for key, header in parts
                for column in (
                    Column(key=f"{key}_s", header=header),
                    Column(
                        key=f"{key}_share",
                        header="share",
                        quantity=PERCENT,
                        rank=2,
                        note="Shares are of the window.",
                        value=partial(_share, key),
                    ),
                )
            ),
            Column(
                key="window_s",
                header="window",
                rank=1,
                note="Window: from the previous phase's end to the end of the phase's last "
                f"{words.kernels_word(profile).removesuffix('s')}.",
            ),
            Column(key="num_kernels", header=words.kernels_word(profile), quantity=_CALLS, rank=3),
            Column(key="timed_s", header="unprofiled", note="Unprofiled: the median of the phase in the timed steps."),
            Column(
                key="agreement",
                header="busy vs unprofiled",
                wraps_from=24,
                value=lambda span: words.agreement(span, profile),
            ),
        ),
        caption="Time per step.",
    )


def _share(part: str, span: Span) -> float | None:
    seconds: float = getattr(span, f"{part}_s")
    return seconds / span.window_s if seconds else None


def category_table(run: Run, profile: Profile) -> Table:
    found = spans(run, profile)
    rows: list[Row] = []
    for category in shown_categories(profile):
        row: Row = {"category": category}
        for span in found:
            seconds = span.categories[category]
            row |= {span.phase: seconds, f"{span.phase}_share": seconds / span.busy_s} if seconds else {}
        rows.append(row)
    columns = [Column(key="category")]
    for index, span in enumerate(found):
        last = index == len(found) - 1  # the step, or the only phase
        columns += [
            Column(key=span.phase, header=span.phase, quantity=TIME, rank=0 if last else 2),
            Column(key=f"{span.phase}_share", header="share", quantity=PERCENT, rank=1 if last else 3, bar=last),
        ]
    rows.append({"category": "busy"} | {span.phase: span.busy_s for span in found})
    return Table(name="categories", columns=tuple(columns), rows=tuple(rows))


def kernel_table(profile: Profile) -> Table:
    word, kernels = words.kernels_word(profile).removesuffix("s"), top_kernels(profile)
    of_several = "; ≈ marks the median of several ranges' medians"

    def median(kernel: TopKernel) -> Scalar:
        return kernel.median_s if kernel.median_is_exact else f"≈ {units.format_time(kernel.median_s)}"

    return Table.of(
        "kernels",
        kernels,
        (
            Column(key="short", header=word, wraps_from=36),
            Column(key="category", rank=2),
            Column(key="phase", rank=1),
            Column(
                key="range",
                rank=3,
                note="Range: the module, or named range, with most of its time.",
                value=lambda kernel: kernel.ranges[0],
            ),
            Column(
                key="ranges",
                quantity=_CALLS,
                rank=5,
                note="Ranges: how many it runs in.",
                value=lambda kernel: len(kernel.ranges) if any(kernel.ranges) else None,
            ),
            Column(key="calls", quantity=_CALLS, rank=1),
            Column(key="time_s", header="time"),
            Column(key="share", quantity=PERCENT, bar=True),
            Column(
                key="median_s",
                header="median",
                rank=4,
                note=f"Median: of a call{'' if all(kernel.median_is_exact for kernel in kernels) else of_several}.",
                value=median,
            ),
        ),
        caption=f"Calls and time per step; share of the time of all {word}s.",
        first=_TOP,
    )


def attention_table(rows: Sequence[AttentionRow]) -> Table:
    columns = (
        Column(key="phase"),
        Column(key="part"),
        Column(key="time_s", header="time"),
        Column(key="flops", header="FLOPs", quantity=FLOPS, rank=4),
        Column(key="moved_bytes", header="bytes", rank=5),
        Column(key="intensity", header="FLOP/B", quantity=DIGITS, rank=1),
        Column(key="flops_per_s", header="achieved", rank=2),
        Column(key="bytes_per_s", header="bandwidth", rank=3),
        Column(key="ceiling_share", header="of the ceiling", quantity=PERCENT),
    )
    of_work = [column.key for column in columns[2:]]
    found = tuple(row_of(row, "phase", "part") | row_of(row.work, *of_work) for row in rows)
    return Table(name="attention", columns=columns, rows=found)


def host_call_table(profile: Profile) -> Table:
    calls = sorted(profile.host_calls, key=lambda call: -call.total_s)
    steps = profile.num_steps
    return Table.of(
        "host_calls",
        calls,
        (
            Column(key="name", header="call", wraps_from=20),
            Column(key="phase", rank=1, note="Outside: in no phase." * any(c.phase == "outside" for c in calls)),
            Column(key="range", rank=2),
            Column(key="calls", quantity=_CALLS, value=lambda call: call.calls / steps),
            Column(key="host_s", header="host time", value=lambda call: call.total_s / steps),
        ),
        first=_MOST_HOST_CALLS,
    )


def kernel_rows(profile: Profile) -> list[Row]:
    """One row per kernel, phase, range and stream, largest total first.

    `calls`, `total_s`, `median_s` and `max_s` cover all `num_steps` profiled steps; `per_step_s` is total_s /
    num_steps. `share` is relative to the durations of all kernels.
    """
    total_s = sum(kernel.total_s for kernel in profile.kernels)
    return [_kernel_row(kernel, profile, total_s) for kernel in sorted(profile.kernels, key=lambda k: -k.total_s)]


def _kernel_row(kernel: KernelStats, profile: Profile, total_s: float) -> Row:
    return {
        **row_of(kernel, "name", "category", "phase"),
        "range": kernel.range or None,
        "stream": kernel.stream,
        "num_steps": profile.num_steps,
        **row_of(kernel, "calls", "total_s"),
        "per_step_s": kernel.total_s / profile.num_steps,
        "share": kernel.total_s / total_s if total_s else None,
        **row_of(kernel, "median_s", "max_s"),
    }
