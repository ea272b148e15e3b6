"""One device of a trace of several, and the process that drives it.

A profile divides the timeline of one device. Two devices taken together would count as busy while one of them waits for
the other, and the steps of several processes overlap on the host.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from steplab.reading.traces.trace import NONE, Column, Trace


def launching_calls(trace: Trace) -> Column:
    """The number of the host call that launched each piece of work; NONE where the trace has none.

    Correlation id 0 is none (CUPTI_CORRELATION_ID_UNKNOWN in cupti_activity.h).
    """
    known, wanted = trace.calls.correlation, trace.work.correlation
    if not len(known):
        return np.full(len(wanted), NONE)
    order = np.argsort(known, kind="stable")
    call = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)]
    return np.where((known[call] == wanted) & (wanted > 0), call, NONE)


def one_device(trace: Trace) -> Trace:
    """The trace with the device that has the most pieces of work, and the process that launched most of these.

    Work whose device or launch is unknown stays. Notes say what is left out; without that, the trace is unchanged.
    """
    processes = np.array((*trace.processes, NONE))
    device, calls = trace.work.device, launching_calls(trace)
    launcher = processes[np.append(trace.calls.thread, NONE)[calls]]
    chosen = _most_common(device)
    is_mine = (device == chosen) | (device == NONE)
    process = _most_common(launcher[is_mine])
    is_mine &= (launcher == process) | (launcher == NONE)
    if is_mine.all():
        return trace
    if process != NONE:
        trace = dataclasses.replace(
            trace,
            calls=trace.calls.where(processes[trace.calls.thread] == process),
            ops=trace.ops.where(processes[trace.ops.thread] == process),
            ranges=trace.ranges.where(processes[trace.ranges.thread] == process),
        )
    notes = (*trace.notes, *_notes(_known(device), chosen, len(_known(launcher))))
    return dataclasses.replace(trace, work=trace.work.where(is_mine), notes=notes)


def _known(numbers: Column) -> list[int]:
    found: list[int] = np.unique(numbers[numbers != NONE]).tolist()
    return found


def _most_common(numbers: Column) -> int:
    """The number that occurs most often, NONE left out; NONE if there is no other."""
    found, counts = np.unique(numbers[numbers != NONE], return_counts=True)
    return int(found[counts.argmax()]) if len(found) else NONE


def _notes(devices: list[int], chosen: int, num_processes: int) -> Iterator[str]:
    others = ", ".join(f"cuda:{device}" for device in devices if device != chosen)
    if others:
        yield f"devices: the figures are those of cuda:{chosen}, which has the most work; the trace also has {others}"
    if num_processes > 1:
        yield f"processes: {num_processes} launched work; the figures are of that which launched most on cuda:{chosen}"
