"""Lists the weights of one rank under tensor parallelism, and the size of their FSDP shards."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steplab.specs.model import TransformerShape

PartName = Literal["embedding", "block", "head"]


@dataclass(frozen=True, slots=True)
class Weight:
    name: str
    rows: int
    row_elements: int
    trained: bool = True
    """True if it has a gradient and optimizer state."""

    @property
    def elements(self) -> int:
        return self.rows * self.row_elements

    @property
    def of_linear_layer(self) -> bool:
        return not any(word in self.name for word in ("norm", "embedding", "positions"))

    def shard(self, ranks: int) -> int:
        """Elements of the first rank's shard, the largest, because rows are not split."""
        return math.ceil(self.rows / ranks) * self.row_elements

    def padded(self, ranks: int) -> int:
        """Elements in transit when all shards travel, each padded to the largest."""
        return self.shard(ranks) * ranks


@functools.lru_cache(maxsize=1024)
def weights_of(shape: TransformerShape, part: PartName, tp: int) -> tuple[Weight, ...]:
    """One rank's weights of the embedding, of one block or of the head, in the order of the model.

    Tensor parallelism splits matrices by outputs or by inputs and leaves norms whole (model.layout).
    """
    d, f, v, learned = shape.d_model, shape.d_ff, shape.vocab_size, shape.learned_positions
    if part == "embedding":
        positions = (Weight("positions.weight", learned // tp, d),) if learned else ()
        return (Weight("embedding.weight", v // tp, d), *positions)
    if part == "head":
        return (*_norm(shape, "norm"), *(() if shape.head == "tied" else (Weight("head.weight", v // tp, d),)))
    of_inputs, of_all = shape.biases != "none", shape.biases == "all"
    *wide, last = shape.feed_forward_layers
    widths = dict(zip(("query", "key", "value"), shape.query_key_value_widths, strict=True))
    inner = dict.fromkeys(wide, f)
    if shape.projections == "merged":
        widths, inner = {"query_key_value": sum(widths.values())}, {"gate_up": 2 * f} if len(wide) > 1 else inner
    return (
        *_norm(shape, "attention_norm"),
        *(w for name, width in widths.items() for w in _linear(f"attention.{name}", width // tp, d, of_inputs)),
        *_linear("attention.output", d, d // tp, of_all),
        *_norm(shape, "feed_forward_norm"),
        *(w for name, width in inner.items() for w in _linear(f"feed_forward.{name}", width // tp, d, of_all)),
        *_linear(f"feed_forward.{last}", d, f // tp, of_all),
    )


def _linear(name: str, rows: int, row_elements: int, has_bias: bool) -> tuple[Weight, ...]:
    bias = (Weight(f"{name}.bias", rows, 1),) if has_bias else ()
    return (Weight(f"{name}.weight", rows, row_elements), *bias)


def _norm(shape: TransformerShape, name: str) -> tuple[Weight, ...]:
    return _linear(name, shape.d_model, 1, shape.has_norm_biases)


def elements(weights: Sequence[Weight]) -> int:
    return sum(weight.elements for weight in weights)


def trained(weights: Sequence[Weight]) -> int:
    return sum(weight.elements for weight in weights if weight.trained)
