"""The last steps of a long trace: enough to see where the time goes, in little memory."""

import dataclasses
import re
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from steplab.traces.trace import NONE, Column, DeviceWork, HostCalls, Ops, Ranges, Trace

STEP = re.compile(r"^(step|ProfilerStep#\d+)$")
"""The names of the ranges that are steps."""

_Table = TypeVar("_Table", DeviceWork, HostCalls, Ops, Ranges)


def step_ranges(trace: Trace) -> Column:
    """The numbers of the ranges that are steps, in the order in which they began."""
    named = [number for number, name in enumerate(trace.names) if STEP.match(name)]
    return np.flatnonzero(np.isin(trace.ranges.name, named))


def last_steps(trace: Trace, most: int) -> Trace:
    """The trace with what its last `most` steps did on the host, and what they launched; a note says what is left out.

    A trace with no more steps than that is returned unchanged.
    """
    steps = step_ranges(trace)
    if len(steps) <= most:
        return trace
    start_ns = int(trace.ranges.start_ns[steps[-most]])
    # Work whose launch is not in the trace is judged by when it ran.
    without_call = ~np.isin(trace.work.correlation, trace.calls.correlation) | (trace.work.correlation == NONE)
    calls = _rows(trace.calls, trace.calls.start_ns >= start_ns)
    launched = np.isin(trace.work.correlation, calls.correlation) & ~without_call
    note = f"the last {most} of {len(steps)} steps are used"
    return dataclasses.replace(
        trace,
        calls=calls,
        work=_rows(trace.work, launched | (without_call & (trace.work.start_ns >= start_ns))),
        ops=_rows(trace.ops, trace.ops.start_ns >= start_ns),
        ranges=_rows(trace.ranges, trace.ranges.start_ns >= start_ns),
        notes=(*trace.notes, note),
    )


def _rows(table: _Table, chosen: NDArray[np.bool_]) -> _Table:
    columns = {field.name: getattr(table, field.name)[chosen] for field in dataclasses.fields(table)}
    return type(table)(**columns)
