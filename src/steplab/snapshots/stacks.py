"""The stacks of a snapshot, each different one once."""

from steplab.limits import LimitReached, Limits
from steplab.snapshots.history import Frame


class Stacks:
    """Numbers stacks in the order in which they are first seen, and stores their frames."""

    def __init__(self, limits: Limits | None = None) -> None:
        """`limits` None: the usual ones."""
        self._most_frames = (limits or Limits()).num_frames
        self._numbers: dict[tuple[int, ...], int] = {}
        self._num_frames = 0
        self._frames: dict[Frame, int] = {}
        self._frame_of_dict: dict[int, tuple[dict[object, object], int]] = {}
        """By identity, which holds while the dict is kept: a snapshot has each frame once, and refers to it."""

    def number_of(self, frames: list[object]) -> int | None:
        """The number of the stack with the frames of these dicts; None if one of them is not a frame."""
        key = tuple(map(self._frame, frames))
        if NO_FRAME in key:
            return None
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._num_frames += len(key)
            if self._num_frames > self._most_frames:
                raise LimitReached(f"its stacks have more than {self._most_frames:,} frames")
        return number

    def all(self) -> tuple[tuple[Frame, ...], ...]:
        """The stacks, by number."""
        frames = list(self._frames)
        return tuple(tuple(frames[number] for number in stack) for stack in self._numbers)

    def _frame(self, frame: object) -> int:
        known = self._frame_of_dict.get(id(frame))
        if known is not None:
            return known[1]
        if not isinstance(frame, dict):
            return NO_FRAME
        file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
        if not (isinstance(file, str) and isinstance(line, int) and isinstance(name, str)):
            return NO_FRAME
        number = self._frames.setdefault((file, line, name), len(self._frames))
        self._frame_of_dict[id(frame)] = (frame, number)
        return number


NO_FRAME = -1
