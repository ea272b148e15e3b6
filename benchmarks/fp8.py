"""fp8 linear layers, their products and casts, and a Transformer block, against bf16 and torchao.

Cases of benchmarks.kernels. No longer timed, because slower on an H200 (TFLOP/s, torch 2.11): scales of 1x128 blocks,
1,050 forward and 780 in the weight gradient, against 1,250 to 1,330 with one scale a tensor; scales of rows, equal with
fast accumulation and 5 to 10 % slower without; gradients in e4m3, equal to e5m2; other cast tiles, within 2 %.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from benchmarks.timing import Call, Case, given
from torch import Tensor, nn
from torch.nn.functional import linear

from steplab.model.compiling import compiled
from steplab.model.fp8_blocks import Fp8Linear, products_by_torchao, products_in_fp8
from steplab.model.fused_block import FusedBlock
from steplab.model.transformer import NORM_EPS, Block, rotary_table
from steplab.ops.attention.api import AttentionFn, attention_named
from steplab.ops.fp8.casts import E5M2, amax, cast_both
from steplab.ops.fp8.linear import fp8_linear, product
from steplab.ops.rms_norm import add_rms_norm, add_rms_norm_amax
from steplab.ops.rotary_heads import rotary_heads_backward_amax
from steplab.ops.swiglu import swiglu, swiglu_amax, swiglu_backward_amax
from steplab.specs.model import MODEL_SIZES

LAYERS = (8192, 2560, 10240), (8192, 10240, 2560), (32768, 4096, 11008)
BATCH, CONTEXT = 4, 2048
SHAPE = replace(MODEL_SIZES["2.7b"], projections="merged")
BF16 = torch.bfloat16


def made(*sizes: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*sizes, dtype=BF16) * scale


def products(options: argparse.Namespace) -> list[Case]:
    """Products, whole layer with casts, and casts of each layer, on random data."""
    return [case for layer in LAYERS for case in _of_layer(*layer)]


def _of_layer(tokens: int, inputs: int, outputs: int) -> Iterator[Case]:
    x, weight, dy = made(tokens, inputs), made(outputs, inputs, scale=0.02), made(tokens, outputs, scale=1e-4)
    x_amax, w_amax, dy_amax = amax(x), amax(weight), amax(dy)
    (x8, x8_T), (w8, w8_T), (dy8, dy8_T) = cast_both(x, x_amax), cast_both(weight, w_amax), cast_both(dy, dy_amax, E5M2)
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    name, flops, size = f"{tokens}x{inputs}x{outputs}", 2 * tokens * inputs * outputs, tokens * outputs
    alone: dict[str, Call] = {"bf16 y": lambda: linear(x, weight)}
    alone |= {"bf16 dx": lambda: dy @ weight, "bf16 dw": lambda: dy.t() @ x}
    for which, a, b in (("y", x8, w8), ("dx", dy8, w8_T), ("dw", dy8_T, x8_T)):
        alone |= {
            f"fp8 {'fast' if f else 'exact'} {which}": partial(product, a, b, BF16, fast=f) for f in (True, False)
        }

    def layer(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Call]:
        return given(lambda: torch.autograd.grad(function(*leaves), leaves, dy))

    def by_torchao() -> Call:
        one = nn.Sequential(nn.Linear(inputs, outputs, bias=False, dtype=BF16))
        products_by_torchao(nn.ModuleList([one]))
        converted: Callable[[Tensor], Tensor] = torch.compile(one, dynamic=False)
        return lambda: torch.autograd.grad(converted(leaves[0]), (leaves[0], *one.parameters()), dy)

    layers = {"layer bf16": layer(linear), "layer fp8_linear": layer(fp8_linear)}
    layers["layer torchao"] = by_torchao
    casts: dict[str, tuple[int, Call]] = {"cast copy": (4, dy.clone), "cast amax": (2, lambda: amax(dy))}
    casts["cast both"] = 4, lambda: cast_both(dy, dy_amax, E5M2)
    for what, call in alone.items():
        yield Case(name=f"{name} {what}", amount=flops, unit="FLOP", build=given(call))
    for what, build in layers.items():
        yield Case(name=f"{name} {what}", amount=3 * flops, unit="FLOP", build=build)
    for what, (num_bytes, call) in casts.items():
        yield Case(name=f"{name} {what}", amount=num_bytes * size, build=given(call))


# --- a block ------------------------------------------------------------------------------------------------------


def block(options: argparse.Namespace) -> list[Case]:
    """Passes over each kind of 2.7b block on 4 x 2,048 tokens, gradients compared with bf16's; then producing kernels
    with and without maxima.
    """
    attend, wanted = attention_named(options.attention), list[Tensor]()
    flops = 6 * BATCH * CONTEXT * sum(each.numel() for each in Block(SHAPE, attend).parameters())

    def errors(gradients: tuple[Tensor, ...]) -> str:
        found = [each.float() for each in gradients]
        wanted.extend([] if wanted else found)
        each = (float((ours - exact).norm() / exact.norm()) for ours, exact in zip(found, wanted, strict=True))
        return f"gradients from bf16's: {' '.join(f'{error:.4f}' for error in each)}"

    passes = [
        Case(name=name, amount=flops, unit="FLOP", build=build, check=None if "plain" in name else errors)
        for name, build in _blocks(attend)
    ]
    return passes + [Case(name=name, build=given(call)) for name, call in _producers()]


def _block_of(kind: type[Block], attend: AttentionFn, convert: Callable[[nn.Module], object] = id) -> Block:
    """Every kind has the same weights."""
    torch.manual_seed(0)
    one = kind(SHAPE, attend).to(BF16)
    for parameter in one.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    convert(nn.ModuleList([one]))
    return one


def _linear_in_fp8(blocks: nn.Module) -> None:
    """Each layer finds the maxima of input, weight and gradient in a kernel each."""
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear


def _blocks(attend: AttentionFn) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Builds of a pass over a block: gradients of the stream and all weights."""
    x, branch, dx, d_branch = (made(BATCH, CONTEXT, SHAPE.d_model) for _ in range(4))
    stream, gradients = (x.requires_grad_(), branch.requires_grad_()), (dx, d_branch)
    table = rotary_table(CONTEXT, SHAPE.head_dim).to(x.device)

    def run(one: Block, compile: bool = False) -> Call:
        function = compiled(one, "default") if compile else one
        if isinstance(one, FusedBlock):
            return lambda: torch.autograd.grad(function(stream, table), (*stream, *one.parameters()), gradients)
        return lambda: torch.autograd.grad(function(x, table), (x, *one.parameters()), dx)

    yield "bf16", lambda: run(_block_of(FusedBlock, attend))
    yield "bf16, plain block, compiled", lambda: run(_block_of(Block, attend), compile=True)
    yield "fp8", lambda: run(_block_of(FusedBlock, attend, _linear_in_fp8))
    yield "fp8, amax by producers", lambda: run(_block_of(FusedBlock, attend, products_in_fp8))
    yield "torchao, plain block, compiled", lambda: run(_block_of(Block, attend, products_by_torchao), compile=True)
    yield "torchao, our block, compiled", lambda: run(_block_of(FusedBlock, attend, products_by_torchao), compile=True)


def _producers() -> Iterator[tuple[str, Call]]:
    """Producing kernels, without and with the largest magnitude."""
    x, branch, weight = (made(*sizes, SHAPE.d_model) for sizes in ((BATCH, CONTEXT), (BATCH, CONTEXT), ()))
    joined, grad = made(BATCH, CONTEXT, 2 * SHAPE.d_ff), made(BATCH, CONTEXT, SHAPE.d_ff)
    q, k, v = (made(BATCH, CONTEXT, SHAPE.num_heads, SHAPE.head_dim).transpose(1, 2) for _ in range(3))
    table = rotary_table(CONTEXT, SHAPE.head_dim).to(x.device)
    plain, of_heads = torch.ops.steplab, [each.transpose(1, 2) for each in (q, k, v)]
    yield "norm", lambda: add_rms_norm(x, branch, weight, NORM_EPS)
    yield "norm, amax", lambda: add_rms_norm_amax(x, branch, weight, NORM_EPS)
    yield "swiglu", lambda: swiglu(joined)
    yield "swiglu, amax", lambda: swiglu_amax(joined)
    yield "swiglu backward", lambda: plain.swiglu_backward(grad, joined)
    yield "swiglu backward, amax", lambda: swiglu_backward_amax(grad, joined)
    yield "rotary backward", lambda: plain.rotary_heads_backward(*of_heads, table)
    yield "rotary backward, amax", lambda: rotary_heads_backward_amax(q, k, v, table)
