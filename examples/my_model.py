"""A model of one's own, measured by name: steplab run --model examples.my_model:build --context 64

The function takes those of `batch`, `context`, `device` and `seed` that it wants, by name. It returns a module that
gives a scalar loss, and a function that makes one batch for it.
"""

import torch
from torch import Tensor, nn


class BagOfWords(nn.Module):
    """Predicts a class from the mean of its tokens' embeddings."""

    def __init__(self, vocab_size: int = 5_000, width: int = 256, num_classes: int = 20) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.EmbeddingBag(vocab_size, width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, num_classes),
        )

    def forward(self, tokens: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(tokens), label)


def build(batch: int, context: int, device: torch.device) -> tuple[nn.Module, object]:
    """What steplab calls."""

    def make_batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(5_000, (batch, context), device=device)
        return tokens, torch.randint(20, (batch,), device=device)

    return BagOfWords(), make_batch
