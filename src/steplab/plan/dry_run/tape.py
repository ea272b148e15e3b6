"""Imitates autograd's memory: saved tensors, and the lifetime of each gradient.

Nodes run in reverse order. A node makes its inputs' gradients, then frees the gradients it took, then its saved
tensors. A gradient is added to an existing one in place, unless that is a view (torch/csrc/autograd/engine.cpp,
input_buffer.cpp). One parameter's gradients from several nodes are summed before an earlier pass's is added.

Activation checkpointing is torch.utils.checkpoint without reentrant autograd. Forward, a block's nodes save nothing,
and its frame keeps the input. The first node to run backward recomputes the block up to the last tensor that a node
needs (early stop); nodes take their tensors from the frame in order. Selective checkpointing keeps the outputs of
matmuls and fused attention in the frame; selective_2 leaves out every second linear layer.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from steplab.plan.dry_run.tensors import Slot, Tensor
from steplab.specs.checkpointing import SELECTIVE

if TYPE_CHECKING:
    from steplab.plan.dry_run.machine import Machine

Kept = tuple[Tensor, ...]
Backward = Callable[..., Sequence[Tensor | None]]
"""(machine, saved, *gradients of the outputs) -> gradients of the inputs, in the order of `Node.inputs`"""


class Node:
    __slots__ = ("backward", "inputs", "kept", "outputs", "recomputed", "where")

    def __init__(self, inputs: tuple[Slot | None, ...], kept: Kept, backward: Backward, where: str) -> None:
        self.inputs, self.kept, self.backward, self.where = inputs, kept, backward, where
        self.outputs: list[Slot] = []
        self.recomputed: Callable[[], Kept] | None = None

    def gives(self, output: Tensor, *others: Tensor) -> Tensor:
        """Register the node's outputs, and return the first."""
        for each in (output, *others):
            each.slot = Slot(each.dtype)
            self.outputs.append(each.slot)
        return output


def run_backward(machine: "Machine") -> None:
    """Run all nodes, last first; the gradient of the last one's output must be in its slot."""
    while machine.tape:
        _run(machine.tape.pop(), machine)


def _run(node: Node, machine: "Machine") -> None:
    machine.where = node.where
    if node.recomputed is not None:
        node.kept = node.recomputed()
    gradients = list(node.backward(machine, node.kept, *[slot.take() for slot in node.outputs]))
    for index, slot in enumerate(node.inputs):
        if slot is not None:
            gradients[index] = _in_dtype_of(slot, gradients[index], machine)
    node.kept, node.recomputed = (), None
    for index, slot in enumerate(node.inputs):
        if slot is not None:
            gradient, gradients[index] = gradients[index], None
            assert gradient is not None
            _gather(slot, gradient, machine)


def _in_dtype_of(slot: Slot, gradient: Tensor | None, machine: "Machine") -> Tensor:
    assert gradient is not None
    return gradient if gradient.dtype is slot.dtype else machine.copy(gradient, slot.dtype)


def _gather(slot: Slot, gradient: Tensor, machine: "Machine") -> None:
    if slot.of_pass is not None:
        _gather(slot.of_pass, gradient, machine)
        slot.num_to_come -= 1
        if slot.num_to_come:
            return
        gradient, slot.num_to_come = slot.of_pass.take(), slot.num_uses
    if slot.gradient is None:
        slot.gradient = gradient
    elif slot.gradient.is_view and not slot.is_leaf:
        slot.gradient = machine.copy(gradient, slot.dtype, added_to=slot.gradient)
    else:
        machine.ran("add", (slot.gradient, gradient), (slot.gradient,))
    if slot.is_leaf and slot.gradient is gradient:
        gradient.storage.piece.category = "gradients"


class Enough(Exception):
    """Ends a recomputation once it has every tensor that its block's nodes save."""


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
        """Register a node's saved tensors and return its number; raises Enough once the last node has them."""
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
        """Output of an operator; selective checkpointing computes it once and keeps it."""
        self._num_linear[self.recomputing] += is_linear
        is_second = is_linear and self._num_linear[self.recomputing] % 2 == 0
        if self._checkpointing not in SELECTIVE or (is_second and self._checkpointing == "selective_2"):
            return make()
        if self.recomputing:
            return self._outputs.pop(0)
        made = make()
        self._outputs.append(made)
        return made
