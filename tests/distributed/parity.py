import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.ops.update import UpdateByParts
from steplab.parallel import DataParallel

STRATEGIES = ("naive", "flat", "overlap", "bucketed")
TINY_MB = 0.001
"""MB that hold some parameters of these modules; others are alone in a bucket."""

Loss = Callable[[nn.Module, Tensor, int], Tensor]


def mean_square(module: nn.Module, batch: Tensor, rank: int) -> Tensor:
    return module(batch).square().mean()


def batches(steps: int, passes: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(steps, passes, dist.get_world_size(), *shape, generator=generator, dtype=dtype)


def assert_trains_alike(
    module: nn.Module,
    *,
    loss: Loss = mean_square,
    shape: Sequence[int] = (3, 8),
    steps: int = 3,
    silent_passes: Sequence[bool] = (False,),
    set_to_none: bool = True,
    tolerance: float = 1e-11,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    **options: Any,
) -> DataParallel:
    """Weights after each step equal one process's; gradients are equal bit for bit over ranks.

    `loss` and `shape` are of one rank's batch. `silent_passes`: for each backward pass of a step, if it is within
    `no_sync`. `tolerance`: relative and absolute, of weights. `wrap` changes the module before DataParallel; `options`
    are DataParallel's.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = copy.deepcopy(module)
    model = DataParallel(wrap(module), **options)
    for step in batches(steps, len(silent_passes), *shape):
        for silent, batch in zip(silent_passes, step, strict=True):
            sum((loss(alone, batch[other], other) / size for other in range(size)), torch.zeros(())).backward()
            if silent:
                with model.no_sync():
                    loss(model, batch[rank], rank).backward()
            else:
                loss(model, batch[rank], rank).backward()
        model.finish_gradient_synchronization()
        assert_gradients_are_equal_over_ranks(model)
        for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
            assert (expected.grad is None) == (found.grad is None)
        for trained in (alone, model):
            descend(trained)
            trained.zero_grad(set_to_none)
        for (name, expected), found in zip(alone.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=f"{name} differs")
    return model


@torch.no_grad()
def descend(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.sub_(0.1 * parameter.grad)


def assert_gradients_are_equal_over_ranks(module: nn.Module) -> None:
    assert_equal_over_ranks(parameter.grad for parameter in module.parameters())


def assert_equal_over_ranks(tensors: Iterable[Tensor | None]) -> None:
    """Bit for bit, or absent on all ranks. Ranks exchange digests: pickled tensors took a third of the tests' time."""
    digests = b"".join(bytes(32) if tensor is None else hashlib.sha256(_bits(tensor)).digest() for tensor in tensors)
    mine = torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        differing = (theirs != mine).any(1).nonzero().flatten().tolist()
        assert not differing, f"rank {rank} has other values in tensors {differing}"


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_recovers(model: DataParallel) -> None:
    def fail(_: Tensor) -> None:
        raise ArithmeticError

    x = torch.full((2, 8), 1.0 + dist.get_rank(), dtype=torch.float64)
    alone = copy.deepcopy(model.module)
    hook = model.a.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(x, True).sum().backward()
    hook.remove()
    model.finish_gradient_synchronization()
    model.zero_grad()
    model(x, True).sum().backward()
    model.finish_gradient_synchronization()
    size = dist.get_world_size()
    for rank in range(size):
        (alone(torch.full((2, 8), 1.0 + rank, dtype=torch.float64), True).sum() / size).backward()
    for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def assert_updates_in_parts_are_those_afterwards(
    module: nn.Module, *, loss: Loss = mean_square, shape: Sequence[int] = (3, 8), **options: Any
) -> None:
    rank, steps = dist.get_rank(), 3
    found: list[Any] = []
    for in_parts in (False, True):
        model = DataParallel(copy.deepcopy(module), **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        parts = UpdateByParts(optimizer)
        for (batch,) in batches(steps, 1, *shape):
            loss(model, batch[rank], rank).backward()
            if in_parts:
                given = []
                for parameters in model.finish_in_parts():
                    parts.of(parameters)
                    given += parameters
                assert sorted(map(id, given)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
            else:
                model.finish_gradient_synchronization()
                optimizer.step()
            optimizer.zero_grad()
        found.append((list(model.parameters()), optimizer.state_dict()))
    (expected, expected_state), (parameters, state) = found
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
