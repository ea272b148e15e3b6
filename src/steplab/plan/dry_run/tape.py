"""autograd as far as memory goes: what is saved for the backward pass, and when each gradient comes and goes.

The engine runs nodes in the reverse order of their making. A node takes the gradients of its outputs, is given what it
saved, makes the gradients of its inputs, and frees first the gradients it took, then what it saved. A gradient
that arrives where one is already is added to it: in place, unless that one is a view (torch/csrc/autograd/engine.cpp,
input_buffer.cpp). What comes to one parameter from several nodes is added up first, and then to the gradient that it
has from an earlier pass.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from steplab.plan.dry_run.sizes import Dtype
from steplab.plan.dry_run.tensors import Slot, Tensor


class Engine(Protocol):
    """What a backward pass needs of the machine that it runs on."""

    where: str
    """What part of the model is under way."""

    def copy(self, tensor: Tensor, dtype: Dtype, added_to: Tensor | None = None) -> Tensor:
        """A tensor of the same shape in fresh memory; added_to: the sum with another."""

    def ran(self, name: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """An operator ran."""


Backward = Callable[..., Sequence[Tensor | None]]
"""(machine, saved, *gradients of the outputs) -> gradients of the inputs, in the order of `Node.inputs`"""


class Node:
    """One operator of the forward pass, to be run backwards."""

    __slots__ = ("backward", "inputs", "kept", "outputs", "recomputed", "where")

    def __init__(
        self, inputs: tuple[Slot | None, ...], kept: tuple[Tensor, ...], backward: Backward, where: str
    ) -> None:
        self.inputs, self.kept, self.backward, self.where = inputs, kept, backward, where
        self.outputs: list[Slot] = []
        self.recomputed: Callable[[], tuple[Tensor, ...]] | None = None
        """Under checkpointing, gives what it saved."""

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

    def run_backward(self, machine: Engine) -> None:
        """Run all nodes, the last first; the gradient of the last one's output must be in its slot."""
        while self._nodes:
            _run(self._nodes.pop(), machine)


def _run(node: Node, machine: Engine) -> None:
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


def _in_dtype_of(slot: Slot, gradient: Tensor | None, machine: Engine) -> Tensor:
    """A gradient has the number format of its tensor: the engine sees to that."""
    assert gradient is not None
    return gradient if gradient.dtype is slot.dtype else machine.copy(gradient, slot.dtype)


def _gather(slot: Slot, gradient: Tensor, machine: Engine) -> None:
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
