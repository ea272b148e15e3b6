"""Select one device of a trace, and the process that drives it. Two devices together would count as busy while one
waits for the other.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from steplab.reading.traces.trace import NONE, Column, Trace


def launching_calls(trace: Trace) -> Column:
    """Index of the host call that launched each row of work; NONE: not in the trace. Correlation id 0 means none
    (CUPTI_CORRELATION_ID_UNKNOWN in cupti_activity.h).
    """
    known, wanted = trace.calls.correlation, trace.work.correlation
    order = np.argsort(known, kind="stable")
    call = np.append(order, NONE)[np.searchsorted(known, wanted, sorter=order)]
    return np.where((np.append(known, NONE)[call] == wanted) & (wanted > 0), call, NONE)


def one_device(trace: Trace) -> Trace:
    """Trace of the device with the most work, and of the process that launched most of it. Work of unknown device or
    launch remains. Notes name what is omitted.
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
    """Most frequent value besides NONE; NONE if there is no other."""
    found, counts = np.unique(numbers[numbers != NONE], return_counts=True)
    return int(found[counts.argmax()]) if len(found) else NONE


def _notes(devices: list[int], chosen: int, num_processes: int) -> Iterator[str]:
    others = ", ".join(f"cuda:{device}" for device in devices if device != chosen)
    if others:
        yield f"devices: figures show cuda:{chosen}, with the most work; the trace also has {others}"
    if num_processes > 1:
        yield f"processes: {num_processes} launched work; figures show the most active on cuda:{chosen}"
