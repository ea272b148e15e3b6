"""The plain Transformer's block with one kernel for each part between matrix products.

It supports merged projections, RMSNorm, rotary embedding and SwiGLU, with the plain block's parameter names. It takes
and returns the residual stream as two tensors, stream and branch, which the next norm's kernel adds.

Shape suffixes: B batch, T tokens (context), C d_model, 2 cosine and sine.
"""

import torch
from torch import Tensor, nn

from steplab.model.transformer import NORM_EPS, Block, MergedSwiGLU, SelfAttention
from steplab.ops.attention.api import AttentionFn
from steplab.ops.attention.shapes import autocast_dtype
from steplab.ops.rms_norm import add_rms_norm
from steplab.ops.rotary_heads import rotary_heads
from steplab.ops.swiglu import swiglu
from steplab.specs.model import TransformerShape

Stream = tuple[Tensor, Tensor]
"""(x_BTC, branch_BTC): the residual stream is their sum."""


class AddRMSNorm(nn.RMSNorm):
    def forward(self, x_BTC: Tensor, branch_BTC: Tensor) -> Stream:  # type: ignore[override]
        """(normed, x + branch). normed has autocast's dtype, so that the next product needs no cast."""
        return add_rms_norm(
            x_BTC, branch_BTC, self.weight, NORM_EPS, dtype=autocast_dtype(x_BTC.device.type) or x_BTC.dtype
        )


class LastNorm(AddRMSNorm):
    def forward(self, stream: Stream) -> Tensor:  # type: ignore[override]
        return super().forward(*stream)[0]


class FusedSelfAttention(SelfAttention):
    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor | None) -> Tensor:
        assert rotary_2TD is not None
        q_BHTD, k_BNTD, v_BNTD = rotary_heads(
            self.query_key_value(x_BTC), rotary_2TD, num_heads=self.widths[0] // self.head_dim
        )
        o_BHTD = self.attend(q_BHTD, k_BNTD, v_BNTD, causal=True)
        return self.output(o_BHTD.transpose(1, 2).flatten(2))


class FusedSwiGLU(MergedSwiGLU):
    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x_BTC)))


class FusedBlock(Block):
    """Attention, then feed-forward. The norm before each also adds the previous branch to the stream."""

    fp32_gradients_of_products = True
    """True: compiled alone, it computes gradients of fp32 weights directly in fp32 (model/gradient_products)."""

    def __init__(self, shape: TransformerShape, attention: AttentionFn) -> None:
        nn.Module.__init__(self)
        self.attention_norm = AddRMSNorm(shape.d_model)
        self.attention = FusedSelfAttention(shape, attention)
        self.feed_forward_norm = AddRMSNorm(shape.d_model)
        self.feed_forward = FusedSwiGLU(shape.d_model, shape.d_ff, bias=shape.biases == "all")

    def forward(self, stream: Stream, rotary_2TD: Tensor | None) -> Stream:  # type: ignore[override]
        normed_BTC, x_BTC = self.attention_norm(*stream)
        normed_BTC, x_BTC = self.feed_forward_norm(x_BTC, self.attention(normed_BTC, rotary_2TD))
        return x_BTC, self.feed_forward(normed_BTC)

    @staticmethod
    def entered(x_BTC: Tensor) -> Stream:  # type: ignore[override]
        """x and a branch of zeros, so that the first block runs the same code as the others."""
        return x_BTC, torch.zeros_like(x_BTC, dtype=autocast_dtype(x_BTC.device.type))

    @staticmethod
    def last_norm(shape: TransformerShape) -> nn.Module:
        return LastNorm(shape.d_model)
