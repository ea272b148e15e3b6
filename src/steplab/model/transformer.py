"""The plain Transformer under test, short enough to read at once.

Pre-norm blocks without dropout. TransformerShape chooses RMSNorm or LayerNorm, rotary or learned positions, grouped
heads, SwiGLU or GELU, biases, merged linear layers, and a tied or separate output head. The blocks' class and the
functions for attention, loss and block calls are arguments, for comparisons on one model.

Shape suffixes: B batch, T tokens (context), V vocabulary, C d_model, H heads, N heads of keys and values, D head
dimension, 2 cosine and sine.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, silu

from steplab.ops.attention.api import AttentionFn
from steplab.ops.columns import columns
from steplab.specs.model import TransformerShape

LossFn = Callable[[Tensor, Tensor], Tensor]
"""(logits_NV, targets_N) -> scalar"""

HeadLossFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_NC, weight_VC, targets_N) -> scalar loss of the logits x weight^T"""

BlockCaller = Callable[[int, nn.Module, Tensor, Tensor | None], Tensor]
"""(index, block, x_BTC, rotary_2TD) -> block(x_BTC, rotary_2TD), perhaps recomputed in backward
(model.checkpointing)
"""

ROPE_BASE = 10_000.0
INIT_STD = 0.02
NORM_EPS = 1e-5


def call_plainly(index: int, block: nn.Module, x_BTC: Tensor, rotary_2TD: Tensor | None) -> Tensor:
    output: Tensor = block(x_BTC, rotary_2TD)
    return output


class Transformer(nn.Module):
    """Tokens and targets in, scalar loss out; without targets, logits out."""

    rotary_2TD: Tensor | None  # noqa: N815 (a shape suffix)

    def __init__(
        self,
        shape: TransformerShape,
        *,
        context: int,
        attention: AttentionFn,
        loss: LossFn = cross_entropy,
        head_loss: HeadLossFn | None = None,
        call_block: BlockCaller = call_plainly,
        block: "type[Block] | None" = None,
    ) -> None:
        """`head_loss` replaces the output head and `loss`. `block` is the class of the blocks, by default Block."""
        super().__init__()
        self.loss = loss
        self.head_loss = head_loss
        self.call_block = call_block
        kind = block or Block
        self.entered = kind.entered
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        learned = shape.learned_positions
        self.positions = nn.Embedding(learned, shape.d_model) if learned else None
        self.blocks = nn.ModuleList(kind(shape, attention) for _ in range(shape.num_layers))
        self.norm = kind.last_norm(shape)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        rotary_2TD = None if learned else rotary_table(context, shape.head_dim)
        self.register_buffer("rotary_2TD", rotary_2TD, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if shape.head == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        rotary_2TD = None if self.rotary_2TD is None else self.rotary_2TD[:, : tokens_BT.shape[1]]
        x_BTC = self.entered(embed(tokens_BT, self.embedding, self.positions))
        for index, block in enumerate(self.blocks):
            x_BTC = self.call_block(index, block, x_BTC, rotary_2TD)
        if targets_BT is not None and self.head_loss is not None:
            return self.head_loss(self.norm(x_BTC).flatten(0, 1), self.head.weight, targets_BT.flatten())
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        if targets_BT is None:
            return logits_BTV
        return self.loss(logits_BTV.flatten(0, 1), targets_BT.flatten())


def embed(tokens_BT: Tensor, embedding: nn.Embedding, positions: nn.Embedding | None) -> Tensor:
    x_BTC: Tensor = embedding(tokens_BT)
    if positions is None:
        return x_BTC
    positions_TC: Tensor = positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
    return x_BTC + positions_TC


def norm_of(shape: TransformerShape) -> nn.Module:
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.d_model, eps=NORM_EPS, bias=shape.has_norm_biases)
    return nn.RMSNorm(shape.d_model, eps=NORM_EPS)


class Block(nn.Module):
    compiled_within: bool = False
    """True if the forward pass is compiled. Hooks on submodules would then cause another compilation."""

    def __init__(self, shape: TransformerShape, attention: AttentionFn) -> None:
        super().__init__()
        self.attention_norm = norm_of(shape)
        self.attention = SelfAttention(shape, attention)
        self.feed_forward_norm = norm_of(shape)
        self.feed_forward = feed_forward_of(shape)

    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor | None) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rotary_2TD)
        return x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))

    @staticmethod
    def entered(x_BTC: Tensor) -> Tensor:
        return x_BTC

    @staticmethod
    def last_norm(shape: TransformerShape) -> nn.Module:
        return norm_of(shape)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention; groups of query heads may share keys and values (Ainslie et al. 2023,
    "GQA").
    """

    def __init__(self, shape: TransformerShape, attention: AttentionFn) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.attend = attention
        bias = shape.biases != "none"
        self.widths = shape.query_key_value_widths
        self.merged = shape.projections == "merged"
        if self.merged:
            self.query_key_value = nn.Linear(shape.d_model, sum(self.widths), bias=bias)
        else:
            self.query, self.key, self.value = (nn.Linear(shape.d_model, width, bias=bias) for width in self.widths)
        self.output = nn.Linear(shape.d_model, shape.d_model, bias=shape.biases == "all")

    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor | None) -> Tensor:
        projected = (
            columns(self.query_key_value(x_BTC), self.widths)
            if self.merged
            else (project(x_BTC) for project in (self.query, self.key, self.value))
        )
        q_BHTD, k_BNTD, v_BNTD = (x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x_BTD in projected)
        o_BHTD = self.attend(rotate(q_BHTD, rotary_2TD), rotate(k_BNTD, rotary_2TD), v_BNTD, causal=True)
        return self.output(o_BHTD.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(silu(self.gate(x_BTC)) * self.up(x_BTC))


class MergedSwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False) -> None:
        super().__init__()
        self.widths = d_ff, d_ff
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate_BTF, up_BTF = columns(self.gate_up(x_BTC), self.widths)
        return self.down(silu(gate_BTF) * up_BTF)


class GELU(nn.Module):
    """down(gelu(up(x))), as in GPT-2, without its approximation of gelu (Hendrycks and Gimpel 2016)."""

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(gelu(self.up(x_BTC)))


def feed_forward_of(shape: TransformerShape) -> nn.Module:
    kind: type[SwiGLU | MergedSwiGLU | GELU] = GELU
    if shape.feed_forward == "swiglu":
        kind = MergedSwiGLU if shape.projections == "merged" else SwiGLU
    return kind(shape.d_model, shape.d_ff, bias=shape.biases == "all")


def rotary_table(context: int, head_dim: int) -> Tensor:
    """Cosines, then sines, of position x frequency: [2, context, head_dim / 2] (Su et al. 2021, section 3.4)."""
    frequency_D = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_TD = torch.outer(torch.arange(context, dtype=torch.float32), frequency_D)
    return torch.stack((angle_TD.cos(), angle_TD.sin()))


def rotate(x_BHTD: Tensor, rotary_2TD: Tensor | None) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) by their position's angle, in the table's precision. Without a table (learned
    positions) return x unchanged.
    """
    if rotary_2TD is None:
        return x_BHTD
    cos_TD, sin_TD = rotary_2TD
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos_TD - b * sin_TD, b * cos_TD + a * sin_TD), dim=-1).to(x_BHTD.dtype)
