"""Activation checkpointing in the dry run, as torch.utils.checkpoint does it without reentrant autograd.

In the forward pass the nodes of a block keep nothing; the block's frame keeps its input. When the first of them is run
backwards, the block's forward pass runs again up to the last tensor that one of them wants (early stop), and each node
takes its own out of the frame when its turn comes. Selective checkpointing keeps the outputs of matmuls and of fused
attention in the frame as well, and hands them out in place of computing them again.
"""

from collections.abc import Callable
from typing import Any

from steplab.plan.dry_run.tensors import Tensor

Kept = tuple[Tensor, ...]


class Enough(Exception):
    """A recomputation has found everything its block's nodes keep."""


class Frame:
    """One checkpointed call of a block."""

    def __init__(self, run: Callable[[Any], Any], x: Any, *, selective: bool) -> None:
        self._run, self._x, self._selective = run, x, selective
        self._num_nodes = 0
        self._found: list[Kept | None] = []
        self._outputs: list[Tensor] = []
        self.recomputing = False
        """Whether the forward pass under way is the second."""

    def run(self) -> Any:
        """The block's forward pass, the first or the second."""
        return self._run(self._x)

    def has_found(self) -> bool:
        """Whether it was recomputed."""
        return bool(self._found)

    def enter(self, kept: Kept) -> int:
        """Another of the block's nodes would keep these; gives its number. Raises Enough for the last to be found."""
        if not self.recomputing:
            self._num_nodes += 1
            return self._num_nodes - 1
        self._found.append(kept)
        if len(self._found) == self._num_nodes:
            raise Enough
        return len(self._found) - 1

    def take(self, number: int) -> Kept:
        """What a node keeps, which the frame keeps no longer."""
        kept, self._found[number] = self._found[number], None
        assert kept is not None
        return kept

    def output(self, make: Callable[[], Tensor]) -> Tensor:
        """The output of an operator that selective checkpointing keeps: made once."""
        if not self._selective:
            return make()
        if self.recomputing:
            return self._outputs.pop(0)
        made = make()
        self._outputs.append(made)
        return made
