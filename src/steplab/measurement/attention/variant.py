"""One implementation on one set of inputs: passes, memory, errors."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from steplab.measurement.attention.error import Inputs
from steplab.measurement.clock import ColdCall, seconds_of
from steplab.measurement.machine.device import Device, allocated_bytes
from steplab.measurement.machine.failures import failure_from
from steplab.measurement.tensors import TORCH_DTYPES, storage_sizes
from steplab.ops.attention.api import AttentionFn, attention_named
from steplab.records.attention import AttentionCell, AttentionMemory
from steplab.specs.attention import AttentionPass, AttentionSpec

MakeAttention = Callable[[AttentionSpec], AttentionFn]


def make_attention(spec: AttentionSpec) -> AttentionFn:
    function = attention_named(spec.implementation)
    if spec.compile == "off":
        return function
    compiled: AttentionFn = torch.compile(function, mode=spec.compile, dynamic=False)
    return compiled


def make_inputs(spec: AttentionSpec, device: Device, seed: int) -> Inputs:
    """Normally distributed inputs; shape and seed determine them."""
    dtype = TORCH_DTYPES.get(spec.dtype, torch.float32)
    generator = torch.Generator(device.torch_device).manual_seed(seed)

    def normal(heads: int, length: int) -> Tensor:
        shape = (spec.batch, heads, length, spec.dim)
        return torch.randn(shape, dtype=dtype, device=device.torch_device, generator=generator)

    return Inputs(
        q=normal(spec.heads, spec.queries).requires_grad_(),
        k=normal(spec.num_kv_heads, spec.num_keys).requires_grad_(),
        v=normal(spec.num_kv_heads, spec.num_keys).requires_grad_(),
        do=normal(spec.heads, spec.queries),
    )


@dataclass(kw_only=True)
class AttentionVariant:
    index: int
    cell: AttentionCell
    """Result so far."""
    function: AttentionFn
    inputs: Inputs
    ready: set[AttentionPass] = field(default_factory=set)

    @property
    def spec(self) -> AttentionSpec:
        return self.cell.spec

    def keep(self, **found: Any) -> None:
        self.cell = replace(self.cell, **found)

    def keep_memory(self, **found: int | None) -> None:
        self.keep(memory=replace(self.cell.memory or AttentionMemory(), **found))

    def note(self, text: str) -> None:
        self.keep(notes=(*self.cell.notes, text))

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.forward_for_backward()

    def forward_for_backward(self) -> Tensor:
        given = self.inputs
        return self.function(given.q, given.k, given.v, causal=self.spec.causal)

    def backward(self, output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, self.inputs.leaves, self.inputs.do)

    def fail(self, error: Exception, stage: str, device: Device) -> None:
        no_kernel = f"no kernel for {self.spec.label} on {device.torch_device.type}"
        self.keep(failure=failure_from(error, stage, device, no_kernel))

    def call(self, name: AttentionPass) -> ColdCall:
        """Backward has a forward pass before each repeat: tensors saved for all would fill the device's memory."""
        if name == "forward":
            return ColdCall(run=lambda _: self.forward())
        if name == "backward":
            return ColdCall(prepare=self.forward_for_backward, run=self.backward)
        return ColdCall(run=lambda _: self.backward(self.forward_for_backward()))


def try_forward(variant: AttentionVariant, device: Device) -> Tensor:
    variant.keep(first_call_s=seconds_of(variant.forward, device))
    gauge = Gauge(device)
    output = variant.forward()
    variant.keep_memory(forward_peak_bytes=gauge.peak())
    variant.ready.add("forward")
    return output


def try_both(variant: AttentionVariant, device: Device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run forward and backward, measuring memory; returns output and gradients."""
    first_s = seconds_of(lambda: variant.backward(variant.forward_for_backward()), device)
    variant.keep(first_call_s=first_s + (variant.cell.first_call_s or 0.0))
    gauge = Gauge(device)
    if allocated_bytes(device) is None:
        saved = SavedTensors(variant.inputs)
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
            output = variant.forward_for_backward()
        saved.keep(output)
        variant.keep_memory(saved_bytes=saved.num_bytes())
        del saved
    else:
        output = variant.forward_for_backward()
        variant.keep_memory(saved_bytes=gauge.now())
    gradients = variant.backward(output)
    variant.keep_memory(both_peak_bytes=gauge.peak())
    variant.ready |= {"backward", "both"}
    return output.detach(), gradients


class Gauge:
    """Allocated bytes beyond those at its creation, now and at the peak."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        device.reset_peak()
        self._before = allocated_bytes(device)

    def now(self) -> int | None:
        """Allocated bytes, less those at this object's creation; None if the allocator does not count."""
        after = allocated_bytes(self._device)
        return after - self._before if after is not None and self._before is not None else None

    def peak(self) -> int | None:
        self._device.synchronize()
        peak = self._device.peak("step")
        return peak.peak_allocated_bytes - self._before if peak and self._before is not None else None


class SavedTensors:
    """Count storages that autograd saves on a CPU, whose allocator does not count."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = storage_sizes(inputs.leaves)
        self._held: list[Tensor] = []

    def keep(self, tensor: Tensor) -> Tensor:
        """Pack hook that holds the tensor, so that its address is not reused."""
        self._held.append(tensor.detach())
        return tensor

    def num_bytes(self) -> int:
        return sum(size for address, size in storage_sizes(self._held).items() if address not in self._inputs)
