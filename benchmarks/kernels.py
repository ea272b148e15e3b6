"""Single kernels on a GPU against alternatives, alternating in one process (timing.py).

    python -m benchmarks.kernels adamw [--parameters 2.5e8] [--tensors 1]
    python -m benchmarks.kernels attention                       # of `small`, for Python's time per call
    python -m benchmarks.kernels cross_entropy [--tokens 8192] [--width 4096] [--entries 131072] [--dtype bf16]
    python -m benchmarks.kernels block_ops [--model xl]
    python -m benchmarks.kernels fp8_products
    python -m benchmarks.kernels fp8_block [--attention flash_triton]
    python -m benchmarks.kernels ... --tiles                     # only steplab's kernels, in other tiles
    python -m benchmarks.kernels ... --repeats 24 --output FILE.json

`steplab attention` times attention on the device. Bytes count inputs and outputs once. Memory is the allocator's peak
beyond inputs and gradients. Missing libraries are left out: liger-kernel, cut-cross-entropy, torchao, or torch 2.13's
linear_cross_entropy.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks import fp8
from benchmarks.timing import Call, Case, Constants, given, in_tiles, measure
from torch import Tensor
from torch.nn import functional

from steplab.measurement.machine.device import open_device
from steplab.ops import cross_entropy_chunks, triton_places
from steplab.ops import rms_norm as norm
from steplab.ops import rotary_heads as heads
from steplab.ops import swiglu as gated
from steplab.ops.adamw import OneKernelAdamW
from steplab.ops.attention.api import attention as any_attention
from steplab.ops.cross_entropy import linear_cross_entropy
from steplab.ops.cross_entropy_chunks import Terms
from steplab.ops.triton_places import chunk_tokens, padded_entries
from steplab.specs.model import MODEL_SIZES

BATCH, CONTEXT = 4, 512
ADAMW_BYTES = 28
"""Bytes per parameter: an update reads parameter, gradient and both moments, and writes all but the gradient. With
masters the gradient has 2 bytes instead of 4, and the weight 2 written.
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# --- AdamW --------------------------------------------------------------------------------------------------------


def adamw(options: argparse.Namespace) -> list[Case]:
    """An optimizer step, and a copy of as many bytes, half read and half written."""
    count, moved = int(options.parameters), ADAMW_BYTES * options.parameters
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}

    def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        size = count // options.tensors
        made = [torch.randn(size, dtype=dtype).requires_grad_() for _ in range(options.tensors)]
        for parameter in made:
            parameter.grad = torch.randn(size, dtype=dtype)
        return made

    def with_masters() -> Call:
        weights = parameters(torch.bfloat16)
        return OneKernelAdamW(weights, masters={weight: weight.detach().float() for weight in weights}, **settings).step

    def by_torch(**how: Any) -> Call:
        return torch.optim.AdamW(parameters(), **settings, **how).step

    def copy() -> Call:
        source = torch.empty(int(moved / 8))
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    ours = [
        Case(name="one kernel", build=lambda: OneKernelAdamW(parameters(), **settings).step, amount=moved),
        Case(name="one kernel, bf16 weights with fp32 masters", build=with_masters, amount=moved),
    ]
    if options.tiles:
        tiles: list[Constants] = [
            {"ADAMW_BLOCK": block, "ADAMW_WARPS": warps}
            for block, warps in [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16)]
        ]
        return list(in_tiles(ours, triton_places, tiles))
    peers = [
        Case(name=f"torch {name}", build=partial(by_torch, **{name: True}), amount=moved)
        for name in ("fused", "foreach")
    ]
    return [*ours, *peers, Case(name="copy of as many bytes", build=copy, amount=moved)]


# --- attention ----------------------------------------------------------------------------------------------------


def attention(options: argparse.Namespace) -> list[Case]:
    """Forward, and autograd's whole backward pass over the one operator. `copy`, a multiplication, shows its engine
    alone. B, H, S, D are as in `small` at context 512.
    """
    functions: dict[str, Callable[..., Tensor]] = {"copy": lambda q, k, v: q * k * v}
    for name in ("flash_triton", "sdpa_cudnn", "sdpa_flash", "flash_attn_4", "sdpa"):
        functions[name] = partial(any_attention, implementation=name, causal=True)
    *leaves, do = (torch.randn(4, 12, 512, 64, dtype=torch.bfloat16) for _ in range(4))
    for leaf in leaves:
        leaf.requires_grad_()

    def backward(function: Callable[..., Tensor]) -> Call:
        output = function(*leaves)
        return lambda: torch.autograd.grad(output, leaves, do, retain_graph=True)

    forwards = [Case(name=name, build=given(partial(f, *leaves))) for name, f in functions.items()]
    return [*forwards, *(Case(name=f"{name} backward", build=partial(backward, f)) for name, f in functions.items())]


# --- the output head with its loss --------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, targets) -> mean loss"""


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets)


def own(name: str) -> Loss:
    return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, implementation=name)


def liger(**options: Any) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    parameters = list(signature(Function.forward).parameters.values())[4:]  # after ctx, input, weight and target
    others = [options.get(each.name, each.default) for each in parameters]

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        output = Function.apply(hidden, weight, targets, *others)
        return output[0] if isinstance(output, tuple) else output

    return loss


def cut(filter_eps: Any) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return lambda hidden, weight, targets: cut_cross_entropy(hidden, weight, targets, filter_eps=filter_eps)


def torchs() -> Loss:
    in_torch, options = functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()  # from torch 2.13 on
    return lambda hidden, weight, targets: in_torch(hidden, weight, targets, options=options)


LOSSES: dict[str, Callable[[], Loss]] = {
    "fused": lambda: own("fused"),
    "chunked": lambda: own("chunked"),
    "torch eager": lambda: plain,
    "torch compiled": lambda: torch.compile(plain, dynamic=False),
    "torch linear_cross_entropy": torchs,
    "liger": liger,
    "liger fp32 sums": lambda: liger(accum_dtype=torch.float32),
    "cut_cross_entropy exact": lambda: cut(None),
    "cut_cross_entropy": lambda: cut("auto"),
}
"""Liger chooses its chunks; cut cross-entropy drops small gradients by default, `exact` keeps all."""


def cross_entropy(options: argparse.Namespace) -> list[Case]:
    """Forward and backward of the last linear layer with the loss, three products; with --tiles, the kernel of softmax,
    loss and gradient on a chunk's logits, read and written once.
    """
    tokens, width, entries, dtype = options.tokens, options.width, options.entries, DTYPES[options.dtype]
    if options.tiles:
        rows = chunk_tokens(tokens, entries, dtype.itemsize)

        def kernel() -> Call:
            logits = torch.randn(rows, padded_entries(entries)).to(dtype)[:, :entries]
            targets = torch.randint(entries, (rows,))
            losses, scale = torch.empty(rows), torch.ones(rows)
            return lambda: cross_entropy_chunks.triton_rows(logits, targets, losses, scale, Terms(-100, 0.0, 0.0))

        sizes = [(2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32)]
        case = Case(name="softmax, loss and gradient", build=kernel, amount=2 * rows * entries * dtype.itemsize)
        tiles: list[Constants] = [{"BLOCK": block, "NUM_WARPS": warps} for block, warps in sizes]
        return list(in_tiles([case], cross_entropy_chunks, tiles))
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(entries, width, dtype=dtype).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(entries, (tokens,))

    def passes(make: Callable[[], Loss]) -> Call:
        loss = make()

        def run() -> None:
            hidden.grad = weight.grad = None
            loss(hidden, weight, targets).backward()

        return run

    flops = 6 * tokens * width * entries
    return [Case(name=name, build=partial(passes, make), amount=flops, unit="FLOP") for name, make in LOSSES.items()]


# --- between the products of a block ------------------------------------------------------------------------------


def block_ops(options: argparse.Namespace) -> list[Case]:
    """RMSNorm with the preceding sum, rotary embedding and SwiGLU: batch 4, context 512, bf16 products, float32
    residual stream.
    """
    shape, tokens, ops = MODEL_SIZES[options.model], BATCH * CONTEXT, torch.ops.steplab
    width, inner, num_heads = shape.d_model, shape.d_ff, shape.num_heads
    table = torch.randn(2, CONTEXT, shape.head_dim // 2)
    narrow, wide = partial(torch.randn, dtype=torch.bfloat16), torch.randn
    branch, stream, joined = (narrow, tokens, width), (wide, tokens, width), (narrow, tokens, 2 * inner)
    grad, half = (narrow, BATCH, CONTEXT, num_heads, shape.head_dim), (narrow, tokens, inner)

    def norm_backward(g: Tensor, of_sum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> object:
        return ops.add_rms_norm_backward(g, of_sum, total, weight, rstd, torch.float32, torch.bfloat16)

    def norm_forward(x: Tensor, added: Tensor, weight: Tensor) -> object:
        return ops.add_rms_norm(x, added, weight, 1e-5, torch.bfloat16)

    def on(call: Callable[..., object], tensors: Sequence[tuple[Any, ...]]) -> Call:
        return partial(call, *(make(*sizes) for make, *sizes in tensors))

    def op(
        name: str, moved: int, call: Callable[..., object], tensors: list[Any], module: Any, tiles: list[Constants]
    ) -> Iterator[Case]:
        case = Case(name=name, build=partial(on, call, tensors), amount=moved, set_bytes=moved)
        return in_tiles([case], module, tiles if options.tiles else tiles[:1])

    def turn(merged: Tensor) -> object:
        return ops.rotary_heads(merged, table, num_heads)

    def turn_back(*grads: Tensor) -> object:
        return ops.rotary_heads_backward(*grads, table)

    size, weight = 4 * tokens * width, (wide, width)
    inputs = [branch, stream, stream, weight, (wide, tokens)]
    return [
        *op("add_rms_norm backward", 4 * size, norm_backward, inputs, norm, _NORM_BACKWARD),
        *op("add_rms_norm", 3 * size, norm_forward, [stream, branch, weight], norm, _NORM),
        *op("rotary_heads backward", 3 * size, turn_back, 3 * [grad], heads, _ROTARY),
        *op("rotary_heads", 3 * size, turn, [(narrow, BATCH, CONTEXT, 3 * width)], heads, _ROTARY),
        *op("swiglu backward", 10 * tokens * inner, ops.swiglu_backward, [half, joined], gated, _SWIGLU),
        *op("swiglu", 6 * tokens * inner, ops.swiglu, [joined], gated, _SWIGLU),
    ]


_NORM_BACKWARD: list[Constants] = [
    {"NUM_PROGRAMS": 132 * programs, "BACKWARD_WARPS": warps}
    for programs, warps in [(4, 8), (4, 4), (8, 4), (8, 8), (2, 16), (2, 8), (3, 8), (4, 16)]
]
"""The first are in use, as in the other lists."""
_NORM: list[Constants] = [{"FORWARD_WARPS": warps} for warps in (8, 4, 2)]
_ROTARY: list[Constants] = [
    {"ELEMENTS": size, "NUM_WARPS": warps} for size, warps in [(1024, 4), (512, 2), (2048, 8), (2048, 4)]
]
_SWIGLU: list[Constants] = [
    {"ROWS": rows, "COLUMNS": columns, "NUM_WARPS": warps}
    for rows, columns, warps in [(2, 512, 4), (4, 256, 4), (1, 1024, 4), (2, 1024, 4), (4, 512, 4)]
]


KERNELS: dict[str, Callable[[argparse.Namespace], list[Case]]] = {
    "adamw": adamw,
    "attention": attention,
    "cross_entropy": cross_entropy,
    "block_ops": block_ops,
    "fp8_products": fp8.products,
    "fp8_block": fp8.block,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", choices=KERNELS)
    parser.add_argument("--parameters", type=float, default=2.5e8)
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--entries", type=int, default=131_072)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--model", default="xl", choices=MODEL_SIZES)
    parser.add_argument("--attention", default="sdpa_cudnn")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda", help="cpu: to try the cases that run on one")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = open_device(options.device)
    with device.torch_device:
        cases = KERNELS[options.kernels](options)
    rows = measure(cases, device, options.repeats)
    name = torch.cuda.get_device_name() if device.asynchronous else options.device
    about = {"device": name, "torch": torch.__version__, "options": vars(options)}
    if options.output:
        options.output.write_text(json.dumps(about | {"rows": rows}, indent=1, default=str), encoding="utf-8")
    print(f"{about['device']}, torch {about['torch']}, medians of {options.repeats} turns\n")
    print("| kernel | µs | smallest to largest | rate | Python, µs | beyond, MiB |\n|---|--:|--:|--:|--:|--:|")
    for row in sorted((row for row in rows if row.get("samples_s")), key=lambda row: median(row["samples_s"])):
        samples = row["samples_s"]
        constants = " ".join(f"{name.lower()} {value}" for name, value in row.items() if name.isupper())
        rate = f"{row['amount'] / median(samples) / 1e12:.2f} T{row['unit']}/s" if row["amount"] else "–"
        print(
            f"| {row['name']} {constants} | {median(samples) * 1e6:.1f} | {min(samples) * 1e6:.1f} to "
            f"{max(samples) * 1e6:.1f} | {rate} | {median(row['python_s']) * 1e6:.1f} "
            f"| {(row['beyond_bytes'] or 0) / 2**20:.0f} |"
        )
    for row in rows:
        for word in {"left_out", "check"} & row.keys():
            print(f"{word.replace('_', ' ')}: {row['name']}: {row[word]}")


if __name__ == "__main__":
    main()
