import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)).double()


def in_channels_last(module: nn.Module) -> nn.Module:
    convert: Any = module.to
    return convert(memory_format=torch.channels_last)


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).double()
        self.tied = nn.Linear(8, 8).double()
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).double().requires_grad_(False)
        self.unused = nn.Linear(8, 8).double()
        self.single = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(3))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.frozen(x) + self.tied(x)
        x = x + self.single(x.float()).double()
        if which >= 0:
            x = x + self.experts[which](x)
        return x * self.scale


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(6, 8, dtype=torch.float64).t())
        self.sliced = nn.Parameter(torch.randn(8, 12, dtype=torch.float64)[:, ::2])
        self.conv = in_channels_last(nn.Conv2d(2, 3, 3, padding=1).double())
        self.summed = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        flat = x @ self.transposed + x @ self.sliced
        image = self.conv(x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last))
        return flat.sum(1) * image.sum((1, 2, 3)) + self.summed.sum()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.entry, self.block, self.reentrant = nn.Linear(8, 8).double(), plain(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x: Tensor, a_first: bool) -> Tensor:
        x = self.head(x)
        return self.b(self.a(x).tanh()) if a_first else self.a(self.b(x).tanh())


class Added(nn.Module):
    """A parameter added as a view; autograd leaves its gradient in memory that the layer's backward reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).double()
        self.added = nn.ParameterList([torch.randn(3, 8, dtype=torch.float64)])  # behind the layer, so sent before it

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        h.register_hook(lambda _: time.sleep(0.005))  # by then an average made in that memory would be there
        return h + self.added[0][None].view(3, 8)


def square(width: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(width, width, bias=bias)


class RandomGraph(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        width = 8
        self.layers = nn.ModuleList()
        self.plan: list[tuple[int, int, int]] = []
        for place in range(chance.randint(1, 7)):
            kinds: list[Callable[[int], nn.Module]] = [square, nn.LayerNorm, partial(square, bias=False)]
            layer = chance.choice(kinds)(width)
            self.layers.append(layer.to(chance.choice([torch.float64, torch.float64, torch.float32])))
            if chance.random() < 0.2:
                layer.requires_grad_(False)
            if chance.random() < 0.2 and isinstance(layer, nn.Linear):
                for earlier in self.layers[:place]:
                    if isinstance(earlier, nn.Linear) and earlier.weight.dtype == layer.weight.dtype:
                        layer.weight = earlier.weight
            uses = chance.choice([0, 1, 1, 1, 2])
            self.plan.append((place, uses, chance.choice([0, 0, 2, 3])))
        self.scale = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor, number: int) -> Tensor:
        for place, uses, divisor in self.plan:
            if divisor and number % divisor == 0:
                continue
            layer = self.layers[place]
            dtype = next(layer.parameters()).dtype
            for _ in range(uses):
                x = x + torch.tanh(layer(x.to(dtype)).double())
        return x * self.scale
