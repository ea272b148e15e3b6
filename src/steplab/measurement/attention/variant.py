"""One implementation on one set of inputs: passes, memory, errors."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steplab.measurement.attention.error import Inputs
from steplab.measurement.clock import ColdCall, seconds_of
from steplab.measurement.machine.device import Device, allocated_bytes
from steplab.measurement.machine.failures import failure_of, has_no_kernel, refused_memory
from steplab.measurement.tensors import TORCH_DTYPES
from steplab.ops.attention.api import AttentionFn, attention_named
from steplab.records.attention import AttentionCell, AttentionMemory, TensorError
from steplab.records.failure import Failure
from steplab.records.timing import PhaseSamples
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
    spec: AttentionSpec
    function: AttentionFn
    inputs: Inputs
    ready: set[AttentionPass] = field(default_factory=set)
    samples: dict[AttentionPass, list[float]] = field(default_factory=dict)
    interleaved: tuple[str, ...] = ()
    failure: Failure | None = None
    first_call_s: float | None = None
    saved_bytes: int | None = None
    forward_peak_bytes: int | None = None
    both_peak_bytes: int | None = None
    errors: tuple[TensorError, ...] = ()
    checked_heads: int | None = None
    notes: list[str] = field(default_factory=list)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.forward_for_backward()

    def forward_for_backward(self) -> Tensor:
        given = self.inputs
        return self.function(given.q, given.k, given.v, causal=self.spec.causal)

    def backward(self, output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, self.inputs.leaves, self.inputs.do)

    def fail(self, error: Exception, stage: str, device: Device) -> None:
        self.failure = refused_memory(error, stage, device)
        if self.failure is None and has_no_kernel(error):
            message = f"no kernel for {self.spec.label} on {device.torch_device.type}"
            self.failure = Failure(kind="error", message=message, phase=stage)
        self.failure = self.failure or failure_of(error, stage)

    def call(self, name: AttentionPass) -> ColdCall:
        """Backward has a forward pass before each repeat: tensors saved for all would fill the device's memory."""
        if name == "forward":
            return ColdCall(run=lambda _: self.forward())
        if name == "backward":
            return ColdCall(prepare=self.forward_for_backward, run=self.backward)
        return ColdCall(run=lambda _: self.backward(self.forward_for_backward()))

    def note_waiting(self, name: AttentionPass, num_waits: int, repeats: int) -> None:
        if num_waits:
            self.notes.append(
                f"{name}: in {num_waits} of {repeats} repeats the device may have waited for Python, which had "
                "not started all kernels in time"
            )

    def cell(self, device: Device) -> AttentionCell:
        memory = AttentionMemory(
            saved_bytes=self.saved_bytes,
            forward_peak_bytes=self.forward_peak_bytes,
            both_peak_bytes=self.both_peak_bytes,
        )
        passes = (
            PhaseSamples(phase=name, device_s=tuple(s))
            if device.asynchronous
            else PhaseSamples(phase=name, host_s=tuple(s))
            for name, s in self.samples.items()
            if s
        )
        return AttentionCell(
            spec=self.spec,
            passes=tuple(passes),
            first_call_s=self.first_call_s,
            memory=memory,
            errors=self.errors,
            checked_heads=self.checked_heads,
            interleaved=self.interleaved,
            failure=self.failure,
            notes=tuple(self.notes),
        )


def try_forward(variant: AttentionVariant, device: Device) -> Tensor:
    variant.first_call_s = seconds_of(variant.forward, device)
    gauge = Gauge(device)
    output = variant.forward()
    variant.forward_peak_bytes = gauge.peak()
    variant.ready.add("forward")
    return output


def try_both(variant: AttentionVariant, device: Device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run forward and backward, measuring memory; returns output and gradients."""
    first_s = seconds_of(lambda: variant.backward(variant.forward_for_backward()), device)
    variant.first_call_s = first_s + (variant.first_call_s or 0.0)
    gauge = Gauge(device)
    if allocated_bytes(device) is None:
        saved = SavedTensors(variant.inputs)
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
            output = variant.forward_for_backward()
        saved.keep(output)
        variant.saved_bytes = saved.num_bytes()
        del saved
    else:
        output = variant.forward_for_backward()
        variant.saved_bytes = gauge.now()
    gradients = variant.backward(output)
    variant.both_peak_bytes = gauge.peak()
    variant.ready |= {"backward", "both"}
    return output.detach(), gradients


class Gauge:
    """Count bytes allocated since its creation."""

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
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs.leaves}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Pack hook that holds the storage, so that its address is not reused."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return tensor

    def num_bytes(self) -> int:
        return sum(storage.nbytes() for address, storage in self._storages.items() if address not in self._inputs)
