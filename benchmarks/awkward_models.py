"""Two models with faults that `steplab explain` finds, for recorded profiles of its findings.

steplab profile --model benchmarks.awkward_models:waiting      (from the root of the checkout)
steplab profile --model benchmarks.awkward_models:growing --compile default --warmup 3 --steps 12
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, DEPTH, TOKENS = 1024, 8, 2048


class Waiting(nn.Module):
    """Reads its loss back in each step, and takes input from pageable host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.history: list[float] = []

    def forward(self, x_host: Tensor) -> Tensor:
        loss = self.layers(x_host.to(next(self.layers.parameters()).device)).square().mean()
        self.history.append(loss.item())
        return loss


class Growing(nn.Module):
    """Runs one more layer from every fourth step on: each depth is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4 * DEPTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        depth = 1 + self.calls // 4
        self.calls += 1
        for layer in self.layers[:depth]:
            x = layer(x)
        return x.square().mean()


def waiting(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The batch stays on the host; the model moves it."""
    return Waiting().to(device), lambda: torch.randn(TOKENS, WIDTH)


def growing(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    return Growing().to(device), lambda: torch.randn(TOKENS, WIDTH, device=device)
