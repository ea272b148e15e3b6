"""Where time, bytes and the names of phases stand in a picture of memory over time."""

from collections.abc import Sequence
from dataclasses import dataclass

from steplab.records.memory_profile import MemoryPhase
from steplab.report.kit import charts as ax
from steplab.report.kit.labels import fitted, text_width
from steplab.report.kit.text import plain
from steplab.report.memory_shapes import LETTERS

WIDE, NARROW = 1040, 324
"""Widths of a picture that is alone, and of one that has others beside it."""
HEIGHTS = {WIDE: 300, NARROW: 210}
"""Of the bytes' axis."""
LEFT, RIGHT, STRIP, BOTTOM = 62, 10, 22, 24
"""Margins: for the sizes, at the right, for the phases' names, for the times."""
GAP = 8
"""Least distance of two labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Where time and bytes stand in a picture."""

    width: float
    """Of the whole picture."""
    start_s: float
    """At the left edge, on the timeline's axis."""
    end_s: float
    """At the right edge."""
    scale: ax.Scale
    """Of the bytes."""

    @property
    def bottom(self) -> float:
        """Where zero bytes are."""
        return STRIP + HEIGHTS[int(self.width)]

    @property
    def right(self) -> float:
        """The right edge."""
        return self.width - RIGHT

    def x(self, time_s: float) -> float:
        """Place of a time, kept within the frame."""
        inside = min(max(time_s, self.start_s), self.end_s) - self.start_s
        return LEFT + inside * (self.right - LEFT) / ((self.end_s - self.start_s) or 1)

    def y(self, num_bytes: float) -> float:
        """Place of a size."""
        return self.bottom - num_bytes / self.scale.high * (self.bottom - STRIP)


def phase_labels(phases: Sequence[MemoryPhase], frame: Frame) -> list[tuple[float, str]]:
    """Left edges and texts of the phases' names: over the middle of their phase, moved aside where they would meet.

    Where not all have room the shortest phases' names are left out; hovering tells them.
    """
    kept = list(phases)
    while kept:
        texts = [fitted(plain(phase.name), frame.right - LEFT, LETTERS) for phase in kept]
        widths = [text_width(text, LETTERS) for text in texts]
        if sum(widths) + GAP * (len(kept) - 1) <= frame.right - LEFT:
            middles = [(frame.x(phase.start_s) + frame.x(phase.end_s)) / 2 for phase in kept]
            return list(zip(_spread(middles, widths, LEFT, frame.right), texts, strict=True))
        kept.remove(min(kept, key=lambda phase: phase.end_s - phase.start_s))
    return []


def _spread(middles: Sequence[float], widths: Sequence[float], left: float, right: float) -> list[float]:
    """Left edges of texts around these middles, kept apart and within the frame; there is room for all."""
    lefts: list[float] = []
    for middle, width in zip(middles, widths, strict=True):
        lefts.append(max(middle - width / 2, left))
        left = lefts[-1] + width + GAP
    for index in range(len(lefts) - 1, -1, -1):
        lefts[index] = min(lefts[index], right - widths[index])
        right = lefts[index] - GAP
    return lefts
