"""Records a step's types and numbers, by hooks on its modules and modes over its operations.

The fp32 run leaves one byte per element (zero, tiny, finite, infinite, not a number) for comparison.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steplab.measurement.precision.modes import AuditPlace, Functions, Operators, types_in
from steplab.measurement.step.spans import around_calls, modules_for_hooks
from steplab.measurement.tensors import dtype_name, tensors_in
from steplab.records.numerics import Elements, ModuleAudit, OperationAudit

_ZERO, _TINY, _FINITE, _INFINITE, _NAN = 0, 1, 2, 3, 4
_COMPARED = ("num_overflowed", "num_underflowed", "num_below_range")  # with a reference
_COUNTS = ("num_inf", "num_nan", "num_zero", "num_subnormal", *_COMPARED)
_LOWEST_EXPONENT, _NUM_EXPONENTS = -160, 320  # fp32: subnormals from 2^-149, numbers below 2^128


@dataclass(slots=True)
class Tally:
    num_elements: int = 0
    _counts: list[Tensor] = field(default_factory=list)
    _extremes: list[Tensor] = field(default_factory=list)
    _was_compared: bool = True

    def add(self, tensor: Tensor, reference: Tensor | None) -> None:
        """Count a tensor's values; `reference`: `kinds_of` the same tensor in fp32."""
        x = tensor.detach()
        if x.numel() == 0:
            return
        self.num_elements += x.numel()
        magnitude, zero, nan, infinite = x.abs(), x == 0, torch.isnan(x), torch.isinf(x)
        normal = torch.finfo(x.dtype).smallest_normal
        masks = [infinite, nan, zero, ~zero & (magnitude < normal)]
        if reference is None:
            self._was_compared = False
        else:
            masks.append((infinite | nan) & (reference <= _FINITE))
            masks.append(zero & (reference > _ZERO) & (reference < _NAN))
            masks.append(zero & (reference == _TINY))
        counts = [torch.count_nonzero(mask) for mask in masks]
        counts += [torch.zeros_like(counts[0])] * (len(_COUNTS) - len(counts))
        self._counts.append(torch.stack(counts))
        largest = torch.where(infinite | nan, 0, magnitude).max()
        smallest = torch.where(zero | nan, torch.inf, magnitude).min()
        self._extremes.append(torch.stack((largest, smallest)))

    def elements(self) -> Elements | None:
        if not self.num_elements:
            return None
        counts = dict(zip(_COUNTS, torch.stack(self._counts).sum(0).tolist(), strict=True))
        if not self._was_compared:
            counts |= dict.fromkeys(_COMPARED)
        extremes = [pair.tolist() for pair in self._extremes]
        largest, smallest = max(pair[0] for pair in extremes), min(pair[1] for pair in extremes)
        return Elements(
            num_elements=self.num_elements,
            **counts,
            largest=largest if counts["num_inf"] + counts["num_nan"] < self.num_elements else None,
            smallest=smallest if smallest != torch.inf else None,
        )


def kinds_of(tensor: Tensor, low: torch.dtype) -> Tensor:
    """One byte per element: zero, tiny (zero in the type `low`), finite, infinite or not a number."""
    x = tensor.detach()
    kinds = torch.full(x.shape, _FINITE, dtype=torch.uint8, device=x.device)
    kinds[x.to(low) == 0] = _TINY
    kinds[x == 0] = _ZERO
    kinds[torch.isinf(x)] = _INFINITE
    kinds[torch.isnan(x)] = _NAN
    return kinds


class Exponents:
    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, tensor: Tensor) -> None:
        x = tensor.detach().float().flatten()
        x = x[torch.isfinite(x) & (x != 0)]
        exponents = torch.frexp(x).exponent - 1  # frexp's fraction lies between 1/2 and 1
        found = torch.bincount(exponents.long() - _LOWEST_EXPONENT, minlength=_NUM_EXPONENTS)
        self._counts = found if self._counts is None else self._counts + found

    def counts(self) -> tuple[tuple[int, int], ...]:
        """Pairs of exponent and count, by ascending exponent."""
        found = self._counts.tolist() if self._counts is not None else []
        return tuple((index + _LOWEST_EXPONENT, count) for index, count in enumerate(found) if count)


_COUNTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Key = tuple[str, str, int]
"""Module, kind of its tensor, and number within that kind."""


class _Seen:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_leaf = next(module.children(), None) is None
        self.types: dict[str, dict[str, None]] = {
            name: {} for name in ("inputs", "outputs", "gradients", "output_gradients")
        }
        self.tallies = {name: Tally() for name in ("outputs", "gradients", "output_gradients")}
        self.num_tensors = dict.fromkeys(self.tallies, 0)


class NumericsWatch:
    def __init__(
        self, model: nn.Module, device: torch.device, low: torch.dtype, reference: "NumericsWatch | None" = None
    ) -> None:
        """`low`: the audited number format. `reference`: the watch of the fp32 run; None: this is the fp32 run."""
        self.exponents = Exponents()
        """Exponents of `all_gradients`; filled only in the fp32 run."""
        self.all_gradients = Tally()
        """Gradients of parameters, and of leaf modules' outputs."""
        self._device, self._low, self._reference = device, low, reference
        self._kinds: dict[Key, Tensor] = {}
        self._modules, self.left_out = modules_for_hooks(model)
        self._seen = {name: _Seen(module) for name, module in self._modules.items()}
        self._place = AuditPlace()
        self.operators = Operators(self._place)
        self._functions = Functions(self._place, self.operators)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with around_calls(self._modules, self._enter, self._leave), self._functions, self.operators:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._place.phase = "backward"
        with self.operators:
            yield

    def gradients(self) -> None:
        counted: set[nn.Parameter] = set()  # a tied parameter has several modules
        for name, seen in self._seen.items():
            for parameter in seen.module.parameters(recurse=False):
                if parameter.grad is not None:
                    self._count(name, "gradients", parameter.grad, of_all=parameter not in counted)
                    counted.add(parameter)

    def _enter(self, name: str, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._place.enter(name)
        self._seen[name].types["inputs"] |= types_in((arguments, keywords))

    def _leave(self, name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        self._place.leave()
        self._seen[name].types["outputs"] |= types_in(output)
        for tensor in tensors_in(output):
            self._count(name, "outputs", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._count, name, "output_gradients", of_all=self._seen[name].is_leaf))

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
        return tuple(_audit(name, seen) for name, seen in self._seen.items() if any(seen.types.values()))

    def operations(self) -> tuple[OperationAudit, ...]:
        return self._functions.operations()


def _audit(name: str, seen: _Seen) -> ModuleAudit:
    return ModuleAudit(
        module=name,
        kind=type(seen.module).__name__,
        leaf=seen.is_leaf,
        parameters=tuple(dict.fromkeys(dtype_name(p.dtype) for p in seen.module.parameters(recurse=False))),
        **{name: tuple(types) for name, types in seen.types.items()},
        output_elements=seen.tallies["outputs"].elements(),
        gradient_elements=seen.tallies["gradients"].elements(),
        output_gradient_elements=seen.tallies["output_gradients"].elements(),
    )
