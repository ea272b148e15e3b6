"""Activation checkpointing in the dry run, as torch.utils.checkpoint does it without reentrant autograd.

In the forward pass a block's nodes keep nothing, and its frame keeps its input. The first backward of a node recomputes
the block up to the last tensor that a node needs (early stop). Nodes take their tensors from the frame in order.
Selective checkpointing also keeps the outputs of matmuls and of fused attention in the frame, instead of recomputing
them.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from steplab.plan.dry_run.tensors import Tensor
from steplab.specs.checkpointing import SELECTIVE

Kept = tuple[Tensor, ...]


class Enough(Exception):
    """A recomputation has found every tensor that its block's nodes keep."""


class Frame:
    def __init__(self, run: Callable[[Any], Any], x: Any, checkpointing: str) -> None:
        self._run, self._x, self._checkpointing = run, x, checkpointing
        self._num_linear = Counter[bool]()
        self._num_nodes = 0
        self._found: list[Kept | None] = []
        self._outputs: list[Tensor] = []
        self.recomputing = False

    def run(self) -> Any:
        return self._run(self._x)

    def has_found(self) -> bool:
        return bool(self._found)

    def enter(self, kept: Kept) -> int:
        """Register a node's kept tensors and return its number; raises Enough once the last is found."""
        if not self.recomputing:
            self._num_nodes += 1
            return self._num_nodes - 1
        self._found.append(kept)
        if len(self._found) == self._num_nodes:
            raise Enough
        return len(self._found) - 1

    def take(self, number: int) -> Kept:
        kept, self._found[number] = self._found[number], None
        assert kept is not None
        return kept

    def output(self, make: Callable[[], Tensor], *, is_linear: bool) -> Tensor:
        """The output of an operator that selective checkpointing keeps: made once."""
        self._num_linear[self.recomputing] += is_linear
        is_second = is_linear and self._num_linear[self.recomputing] % 2 == 0
        if self._checkpointing not in SELECTIVE or (is_second and self._checkpointing == "selective_2"):
            return make()
        if self.recomputing:
            return self._outputs.pop(0)
        made = make()
        self._outputs.append(made)
        return made
