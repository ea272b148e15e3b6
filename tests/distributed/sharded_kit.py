import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tests.distributed import transports
from torch import Tensor, nn

from steplab.parallel.collectives import Collectives, Pending

STEPS = 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    # its default eps depends on a group's first dtype, which differs between ranks
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1, "eps": (1e-7, 1e-3)}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.01}),
    **{cls.__name__: (cls, {"lr": 0.01}) for cls in (torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adamax)},
    **{cls.__name__: (cls, {"lr": 0.01}) for cls in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop)},
}


class Tiny(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.hidden = nn.Linear(width, 17)
        self.back = nn.Linear(17, width, dtype=torch.bfloat16)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.embedding(tokens)))
        x = self.frozen(self.back(x.bfloat16()).float()) * self.scale
        return self.head(x)


class Recorder(transports.Recorder):
    def __init__(self, inner: Collectives, delays: random.Random | None = None) -> None:
        super().__init__(inner)
        self.delays = delays

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        return self._begin("all_gather", output, lambda target: self.inner.all_gather(target, part))

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        return self._begin("broadcast", tensor, lambda target: self.inner.broadcast(target, source=source))

    def host_gather(self, value: Any) -> list[Any]:
        return self.inner.host_gather(value)

    def _begin(self, name: str, tensor: Tensor, start: Callable[[Tensor], Pending]) -> Pending:
        self.calls.append((name, tensor.nbytes))
        if self.delays is None:
            return start(tensor)
        time.sleep(self.delays.uniform(0, 0.02))
        target = tensor.clone()
        return Late(start(target), self.delays.uniform(0, 0.02), lambda: tensor.copy_(target))


class Late:
    def __init__(self, inner: Pending, seconds: float, arrive: Callable[[], object]) -> None:
        self.inner, self.seconds, self.arrive = inner, seconds, arrive

    def wait(self) -> None:
        time.sleep(self.seconds)
        self.inner.wait()
        self.arrive()


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def trained(model: Tiny, name: str) -> list[nn.Parameter]:
    if name == "SparseAdam":
        model.embedding.sparse = True
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return list(model.embedding.parameters())
    return [param for param in model.parameters() if name != "Muon" or (param.dim() == 2 and param.numel())]


def give_gradients(params: Iterable[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()


def groups(model: Tiny) -> list[dict[str, Any]]:
    return [
        {"params": [model.embedding.weight, model.head.weight], "lr": 0.03},
        {"params": [*model.hidden.parameters(), model.scale, model.empty], "weight_decay": 0.0},
        {"params": [*model.back.parameters(), *model.frozen.parameters(), model.unused]},
    ]


def once(parameter_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": list(dict.fromkeys(group["params"]))} for group in parameter_groups]


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), f"{name} differs by {(param - expected[name]).abs().max()}"


def assert_same_state(state: Any, expected: Any, at: str = "state") -> None:
    if isinstance(expected, Tensor):
        assert isinstance(state, Tensor), at
        assert state.dtype == expected.dtype, at
        assert torch.equal(state, expected), at
    elif isinstance(expected, dict):
        assert state.keys() == expected.keys(), f"{at}: {sorted(map(str, state))} and {sorted(map(str, expected))}"
        for key, value in expected.items():
            assert_same_state(state[key], value, f"{at}[{key!r}]")
    elif isinstance(expected, list):
        assert len(state) == len(expected), at
        for index, value in enumerate(expected):
            assert_same_state(state[index], value, f"{at}[{index}]")
    else:
        assert state == expected, at


def largest_share_bound(elements: Sequence[int], size: int) -> float:
    """Bound of a rank's elements: total / size + (1 − 1 / size) · largest (Graham 1966, list scheduling).

    It holds in any order, also for groups added later: the rank that received its last parameter had at most the
    others' average by then.
    """
    largest = max(elements, default=0)
    return (sum(elements) + (size - 1) * largest) / size
