"""The plain Transformer cut into stages of a pipeline: runs of blocks, the first with the embedding, the last with the
head.

Parameters keep their names, so that a stage's are found in the whole model.

Shape suffixes as in transformer.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from steplab.model.transformer import Block, Transformer, embed
from steplab.specs.layout import blocks_of_stage

Around = Callable[[], AbstractContextManager[object]]
"""Gives a context, such as autocast's."""


def blocks_of(module: "Transformer | TransformerStage") -> dict[int, Block]:
    """The blocks by their places in the whole model."""
    return {int(name): block for name, block in module.blocks.named_children() if isinstance(block, Block)}


class TransformerStage(nn.Module):
    """Tokens (first stage) or the residual stream in; the residual stream or logits (last stage) out."""

    rotary_2TD: Tensor | None  # noqa: N815 (a shape suffix)

    def __init__(self, whole: Transformer, number: int, num_stages: int, around: Around = nullcontext) -> None:
        """Build a stage that shares its parameters with `whole`; `around` is entered for each forward pass."""
        super().__init__()
        self.around = around
        self.embedding = whole.embedding if number == 0 else None
        self.positions = whole.positions if number == 0 else None
        indices = blocks_of_stage(number, num_stages, len(whole.blocks))
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in indices})
        last = number == num_stages - 1
        self.norm = whole.norm if last else None
        self.head = whole.head if last else None
        self.register_buffer("rotary_2TD", whole.rotary_2TD, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens [B, T] or the residual stream [B, T / tp, C]."""
        with self.around():
            x_BTC = embed(x, self.embedding, self.positions) if self.embedding is not None else x
            for block in self.blocks.values():
                x_BTC = block(x_BTC, self.rotary_2TD)
            if self.norm is None or self.head is None:
                return x_BTC
            logits_BTV: Tensor = self.head(self.norm(x_BTC))
            return logits_BTV


def cut(whole: Transformer, numbers: Sequence[int], num_stages: int, around: Around) -> list[TransformerStage]:
    """The stages of these numbers; `whole` is emptied, so that parameters of no stage are freed."""
    stages = [TransformerStage(whole, number, num_stages, around) for number in numbers]
    del whole.embedding, whole.positions, whole.blocks, whole.norm, whole.head
    return stages
