"""Two layers with a norm between them: the smallest model that shows every rule of autocast.

Under fp16 or bf16 autocast on a CUDA GPU the first layer and the logits are in low precision. The norm, the loss,
parameters and gradients are in fp32. Pass your own model to steplab through a function like `toy`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUM_FEATURES, WIDTH, NUM_CLASSES = 20, 10, 5


class ToyModel(nn.Module):
    """Features [N, 20] and classes [N] in, scalar loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(NUM_FEATURES, WIDTH, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(WIDTH)
        self.fc2 = nn.Linear(WIDTH, NUM_CLASSES, bias=False)

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        logits = self.fc2(self.ln(self.relu(self.fc1(features))))
        return cross_entropy(logits, classes)


def toy(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """The model, and a function that makes batches of batch x context random examples."""
    num_examples = batch * context

    def make_batch() -> tuple[Tensor, Tensor]:
        features = torch.randn(num_examples, NUM_FEATURES, device=device)
        return features, torch.randint(NUM_CLASSES, (num_examples,), device=device)

    return ToyModel(), make_batch
