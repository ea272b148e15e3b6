"""The operators of a step with many identical blocks, from steps with two and with three."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec

from steplab.plan.dry_run.events import Operator

_REPEATED = "block 1"


@dataclass(frozen=True, slots=True)
class RepeatedBlocks(Sequence[Operator]):
    """In order. The memory that a repeated block reads is not known, so fusion reads `few` and `more`."""

    few: tuple[Operator, ...]
    more: tuple[Operator, ...]
    num_layers: int

    @property
    def times(self) -> int:
        """Number of added blocks: each adds the difference between `more` and `few`."""
        return self.num_layers - 2

    def __iter__(self) -> Iterator[Operator]:
        block: list[Operator] = []
        updates = iter([op for op in self.few if op.phase == "optimizer"])
        for op in self.more:
            if block and (op.where != _REPEATED or op.phase != block[0].phase):
                for _ in range(self.times):
                    yield from block
                block = []
            if op.phase == "optimizer":
                yield self._of_all(next(updates, op), op)
            elif op.where == _REPEATED:
                block.append(op)
            else:
                yield op

    def _of_all(self, few: Operator, more: Operator) -> Operator:
        if few.name != more.name:
            return more
        grown = {
            name: getattr(few, name) + self.times * (getattr(more, name) - getattr(few, name))
            for name in ("read_bytes", "written_bytes", "flops", "calls")
        }
        return msgspec.structs.replace(more, **grown)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Operator: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Operator]: ...
    def __getitem__(self, index: int | slice) -> Operator | Sequence[Operator]:
        return tuple(self)[index]
