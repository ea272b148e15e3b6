"""A Transformer block forward and backward on a GPU: in bf16, in fp8, and as torchao converts it.

    python -m benchmarks.fp8_block fp8_block.json [--attention flash_triton]      # 2 minutes on an H200

The block is one of 2.7b, on 4 x 2,048 tokens. All cells alternate, on random data, in CUDA graphs of 30 ms; printed are
medians over turns, TFLOP/s of the products, and the step if its 32 blocks took so much more or less than those of bf16:
head, loss, optimizer and embedding stay as they are. Then the kernels that write values, with and without the largest
magnitude of them. A cell that fails prints why, the others go on.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from benchmarks.fp8_products import BF16, built, gauges, made, shown, turns_of
from torch import Tensor, nn

from steplab.model.compiling import compiled
from steplab.model.fused_block import FusedBlock, Stream
from steplab.model.transformer import NORM_EPS, Block, rotary_table
from steplab.ops.attention.api import AttentionFn, attention_named
from steplab.ops.fp8.joined import fp8_heads, fp8_swiglu
from steplab.ops.fp8.linear import fp8_linear
from steplab.ops.rms_norm import add_rms_norm, add_rms_norm_amax
from steplab.ops.rotary_heads import rotary_heads_backward_amax
from steplab.ops.swiglu import swiglu, swiglu_amax, swiglu_backward_amax
from steplab.specs.model import MODEL_SIZES, TransformerShape

BATCH, CONTEXT, NUM_BLOCKS = 4, 2048, 32
SHAPE = replace(MODEL_SIZES["2.7b"], projections="merged")
STEP_MS = 313.0
"""A step of 2.7b in bf16 on an H200."""
Made = Iterator[tuple[str, Callable[[], Callable[[], object]]]]


class Fp8Linear(nn.Linear):
    """Finds the largest magnitudes of its input, its weight and its gradient by a kernel for each."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight)


class Fp8Block(FusedBlock):
    """Norms, SwiGLU and rotary embedding give the largest magnitudes of what they write."""

    def forward(self, stream: Stream, rotary_2TD: Tensor | None) -> Stream:  # type: ignore[override]
        assert rotary_2TD is not None
        norm_weight, qkv_weight, output_weight, second_norm_weight, gate_up, down = self.parameters()
        normed, x, largest = add_rms_norm_amax(*stream, norm_weight, NORM_EPS)
        num_heads = self.attention.widths[0] // self.attention.head_dim
        q, k, v = fp8_heads(normed, qkv_weight, rotary_2TD, num_heads, x_amax=largest)
        branch = fp8_linear(self.attention.attend(q, k, v, causal=True).transpose(1, 2).flatten(2), output_weight)
        normed, x, largest = add_rms_norm_amax(x, branch, second_norm_weight, NORM_EPS)
        return x, fp8_swiglu(normed, gate_up, down, x_amax=largest)


def block_of(kind: type[Block], shape: TransformerShape, attend: AttentionFn) -> Block:
    """Its weights are the same for every kind."""
    torch.manual_seed(0)
    block = kind(shape, attend).to("cuda", BF16)
    for parameter in block.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return block


def blocks(shape: TransformerShape, attend: AttentionFn, batch: int, context: int) -> Made:
    """A pass over each kind of block: gradients of the stream and of all weights."""
    x, branch, dx, d_branch = (made(batch, context, shape.d_model) for _ in range(4))
    stream, gradients = (x.requires_grad_(), branch.requires_grad_()), (dx, d_branch)
    table = rotary_table(context, shape.head_dim).to("cuda")

    def run(block: Block, compile: bool = False) -> Callable[[], tuple[Tensor, ...]]:
        function = compiled(block, "default") if compile else block
        leaves = (*stream, *block.parameters())
        if isinstance(block, FusedBlock):
            return lambda: torch.autograd.grad(function(stream, table), leaves, gradients)
        return lambda: torch.autograd.grad(function(x, table), (x, *block.parameters()), dx)

    def one_by_one() -> Callable[[], tuple[Tensor, ...]]:
        block = block_of(FusedBlock, shape, attend)
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear
        return run(block)

    def torchao(kind: type[Block]) -> Callable[[], tuple[Tensor, ...]]:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

        return run(convert_to_float8_training(block_of(kind, shape, attend)), compile=True)

    yield "bf16", lambda: run(block_of(FusedBlock, shape, attend))
    yield "bf16, plain block, compiled", lambda: run(block_of(Block, shape, attend), compile=True)
    yield "fp8", one_by_one
    yield "fp8, amax by producers", lambda: run(block_of(Fp8Block, shape, attend))
    yield "torchao, plain block, compiled", lambda: torchao(Block)
    yield "torchao, our block, compiled", lambda: torchao(FusedBlock)


def producers(shape: TransformerShape, batch: int, context: int) -> Made:
    """Kernels that write values, each without and with the largest magnitude."""
    x, branch, weight = (made(*sizes, shape.d_model) for sizes in ((batch, context), (batch, context), ()))
    joined, grad = made(batch, context, 2 * shape.d_ff), made(batch, context, shape.d_ff)
    heads = [made(batch, context, shape.num_heads, shape.head_dim).transpose(1, 2) for _ in range(3)]
    table = rotary_table(context, shape.head_dim).to("cuda")
    plain, of_heads = torch.ops.steplab, [each.transpose(1, 2) for each in heads]
    yield "norm", lambda: lambda: add_rms_norm(x, branch, weight, NORM_EPS)
    yield "norm, amax", lambda: lambda: add_rms_norm_amax(x, branch, weight, NORM_EPS)
    yield "swiglu", lambda: lambda: swiglu(joined)
    yield "swiglu, amax", lambda: lambda: swiglu_amax(joined)
    yield "swiglu backward", lambda: lambda: plain.swiglu_backward(grad, joined)
    yield "swiglu backward, amax", lambda: lambda: swiglu_backward_amax(grad, joined)
    yield "rotary backward", lambda: lambda: plain.rotary_heads_backward(*of_heads, table)
    yield "rotary backward, amax", lambda: lambda: rotary_heads_backward_amax(heads[0], heads[1], heads[2], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--attention", default="sdpa_cudnn")
    options = parser.parse_args()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "attention": options.attention}
    cells = built(blocks(SHAPE, attention_named(options.attention), BATCH, CONTEXT))
    found: list[Tensor]
    for name, call in cells.items():
        found = [each.float() for each in call()]  # type: ignore[attr-defined]
        if name == "bf16":
            wanted = found
        elif "plain" not in name:
            errors = [float((ours - exact).norm() / exact.norm()) for ours, exact in zip(found, wanted, strict=True)]
            print(f"gradients of {name}, beside those of bf16: " + " ".join(f"{error:.4f}" for error in errors))
    rows = turns_of(cells, gauges())
    del cells, found, wanted
    torch.cuda.empty_cache()
    small = turns_of(built(producers(SHAPE, BATCH, CONTEXT)), gauges())
    options.output.write_text(json.dumps(about | {"blocks": rows, "producers": small}))
    num_flops = 6 * BATCH * CONTEXT * sum(each.numel() for each in Block(SHAPE, attention_named("sdpa")).parameters())
    print(f"{about}\nms, TFLOP/s and ms of a step, ms of Python without a graph, MHz, W")
    for name, row in rows.items():
        ms = median(row["ms"])
        step_ms = STEP_MS + NUM_BLOCKS * (ms - median(rows["bf16"]["ms"]))
        print(shown(name, row, f"{num_flops / ms / 1e9:.0f} {step_ms:.0f}"))
    for name, row in small.items():
        print(shown(name, row))


if __name__ == "__main__":
    main()
