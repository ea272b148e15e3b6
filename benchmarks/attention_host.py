"""Microseconds of the host for one call of attention, forward and backward: what a small model waits for.

    python -m benchmarks.attention_host [calls]        (from the root of the checkout, on a CUDA GPU)

The shape is so small that the device is never behind. The host's clock runs over many calls without waiting for the
device, implementations in turns, and the median over the turns is shown. Backward is autograd's whole pass over the
one operator, its engine included, which `copy` shows alone: a multiplication by one in place of attention.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from steplab.ops.attention.api import attention
from steplab.ops.errors import Unsupported

NAMES = ("flash_triton", "sdpa_cudnn", "sdpa_flash", "flash_attn_4", "sdpa")
TURNS = 15
SHAPE = (4, 12, 512, 64)  # B, H, S, D of `small` at context 512


def one_call(function: Callable[[Tensor, Tensor, Tensor], Tensor], calls: int) -> tuple[float, float]:
    """Seconds of the host for a forward and for a backward call."""
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    do = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = [function(q, k, v) for _ in range(calls)]
    forward = time.perf_counter() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    for output in outputs:
        torch.autograd.grad(output, (q, k, v), do)
    backward = time.perf_counter() - started
    torch.cuda.synchronize()
    return forward / calls, backward / calls


def main(calls: str = "30") -> None:
    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"copy": lambda q, k, v: q * k * v}
    for name in NAMES:
        function: Callable[[Tensor, Tensor, Tensor], Tensor] = partial(attention, implementation=name, causal=True)
        try:
            one_call(function, 3)
        except (Unsupported, ImportError) as error:
            print(f"{name}: not measured: {error}")
        else:
            functions[name] = function
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(TURNS):
        for name, function in functions.items():
            samples[name].append(one_call(function, int(calls)))
    print(f"{'implementation':16} {'forward µs':>11} {'backward µs':>12}")
    for name, pairs in samples.items():
        forward, backward = (median(column) * 1e6 for column in zip(*pairs, strict=True))
        print(f"{name:16} {forward:11.1f} {backward:12.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
