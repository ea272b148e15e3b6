"""Origins of memory: phase, module, operator, tensor and line, as far as known.

The line is the innermost on the stack that the user may have written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from steplab.reading.snapshots.history import NONE, Frame, Integers, Numbers
from steplab.reading.snapshots.replay import Lifetimes
from steplab.reading.snapshots.timeline import Positions, Residents
from steplab.records.memory_marks import Marks, Stretch

_LIBRARY = re.compile(
    r"/(site|dist)-packages/(torch|torch_\w+|triton|functorch)/"
    r"|/torch/(_\w+|nn|optim|utils|autograd|cuda|amp|distributed|fx|func|compiler|profiler|overrides\.py|functional\.py)"
    r"|/lib/python3\.\d+/(?!site-packages/|dist-packages/)"
)
"""torch and Python's library."""
_HARNESS = re.compile(r"/steplab/(measurement|cli|lab)/|/steplab/(__main__|model/workload)\.py$")
_STEP = re.compile(r"/steplab/measurement/(step/)?step\.py$")
"""Older snapshots have the file in `measurement`."""
_GENERATED = re.compile(r"torchinductor|/inductor|^<eval_with_key>")
_WRITTEN = re.compile(r"\.py$|^<ipython-input")
_PARTS_SHOWN = 3


class SourceLines:
    def __init__(self, stacks: Sequence[tuple[Frame, ...]]) -> None:
        self._stacks = stacks
        self.of = cache(self._find)
        """Maps a stack number to `steplab/model/transformer.py:81 in forward`, or None."""

    def _find(self, number: int) -> str | None:
        if number == NONE:
            return None
        frames = self._stacks[number]
        for is_told in (_is_users, _is_generated, _is_step):
            for frame in frames:
                if is_told(frame):
                    return _line(frame)
        return None


@cache
def _is_users(frame: Frame) -> bool:
    file = frame[0]
    foreign = _LIBRARY.search(file) or _HARNESS.search(file) or _GENERATED.search(file)
    return bool(_WRITTEN.search(file)) and not foreign


def _is_generated(frame: Frame) -> bool:
    """True for torch.compile's code, shown if its source line is unknown."""
    return bool(_GENERATED.search(frame[0]))


def _is_step(frame: Frame) -> bool:
    """True for the step's own code, shown for memory from outside the model, such as the optimizer's."""
    return bool(_STEP.search(frame[0]))


def _line(frame: Frame) -> str:
    file, line, name = frame
    return f"{'/'.join(file.split('/')[-_PARTS_SHOWN:]).lstrip('/')}:{line} in {name}"


@dataclass(frozen=True, slots=True)
class Origin:
    phase: str | None = None
    module: str | None = None
    op: str | None = None
    source: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class Origins:
    def __init__(
        self,
        lifetimes: Lifetimes,
        stacks: tuple[tuple[Frame, ...], ...],
        positions: Positions,
        marks: Marks | None,
        residents: Residents,
    ) -> None:
        self._marks = marks or Marks()
        self._stack = lifetimes.stack
        self._lines = SourceLines(stacks)
        self._ordinals = positions.ordinals(lifetimes.start)
        self._phases = positions.innermost(self._marks.phases)
        self._modules = positions.innermost(self._marks.modules)
        self._operators = positions.innermost(self._marks.operators)
        made = self._marks.made
        pieces = residents.find([m.address for m in made], [m.position for m in made]).tolist()
        self._made = dict(reversed(list(zip(pieces, made, strict=True))))  # the first tensor in it counts
        self._made.pop(NONE, None)

    def kinds(self, pieces: Integers) -> list[Integers]:
        ordinals = self._ordinals[pieces]
        known = np.maximum(ordinals, 0)
        columns = [self._stack[pieces].astype(np.int64)]
        for numbers in (self._phases, self._modules, self._operators):
            columns.append(np.where(ordinals == NONE, NONE, numbers[known] if len(numbers) else NONE))
        tensors = dict[tuple[object, ...], int]()
        kind_of = {
            piece: tensors.setdefault((made.op, made.shape, made.dtype), len(tensors))
            for piece, made in self._made.items()
        }
        columns.append(np.fromiter((kind_of.get(piece, NONE) for piece in pieces.tolist()), np.int64, len(pieces)))
        return [column for column in columns if len(column) and column.min() != column.max()]

    def of(self, piece: int) -> Origin:
        source = self._lines.of(int(self._stack[piece]))
        ordinal = int(self._ordinals[piece])
        if ordinal == NONE:
            return Origin(source=source)
        made = self._made.get(piece)
        operator = self._name(self._marks.operators, self._operators, ordinal)
        return Origin(
            phase=self._name(self._marks.phases, self._phases, ordinal),
            module=self._name(self._marks.modules, self._modules, ordinal),
            op=made.op if made else operator,
            source=source,
            shape=tuple(made.shape) if made else None,
            dtype=made.dtype if made else None,
        )

    def _name(self, stretches: Sequence[Stretch], numbers: Numbers, ordinal: int) -> str | None:
        number = int(numbers[ordinal])
        return stretches[number].name if number != NONE else None
