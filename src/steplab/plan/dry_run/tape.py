"""autograd as far as memory goes: what is kept for the backward pass, and when each gradient comes and goes.

The engine runs nodes in the reverse order of their making. A node takes the gradients of its outputs, is given what it
kept, makes the gradients of its inputs, and lets go: first of the gradients it took, then of what it kept. A gradient
that arrives where one is already is added to it: in place, unless that one is a view (torch/csrc/autograd/engine.cpp,
input_buffer.cpp).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from steplab.plan.dry_run.memory import Tensor
from steplab.plan.dry_run.sizes import Dtype

if TYPE_CHECKING:
    from steplab.plan.dry_run.machine import Machine

Backward = Callable[..., Sequence[Tensor | None]]
"""(machine, kept, *gradients of the outputs) -> gradients of the inputs, in the order of `Node.inputs`"""


class Slot:
    """Where the gradient of a tensor is gathered: of one made by a node, or of a parameter, which keeps it."""

    __slots__ = ("dtype", "gradient", "is_leaf")

    def __init__(self, dtype: Dtype, is_leaf: bool = False) -> None:
        self.dtype, self.is_leaf = dtype, is_leaf
        self.gradient: Tensor | None = None

    def take(self) -> Tensor:
        """The gradient, which is its no longer."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        return gradient


class Node:
    """One operator of the forward pass, to be run backwards."""

    __slots__ = ("backward", "inputs", "kept", "outputs", "recomputed", "where")

    def __init__(
        self, inputs: tuple[Slot | None, ...], kept: tuple[Tensor, ...], backward: Backward, where: str
    ) -> None:
        self.inputs, self.kept, self.backward, self.where = inputs, kept, backward, where
        self.outputs: list[Slot] = []
        self.recomputed: Callable[[], tuple[Tensor, ...]] | None = None
        """Under checkpointing, gives what it kept."""

    def gives(self, *outputs: Tensor) -> None:
        """These are its outputs."""
        for output in outputs:
            output.slot = Slot(output.dtype)
            self.outputs.append(output.slot)


class Tape:
    """The nodes of a forward pass, in the order they were made."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def add(self, node: Node) -> None:
        """Write a node down."""
        self._nodes.append(node)

    def run_backward(self, machine: "Machine") -> None:
        """Run all nodes, the last first; the gradient of the last one's output must be in its slot."""
        while self._nodes:
            _run(self._nodes.pop(), machine)


def _run(node: Node, machine: "Machine") -> None:
    machine.ledger.where = node.where
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
    """A gradient has the number format of its tensor: the engine sees to that."""
    assert gradient is not None
    return gradient if gradient.dtype is slot.dtype else machine.copy(gradient, slot.dtype)


def _gather(slot: Slot, gradient: Tensor, machine: "Machine") -> None:
    if slot.gradient is not None and slot.gradient.is_view:
        slot.gradient = machine.copy(gradient, slot.dtype)
    elif slot.gradient is None:
        slot.gradient = gradient
    if slot.is_leaf:
        gradient.storage.piece.category = "gradients"
