"""Counts the elements of a step's tensors, as values and in the symbols of docs/memory_formulas.md.

B batch, T context, V vocabulary, L layers, d width of the residual stream, f inner width of a feed-forward block, h
heads, k heads of keys and values where they are fewer, P learned positions, n ranks of tensor parallelism. A rank has
1/n of each matrix, of the heads and of the vocabulary; between matmuls it has 1/n of the tokens (model/layout.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

from steplab.specs.model import TransformerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtype:
    name: str
    """In StepSpec's spelling, such as bf16, or in words."""
    num_bytes: int


FP32 = Dtype(name="fp32", num_bytes=4)
BF16 = Dtype(name="bf16", num_bytes=2)
FP16 = Dtype(name="fp16", num_bytes=2)
FP8 = Dtype(name="fp8", num_bytes=1)
BOOL = Dtype(name="bool", num_bytes=1)
INT32 = Dtype(name="int32", num_bytes=4)
INT64 = Dtype(name="int64", num_bytes=8)


def rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class Count:
    value: int
    symbols: str
    """'B h T²'; '' for 1."""

    def formula(self, dtype: Dtype) -> str:
        """Bytes as a formula: '4 B h T²'."""
        if dtype.num_bytes == 1 and self.symbols:
            return self.symbols
        return f"{dtype.num_bytes} {self.symbols}".rstrip()


def together(*counts: Count) -> Count:
    return Count(sum(count.value for count in counts), f"({' + '.join(count.symbols for count in counts)})")


def half(count: Count) -> Count:
    return Count(count.value // 2, f"{count.symbols} / 2")


class Split(NamedTuple):
    ranks: int = 1
    tokens: bool = True
    """True if a rank has 1/n of the tokens between matmuls (sequence parallelism), as in steplab."""


WHOLE = Split()


class Sizes:
    """Element counts of all tensors in a step of the plain Transformer."""

    def __init__(self, shape: TransformerShape, batch: int, context: int, split: Split = WHOLE) -> None:
        B, T, d, f, V, h = batch, context, shape.d_model, shape.d_ff, shape.vocab_size, shape.num_heads
        P, grouped, keys = shape.learned_positions, shape.num_kv_heads is not None, shape.kv_width
        tp = split.ranks
        self.shape, self.batch, self.context = shape, batch, context
        self.heads, self.kv_heads = h // tp, shape.kv_heads // tp

        def part(value: int, symbols: str) -> Count:
            return Count(value // tp, symbols if tp == 1 else f"{symbols} / n")

        self.one = Count(1, "")
        self.tokens = Count(B * T, "B T")
        self.split_tokens = split.tokens and tp > 1
        """True under sequence parallelism of several ranks."""
        self.gathered = Count(B * T * d, "B T d")
        self.residual = part(B * T * d, "B T d")
        self.stream = self.residual if self.split_tokens else self.gathered
        self.rows_of_stream = part(B * T, "B T") if self.split_tokens else self.tokens
        self.keys = part(B * T * keys, "B T d k / h") if grouped else self.residual
        self.inner = part(B * T * f, "B T f")
        self.logits = part(B * T * V, "B T V")
        self.scores = part(B * h * T * T, "B h T²")
        self.square = Count(T * T, "T²")
        self.rows = part(B * h * T, "B h T")
        self.width = Count(d, "d")
        self.query_width = part(d, "d")
        self.inner_width = part(f, "f")
        self.key_width = part(keys, "d k / h") if grouped else self.query_width
        self.projection = part(d * d, "d²")
        self.key_projection = part(d * keys, "d² k / h") if grouped else self.projection
        self.feed_forward = part(d * f, "d f")
        self.vocabulary = part(d * V, "d V")
        self.rotary = Count(T * d // h, "T d / h")
        self.positions = Count(T, "T")
        self.positions_width = Count(T * d, "T d")
        self.position_table = part(P * d, "P d")

    def one_order(self, x: Count) -> bool:
        """True if [B, T, heads, d / h] and [B, heads, T, d / h] have the same layout in memory, so that neither is
        copied.

        x: number of elements of either.
        """
        return self.context == 1 or x.value == self.tokens.value * self.shape.head_dim
