"""fp8 linear layers, their products and casts, and a Transformer block, against bf16 and torchao.

Cases of benchmarks.kernels. No longer timed, because slower on an H200 (TFLOP/s, torch 2.11): scales of 1x128 blocks,
1,050 forward and 780 in the weight gradient, against 1,250 to 1,330 with one scale a tensor; scales of rows, equal with
fast accumulation and 5 to 10 % slower without; gradients in e4m3, equal to e5m2; other cast tiles, within 2 %.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.timing import Call, Case
from torch import Tensor, nn
from torch.nn.functional import linear

from steplab.model.compiling import compiled
from steplab.model.fused_block import FusedBlock, Stream
from steplab.model.transformer import NORM_EPS, Block, rotary_table
from steplab.ops.attention.api import AttentionFn, attention_named
from steplab.ops.fp8.casts import E5M2, amax, cast, cast_both
from steplab.ops.fp8.linear import fp8_heads, fp8_linear, fp8_swiglu, product
from steplab.ops.rms_norm import add_rms_norm, add_rms_norm_amax
from steplab.ops.rotary_heads import rotary_heads_backward_amax
from steplab.ops.swiglu import swiglu, swiglu_amax, swiglu_backward_amax
from steplab.specs.model import MODEL_SIZES

LAYERS = (8192, 2560, 10240), (8192, 10240, 2560), (32768, 4096, 11008)
BATCH, CONTEXT = 4, 2048
SHAPE = replace(MODEL_SIZES["2.7b"], projections="merged")
BF16 = torch.bfloat16
Made = Iterator[tuple[str, float, str, Callable[[], Call]]]
"""Name, amount, unit, and a maker of the call."""


def made(*sizes: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=BF16) * scale


def torchao(module: nn.Module) -> Any:
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

    return convert_to_float8_training(module)


def products(options: argparse.Namespace) -> list[Case]:
    """Products, whole layer with casts, and casts of each layer, on random data."""
    return [
        Case(name=f"{'x'.join(map(str, layer))} {name}", amount=amount, unit=unit, make=make)
        for layer in LAYERS
        for name, amount, unit, make in _of_layer(*layer)
    ]


def _of_layer(tokens: int, inputs: int, outputs: int) -> Made:
    x, weight, dy = made(tokens, inputs), made(outputs, inputs, scale=0.02), made(tokens, outputs, scale=1e-4)
    x_amax, w_amax, dy_amax = amax(x), amax(weight), amax(dy)
    (x8, x8_T), (w8, w8_T), (dy8, dy8_T) = cast_both(x, x_amax), cast_both(weight, w_amax), cast_both(dy, dy_amax, E5M2)
    flops = 2 * tokens * inputs * outputs
    yield "bf16 y", flops, "FLOP", lambda: lambda: linear(x, weight)
    yield "bf16 dx", flops, "FLOP", lambda: lambda: dy @ weight
    yield "bf16 dw", flops, "FLOP", lambda: lambda: dy.t() @ x
    for name, a, b in (("y", x8, w8), ("dx", dy8, w8_T), ("dw", dy8_T, x8_T)):
        for fast in (True, False):
            call = partial(product, a, b, BF16, fast=fast)
            yield f"fp8 {'fast' if fast else 'exact'} {name}", flops, "FLOP", lambda call=call: call  # type: ignore[misc]

    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def layer(function: Callable[[Tensor, Tensor], Tensor]) -> Call:
        return lambda: torch.autograd.grad(function(*leaves), leaves, dy)

    def by_torchao() -> Call:
        one = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=BF16))
        converted: Callable[[Tensor], Tensor] = torch.compile(torchao(one), dynamic=False)
        return lambda: torch.autograd.grad(converted(leaves[0]), (leaves[0], *one.parameters()), dy)

    with_bf16 = partial(fp8_linear, weight_gradient="bf16")
    yield "layer bf16", 3 * flops, "FLOP", lambda: layer(linear)
    yield "layer fp8_linear", 3 * flops, "FLOP", lambda: layer(fp8_linear)
    yield "layer fp8_linear, dw bf16", 3 * flops, "FLOP", lambda: layer(with_bf16)
    yield "layer torchao", 3 * flops, "FLOP", by_torchao
    size = tokens * outputs
    yield "cast copy", 4 * size, "B", lambda: dy.clone
    yield "cast amax", 2 * size, "B", lambda: lambda: amax(dy)
    yield "cast rows", 3 * size, "B", lambda: lambda: cast(dy, dy_amax, E5M2)
    yield "cast both", 4 * size, "B", lambda: lambda: cast_both(dy, dy_amax, E5M2)


# --- a block ------------------------------------------------------------------------------------------------------


class Fp8Linear(nn.Linear):
    """Reduces maxima of input, weight and gradient in a kernel each."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight)


class Fp8Block(FusedBlock):
    """Norms, SwiGLU and rotary embedding return the largest magnitudes of their outputs."""

    def forward(self, stream: Stream, rotary_2TD: Tensor | None) -> Stream:  # type: ignore[override]
        assert rotary_2TD is not None
        norm_weight, qkv_weight, output_weight, second_norm_weight, gate_up, down = self.parameters()
        normed, x, largest = add_rms_norm_amax(*stream, norm_weight, NORM_EPS)
        num_heads = self.attention.widths[0] // self.attention.head_dim
        q, k, v = fp8_heads(normed, qkv_weight, rotary_2TD, num_heads, x_amax=largest)
        branch = fp8_linear(self.attention.attend(q, k, v, causal=True).transpose(1, 2).flatten(2), output_weight)
        normed, x, largest = add_rms_norm_amax(x, branch, second_norm_weight, NORM_EPS)
        return x, fp8_swiglu(normed, gate_up, down, x_amax=largest)


def block(options: argparse.Namespace) -> list[Case]:
    """Passes over each kind of 2.7b block on 4 x 2,048 tokens, gradients compared with bf16's; then producing kernels
    with and without maxima.
    """
    attend = attention_named(options.attention)
    flops = 6 * BATCH * CONTEXT * sum(each.numel() for each in Block(SHAPE, attend).parameters())
    blocks, wanted = dict(_blocks(attend)), list[Tensor]()
    for name, make in blocks.items():
        try:
            found = [each.float() for each in make()()]
        except Exception:  # measure reports it
            continue
        wanted = wanted or found
        if "plain" not in name:
            errors = [float((ours - exact).norm() / exact.norm()) for ours, exact in zip(found, wanted, strict=True)]
            print(f"gradients of {name}, from bf16's: {' '.join(f'{error:.4f}' for error in errors)}", file=sys.stderr)
    passes = [Case(name=name, amount=flops, unit="FLOP", make=make) for name, make in blocks.items()]
    return passes + [Case(name=name, make=lambda call=call: call) for name, call in _producers()]  # type: ignore[misc]


def _block_of(kind: type[Block], attend: AttentionFn) -> Block:
    """Every kind has the same weights."""
    torch.manual_seed(0)
    one = kind(SHAPE, attend).to("cuda", BF16)
    for parameter in one.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return one


def _blocks(attend: AttentionFn) -> Iterator[tuple[str, Callable[[], Callable[[], tuple[Tensor, ...]]]]]:
    """Makers of a pass over a block: gradients of the stream and all weights."""
    x, branch, dx, d_branch = (made(BATCH, CONTEXT, SHAPE.d_model) for _ in range(4))
    stream, gradients = (x.requires_grad_(), branch.requires_grad_()), (dx, d_branch)
    table = rotary_table(CONTEXT, SHAPE.head_dim).to("cuda")

    def run(one: Block, compile: bool = False) -> Callable[[], tuple[Tensor, ...]]:
        function = compiled(one, "default") if compile else one
        if isinstance(one, FusedBlock):
            return lambda: torch.autograd.grad(function(stream, table), (*stream, *one.parameters()), gradients)
        return lambda: torch.autograd.grad(function(x, table), (x, *one.parameters()), dx)

    def one_by_one() -> Callable[[], tuple[Tensor, ...]]:
        one = _block_of(FusedBlock, attend)
        for module in one.modules():
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear
        return run(one)

    yield "bf16", lambda: run(_block_of(FusedBlock, attend))
    yield "bf16, plain block, compiled", lambda: run(_block_of(Block, attend), compile=True)
    yield "fp8", one_by_one
    yield "fp8, amax by producers", lambda: run(_block_of(Fp8Block, attend))
    yield "torchao, plain block, compiled", lambda: run(torchao(_block_of(Block, attend)), compile=True)
    yield "torchao, our block, compiled", lambda: run(torchao(_block_of(FusedBlock, attend)), compile=True)


def _producers() -> Iterator[tuple[str, Call]]:
    """Producing kernels, without and with the largest magnitude."""
    x, branch, weight = (made(*sizes, SHAPE.d_model) for sizes in ((BATCH, CONTEXT), (BATCH, CONTEXT), ()))
    joined, grad = made(BATCH, CONTEXT, 2 * SHAPE.d_ff), made(BATCH, CONTEXT, SHAPE.d_ff)
    heads = [made(BATCH, CONTEXT, SHAPE.num_heads, SHAPE.head_dim).transpose(1, 2) for _ in range(3)]
    table = rotary_table(CONTEXT, SHAPE.head_dim).to("cuda")
    plain, of_heads = torch.ops.steplab, [each.transpose(1, 2) for each in heads]
    yield "norm", lambda: add_rms_norm(x, branch, weight, NORM_EPS)
    yield "norm, amax", lambda: add_rms_norm_amax(x, branch, weight, NORM_EPS)
    yield "swiglu", lambda: swiglu(joined)
    yield "swiglu, amax", lambda: swiglu_amax(joined)
    yield "swiglu backward", lambda: plain.swiglu_backward(grad, joined)
    yield "swiglu backward, amax", lambda: swiglu_backward_amax(grad, joined)
    yield "rotary backward", lambda: plain.rotary_heads_backward(*of_heads, table)
    yield "rotary backward, amax", lambda: rotary_heads_backward_amax(heads[0], heads[1], heads[2], table)
