import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import modules, parity
from tests.distributed.ranks import Cases
from tests.distributed.transports import Delays
from tests.first import first
from torch import Tensor, nn

from steplab.parallel import DataParallel
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.errors import Unsupported, UserError

cases = Cases()


@pytest.mark.parametrize("size", first(1, [2, 4]))
def test_data_parallelism(size: int, subtests: pytest.Subtests) -> None:
    cases.run(size, subtests)


def every_way(assertion: Any, **options: Any) -> None:
    for strategy in parity.STRATEGIES:
        assertion(strategy=strategy, bucket_size_mb=parity.TINY_MB, **options)


def awkward_loss(spare_rank: int, module: nn.Module, batch: Tensor, rank: int) -> Tensor:
    which = -1 if rank == spare_rank else rank % 2
    return module(batch, which).square().mean()


@cases
def a_plain_module() -> None:
    every_way(lambda **options: parity.assert_trains_alike(modules.plain(), **options))


@cases.in_a_small_world
def gradients_zeroed_and_not_dropped() -> None:
    every_way(lambda **options: parity.assert_trains_alike(modules.plain(), set_to_none=False, **options))


@cases
def tied_frozen_unused_mixed_and_rank_dependent() -> None:
    loss = partial(awkward_loss, 1)
    every_way(lambda **options: parity.assert_trains_alike(modules.Awkward(), loss=loss, tolerance=1e-5, **options))


@cases
def gradients_of_nobody_stay_none() -> None:
    model = DataParallel(modules.Awkward(), bucket_size_mb=parity.TINY_MB)
    for _ in range(2):
        awkward_loss(-2, model, torch.ones(2, 8, dtype=torch.float64), dist.get_rank()).backward()
        model.finish_gradient_synchronization()
        assert model.unused.weight.grad is None
        assert model.experts[2].weight.grad is None
        assert model.frozen.weight.grad is None
        assert model.experts[1].weight.grad is not None
        model.zero_grad()


@cases
def passes_in_any_mixture() -> None:
    loss = partial(awkward_loss, 0)
    for silent in [(False, True), (True, True), (True, True, False), (False, False, False)]:
        every_way(partial(_awkward, loss=loss, silent_passes=silent, tolerance=1e-5))


def _awkward(**options: Any) -> None:
    parity.assert_trains_alike(modules.Awkward(), steps=2, **options)


@cases
def each_pass_uses_other_parameters() -> None:
    def loss(module: nn.Module, batch: Tensor, rank: int) -> Tensor:
        which = (int(batch.abs().sum() * 100)) % 4 - 1  # by the data: another on every rank and pass
        return module(batch, which).square().mean()

    every_way(lambda **options: _awkward(loss=loss, silent_passes=(False, False), tolerance=1e-5, **options))


@cases.in_a_small_world
def parts_updated_as_they_arrive() -> None:
    for strategy in parity.STRATEGIES:
        options: dict[str, Any] = {"strategy": strategy, "bucket_size_mb": parity.TINY_MB}
        parity.assert_updates_in_parts_are_those_afterwards(modules.Awkward(), loss=partial(awkward_loss, 1), **options)


@cases.in_a_small_world
def what_has_not_arrived_is_not_updated() -> None:
    model = DataParallel(modules.plain(), "overlap")
    last_to_arrive = next(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8, dtype=torch.float64) + dist.get_rank()).sum().backward()
    arriving = model.finish_in_parts()
    assert last_to_arrive not in set(next(arriving))
    with pytest.raises(UserError, match="gradients are not averaged yet"):
        optimizer.step()
    arriving.close()  # the rest arrives all the same
    parity.assert_gradients_are_equal_over_ranks(model)
    optimizer.step()


@cases
def two_synchronisations_before_a_step() -> None:
    """The second adds its average to the first's, already equal on all ranks."""
    for strategy in parity.STRATEGIES:
        torch.manual_seed(1)
        module = modules.plain()
        x = torch.randn(3, 8, dtype=torch.float64) + dist.get_rank()
        model = DataParallel(module, strategy, bucket_size_mb=parity.TINY_MB)
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        twice = [p.grad for p in model.parameters()]
        torch.testing.assert_close(twice, [2 * gradient for gradient in once])
        parity.assert_gradients_are_equal_over_ranks(model)


@cases.in_a_small_world
def parameters_and_gradients_that_are_not_contiguous() -> None:
    every_way(lambda **options: parity.assert_trains_alike(modules.Strided(), **options))


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.zeros(5, 4)), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(nn.functional.embedding(tokens, self.table, sparse=True))


@cases.in_a_small_world
def what_it_does_not_serve_is_refused_by_name() -> None:
    for strategy in parity.STRATEGIES:
        model = DataParallel(LooksUp(), strategy)
        with pytest.raises(Unsupported, match="data parallelism with a sparse gradient of table is not supported"):
            _trained(model, torch.tensor([1, 2]))
        model.zero_grad()
        model.finish_gradient_synchronization()
        with pytest.raises(UserError, match="cannot be copied or pickled: copy its `module`"):
            copy.deepcopy(model)
        with pytest.raises(Unsupported):
            _trained(model, torch.tensor([1, 2]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del model
        assert not caught  # the error is told: a drop under way is no second thing


def _trained(model: DataParallel, batch: Tensor) -> None:
    model(batch).sum().backward()
    model.finish_gradient_synchronization()


@cases.in_a_small_world
def buffers_whose_elements_repeat_are_those_of_the_first_rank() -> None:
    """An expanded mask shares one element, to which torch writes nothing."""
    module, rank = modules.plain(), dist.get_rank()
    module.register_buffer("mask", torch.tensor([[float(rank)], [float(rank + 5)]]).expand(2, 3))
    DataParallel(module)
    mask = module.get_buffer("mask")
    assert mask.tolist() == [[0.0] * 3, [5.0] * 3]
    assert mask.stride() == (1, 0)


@cases
def gradients_in_memory_that_backward_has_still_to_read() -> None:
    every_way(lambda **options: parity.assert_trains_alike(modules.Added(), **options))


@cases.in_a_small_world
def a_backward_pass_that_raised_leaves_nothing_once_finished() -> None:
    for strategy in parity.STRATEGIES:
        parity.assert_recovers(DataParallel(modules.TwoWays(), strategy, bucket_size_mb=parity.TINY_MB))


@cases.in_a_small_world
def activation_checkpointing() -> None:
    for reentrant in (False, True):
        every_way(lambda r=reentrant, **options: parity.assert_trains_alike(modules.Checkpointed(r), **options))


@cases.in_a_small_world
def a_compiled_inner_module() -> None:
    def compiled(module: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]

    def compiled_in_place(module: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        module.compile(backend="aot_eager")
        return module

    parity.assert_trains_alike(modules.plain(), wrap=compiled, bucket_size_mb=parity.TINY_MB)
    parity.assert_trains_alike(modules.plain(), wrap=compiled_in_place, strategy="overlap", silent_passes=(True, False))


@cases
def random_delays_around_collectives() -> None:
    every_way(
        lambda **options: parity.assert_trains_alike(
            modules.Awkward(),
            loss=partial(awkward_loss, 1),
            steps=2,
            silent_passes=(False, True, False),
            tolerance=1e-5,
            group=Delays(GroupCollectives(), longest_s=0.002),
            **options,
        )
    )


@cases
def random_module_graphs() -> None:
    def loss(module: nn.Module, batch: Tensor, rank: int) -> Tensor:
        return module(batch, rank + int(batch.abs().sum() * 100)).square().mean()

    for seed in range(24):
        torch.manual_seed(seed)
        parity.assert_trains_alike(
            modules.RandomGraph(seed),
            loss=loss,
            steps=2,
            silent_passes=[(False,), (True, False), (False, False)][seed % 3],
            tolerance=1e-5,
            strategy=parity.STRATEGIES[seed % 4],
            bucket_size_mb=parity.TINY_MB,
        )


@cases.in_a_small_world
def gradients_within_a_created_graph() -> None:
    model = DataParallel(modules.plain(), bucket_size_mb=parity.TINY_MB)
    model(torch.ones(2, 8, dtype=torch.float64)).square().mean().backward(create_graph=True)
    model.finish_gradient_synchronization()
    parity.assert_gradients_are_equal_over_ranks(model)
    assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)


@cases
def a_group_of_some_ranks() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    model = DataParallel(nn.Linear(2, 1, bias=False), group=pairs[rank // 2])
    model(torch.full((1, 2), float(rank))).sum().backward()
    model.finish_gradient_synchronization()
    assert model.weight.grad.tolist() == [[rank // 2 * 2 + 0.5] * 2]
