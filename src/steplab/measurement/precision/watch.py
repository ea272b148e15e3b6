"""Records a step's types and numbers, by hooks on its modules and modes over its operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steplab.measurement.precision.elements import Exponents, Tally, kinds_of
from steplab.measurement.precision.modes import Functions, Operators, Place, types_in
from steplab.measurement.step.spans import modules_for_hooks
from steplab.measurement.tensors import dtype_name, tensors_in
from steplab.records.numerics import MatmulAudit, ModuleAudit, OperationAudit

_COUNTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Key = tuple[str, str, int]
"""Module, the kind of its tensor, and the tensor's number among those."""


class _Seen:
    """The record of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_leaf = next(module.children(), None) is None
        self.types: dict[str, dict[str, None]] = {
            name: {} for name in ("inputs", "outputs", "gradients", "output_gradients")
        }
        self.tallies = {name: Tally() for name in ("outputs", "gradients", "output_gradients")}
        self.num_tensors = dict.fromkeys(self.tallies, 0)


class NumericsWatch:
    """Records one step: `with watch.forward(): ...`, then `with watch.backward(): ...`, then `gradients()`."""

    def __init__(
        self, model: nn.Module, device: torch.device, low: torch.dtype, reference: "NumericsWatch | None" = None
    ) -> None:
        """Record a step of `model`; `low` is the type of the precision under audit.

        `reference` is the record of the fp32 run, to compare with; without one this is the reference itself, and keeps
        what a comparison needs.
        """
        self.exponents = Exponents()
        """The exponents of all gradients in `all_gradients`; counted for a reference only."""
        self.all_gradients = Tally()
        """The gradients of parameters, and of the outputs of modules without submodules."""
        self._device, self._low, self._reference = device, low, reference
        self._kinds: dict[Key, Tensor] = {}
        modules, self.left_out = modules_for_hooks(model)
        self._seen = {name: _Seen(module) for name, module in modules.items()}
        self._place = Place()
        self._operators = Operators(self._place)
        self._functions = Functions(self._place, self._operators)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context that records the forward pass inside it."""
        hooks: list[RemovableHandle] = []
        for name, seen in self._seen.items():
            hooks += self._attach(name, seen)
        try:
            with self._functions, self._operators:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context that records the backward pass inside it."""
        self._place.phase = "backward"
        with self._operators:
            yield

    def gradients(self) -> None:
        """Record the gradients of the parameters, after the backward pass."""
        counted: set[nn.Parameter] = set()  # a tied parameter has several modules
        for name, seen in self._seen.items():
            for parameter in seen.module.parameters(recurse=False):
                if parameter.grad is not None:
                    self._count(name, "gradients", parameter.grad, of_all=parameter not in counted)
                    counted.add(parameter)

    def _attach(self, name: str, seen: _Seen) -> tuple[RemovableHandle, ...]:
        def enter(module: nn.Module, arguments: Any, keywords: Any) -> None:
            self._place.enter(name)
            seen.types["inputs"] |= types_in((arguments, keywords))

        def leave(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            self._place.leave()
            seen.types["outputs"] |= types_in(output)
            for tensor in tensors_in(output):
                self._look_at_output(name, seen, tensor)

        return (
            seen.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            seen.module.register_forward_hook(leave, with_kwargs=True),
        )

    def _look_at_output(self, name: str, seen: _Seen, tensor: Tensor) -> None:
        self._count(name, "outputs", tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self._count(name, "output_gradients", grad, of_all=seen.is_leaf))

    def _count(self, name: str, what: str, tensor: Tensor, *, of_all: bool = False) -> None:
        if tensor.dtype not in _COUNTED or tensor.layout != torch.strided:
            return
        seen = self._seen[name]
        seen.types[what][dtype_name(tensor.dtype)] = None
        key = (name, what, seen.num_tensors[what])
        seen.num_tensors[what] += 1
        with self._place.counting(self._device.type):
            before = self._reference._kinds.get(key) if self._reference else None
            if before is not None and before.shape != tensor.shape:
                before = None
            seen.tallies[what].add(tensor, before)
            if of_all:
                self.all_gradients.add(tensor, before)
            if self._reference is None:
                self._kinds[key] = kinds_of(tensor, self._low)
                if of_all:
                    self.exponents.add(tensor)

    def modules(self) -> tuple[ModuleAudit, ...]:
        """The record of each module that was called, or has its own gradients."""
        return tuple(_audit(name, seen) for name, seen in self._seen.items() if any(seen.types.values()))

    def operations(self) -> tuple[OperationAudit, ...]:
        """The operations of the forward pass."""
        return self._functions.operations()

    def matmuls(self) -> tuple[MatmulAudit, ...]:
        """The operators that multiplied matrices, in both passes."""
        return self._operators.matmuls()


def _audit(name: str, seen: _Seen) -> ModuleAudit:
    return ModuleAudit(
        module=name,
        kind=type(seen.module).__name__,
        leaf=seen.is_leaf,
        parameters=tuple(dict.fromkeys(dtype_name(p.dtype) for p in seen.module.parameters(recurse=False))),
        inputs=tuple(seen.types["inputs"]),
        outputs=tuple(seen.types["outputs"]),
        gradients=tuple(seen.types["gradients"]),
        output_gradients=tuple(seen.types["output_gradients"]),
        output_elements=seen.tallies["outputs"].elements(),
        gradient_elements=seen.tallies["gradients"].elements(),
        output_gradient_elements=seen.tallies["output_gradients"].elements(),
    )
