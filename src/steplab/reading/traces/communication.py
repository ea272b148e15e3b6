"""Times of messages and computation in a trace, their overlap, and the last step's timeline.

On a GPU a message is a communication kernel, or a copy between GPUs. steplab's peer copies run on separate streams,
where all work counts as communication. On a CPU a message is gloo's range on its own thread.
"""

import re

import numpy as np

from steplab.errors import SteplabError
from steplab.reading.traces.activity import Activity, Pieces, activity_of
from steplab.reading.traces.host import Host
from steplab.reading.traces.intervals import length, overlap
from steplab.reading.traces.trace import NONE, Column, Trace
from steplab.reading.traces.windows import cut
from steplab.records.ddp import COMMUNICATION_ROW, COMPUTE_ROW, TracedSteps
from steplab.records.profile import CATEGORIES, PHASES, Timeline

_MESSAGE_RANGES = re.compile(r"^(gloo|mpi|ucc):")
"""Names of the host ranges that mark messages."""
_TRANSFERS = re.compile(r"^Mem(cpy|set)")
_OF_PEER_COPIES = re.compile(r"^Memcpy (DtoD|PtoP)\b|^mean_kernel$")
_COMMUNICATION = CATEGORIES.index("communication")
_FINEST = 4000
"""The timeline draws no gap shorter than a step over this number."""


def traced_steps(trace: Trace, host: Host | None = None) -> TracedSteps:
    """Communication and its overlap in a trace of whole steps. Raises SteplabError without steps or work."""
    host = host or Host(trace)
    on_host = not len(trace.work)
    activity = activity_of(trace, host)
    activity = activity.where(activity.step != NONE)
    num_steps = len(host.steps[0])
    if not num_steps or not len(activity):
        raise SteplabError("the trace marks no steps, or has no work in them")
    sent, computed, drawn = _rows_of_host(trace, host, activity) if on_host else _rows_of_device(trace, activity)
    last_step = int(activity.step.max())
    # On a CPU a step is its range; on a GPU, from its first work to its last.
    if on_host:
        begins_ns, ends_ns = int(host.steps[0][-1]), int(host.steps[1][-1])
        phases = _phases_of_host(trace, begins_ns, ends_ns)
        last_ns = int(max(activity.end_ns.max(), sent.end_ns.max() if len(sent.end_ns) else 0))
        steps_ns = last_ns - int(activity.start_ns.min())
    else:
        # The device may wait between steps, so each counts by itself.
        works = (activity.where(activity.step == step) for step in np.unique(activity.step))
        spans_ns = [(int(work.start_ns.min()), int(work.end_ns.max())) for work in works]
        begins_ns, ends_ns = spans_ns[-1]
        # Late work on a phase's own streams may leave it an empty window at the end.
        windows = [window for window in cut(activity) if window.step == last_step and window.end_ns > window.start_ns]
        phases = [(host.phase_names[w.phase], max(w.start_ns, begins_ns), w.end_ns) for w in windows]
        steps_ns = sum(end_ns - start_ns for start_ns, end_ns in spans_ns)
    pieces = {
        row: shown.where((shown.start_ns >= begins_ns) & (shown.start_ns < ends_ns))
        for row, shown in ((COMPUTE_ROW, drawn), (COMMUNICATION_ROW, sent))
    }
    return TracedSteps(
        num_steps=num_steps,
        step_s=steps_ns / num_steps / 1e9,
        communication_s=length(*sent.intervals) / num_steps / 1e9,
        overlapped_s=overlap(sent.intervals, computed.intervals) / num_steps / 1e9,
        timeline=_timeline(pieces, phases, begins_ns, ends_ns),
    )


def sent_in(activity: Activity, trace: Trace, host: Host) -> tuple[Pieces, Pieces]:
    """Messages in steps (GPU kernels or CPU ranges), and the computation that may overlap them. The work of `activity`
    must lie in steps.
    """
    sends = activity.category == _COMMUNICATION
    computed = activity.where(~sends & ~trace.named(activity.name, _TRANSFERS.match))
    if len(trace.work):
        return activity.where(sends), computed
    ranges, step = trace.ranges, host.step_at(trace.ranges.start_ns)
    marked = Pieces(
        name=ranges.name,
        start_ns=ranges.start_ns,
        end_ns=ranges.end_ns,
        stream=ranges.thread,
        step=step,
        category=np.full(len(ranges), _COMMUNICATION),
    )
    return marked.where(trace.named(ranges.name, _MESSAGE_RANGES.match) & (step != NONE)), computed


def _rows_of_device(trace: Trace, activity: Activity) -> tuple[Pieces, Pieces, Pieces]:
    sends = activity.category == _COMMUNICATION
    sends |= np.isin(activity.stream, _carriers(trace, activity, sends))
    computes = ~sends & ~trace.named(activity.name, _TRANSFERS.match)
    return activity.where(sends), activity.where(computes), activity.where(~sends)


def _carriers(trace: Trace, activity: Activity, sends: Column) -> Column:
    """Streams on which all work counts as communication: those with a message, or with nothing but peer copies; never
    the stream that computes most.
    """
    streams, lasts_ns = activity.stream, activity.end_ns - activity.start_ns
    of_copies = trace.named(activity.name, _OF_PEER_COPIES.match)
    computed_ns: dict[int, int] = {}
    carriers = []
    for stream in np.unique(streams).tolist():
        mine = streams == stream
        computed_ns[stream] = int(lasts_ns[mine & ~sends].sum())
        if bool(sends[mine].any()) or bool(of_copies[mine].all()):
            carriers.append(stream)
    busiest = max(computed_ns, key=lambda stream: computed_ns[stream])
    return np.array([stream for stream in carriers if stream != busiest], dtype=np.int64)


def _rows_of_host(trace: Trace, host: Host, activity: Activity) -> tuple[Pieces, Pieces, Pieces]:
    """Messages, computation, and the rows to draw as computation, on a CPU: operators that start no message."""
    sent, _ = sent_in(activity, trace, host)
    computed = activity.where(activity.category != _COMMUNICATION)
    return sent, computed, computed


def _phases_of_host(trace: Trace, begins_ns: int, ends_ns: int) -> list[tuple[str, int, int]]:
    ranges = trace.ranges
    ranges = ranges.where((ranges.start_ns >= begins_ns) & (ranges.start_ns < ends_ns))
    columns = (ranges.name, ranges.start_ns, ranges.end_ns)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(trace.names[name], start_ns, end_ns) for name, start_ns, end_ns in rows if trace.names[name] in PHASES]


def _timeline(rows: dict[int, Pieces], phases: list[tuple[str, int, int]], begins_ns: int, ends_ns: int) -> Timeline:
    gap_ns = (ends_ns - begins_ns) // _FINEST
    drawn = [
        (start_ns, end_ns, category, row)
        for row, pieces in rows.items()
        for start_ns, end_ns, category in _joined(pieces, gap_ns)
    ]
    drawn.sort()
    used = sorted({category for _, _, category, _ in drawn})
    return Timeline(
        names=tuple(CATEGORIES[number] for number in used),
        categories=tuple(CATEGORIES[number] for number in used),
        kernel=tuple(used.index(category) for _, _, category, _ in drawn),
        stream=tuple(row for *_, row in drawn),
        start_ns=tuple(start_ns - begins_ns for start_ns, *_ in drawn),
        duration_ns=tuple(end_ns - start_ns for start_ns, end_ns, *_ in drawn),
        phases=tuple((name, start_ns - begins_ns, end_ns - begins_ns) for name, start_ns, end_ns in phases),
    )


def _joined(pieces: Pieces, gap_ns: int) -> list[tuple[int, int, int]]:
    joined: list[tuple[int, int, int]] = []
    order = np.argsort(pieces.start_ns, kind="stable")
    columns = (pieces.start_ns[order], pieces.end_ns[order], pieces.category[order])
    for start_ns, end_ns, category in zip(*(column.tolist() for column in columns), strict=True):
        if joined and joined[-1][2] == category and start_ns - joined[-1][1] <= gap_ns:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_ns), category)
        else:
            joined.append((start_ns, end_ns, category))
    return joined
