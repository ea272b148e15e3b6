"""Traces of several ranks: each reduced, then compared.

A process reads each file, so ranks are read concurrently and only sums and collectives stay in memory. Collectives
match by step, kind, process group and place in the step. A collective ends on all ranks at once, so its ends give clock
differences; the remainder is their error.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from steplab.costs.communication import bus_factor
from steplab.errors import SteplabError
from steplab.reading.traces.activity import Pieces, activity_of
from steplab.reading.traces.communication import sent_in, traced_steps
from steplab.reading.traces.devices import one_device
from steplab.reading.traces.host import Host
from steplab.reading.traces.intervals import length, overlap, union
from steplab.reading.traces.naming import STEP
from steplab.reading.traces.steps import last_steps, step_ranges, with_steps
from steplab.reading.traces.times import possible
from steplab.reading.traces.trace import NONE, Column, Message, Ranges, Trace
from steplab.records.profile import Meeting, PathPart, Profile, Timeline, TracedRank, TracedRanks

_WOKEN_NS = 5e6
_KINDS = {
    "all_?reduce": "all_reduce",
    "all_?gather": "all_gather",
    "reduce_?scatter": "reduce_scatter",
    "all_?to_?all": "all_to_all",
    "broadcast": "broadcast",
    "send|recv": "send_recv",
    "reduce": "reduce",
}
"""Kinds of collectives by patterns of their names; the first match decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Call of a collective on one rank; times in ns since 1970."""

    step: str
    kind: str
    group: str
    size_bytes: int
    start_ns: int
    end_ns: int
    exposed_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    rank: int | None
    host: str
    num_steps: int
    window_ns: int
    compute_ns: int
    communication_ns: int
    hidden_ns: int
    idle_ns: int
    begins_ns: int
    ends_ns: int
    calls: tuple[Call, ...]
    timeline: Timeline
    profile: Profile | None = None


def rank_trace(trace: Trace, step_range: str | None = None) -> RankTrace:
    """Reduce one rank's trace. Without marked steps it counts as one step. Raises SteplabError if nothing ran."""
    trace = last_steps(_with_a_step(possible(one_device(with_steps(trace, step_range)))))
    host = Host(trace)
    on_host = not len(trace.work)
    steps = traced_steps(trace, host)
    activity = activity_of(trace, host)
    activity = activity.where(activity.step != NONE)
    sent, computed = sent_in(activity, trace, host)
    every = np.concatenate((activity.start_ns, sent.start_ns)), np.concatenate((activity.end_ns, sent.end_ns))
    window_ns = int(every[1].max() - every[0].min())
    labels = [trace.names[number] for number in trace.ranges.name[step_ranges(trace)].tolist()]
    labels = labels if len(set(labels)) == len(labels) else [str(number) for number in range(len(labels))]
    last_ns = int(host.steps[0][-1])
    begin_ns = last_ns if on_host else int(activity.start_ns[activity.step == activity.step.max()].min())
    return RankTrace(
        rank=trace.rank,
        host=trace.host,
        num_steps=len(labels),
        window_ns=window_ns,
        compute_ns=length(*computed.intervals),
        communication_ns=length(*sent.intervals),
        hidden_ns=overlap(sent.intervals, computed.intervals),
        idle_ns=window_ns - length(*every),
        begins_ns=trace.base_ns + begin_ns,
        ends_ns=trace.base_ns + int(every[1].max()),
        calls=tuple(_calls(trace, labels, sent, union(*computed.intervals))),
        timeline=steps.timeline,
    )


def _with_a_step(trace: Trace) -> Trace:
    tables = [table for table in (trace.work, trace.calls, trace.ops, trace.ranges) if len(table)]
    if len(step_ranges(trace)) or not tables:
        return trace
    begin_ns = min(int(table.start_ns[0]) for table in tables)
    end_ns = max(int(table.end_ns.max()) for table in tables)
    row = {"name": len(trace.names), "start_ns": begin_ns, "duration_ns": end_ns - begin_ns, "thread": 0}
    ranges = Ranges(**{name: np.append(value, getattr(trace.ranges, name)) for name, value in row.items()})
    return replace(trace, names=(*trace.names, "step"), ranges=ranges, steps=STEP)


def _calls(trace: Trace, labels: list[str], sent: Pieces, computed: tuple[Column, Column]) -> Iterator[Call]:
    columns = (sent.start_ns, sent.end_ns, sent.stream, sent.name, sent.step)
    for start_ns, end_ns, of, number, within in sorted(zip(*(each.tolist() for each in columns), strict=True)):
        text = trace.names[number]
        about = trace.messages.get((start_ns, of), Message(name="", group="", size_bytes=0))
        kind = next((kind for pattern, kind in _KINDS.items() if re.search(pattern, about.name or text, re.I)), "other")
        low = np.searchsorted(computed[1], start_ns, side="right")
        high = np.searchsorted(computed[0], end_ns, side="left")
        beside = np.maximum(computed[0][low:high], start_ns), np.minimum(computed[1][low:high], end_ns)
        yield Call(
            step=labels[within],
            kind=kind,
            group=about.group,
            size_bytes=about.size_bytes,
            start_ns=trace.base_ns + start_ns,
            end_ns=trace.base_ns + end_ns,
            exposed_ns=end_ns - start_ns - int((beside[1] - beside[0]).sum()),
        )


_Key = tuple[str, str, str, int]


def side_by_side(traces: Sequence[RankTrace]) -> TracedRanks:
    """Compare ranks on one clock. Raises SteplabError if two traces are of one rank."""
    ranks = [number if trace.rank is None else trace.rank for number, trace in enumerate(traces)]
    if len(set(ranks)) < len(ranks):
        raise SteplabError(f"two traces are of one rank ({sorted(ranks)}); use a folder per run")
    zero_ns = min(trace.begins_ns for trace in traces)  # sums of times since 1970 exceed a float's precision
    by_rank = {rank: _since(zero_ns, traces[ranks.index(rank)]) for rank in sorted(ranks)}
    met: dict[_Key, dict[int, Call]] = {}
    num: dict[tuple[str, str, str], set[int]] = {}
    for rank, trace in by_rank.items():
        seen = Counter[tuple[str, str, str]]()
        for call in trace.calls:
            of = (call.step, call.kind, call.group)
            met.setdefault((*of, seen[of]), {})[rank] = call
            seen[of] += 1
        for of, count in seen.items():
            num.setdefault(of, set()).add(count)
    # Ranks with different numbers of calls did not make the same calls.
    met = {key: calls for key, calls in met.items() if len(calls) > 1 and len(num[key[:3]]) == 1}
    ahead_ns = _clocks({rank: trace.host for rank, trace in by_rank.items()}, list(met.values()))
    num_last = Counter(_last(calls, ahead_ns) for calls in met.values())
    rows: dict[_Key, list[dict[int, Call]]] = {}
    for (_, kind, group, number), calls in met.items():
        rows.setdefault(("", kind, group, number), []).append(calls)
    meetings = [_meeting(key, found, ahead_ns) for key, found in rows.items()]
    num_steps = min(trace.num_steps for trace in traces)
    waited_s = dict.fromkeys(by_rank, 0.0)
    for meeting, wait_s in meetings:
        waited_s[meeting.last_rank] += wait_s * meeting.num_steps / num_steps
    errors = [
        abs(call.end_ns - ahead_ns[rank] - median(c.end_ns - ahead_ns[r] for r, c in calls.items()))
        for calls in met.values()
        for rank, call in calls.items()
    ]
    return TracedRanks(
        num_steps=num_steps,
        ranks=tuple(
            TracedRank(
                rank=rank,
                step_s=trace.window_ns / trace.num_steps / 1e9,
                compute_s=trace.compute_ns / trace.num_steps / 1e9,
                hidden_s=trace.hidden_ns / trace.num_steps / 1e9,
                exposed_s=(trace.communication_ns - trace.hidden_ns) / trace.num_steps / 1e9,
                idle_s=trace.idle_ns / trace.num_steps / 1e9,
                num_last=num_last[rank],
                late_s=waited_s[rank],
                timeline=trace.timeline,
            )
            for rank, trace in by_rank.items()
        ),
        meetings=tuple(sorted((meeting for meeting, _ in meetings), key=lambda one: -one.late_s - one.exposed_s)),
        path=tuple(_path(by_rank, met, ahead_ns)),
        clock_error_s=median(errors) / 1e9 if errors else None,
    )


def _since(zero_ns: int, trace: RankTrace) -> RankTrace:
    calls = (replace(c, start_ns=c.start_ns - zero_ns, end_ns=c.end_ns - zero_ns) for c in trace.calls)
    return replace(trace, begins_ns=trace.begins_ns - zero_ns, ends_ns=trace.ends_ns - zero_ns, calls=tuple(calls))


def _clocks(hosts: dict[int, str], meetings: list[dict[int, Call]]) -> dict[int, float]:
    """Lead in ns of each rank's clock over the first rank's; 0 without common collectives. Ranks of one machine share a
    clock, unless the ends of their collectives differ by more than waking a process takes.
    """
    ahead_ns = {next(iter(hosts)): 0.0}
    while True:
        differences: dict[int, list[float]] = {}
        for calls in meetings:
            known = [calls[rank].end_ns - ahead_ns[rank] for rank in calls if rank in ahead_ns]
            for rank in calls if known else ():
                if rank not in ahead_ns:
                    differences.setdefault(rank, []).append(calls[rank].end_ns - median(known))
        if not differences:
            return dict.fromkeys(hosts, 0.0) | ahead_ns
        for rank, values in differences.items():
            here = [ahead_ns[known] for known in ahead_ns if hosts[known] == hosts[rank] != ""]
            found = median(values)
            ahead_ns[rank] = here[0] if here and abs(found - here[0]) < _WOKEN_NS else found


def _last(calls: dict[int, Call], ahead_ns: dict[int, float]) -> int:
    return max(calls, key=lambda rank: calls[rank].start_ns - ahead_ns[rank])


def _meeting(key: _Key, found: list[dict[int, Call]], ahead_ns: dict[int, float]) -> tuple[Meeting, float]:
    """One collective over all steps, and the seconds that the median rank waits idle in it for the last one. Both have
    medians over steps, since a rank may be late once by chance.
    """
    _, kind, group, number = key
    last = Counter(_last(calls, ahead_ns) for calls in found).most_common(1)[0][0]
    late_ns, waits_ns, transfers_ns, exposed_ns = [], [], [], []
    for calls in found:
        arrived_ns = {rank: call.start_ns - ahead_ns[rank] for rank, call in calls.items()}
        ended_ns = median(call.end_ns - ahead_ns[rank] for rank, call in calls.items())
        transfers_ns.append(max(ended_ns - max(arrived_ns.values()), 0.0))
        exposed_ns.append(min(transfers_ns[-1], *(call.exposed_ns for call in calls.values())))
        if last in calls:
            others = [rank for rank in calls if rank != last]
            late_ns.append(arrived_ns[last] - median(arrived_ns[rank] for rank in others))
            waits_ns.append(median(calls[rank].exposed_ns for rank in others))
    size_bytes = max(call.size_bytes for calls in found for call in calls.values())
    transfer_s = median(transfers_ns) / 1e9
    late_s = max(0.0, median(late_ns)) / 1e9
    wire_bytes = size_bytes * bus_factor(kind, max(map(len, found)))
    meeting = Meeting(
        collective=kind,
        group=group,
        number=number,
        num_steps=len(found),
        last_rank=last,
        late_s=late_s,
        transfer_s=transfer_s,
        exposed_s=median(exposed_ns) / 1e9,
        size_bytes=size_bytes,
        bus_bytes_per_s=wire_bytes / transfer_s if wire_bytes and transfer_s else None,
    )
    return meeting, min(late_s, median(waits_ns) / 1e9)


def _path(
    by_rank: dict[int, RankTrace], met: dict[_Key, dict[int, Call]], ahead_ns: dict[int, float]
) -> Iterator[PathPart]:
    """The critical path of the last common step: the work of the rank that joins a collective last, then the collective
    itself.
    """
    ends_ns = [(call.end_ns, step) for (step, *_), calls in met.items() for call in calls.values()]
    _, last_step = max(ends_ns, default=(0, ""))
    begin_ns = max(trace.begins_ns - ahead_ns[rank] for rank, trace in by_rank.items())
    meetings = [calls for key, calls in met.items() if key[0] == last_step]
    for calls in sorted(meetings, key=lambda calls: min(call.end_ns - ahead_ns[rank] for rank, call in calls.items())):
        arrived_ns, rank = max((call.start_ns - ahead_ns[rank], rank) for rank, call in calls.items())
        ended_ns = calls[rank].end_ns - ahead_ns[rank]
        if arrived_ns > begin_ns:
            yield PathPart(rank=rank, what="work", time_s=(arrived_ns - begin_ns) / 1e9)
        if ended_ns > max(arrived_ns, begin_ns):
            yield PathPart(rank=rank, what=calls[rank].kind, time_s=(ended_ns - max(arrived_ns, begin_ns)) / 1e9)
        begin_ns = max(begin_ns, ended_ns)
    end_ns, rank = max((trace.ends_ns - ahead_ns[rank], rank) for rank, trace in by_rank.items())
    if end_ns > begin_ns:
        yield PathPart(rank=rank, what="work", time_s=(end_ns - begin_ns) / 1e9)
