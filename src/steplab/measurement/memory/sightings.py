"""Records the memory owned by a step's objects as it runs, and autograd's saved tensors.

It keeps no tensor alive and wraps or replaces none, so the step runs unchanged. Saved tensors are read from autograd's
graph after the forward pass. A node belongs to a module if its number lies between the module's beginning and end.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steplab.measurement import compat
from steplab.measurement.step.spans import modules_for_hooks
from steplab.measurement.step.step import ModelStep, unseen
from steplab.measurement.tensors import dtype_name, tensors_in
from steplab.records.memory_marks import Owned, Saved


class StepSightings:
    """Looks at a step's objects at moments, each numbered and reported to `on_moment`.

    Positions are moment numbers until `StepMarks` replaces them by numbers of allocations.
    """

    def __init__(self, step: ModelStep, device: torch.device, on_moment: Callable[[int], None]) -> None:
        self._step, self._device, self._on_moment = step, device, on_moment
        self._num_moments = 0
        self._calls: list[tuple[str, int, int]] = []
        self._open: list[tuple[int, str, int]] = []
        self.owners: list[Owned] = []
        self.kept: list[Saved] = []
        """Tensors saved for backward in the last micro-step, in the order of their nodes."""
        self.kept_moment: int | None = None
        """Moment of `kept`; None without a graph."""
        self.loss_address: int | None = None
        self.block_inputs: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype of the first tensor passed to each item of a ModuleList."""
        self.block_input_addresses: dict[str, int] = {}

    @property
    def module_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._step.module.named_modules() if name)

    @property
    def parameter_names(self) -> dict[int, str | None]:
        return self._storages(self._step.module.named_parameters())

    @contextmanager
    def watching(self, *, modules: bool) -> Iterator[None]:
        """A context that records gradients and, with `modules`, the model's modules as they appear."""
        hooks = self._attach() if modules else []
        self._step.on_gradients = self.see_gradients
        try:
            yield
        finally:
            self._step.on_gradients = unseen
            for hook in hooks:
                hook.remove()

    def see_what_is_there(self) -> None:
        """The model, optimizer state and batches, before and after the step."""
        step, moment = self._step, self._next_moment()
        self._own(moment, "parameters", [*step.module.named_parameters(), *step.module.named_buffers()])
        state = [] if step.optimizer is None else [step.optimizer.state, step.optimizer.param_groups]
        held = {id(parameter) for parameter in step.module.parameters()}
        tensors = tensors_in([state, vars(step.scaler)])
        self._own(moment, "optimizer_state", [(None, tensor) for tensor in tensors if id(tensor) not in held])
        self._own(moment, "inputs", [(None, tensor) for tensor in tensors_in(step.batches)])

    def see_gradients(self) -> None:
        """After the backward pass."""
        parameters = self._step.module.named_parameters()
        gradients = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
        self._own(self._next_moment(), "gradients", gradients)

    def begin_forward(self) -> None:
        """Forget the previous micro-step: its memory is reused."""
        self.kept.clear()
        self.block_inputs.clear()
        self.block_input_addresses.clear()

    def see_graph(self) -> None:
        """After the forward pass: saved tensors of each node behind the loss."""
        loss = self._step.loss
        if loss is None or loss.grad_fn is None:
            return
        self.kept_moment = self._next_moment()
        self.loss_address = loss.untyped_storage().data_ptr()
        modules = self._modules_by_number()
        for number, node in sorted(_nodes(loss.grad_fn), key=lambda pair: pair[0]):
            for kept in compat.kept_by_node(node):
                # Under checkpointing it is a token for recomputing the tensor.
                if isinstance(kept, Tensor) and self._has_storage(kept):
                    self.kept.append(
                        Saved(
                            address=kept.untyped_storage().data_ptr(),
                            position=self.kept_moment,
                            storage_bytes=kept.untyped_storage().nbytes(),
                            module=modules.get(number, ""),
                            op=node.name(),
                            shape=tuple(kept.shape),
                            dtype=dtype_name(kept.dtype),
                        )
                    )

    def _attach(self) -> list[RemovableHandle]:
        hooks: list[RemovableHandle] = []
        modules, _ = modules_for_hooks(self._step.module)
        for name, module in modules.items():
            if name:
                hooks += self._number(name, module)
            if isinstance(module, nn.ModuleList):
                for child, block in module.named_children():
                    full = f"{name}.{child}" if name else child
                    if full in modules:
                        hooks.append(block.register_forward_pre_hook(self._see_input_of(full), with_kwargs=True))
        return hooks

    def _number(self, name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(module: nn.Module, arguments: Any) -> None:
            self._open.append((len(self._calls), name, compat.next_sequence_number()))
            self._calls.append((name, 0, 0))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            index, name, first = self._open.pop()
            self._calls[index] = (name, first, compat.next_sequence_number())

        before = module.register_forward_pre_hook(enter, prepend=True)
        return before, module.register_forward_hook(leave, always_call=True)

    def _see_input_of(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def see(module: nn.Module, arguments: Any, named: Any) -> None:
            first = next(tensors_in([arguments, named]), None)
            if first is not None and name not in self.block_inputs:
                self.block_inputs[name] = (tuple(first.shape), dtype_name(first.dtype))
                if self._has_storage(first):
                    self.block_input_addresses[name] = first.untyped_storage().data_ptr()

        return see

    def _modules_by_number(self) -> dict[int, str]:
        return {number: name for name, first, end in self._calls for number in range(first, end)}

    def _own(self, moment: int, category: str, tensors: Iterable[tuple[str | None, Tensor]]) -> None:
        for address, name in self._storages(tensors).items():
            self.owners.append(Owned(position=moment, address=address, category=category, name=name))

    def _storages(self, tensors: Iterable[tuple[str | None, Tensor]]) -> dict[int, str | None]:
        names: dict[int, str | None] = {}
        for name, tensor in tensors:
            if self._has_storage(tensor):
                names.setdefault(tensor.untyped_storage().data_ptr(), name)
        return names

    def _has_storage(self, tensor: Tensor) -> bool:
        there = tensor.device.type == self._device.type and (tensor.device.index or 0) == (self._device.index or 0)
        return there and tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() != 0

    def _next_moment(self) -> int:
        self._on_moment(self._num_moments)
        self._num_moments += 1
        return self._num_moments - 1


def _nodes(root: Any) -> Iterator[tuple[int, Any]]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield compat.sequence_number(node), node
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        waiting += fresh
