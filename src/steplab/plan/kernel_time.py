"""Predicts a kernel's time in seconds, from its sizes and its measured rate (costs.kernel_time).

For an eager step it also predicts Python's time to call the operators, and the GPU's waits for Python.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steplab.costs.kernel_time import attention_s, product_s, streaming_s
from steplab.costs.operators import BACKWARD_FLOPS
from steplab.costs.rates import Gpu, HostRates
from steplab.plan.dry_run.events import CHOSEN_BY_TORCH, MADE_BY_HOST, READS_A_VALUE, Operator
from steplab.plan.fusion import Kernel
from steplab.records.step_time import TimePart
from steplab.specs.step import StepSpec

HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
_FLOPS_OF_A_DRAW = (74 / 4, 40 / 4 / BACKWARD_FLOPS)
"""fp32 FLOPs to draw dropout's random numbers, forward and backward, as multiples of attention's FLOPs over the head
dimension.

They amount to 74 and 40 FLOPs a score. cuDNN's kernel takes 1.1 and 0.6 ps a score on an H200.
"""
_ONE_PASS = {"rotary_heads": "fused", "swiglu": "fused"}
_ONE_PASS |= {"add_rms_norm": "fused reduction", "cross_entropy_softmax": "fused reduction"}
"""Operators that run as one Triton kernel, with the compiled kernels that resemble them."""


def kernel_in_step_s(kernel: Kernel, gpu: Gpu, *, replayed: bool = False) -> float:
    """Seconds from a kernel's start to the next one's, in a step where Python is ahead of the GPU.

    replayed: True if a CUDA graph launches the kernels.
    """
    step, factor = gpu.rates.step, gpu.rates.step.product_factor
    if kernel.operator.kind == "streaming":
        factor = 1.0 if kernel.operator.phase == "optimizer" else step.streaming_factor  # updates were fitted in steps
    return kernel_s(kernel, gpu) * factor + step.gap(replayed)


class KernelTimes:
    """Seconds of kernels, as `kernel_in_step_s` predicts them, computed once for all kernels of the same sizes."""

    def __init__(self, gpu: Gpu, *, replayed: bool = False) -> None:
        self._gpu, self._replayed = gpu, replayed
        self._known: dict[tuple[object, ...], float] = {}

    def of(self, kernel: Kernel) -> float:
        op, streaming = kernel.operator, streaming_name(kernel)
        sizes = (streaming, op.name, op.rate, op.kind, op.dtype, op.product, op.flops, kernel.moved_bytes)
        if sizes not in self._known:
            self._known[sizes] = kernel_in_step_s(kernel, self._gpu, replayed=self._replayed)
        return self._known[sizes]


def kernel_s(kernel: Kernel, gpu: Gpu) -> float:
    op = kernel.operator
    if op.kind == "matmul" and op.product is not None:
        return product_s(op.product, op.dtype, gpu)
    if op.kind == "attention" and op.product is not None:
        name, backward = op.name.removesuffix("_backward"), op.name.endswith("_backward")
        if op.rate == CHOSEN_BY_TORCH and HOPPER.search(gpu.name):
            # sdp_utils.cpp: check_prefer_cudnn_attention; with a mask, the tracer could not choose flash attention
            name = "sdpa_cudnn masked" if name == "sdpa_efficient" else "sdpa_cudnn"
        whole = 2 * op.product.flops * (BACKWARD_FLOPS if backward else 1)  # as if computed without a mask
        drawn = op.flops / op.product.k * _FLOPS_OF_A_DRAW[backward] if op.dropout else 0.0
        seconds = attention_s(name, op.product, op.dtype, gpu, backward=backward, causal=op.flops < whole)
        return seconds + drawn / gpu.peaks.get("fp32", math.inf)
    return streaming_s(streaming_name(kernel), kernel.moved_bytes, gpu)


def streaming_name(kernel: Kernel) -> str:
    if kernel.fused:
        reduction = "fused softmax" if kernel.exponentials else "fused reduction"
        return "fused sum of rows" if kernel.sums_rows else reduction if kernel.reduces else "fused"
    op = kernel.operator
    if op.rate:
        return op.rate
    if like := _ONE_PASS.get(op.name.removesuffix("_backward")):
        return like
    if widens(op):
        return f"{op.name} widening"
    return f"{op.name} strided" if op.strided else op.name


def widens(op: Operator) -> bool:
    """True if an input has half the width of the result, as in adding bf16 to an fp32 residual stream.

    torch's converting kernels reach half the bandwidth of others.
    """
    return op.name in ("add", "copy", "mul") and any(2 * each.num_bytes == op.written_bytes for each in op.reads)


def on_tensor_cores(work: Operator | TimePart) -> bool:
    """True for matmuls and fused attention on tensor cores, whose power depends on their share of the peak."""
    return work.kind != "streaming" and work.dtype != "fp32"


@dataclass(frozen=True, slots=True)
class Host:
    host_s: float
    idle_s: float


def hosts_of(spec: StepSpec, gpu: Gpu, operators: Iterable[Operator] | None) -> tuple[dict[str, Host], ...]:
    """Python's time and the GPU's idle time by phase, for a quick CPU and for the measured one.

    Empty if the CPU's time per operator is unknown, or if the step is compiled or was not traced. Python waits for the
    GPU where the model reads a value off a tensor, as transformers does to detect packed sequences.
    """
    rates = gpu.rates.host
    if operators is None or spec.compile != "off" or not rates.forward_call_s:
        return ()
    launches = launches_of(operators, gpu)
    return tuple(waiting(launches, rates, factor) for factor in (rates.eager_s / rates.eager_slow_s, 1.0))


@dataclass(frozen=True, slots=True)
class Launch:
    phase: str
    calls: int
    device_s: float
    is_awaited: bool
    """True if Python waits for the result, as for `.item()`."""


def launches_of(operators: Iterable[Operator], gpu: Gpu) -> list[Launch]:
    times = KernelTimes(gpu)
    return [
        Launch(op.phase, op.calls, times.of(Kernel(op, op.moved_bytes)), op.name == READS_A_VALUE)
        for op in operators
        if op.name != MADE_BY_HOST
    ]


def waiting(launches: Sequence[Launch], rates: HostRates, factor: float = 1.0) -> dict[str, Host]:
    """Python's time and the GPU's idle time by phase.

    factor: the CPU's time per operator, relative to the CPU of `rates`.
    """
    device = host = 0.0
    host_s, idle_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for step in (1, 2):  # the second begins as far ahead as the first ends
        for launch in launches:
            call_s = rates.forward_call_s if launch.phase == "forward" else rates.backward_call_s
            host += factor * launch.calls * call_s
            if step == 2:
                host_s[launch.phase] += factor * launch.calls * call_s
                idle_s[launch.phase] += max(0.0, host - device)
            device = max(device, host) + launch.device_s
            if launch.is_awaited:
                host = device
    return {phase: Host(host_s[phase], idle_s[phase]) for phase in host_s}
