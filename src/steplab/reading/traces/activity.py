"""Table of device work with the launches it came from, which the digest groups and sums. On a GPU a row is a kernel,
copy or fill. On a CPU it is a stretch of an operator outside its inner operators.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.reading.traces.categories import kernel_category, op_category
from steplab.reading.traces.devices import launching_calls
from steplab.reading.traces.host import Host
from steplab.reading.traces.intervals import Nesting
from steplab.reading.traces.trace import NONE, Column, Rows, Trace
from steplab.records.profile import CATEGORIES, OUTSIDE

_QUEUED_NS = 50_000
_GRAPHS = re.compile(r"(cuda|cu|hip)GraphLaunch")
# Operators that only make a view or an empty tensor; their time counts for the surrounding operator.
_BOOKKEEPING = re.compile(
    r"^aten::_?(alias|as_strided|chunk|detach|empty|empty_like|empty_strided|expand|narrow|resolve_conj|resolve_neg"
    r"|result_type|reshape|reshape_alias|select|slice|split|t|transpose|unbind|unflatten|unsafe_view|unsqueeze|view)_?$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces(Rows):
    end_ns: Column
    stream: Column
    """Stream, or thread on a CPU."""
    step: Column
    category: Column

    @property
    def intervals(self) -> tuple[Column, Column]:
        return self.start_ns, self.end_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity(Pieces):
    launch_ns: Column
    """Start of the host call that launched the work; NONE: not in the trace."""
    launched_ns: Column
    call: Column
    """Number of the launching call, which distinguishes work of different launches."""
    op: Column
    phase: Column
    path: Column
    unseen: Column
    """1 if a CUDA graph launched since the previous row left no work in the trace; else 0."""


def activity_of(trace: Trace, host: Host) -> Activity:
    return device_activity(trace, host) if len(trace.work) else cpu_activity(trace, host)


def device_activity(trace: Trace, host: Host) -> Activity:
    """Table of all kernels, copies and fills, attributed by their launches. Work without a launch belongs to the step
    in which it ran, within its stream's order, and to the preceding row's phase.
    """
    work, calls = trace.work, trace.calls
    call = launching_calls(trace)
    found = call != NONE

    def of_call(column: Column) -> Column:
        return np.append(column, NONE)[call]

    launch_ns, thread = of_call(calls.start_ns), of_call(calls.thread)
    step = _steps(trace, host, found, host.step_at(launch_ns), int(launch_ns[found].min(initial=2**62)))
    before = np.maximum.accumulate(np.where(found, np.arange(len(found)), NONE))
    alone = ~found & ((before == NONE) | (step[before] != step))
    phase = host.phase_at(launch_ns, thread)[np.maximum(before, 0)]
    return Activity(
        name=work.name,
        start_ns=work.start_ns,
        end_ns=work.end_ns,
        stream=work.stream,
        launch_ns=launch_ns,
        launched_ns=of_call(calls.end_ns),
        call=call,
        op=host.op_at(launch_ns, thread),
        step=step,
        phase=np.where(alone, host.phase_names.index(OUTSIDE), phase),
        path=np.where(found, host.path_at(launch_ns, thread), 0),
        category=_categories(trace, work.name, on_device=True),
        unseen=_behind_unseen(trace, launch_ns),
    )


def cpu_activity(trace: Trace, host: Host) -> Activity:
    ops = trace.ops
    kept = np.flatnonzero(~trace.named(ops.name, _BOOKKEEPING.match))
    start_ns, end_ns, owner = Nesting(ops.start_ns[kept], ops.duration_ns[kept], ops.thread[kept]).segments
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns, op = start_ns[order], end_ns[order], kept[owner[order]]
    name, thread = ops.name[op], ops.thread[op]
    return Activity(
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
        stream=thread,
        launch_ns=start_ns,
        launched_ns=start_ns,
        call=op,
        op=op,
        step=host.step_at(start_ns),
        phase=host.phase_at(start_ns, thread),
        path=host.path_at(start_ns, thread),
        category=_categories(trace, name, on_device=False),
        unseen=np.zeros_like(op),
    )


def _categories(trace: Trace, name: Column, *, on_device: bool) -> Column:
    categorise = kernel_category if on_device else op_category
    by_name = np.full(len(trace.names) or 1, 0)
    for number in np.unique(name):
        by_name[number] = CATEGORIES.index(categorise(trace.names[number]))
    return by_name[name]


def _steps(trace: Trace, host: Host, found: NDArray[np.bool_], step: Column, first_launch_ns: int) -> Column:
    """Step of each row; NONE outside. `step` is right for known launches. A stream runs work in launch order, so steps
    never decrease along it. Its first rows belong to an earlier step if they were queued before the trace's first
    launch.
    """
    work, starts_ns = trace.work, host.steps[0]
    if found.all() or not len(starts_ns):
        return step
    step, ran_in = step.copy(), np.searchsorted(starts_ns, work.start_ns, side="right") - 1
    for stream in np.unique(work.stream[~found]):
        here = np.flatnonzero(work.stream == stream)
        known, of = found[here] & (step[here] != NONE), step[here]
        low = np.maximum.accumulate(np.where(known, of, NONE))
        high = np.minimum.accumulate(np.where(known, of, len(starts_ns))[::-1])[::-1]
        lost = np.clip(ran_in[here], low, high)
        first = here[: (low == NONE).sum() + 1]
        gaps_ns = work.start_ns[first[1:]] - work.end_ns[first[:-1]]
        queued = work.start_ns[here[0]] < first_launch_ns and (not len(gaps_ns) or np.median(gaps_ns) < _QUEUED_NS)
        is_tail = (low == NONE) & (high == 0) & queued
        step[here] = np.where(found[here], of, np.where(is_tail, NONE, lost))
    return step


def unseen_launches(trace: Trace) -> Column:
    launches = trace.named(trace.calls.name, _GRAPHS.search)
    return np.flatnonzero(launches & ~np.isin(np.arange(len(trace.calls)), launching_calls(trace)))


def _behind_unseen(trace: Trace, launch_ns: Column) -> Column:
    num_before = np.searchsorted(trace.calls.start_ns[unseen_launches(trace)], np.maximum.accumulate(launch_ns))
    return (np.diff(num_before, prepend=num_before[:1]) > 0).astype(np.int64)
