"""Leaves out or cuts device work with impossible times, and adds a doubt to the trace that counts such work.

CUPTI writes 0 for lost times; a profiler with full buffers writes other kernels' ends. A kernel cannot begin before its
launch, and kernels of one stream follow each other.
"""

import dataclasses

import numpy as np

from steplab.reading.traces.devices import launching_calls
from steplab.reading.traces.trace import NONE, Trace
from steplab.units import format_time

_CLOCKS_NS = 50_000
"""Tolerance for clock differences between host and device, and for overlapping kernels of one stream (programmatic
dependent launch: 4 us seen).
"""
_FAR_NS = 1_000_000_000
_MOST_EARLY = 0.5
"""Share of kernels that start before their launch, above which the clocks are at fault, not the kernels' times."""


def possible(trace: Trace) -> Trace:
    """Trace without work at impossible times, and durations cut at the stream's next kernel. Doubts count both."""
    return _without_overlaps(_without_lost_times(trace))


def _without_lost_times(trace: Trace) -> Trace:
    work, call = trace.work, launching_calls(trace)
    if not len(work):
        return trace
    at_zero = (work.start_ns == 0) & ((work.duration_ns == 0) | (np.median(work.start_ns) > _FAR_NS))
    lead_ns = np.where(call == NONE, 0, np.append(trace.calls.start_ns, 0)[call] - work.start_ns)
    early = lead_ns > _CLOCKS_NS
    others = (call != NONE) & ~at_zero
    if (early & others).sum() > _MOST_EARLY * max(1, others.sum()):
        by = format_time(float(np.median(lead_ns[early & others])) / 1e9)
        trace = trace.doubting(
            f"{(early & others).sum()} of {len(work)} kernels begin before their launch, by a median of {by}: "
            "the clocks of CPU and GPU differ, so waits are unknown"
        )
        early = at_zero
    lost = at_zero | early
    if not lost.any():
        return trace
    return dataclasses.replace(trace, work=work.where(~lost)).doubting(
        f"{lost.sum()} of {len(work)} kernels are left out: they begin at time 0 or before their launch; "
        "the profiler lost their times"
    )


def _without_overlaps(trace: Trace) -> Trace:
    work = trace.work
    order = np.lexsort((work.duration_ns, work.start_ns, work.stream))
    start_ns, stream, correlation = work.start_ns[order], work.stream[order], work.correlation[order]
    over_ns = (start_ns + work.duration_ns[order])[:-1] - start_ns[1:]
    # Branches of one CUDA graph run concurrently under one stream number.
    apart = (correlation[1:] != correlation[:-1]) | (correlation[1:] <= 0)
    cut = (stream[1:] == stream[:-1]) & (stream[1:] != NONE) & apart & (over_ns > _CLOCKS_NS)
    if not cut.any():
        return trace
    duration_ns = work.duration_ns.copy()
    duration_ns[order[:-1][cut]] -= over_ns[cut]
    return dataclasses.replace(trace, work=dataclasses.replace(work, duration_ns=duration_ns)).doubting(
        f"{cut.sum()} of {len(work)} kernels outlast the start of their stream's next kernel, by up to "
        f"{format_time(float(over_ns[cut].max()) / 1e9)}; they are cut there"
    )
