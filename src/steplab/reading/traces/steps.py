"""Find the steps of a trace, and limit a long trace to its last ones."""

import dataclasses
import re
from collections import Counter
from fnmatch import translate
from glob import escape

import numpy as np

from steplab.errors import UserError
from steplab.reading.traces.devices import launching_calls
from steplab.reading.traces.trace import NONE, Column, Trace

MOST_STEPS = 20
"""Most steps used, counted from the end; more would only take memory."""
_NUM_OFFERED = 3


def with_steps(trace: Trace, pattern: str | None) -> Trace:
    """Trace whose steps are the ranges (in old torch, operators) matching a shell pattern; None: unchanged. Raises
    UserError with suggestions if none match.
    """
    if pattern is None:
        return trace
    steps = re.compile(translate(pattern))
    trace = dataclasses.replace(trace.with_ranges(steps.match), steps=steps)
    if not len(step_ranges(trace)):
        raise UserError(f"no range matches {pattern}{offered_steps(trace)}")
    return trace


def offered_steps(trace: Trace) -> str:
    """Names of ranges that may be steps, as the end of a sentence: repeated ones, by total time."""
    lasts_ns, num = Counter[str](), Counter[str]()
    for name, duration_ns in zip(trace.ranges.name.tolist(), trace.ranges.duration_ns.tolist(), strict=True):
        like = re.sub(r"\d+", "*", escape(trace.names[name]))
        lasts_ns[like] += duration_ns
        num[like] += 1
    found = [f"'{name}' ({num[name]} of them)" for name, _ in lasts_ns.most_common() if num[name] > 1]
    return f"; pass --step-range, for example {', '.join(found[:_NUM_OFFERED])}" if found else ""


def step_ranges(trace: Trace) -> Column:
    """Indices of step ranges, by start. A step within a step does not count: loop and profiler may both mark steps."""
    steps = np.flatnonzero(trace.named(trace.ranges.name, trace.steps.match))
    ends = trace.ranges.end_ns[steps]
    return steps[np.append(True, ends[1:] > np.maximum.accumulate(ends)[:-1])[: len(steps)]]


def last_steps(trace: Trace) -> Trace:
    """Trace limited to host events and launches of its last MOST_STEPS steps; a note says so."""
    steps = step_ranges(trace)
    if len(steps) <= MOST_STEPS:
        return trace
    start_ns = int(trace.ranges.start_ns[steps[-MOST_STEPS]])
    # Work without a launch in the trace is placed by its own time.
    calls = launching_calls(trace)
    began_ns = np.where(calls == NONE, trace.work.start_ns, np.append(trace.calls.start_ns, 0)[calls])
    note = f"the last {MOST_STEPS} of {len(steps)} steps are used"
    return dataclasses.replace(
        trace,
        calls=trace.calls.where(trace.calls.start_ns >= start_ns),
        work=trace.work.where(began_ns >= start_ns),
        ops=trace.ops.where(trace.ops.start_ns >= start_ns),
        ranges=trace.ranges.where(trace.ranges.start_ns >= start_ns),
        notes=(*trace.notes, note),
    )
