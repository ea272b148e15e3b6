"""Tables of a profile, as texts, for the terminal and for the page. Every figure is per step."""

from collections.abc import Sequence

from steplab import units
from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report import profile_words as words
from steplab.report.grid import Grid
from steplab.report.kernel_names import short_kernel
from steplab.report.kit.text import ABSENT
from steplab.report.profile_figures import TopKernel, shown_categories, spans

_MOST_HOST_CALLS = 12


def phase_grid(run: Run, profile: Profile) -> Grid:
    """Busy, waiting and idle by phase, and the unprofiled time with which the busy time should agree."""
    waits = words.has_host(profile)
    rows = []
    for span in spans(run, profile):
        times_s = (span.busy_s, *((span.host_bound_s,) if waits else ()), span.idle_s)
        rows.append(
            (
                span.phase,
                *(_part(seconds, span.window_s) for seconds in times_s),
                units.format_time(span.window_s),
                words.calls_text(span.num_kernels),
                ABSENT if span.timed_s is None else units.format_time(span.timed_s),
                words.agreement(span, profile).words,
            )
        )
    headers = ("phase", "busy", *(("waits for host",) if waits else ()), "idle", "window", words.kernels_word(profile))
    return Grid(
        headers=(*headers, "unprofiled", "busy time"),
        rows=tuple(rows),
        numeric=(False, *(True for _ in headers), False),
    )


def category_grid(run: Run, profile: Profile) -> Grid:
    """Busy time by category and phase, with its share of the phase's busy time."""
    columns = spans(run, profile)
    rows = [
        (category, *(_part(span.categories[category], span.busy_s, absent=ABSENT) for span in columns))
        for category in shown_categories(profile)
    ]
    rows.append(("busy", *(units.format_time(span.busy_s) for span in columns)))
    return Grid(
        headers=("category", *(span.phase for span in columns)),
        rows=tuple(rows),
        numeric=(False, *(True for _ in columns)),
    )


def _part(seconds: float, total_s: float, absent: str = "0 s") -> str:
    if not seconds:
        return absent
    return f"{units.format_time(seconds)} {units.format_percent(seconds / total_s)}"


def kernel_grid(profile: Profile, kernels: Sequence[TopKernel], name_length: int) -> Grid:
    """Kernels with where they ran and what they took; names cut to `name_length`."""
    rows = tuple(
        (
            short_kernel(kernel.name, name_length),
            kernel.category,
            kernel.phase,
            _where(kernel),
            words.calls_text(kernel.calls),
            units.format_time(kernel.time_s),
            units.format_percent(kernel.share),
            f"{'' if kernel.median_is_exact else '≈ '}{units.format_time(kernel.median_s)}",
        )
        for kernel in kernels
    )
    name = words.kernels_word(profile).removesuffix("s")
    return Grid(
        headers=(name, "category", "phase", "range", "calls", "time", "share", "median"),
        rows=rows,
        numeric=(False, False, False, False, True, True, True, True),
        caption=f"Calls and time a step; share of the time of all {name}s; median of a call, ≈ over several ranges.",
    )


def _where(kernel: TopKernel) -> str:
    """The range with most of a kernel's time, and how many more there are."""
    first = kernel.ranges[0] or ABSENT
    return first if len(kernel.ranges) == 1 else f"{first} +{len(kernel.ranges) - 1}"


def host_call_grid(profile: Profile) -> Grid:
    """Calls of the host that wait for the device or copy, most host time first."""
    calls = sorted(profile.host_calls, key=lambda call: -call.total_s)
    rows = tuple(
        (
            call.name,
            call.phase,
            call.range or ABSENT,
            words.calls_text(call.calls / profile.num_steps),
            units.format_time(call.total_s / profile.num_steps),
        )
        for call in calls[:_MOST_HOST_CALLS]
    )
    left = len(calls) - len(rows)
    return Grid(
        headers=("call", "phase", "range", "calls", "host time"),
        rows=rows,
        numeric=(False, False, False, True, True),
        caption=f"and {left} more" if left else "",
    )
