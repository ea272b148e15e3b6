"""The pieces of work that ran on the device, each with what launched it: the table that the digest groups and sums.

On a GPU a piece is a kernel, copy or fill. On a CPU the operators are the kernels: a piece is a stretch in which one
operator is the innermost on its thread, its own time without its children's.
"""

import re
from dataclasses import dataclass

import numpy as np

from steplab.reading.traces.categories import kernel_category, op_category
from steplab.reading.traces.devices import launching_calls
from steplab.reading.traces.host import Host
from steplab.reading.traces.nesting import Nesting
from steplab.reading.traces.trace import NONE, Column, Rows, Trace
from steplab.records.profile import CATEGORIES

# Operators that only make a view or an empty tensor: their time belongs to the operator around them.
_BOOKKEEPING = re.compile(
    r"^aten::_?(alias|as_strided|chunk|detach|empty|empty_like|empty_strided|expand|narrow|resolve_conj|resolve_neg"
    r"|result_type|reshape|reshape_alias|select|slice|split|t|transpose|unbind|unflatten|unsafe_view|unsqueeze|view)_?$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity(Rows):
    """The pieces of work."""

    end_ns: Column
    stream: Column
    launch_ns: Column
    """The start of the host call that launched it; NONE if the trace has none."""
    launched_ns: Column
    """The end of that call."""
    call: Column
    """The number of that call, which tells pieces of one launch from pieces of two."""
    op: Column
    """The number of the operator that launched it; NONE for none."""
    step: Column
    """The number of the step that launched it; NONE for none."""
    phase: Column
    """The number of the phase, in Host.phase_names."""
    path: Column
    """The number of the range, in Host.paths."""
    category: Column
    """The number of the category, in CATEGORIES."""


def device_activity(trace: Trace, host: Host) -> Activity:
    """Every kernel, copy and fill, attributed by its launch. A piece without a launch is attributed as the piece
    before it."""
    work, calls = trace.work, trace.calls
    call = launching_calls(trace)
    found = call != NONE

    def of_call(column: Column) -> Column:
        return np.where(found, column[call], NONE) if len(column) else call

    launch_ns, thread = of_call(calls.start_ns), of_call(calls.thread)
    return Activity(
        name=work.name,
        start_ns=work.start_ns,
        end_ns=work.start_ns + work.duration_ns,
        stream=work.stream,
        launch_ns=launch_ns,
        launched_ns=of_call(calls.start_ns + calls.duration_ns),
        call=call,
        op=host.op_at(launch_ns, thread),
        step=_filled(host.step_at(launch_ns), found),
        phase=_filled(host.phase_at(launch_ns, thread), found),
        path=np.where(found, host.path_at(launch_ns, thread), 0),
        category=_categories(trace, work.name, on_device=True),
    )


def cpu_activity(trace: Trace, host: Host) -> Activity:
    """The stretches of each operator's own time."""
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
    )


def _categories(trace: Trace, name: Column, *, on_device: bool) -> Column:
    categorise = kernel_category if on_device else op_category
    by_name = np.full(len(trace.names) or 1, 0)
    for number in np.unique(name):
        by_name[number] = CATEGORIES.index(categorise(trace.names[number]))
    return by_name[name]


def _filled(values: Column, found: Column) -> Column:
    """The values, with each that was not found replaced by the one before it."""
    if not len(values):
        return values
    last = np.maximum.accumulate(np.where(found, np.arange(len(values)), 0))
    return values[last]
