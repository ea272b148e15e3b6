"""The origin of each piece of memory: phase, module, operator, tensor and line, as far as each is known."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steplab.reading.snapshots.history import NONE, Frame, Integers, Numbers
from steplab.reading.snapshots.positions import Positions, Residents
from steplab.reading.snapshots.replay import Lifetimes
from steplab.reading.snapshots.source_lines import SourceLines
from steplab.records.memory_marks import Marks, Stretch


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a piece of memory; None for what is unknown."""

    phase: str | None = None
    module: str | None = None
    op: str | None = None
    source: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class Origins:
    """The origins by the number of a lifetime."""

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
        self._made = dict(reversed(list(zip(pieces, made, strict=True))))  # the first tensor made in it counts
        self._made.pop(NONE, None)

    def kinds(self, pieces: Integers) -> list[Integers]:
        """Columns of numbers that are equal for lifetimes of the same origin."""
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
        """The origin of a lifetime."""
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
