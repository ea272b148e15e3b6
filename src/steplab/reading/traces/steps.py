"""The last steps of a long trace: enough to see where the time goes, in little memory."""

import dataclasses
import re

import numpy as np

from steplab.reading.traces.devices import launching_calls
from steplab.reading.traces.trace import NONE, Column, Trace

STEP = re.compile(r"^(step|ProfilerStep#\d+)$")
"""The names of the ranges that are steps."""


def step_ranges(trace: Trace) -> Column:
    """The numbers of the ranges that are steps, in the order in which they began.

    A step within another is part of it: a loop may name its steps under a profiler that is told of each.
    """
    steps = np.flatnonzero(trace.named(trace.ranges.name, STEP.match))
    ends = (trace.ranges.start_ns + trace.ranges.duration_ns)[steps]
    return steps[np.append(True, ends[1:] > np.maximum.accumulate(ends)[:-1])[: len(steps)]]


def last_steps(trace: Trace, most: int) -> Trace:
    """The trace with what its last `most` steps did on the host, and what they launched; a note says what is left out.

    A trace with no more steps than that is returned unchanged.
    """
    steps = step_ranges(trace)
    if len(steps) <= most:
        return trace
    start_ns = int(trace.ranges.start_ns[steps[-most]])
    # Work whose launch is not in the trace is judged by when it ran.
    calls = launching_calls(trace)
    began_ns = np.where(calls == NONE, trace.work.start_ns, np.append(trace.calls.start_ns, 0)[calls])
    note = f"the last {most} of {len(steps)} steps are used"
    return dataclasses.replace(
        trace,
        calls=trace.calls.where(trace.calls.start_ns >= start_ns),
        work=trace.work.where(began_ns >= start_ns),
        ops=trace.ops.where(trace.ops.start_ns >= start_ns),
        ranges=trace.ranges.where(trace.ranges.start_ns >= start_ns),
        notes=(*trace.notes, note),
    )
