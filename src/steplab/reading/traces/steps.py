"""The steps of a trace: which ranges they are, and the last of many, enough to see where the time goes."""

import dataclasses
import re
from collections import Counter
from fnmatch import translate

import numpy as np

from steplab.errors import UserError
from steplab.reading.traces.devices import launching_calls
from steplab.reading.traces.trace import NONE, Column, Trace

_NUM_OFFERED = 3


def with_steps(trace: Trace, pattern: str) -> Trace:
    """The trace, in which the ranges (of old torch, the operators) that a shell pattern names are the steps.

    Raises UserError, which offers others, if there is none.
    """
    trace = trace.with_ranges(re.compile(translate(pattern)).match)
    trace = dataclasses.replace(trace, steps=re.compile(translate(pattern)))
    if not len(step_ranges(trace)):
        raise UserError(f"no range is called {pattern}{offered_steps(trace)}")
    return trace


def offered_steps(trace: Trace) -> str:
    """The ranges that may be steps, as the end of a sentence: those that come again, the longest in all first."""
    lasts_ns, num = Counter[str](), Counter[str]()
    for name, duration_ns in zip(trace.ranges.name.tolist(), trace.ranges.duration_ns.tolist(), strict=True):
        like = re.sub(r"\d+", "*", trace.names[name])
        lasts_ns[like] += duration_ns
        num[like] += 1
    found = [f"'{name}' ({num[name]} of them)" for name, _ in lasts_ns.most_common() if num[name] > 1]
    return f"; --step-range names them, such as {', '.join(found[:_NUM_OFFERED])}" if found else ""


def step_ranges(trace: Trace) -> Column:
    """The numbers of the ranges that are steps, in the order in which they began.

    A step within another is part of it: a loop may name its steps under a profiler that is told of each.
    """
    steps = np.flatnonzero(trace.named(trace.ranges.name, trace.steps.match))
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
