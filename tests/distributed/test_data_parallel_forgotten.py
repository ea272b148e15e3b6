import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import modules
from tests.distributed.parity import STRATEGIES, TINY_MB, assert_gradients_are_equal_over_ranks
from tests.distributed.ranks import Cases
from tests.distributed.shared_memory import SharedMemory

from steplab.parallel import DataParallel, ShardedOptimizer, reduction
from steplab.parallel.errors import UserError

cases = Cases()


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_forgotten_is_told(size: int, subtests: pytest.Subtests) -> None:
    cases.run(size, subtests)


@cases
def a_step_before_the_gradients_are_averaged_is_refused() -> None:
    x = torch.ones(2, 8, dtype=torch.float64) * (dist.get_rank() + 1)
    ways: list[dict[str, Any]] = [{"fused": True}, {"foreach": True}, {"foreach": False}]
    for strategy in STRATEGIES:
        model = DataParallel(modules.plain(), strategy, TINY_MB)
        optimizers = [torch.optim.AdamW(model.parameters(), **way) for way in ways]
        for optimizer in (*optimizers, ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)):
            before = [p.detach().clone() for p in model.parameters()]
            model(x).square().sum().backward()
            with pytest.raises(UserError, match=r"call finish_gradient_synchronization\(\)"):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
            model.finish_gradient_synchronization()
            optimizer.step()
            assert not any(map(torch.equal, before, model.parameters()))
            assert_gradients_are_equal_over_ranks(model)
            optimizer.zero_grad()


@cases.in_a_small_world
def steps_that_wait_for_no_averages_are_not_refused() -> None:
    x = torch.ones(2, 8, dtype=torch.float64)
    for strategy in STRATEGIES:
        model, other = DataParallel(modules.plain(), strategy), modules.plain()
        other(x).sum().backward()
        model(x).sum().backward()
        torch.optim.SGD(other.parameters()).step()
        model.finish_gradient_synchronization()
        with model.no_sync():
            model(x).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        model(x).sum().backward()
        module = model.module
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del model  # which averages them no more
        launched = [RuntimeWarning] if strategy in ("overlap", "bucketed") else []
        assert [w.category for w in caught if "dropped with gradients under way" in str(w.message)] == launched
        torch.optim.SGD(module.parameters()).step()


@cases.in_a_small_world
def a_model_that_is_dropped_between_steps_is_no_matter() -> None:
    model = DataParallel(modules.plain())
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    model.finish_gradient_synchronization()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del model
    assert not caught


@cases
def modules_whose_backward_passes_have_another_order_on_a_rank_are_refused_on_all() -> None:
    """Their gradients would be averaged with each other's, unnoticed."""
    x = torch.ones(2, 8, dtype=torch.float64)
    for strategy, transport in (("overlap", "collectives"), ("bucketed", None)):
        models = [DataParallel(modules.plain(), strategy, transport=transport or SharedMemory()) for _ in range(2)]
        order = models if dist.get_rank() != 1 else models[::-1]
        for model in order:
            model(x).sum().backward()
        told = "sent gradients of several DataParallel in different orders: run their backward passes and"
        with pytest.raises(UserError, match=told):
            models[0].finish_gradient_synchronization()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # they are dropped with gradients under way
            del models, model, order
        reduction._orders.clear()  # other cases run on these ranks, whose orders differ for good now


@cases
def modules_that_are_synchronised_in_another_order_on_a_rank_are_refused_on_all() -> None:
    x = torch.ones(2, 8, dtype=torch.float64)
    models = [DataParallel(modules.plain(), "flat") for _ in range(2)]
    for model in models:
        model(x).sum().backward()
    first = models[dist.get_rank() == 1]
    with pytest.raises(UserError, match="the ranks synchronise different DataParallel: run their backward"):
        first.finish_gradient_synchronization()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        del models, model, first
    reduction._orders.clear()
