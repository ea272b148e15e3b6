"""The stored timeline in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

One process is the device, with one row per stream; a second has the phases and the ranges of the model. Times are
microseconds with three decimals, which is the record's nanosecond exactly. Slices of one row must nest or follow each
other; others go to a further row of the stream. Format: "Trace Event Format", Google, 2016, complete events (ph X) and
metadata events (ph M).
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from steplab.errors import UserError
from steplab.records.profile import Profile, Timeline
from steplab.records.run import Run

_DEVICE, _MODEL = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    name: str
    start_ns: int
    end_ns: int
    """In nanoseconds from the beginning of the step."""
    category: str
    """The kernel's, or 'phase' or 'range'."""


def chrome_trace(run: Run) -> str:
    """JSON of the last profiled step. Raises UserError without a timeline."""
    if run.profile is None:
        raise UserError(f"run {run.id} has no profile; `steplab profile` makes a run that has one")
    if run.profile.timeline is None:
        raise UserError(f"the profile of run {run.id} has no timeline; profile the step again to get one")
    events = ",\n".join(json.dumps(event) for event in _events(run, run.profile, run.profile.timeline))
    about = {"tool": f"steplab {run.steplab_version}", "run": run.id, "created_utc": run.created_utc}
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
    return f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def _events(run: Run, profile: Profile, timeline: Timeline) -> Iterator[dict[str, object]]:
    device = run.environment.device.name if run.environment else profile.device
    yield _metadata("process_name", _DEVICE, 0, name=f"{device}, last profiled step")
    yield _metadata("process_sort_index", _DEVICE, 0, sort_index=_DEVICE)
    word = "thread" if profile.device == "cpu" else "stream"
    threads = itertools.count(1)
    for stream, slices in sorted(_by_stream(timeline).items()):
        yield from _row(_DEVICE, threads, f"{word} {stream}", slices)
    yield _metadata("process_name", _MODEL, 0, name="model")
    yield _metadata("process_sort_index", _MODEL, 0, sort_index=_MODEL)
    phases = [Slice(name=n, start_ns=start, end_ns=end, category="phase") for n, start, end in timeline.phases]
    ranges = [Slice(name=n, start_ns=start, end_ns=end, category="range") for n, start, end, _ in timeline.ranges]
    yield from _row(_MODEL, threads, "phases", phases)
    yield from _row(_MODEL, threads, "ranges", ranges)


def _by_stream(timeline: Timeline) -> dict[int, list[Slice]]:
    streams: dict[int, list[Slice]] = {}
    columns = zip(timeline.kernel, timeline.stream, timeline.start_ns, timeline.duration_ns, strict=True)
    for kernel, stream, start_ns, duration_ns in columns:
        streams.setdefault(stream, []).append(
            Slice(
                name=timeline.names[kernel],
                start_ns=start_ns,
                end_ns=start_ns + duration_ns,
                category=timeline.categories[kernel],
            )
        )
    return streams


def _row(process: int, threads: Iterator[int], name: str, slices: Iterable[Slice]) -> Iterator[dict[str, object]]:
    for index, lane in enumerate(nested_lanes(slices)):
        thread = next(threads)
        yield _metadata("thread_name", process, thread, name=f"{name} ({index + 1})" if index else name)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)
        for piece in lane:
            yield {
                "ph": "X",
                "name": piece.name,
                "cat": piece.category,
                "pid": process,
                "tid": thread,
                "ts": piece.start_ns / 1000,
                "dur": (piece.end_ns - piece.start_ns) / 1000,
            }


def nested_lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The fewest rows where any two slices are apart or nested."""
    lanes: list[list[Slice]] = []
    around: list[list[int]] = []  # ends of the slices that are open at the present moment, one list per lane
    for piece in sorted(slices, key=lambda s: (s.start_ns, -s.end_ns)):
        index = next((index for index, ends in enumerate(around) if _has_room(ends, piece)), len(lanes))
        if index == len(lanes):
            lanes.append([])
            around.append([])
        lanes[index].append(piece)
        around[index].append(piece.end_ns)
    return lanes


def _has_room(ends: list[int], piece: Slice) -> bool:
    """Remove ends before the slice; True if the remaining slices surround it."""
    while ends and ends[-1] <= piece.start_ns:
        ends.pop()
    return not ends or piece.end_ns <= ends[-1]


def _metadata(kind: str, process: int, thread: int, **arguments: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}
