"""Converts linear layers of blocks to fp8: the plain Transformer's by steplab.ops.fp8, any model's by torchao.

Modules are replaced in place by others of the same parameters, after weights are loaded. The head, the embedding, norms
and attention stay. With fused block operators, norm, SwiGLU and rotary kernels also return the largest magnitude of
their results, so the cast to fp8 need not read a result twice.

Shape suffixes: B batch, T tokens (context), C d_model, 2 cosine and sine.
"""

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported
from steplab.model.compiling import repeated_blocks
from steplab.model.fused_block import AddRMSNorm, FusedBlock, FusedSelfAttention, FusedSwiGLU, Stream
from steplab.model.transformer import NORM_EPS
from steplab.ops.fp8.linear import fp8_heads, fp8_linear, fp8_swiglu
from steplab.ops.rms_norm import add_rms_norm_amax
from steplab.ops.triton_places import FP8_MULTIPLE

_BF16 = torch.bfloat16


class Fp8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = fp8_linear(x.to(_BF16), self.weight.to(_BF16))
        return y if self.bias is None else y + self.bias.to(_BF16)


class AddRMSNormAmax(AddRMSNorm):
    """Also returns the largest magnitude of the normed tensor, for its cast to fp8."""

    def forward(self, x_BTC: Tensor, branch_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm_amax(x_BTC, branch_BTC, self.weight, NORM_EPS, dtype=_BF16)


class Fp8SelfAttention(FusedSelfAttention):
    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor | None, amax: Tensor) -> Tensor:  # type: ignore[override]
        assert rotary_2TD is not None
        weight, num_heads = self.query_key_value.weight, self.widths[0] // self.head_dim
        q_BHTD, k_BNTD, v_BNTD = fp8_heads(x_BTC, weight.to(_BF16), rotary_2TD, num_heads, x_amax=amax)
        return self.output(self.attend(q_BHTD, k_BNTD, v_BNTD, causal=True).transpose(1, 2).flatten(2))


class Fp8SwiGLU(FusedSwiGLU):
    def forward(self, x_BTC: Tensor, amax: Tensor) -> Tensor:  # type: ignore[override]
        return fp8_swiglu(x_BTC, self.gate_up.weight.to(_BF16), self.down.weight.to(_BF16), x_amax=amax)


class Fp8Block(FusedBlock):
    def forward(self, stream: Stream, rotary_2TD: Tensor | None) -> Stream:  # type: ignore[override]
        normed_BTC, x_BTC, amax = self.attention_norm(*stream)
        normed_BTC, x_BTC, amax = self.feed_forward_norm(x_BTC, self.attention(normed_BTC, rotary_2TD, amax))
        return x_BTC, self.feed_forward(normed_BTC, amax)


_IN_FP8: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Fp8Linear,
    AddRMSNorm: AddRMSNormAmax,
    FusedSelfAttention: Fp8SelfAttention,
    FusedSwiGLU: Fp8SwiGLU,
    FusedBlock: Fp8Block,
}


def products_in_fp8(module: nn.Module) -> None:
    for block in repeated_blocks(module):
        for each in block.modules():
            if kind := _IN_FP8.get(type(each)):
                each.__class__ = kind


def products_by_torchao(module: nn.Module) -> None:
    """Convert linear layers within a model's repeated blocks by torchao, with a scale per tensor.

    Only layers with multiples of 16 as inputs and outputs are converted. Raises Unsupported without torchao, blocks, or
    such a layer.
    """
    try:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]
    except ImportError as error:
        why = "torchao is not installed" if error.name == "torchao" else f"torchao cannot be imported ({error})"
        raise Unsupported("precision fp8_torchao", why, "pip install torchao, or use --precision fp8") from error
    converted = list[str]()

    def serves(layer: nn.Module, name: str) -> bool:
        served = isinstance(layer, nn.Linear) and not any(size % FP8_MULTIPLE for size in layer.weight.shape)
        if served:
            converted.append(name)
        return served

    for block in repeated_blocks(module):
        convert_to_float8_training(block, module_filter_fn=serves)
    if not converted:
        why = f"no linear layer of its blocks has inputs and outputs that are multiples of {FP8_MULTIPLE}"
        raise Unsupported("precision fp8_torchao", why, "use --precision bf16")
