import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import modules
from tests.distributed.parity import TINY_MB, Loss, assert_equal_over_ranks, batches, mean_square
from tests.distributed.ranks import Cases
from tests.distributed.sharded_kit import largest_share_bound
from tests.distributed.shared_memory import SharedMemory
from tests.distributed.transports import Delays
from tests.first import first
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from steplab.parallel import DataParallel, ShardedOptimizer
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.errors import Unsupported, UserError

cases = Cases()
STEPS = 4


@pytest.mark.parametrize("size", first(1, [2, 4]))
def test_gradients_to_owners(size: int, subtests: pytest.Subtests) -> None:
    cases.run(size, subtests)


def ways(delay_s: float = 0.0) -> list[dict[str, Any]]:
    slow = Delays(GroupCollectives(), delay_s) if delay_s else None
    return [
        {"model": {"group": slow}, "optimizer": {"group": slow}},
        {"model": {"transport": SharedMemory(delay_s)}, "optimizer": {"exchange": SharedMemory(delay_s)}},
    ]


def assert_trains_as_the_whole_optimizer(
    module: nn.Module,
    way: dict[str, Any],
    *,
    loss: Loss = mean_square,
    silent_passes: tuple[bool, ...] = (False,),
    strategy: str = "bucketed",
    set_to_none: bool = True,
    overlapped: Callable[[nn.Module], list[nn.Module]] = lambda module: [],
) -> tuple[DataParallel, ShardedOptimizer]:
    """Weights equal those of an unsharded optimizer.

    Bit for bit with AdamW if two ranks send all at once, as a sum of two has one order. Otherwise with SGD, within a
    rounding per gradient, rank and pass in each step: Adam's quotients would magnify roundings of sums near zero.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    exact = size == 2 and silent_passes.count(False) == 1
    kind: Any = torch.optim.AdamW if exact else torch.optim.SGD
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1} | ({} if exact else {"momentum": 0.9})
    whole = DataParallel(copy.deepcopy(module), strategy, TINY_MB)
    plain = kind(whole.parameters(), **options)
    model = DataParallel(module, strategy, TINY_MB, to_owners=True, **way["model"])
    sharded = ShardedOptimizer(
        model.parameters(), kind, owners=model.owners, bucket_size_mb=TINY_MB, **way["optimizer"], **options
    )
    sharded.overlap_with(*overlapped(module))
    for step in batches(STEPS, len(silent_passes), 3, 8):
        for net in (whole, model):
            for silent, batch in zip(silent_passes, step, strict=True):
                if silent:
                    with net.no_sync():
                        loss(net, batch[rank], rank).backward()
                else:
                    loss(net, batch[rank], rank).backward()
            net.finish_gradient_synchronization()
        assert_only_owners_have_averages(model, whole, rank)
        for optimizer in (plain, sharded):
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    sharded.wait()
    coarsest = max(torch.finfo(parameter.dtype).eps for parameter in model.parameters())
    tolerance = 0.0 if exact else STEPS * size * len(silent_passes) * coarsest
    for (name, expected), found in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=f"{name} differs")
    assert_equal_over_ranks(model.parameters())
    return model, sharded


def assert_only_owners_have_averages(model: DataParallel, whole: DataParallel, rank: int) -> None:
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        if model.owners.get(found) == rank:
            assert (found.grad is None) == (expected.grad is None)
        else:
            assert found.grad is None


def layers(module: nn.Module) -> list[nn.Module]:
    return list(module.children())


def awkward_loss(module: nn.Module, batch: Tensor, rank: int) -> Tensor:
    return module(batch, -1 if rank == 1 else rank % 2).square().mean()


@cases
def weights_are_those_of_the_whole_optimizer() -> None:
    for way in ways():
        assert_trains_as_the_whole_optimizer(modules.plain(), way)


@cases
def tied_unused_and_rank_dependent_parameters_train_as_without_sharding() -> None:
    for way in ways():
        assert_trains_as_the_whole_optimizer(modules.Awkward(), way, loss=awkward_loss)


@cases
def several_passes_of_which_all_or_one_are_sent() -> None:
    for silent in [(True, False), (False, False, False)]:
        for way in ways():
            assert_trains_as_the_whole_optimizer(modules.plain(), way, silent_passes=silent, strategy="overlap")


@cases
def late_copies_and_late_ranks_change_nothing() -> None:
    for way in ways(delay_s=0.003):
        assert_trains_as_the_whole_optimizer(
            modules.plain(), way, set_to_none=False, overlapped=lambda m: list(m.children())
        )


@cases
def nobody_overwrites_parameters_that_others_still_read() -> None:
    rank, late = dist.get_rank(), random.Random(dist.get_rank())
    model = modules.plain()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, exchange=SharedMemory(0.002), lr=1.0)
    for step in range(STEPS):
        time.sleep(late.uniform(0, 0.03))
        seen = [p.detach().clone() for p in model.parameters()]
        time.sleep(late.uniform(0, 0.03))
        for parameter, before in zip(model.parameters(), seen, strict=True):
            assert torch.equal(parameter, before), f"rank {rank}, step {step}"
            parameter.grad = torch.full_like(parameter, 1.0)
        sharded.step()
        for parameter, before in zip(model.parameters(), seen, strict=True):
            assert torch.equal(parameter, before - 1)


@cases
def what_is_sent_is_the_volume_of_stage_1() -> None:
    """(n - 1)/n of all bytes of gradients, and as much of parameters."""
    gradients, parameters = SharedMemory(), SharedMemory()
    way = {"model": {"transport": gradients}, "optimizer": {"exchange": parameters}}
    model, _ = assert_trains_as_the_whole_optimizer(modules.plain(), way)
    size = dist.get_world_size()
    for memory in (gradients, parameters):
        everyone = [0] * size
        dist.all_gather_object(everyone, memory.copied_bytes)
        least = STEPS * (size - 1) * sum(p.nbytes for p in model.parameters())
        padding = STEPS * (size - 1) * len(list(model.parameters())) * 256
        assert least <= sum(everyone) <= least + (padding if memory is parameters else 0)


@cases
def the_memory_of_a_rank_is_bounded() -> None:
    model, sharded = assert_trains_as_the_whole_optimizer(modules.plain(), ways()[1])
    elements = [p.numel() for p in model.parameters()]
    count, size, width = len(elements), dist.get_world_size(), 8
    share = width * largest_share_bound(elements, size) + 256 * count
    under_way = (size - 1) * (width * sum(elements) + 256 * count)  # few enough bytes for one window
    assert model.shared_bytes <= share + under_way
    assert sharded.shared_bytes <= width * sum(elements) + 256 * count * (size + 1)


@cases.in_a_small_world
def an_optimizer_that_is_not_sharded_alike_is_refused() -> None:
    model = DataParallel(modules.plain(), to_owners=True)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        ShardedOptimizer(list(model.parameters())[::-1], torch.optim.SGD, owners=_swapped(model.owners), lr=0.1),
    ):
        with pytest.raises(UserError, match=r"averaged only on other ranks.*owners=model\.owners"):
            optimizer.step()
    with pytest.raises(Unsupported, match="peer_copy on cpu"):
        ShardedOptimizer(modules.plain().parameters(), torch.optim.SGD, exchange="peer_copy", lr=0.1)


@cases.in_a_small_world
def an_overflow_that_one_rank_has_found_is_an_overflow_on_all() -> None:
    rank, whole = dist.get_rank(), DataParallel(modules.plain())
    model = DataParallel(copy.deepcopy(whole.module), to_owners=True)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, owners=model.owners, lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", 8.0), ShardedGradScaler("cpu", 8.0)]
    for step, (batch,) in enumerate(batches(STEPS, 1, 3, 8)):
        for net, optimizer, scaler in ((whole, plain, scalers[0]), (model, sharded, scalers[1])):
            scaler.scale(mean_square(net, batch[rank], rank)).backward()
            net.finish_gradient_synchronization()
            gradient = next(net.parameters()).grad
            if gradient is not None and step == 1:
                gradient[0] = torch.inf
            before = [p.detach().clone() for p in net.parameters()]
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, before, net.parameters())) == (step == 1)
            optimizer.zero_grad()
        assert all(map(torch.equal, whole.parameters(), model.parameters()))
        assert [scaler.get_scale() for scaler in scalers] == [8.0 if step == 0 else 4.0] * 2


@cases.in_a_small_world
def a_gradient_scaler_that_asks_one_rank_alone_is_refused_on_all() -> None:
    for unscaled in (False, True):
        model = DataParallel(modules.plain(), to_owners=True)
        sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, owners=model.owners, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", 8.0)
        scaler.scale(mean_square(model, torch.ones(3, 8, dtype=torch.float64), 0)).backward()
        model.finish_gradient_synchronization()
        if unscaled:
            for parameter in model.parameters():
                if parameter.grad is not None and dist.get_rank() == 1:
                    parameter.grad.fill_(torch.inf)
            scaler.unscale_(sharded)
        with pytest.raises(UserError, match=r"asks all ranks for overflows: use .*ShardedGradScaler, and call its"):
            scaler.step(sharded)
        sharded.step()  # without a scaler it is a step as any other


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(size) for size in (10, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(vector.sum() for vector in self.vectors)


@cases.in_a_small_world
def owners_that_one_rank_alone_misses_are_refused_on_all() -> None:
    model = DataParallel(Vectors(), "overlap", to_owners=True)
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    mine = [p for p in model.parameters() if sharded.owner(p) == dist.get_rank()]
    assert all(model.owners[p] == dist.get_rank() for p in mine) == (dist.get_rank() == 0)
    with pytest.raises(UserError, match=r"averaged only on other ranks.*owners=model\.owners"):
        sharded.step()


@cases.in_a_small_world
def a_layer_that_is_frozen_between_steps_is_exchanged_still() -> None:
    """Its gradients exist only on their owners, so ranks would disagree on its use."""
    for first_frozen in (0, 1):
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = DataParallel(module, to_owners=True)
        sharded = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, owners=model.owners, bucket_size_mb=1e-6, lr=0.1, weight_decay=0.1
        )
        for step in range(3):
            mean_square(model, torch.ones(3, 8), 0).backward()
            model.finish_gradient_synchronization()
            module[0].requires_grad_(step < first_frozen)
            sharded.step()
            sharded.zero_grad(set_to_none=False)
        assert_equal_over_ranks(model.parameters())


def _swapped(owners: Any) -> dict[Tensor, int]:
    return {parameter: 1 - owner for parameter, owner in owners.items()}
