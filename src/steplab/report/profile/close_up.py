"""The part of a step that is drawn kernel by kernel: one block of the model, in the middle of a phase.

A record's ranges carry no layer numbers, so a block is recognised by its repetition: it begins where a range that each
block enters once begins again.
"""

from collections import Counter
from dataclasses import dataclass

from steplab.records.profile import Timeline

_PHASES = ("forward", "backward")
_MOST_KERNELS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A stretch of the step's timeline."""

    title: str
    """What the stretch is."""
    start_ns: int
    """Start in nanoseconds from the beginning of the step."""
    end_ns: int
    """End in nanoseconds from the beginning of the step, later than the start."""
    ranges: tuple[tuple[str, int, int], ...]
    """Name, start and end of the ranges that begin in the stretch."""
    kernels: tuple[int, ...]
    """Numbers of the timeline's kernels that begin in the stretch."""


def close_ups(timeline: Timeline) -> list[Window]:
    """One block in the middle of the forward pass and one of the backward, where ranges that repeat show them."""
    spans = [(name, start, end) for name, start, end in timeline.phases if name in _PHASES]
    windows = (_block(timeline, name, start, end) for name, start, end in spans)
    return [window for window in windows if window is not None]


def _block(timeline: Timeline, phase: str, phase_start_ns: int, phase_end_ns: int) -> Window | None:
    inside = [r for r in timeline.ranges if phase_start_ns <= r[1] < phase_end_ns and "*" in r[0]]
    counts = Counter(name for name, *_ in inside)
    repeated = Counter(count for count in counts.values() if count > 1)
    if not repeated:
        return None
    once = max(repeated, key=lambda count: (repeated[count], -count))  # most ranges are entered once a block
    first = next(name for name, *_ in inside if counts[name] == once)
    starts = [start for name, start, *_ in inside if name == first]
    middle = (len(starts) - 1) // 2
    start_ns, end_ns = starts[middle], starts[middle + 1]
    kernels = tuple(k for k, start in enumerate(timeline.start_ns) if start_ns <= start < end_ns)
    if not kernels or end_ns <= start_ns or len(kernels) > _MOST_KERNELS:
        return None
    return Window(
        title=f"one block of {len(starts)}, {phase}",
        start_ns=start_ns,
        end_ns=end_ns,
        ranges=tuple((name, start, end) for name, start, end, _ in timeline.ranges if start_ns <= start < end_ns),
        kernels=kernels,
    )
