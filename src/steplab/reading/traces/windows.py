"""Divides a step's device time into phases, and each phase's into busy time, waiting and categories.

A phase lasts from the end of the previous phase's last kernel to the end of its own last kernel, as CUDA events between
phases would measure. Kernels of other phases in that interval count in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steplab.reading.traces.activity import Activity
from steplab.reading.traces.intervals import clip, shares, stretches, union
from steplab.reading.traces.trace import NONE
from steplab.records.profile import CATEGORIES, PHASES, PhaseTime

Sums = NDArray[np.float64]

_COMMUNICATION = CATEGORIES.index("communication")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpan:
    phase: int
    step: int
    start_ns: int
    end_ns: int


def cut(activity: Activity) -> list[PhaseSpan]:
    """Windows of phases without gaps between them, in the order in which the host launched the phases.

    A collective does not decide where a phase with other work ends, since it may outlast the phase that launched it.
    """
    if not len(activity):
        return []
    # A piece without a launch follows the launch before it.
    launched = activity.launch_ns != NONE
    before = np.maximum.accumulate(np.where(launched, np.arange(len(launched)), 0))
    follows = launched[before] & (activity.step[before] == activity.step)
    order = np.lexsort((np.where(follows, activity.launch_ns[before], activity.start_ns), activity.step))
    step, phase = activity.step[order], activity.phase[order]
    end_ns, waits = activity.end_ns[order], activity.category[order] == _COMMUNICATION
    border = int(activity.start_ns.min())
    windows = []
    for first, stop in stretches(step, phase):
        ends, computing = end_ns[first:stop], ~waits[first:stop]
        last = int(ends[computing].max() if computing.any() else ends.max())
        window = PhaseSpan(phase=int(phase[first]), step=int(step[first]), start_ns=border, end_ns=max(border, last))
        windows.append(window)
        border = window.end_ns
    final = int(activity.end_ns.max())
    if final > border:  # a collective outlasts all phases
        windows[-1] = replace(windows[-1], end_ns=final)
    return windows


def phase_times(
    activity: Activity, windows: list[PhaseSpan], names: list[str], host_s: dict[str, float], *, on_host: bool
) -> Iterator[PhaseTime]:
    """Sums over each phase's windows. `on_host`: on a CPU, all time outside operators counts as host-bound."""
    longest_ns = int((activity.end_ns - activity.start_ns).max()) if len(activity) else 0
    totals: dict[int, Sums] = {}
    for window in windows:
        # Earlier pieces end before the window.
        low = np.searchsorted(activity.start_ns, window.start_ns - longest_ns, side="left")
        high = np.searchsorted(activity.start_ns, window.end_ns, side="left")
        found = _one_window(activity.where(slice(low, high)), window)
        totals[window.phase] = totals[window.phase] + found if window.phase in totals else found
    for phase in sorted(totals, key=lambda number: (*PHASES, names[number]).index(names[number])):
        window_ns, busy_ns, waiting_ns, *by_category = totals[phase].tolist()
        idle_ns = window_ns - busy_ns
        yield PhaseTime(
            phase=names[phase],
            window_s=window_ns / 1e9,
            busy_s=busy_ns / 1e9,
            host_bound_s=(idle_ns if on_host else waiting_ns) / 1e9,
            idle_s=0.0 if on_host else (idle_ns - waiting_ns) / 1e9,
            categories={name: time_ns / 1e9 for name, time_ns in zip(CATEGORIES, by_category, strict=True) if time_ns},
            host_s=host_s.get(names[phase]),
            num_kernels=len(np.unique(activity.call[activity.phase == phase]))
            if on_host
            else int((activity.phase == phase).sum()),
        )


def _one_window(inside: Activity, window: PhaseSpan) -> Sums:
    start_ns, end_ns = clip(inside.start_ns, inside.end_ns, window.start_ns, window.end_ns)
    kept = end_ns > start_ns
    start_ns, end_ns = start_ns[kept], end_ns[kept]
    length_ns = window.end_ns - window.start_ns
    if not len(start_ns):
        return np.array([length_ns, 0, 0, *np.zeros(len(CATEGORIES))])
    busy_starts, busy_ends = union(start_ns, end_ns)
    by_category = shares(start_ns, end_ns, inside.category[kept], len(CATEGORIES))
    # A gap ends with a kernel; until its launch returned, the device had no work.
    gap_starts = np.concatenate(([window.start_ns], busy_ends[:-1]))
    first = np.searchsorted(start_ns, busy_starts)
    launched_ns = inside.launched_ns[kept][first]
    waiting_ns = np.clip(np.minimum(launched_ns, busy_starts) - gap_starts, 0, None)
    waiting_ns[inside.unseen[kept][first] > 0] = 0
    return np.array([length_ns, (busy_ends - busy_starts).sum(), waiting_ns.sum(), *by_category])
