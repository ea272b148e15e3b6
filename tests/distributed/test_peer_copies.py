"""Gradients that travel by copies into other ranks' memory: the same contract as by collectives."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.distributed import modules
from tests.distributed.parity import STRATEGIES, TINY_MB, assert_gradients_are_equal_over_ranks, assert_trains_alike
from tests.distributed.shared_memory import SharedMemory
from tests.distributed.world import Cases
from torch import Tensor, nn

from steplab.errors import Unsupported, UserError
from steplab.parallel import DataParallel, peer_copies

cases = Cases(__name__)


@pytest.mark.parametrize("size", [2, 4])
def test_peer_copies(size: int, subtests: pytest.Subtests) -> None:
    cases.run(size, subtests)


def every_way(module: Any, **options: Any) -> None:
    """With buckets of one, some and all parameters."""
    for strategy in STRATEGIES:
        assert_trains_alike(module(), strategy=strategy, bucket_size_mb=TINY_MB, transport=SharedMemory(), **options)


def awkward_loss(module: nn.Module, batch: Tensor, rank: int) -> Tensor:
    """Every rank has another expert, and one has none."""
    return module(batch, -1 if rank == 1 else rank % 2).square().mean()


@cases
def a_plain_module() -> None:
    every_way(modules.plain)


@cases.in_a_small_world
def gradients_zeroed_and_not_dropped() -> None:
    every_way(modules.plain, set_to_none=False)


@cases
def tied_frozen_unused_mixed_and_rank_dependent() -> None:
    every_way(modules.Awkward, loss=awkward_loss, tolerance=1e-5)


@cases
def several_passes_of_which_all_or_one_are_sent() -> None:
    for silent in [(True, False), (False, False, False)]:
        every_way(modules.plain, silent_passes=silent)


@cases.in_a_small_world
def parameters_and_gradients_that_are_not_contiguous() -> None:
    every_way(modules.Strided)


@cases
def landing_places_are_used_again() -> None:
    """Room for the largest bucket and little more, for some ten buckets a step."""
    with patch.object(peer_copies, "WINDOW_BYTES", 1):
        model = assert_trains_alike(
            modules.Awkward(), loss=awkward_loss, tolerance=1e-5, strategy="overlap", steps=4,
            transport=SharedMemory(delay_s=0.002),
        )  # fmt: skip
    assert len(model.buckets) > 5


@cases
def what_is_copied_is_what_a_ring_would_send() -> None:
    """2 (n-1)/n of all bytes, up to the parts' whole pages."""
    memory = SharedMemory()
    model = DataParallel(modules.plain(), "flat", transport=memory)
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    model.finish_gradient_synchronization()
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    everyone = [0] * memory.size
    dist.all_gather_object(everyone, memory.copied_bytes)
    assert sum(everyone) == 2 * (memory.size - 1) * num_bytes


@cases
def gradients_that_came_late_are_sent_again() -> None:
    model = DataParallel(modules.TwoWays(), "overlap", transport=SharedMemory())
    alone = modules.TwoWays()
    alone.load_state_dict(model.state_dict())
    x = torch.ones(2, 8, dtype=torch.float64)
    model(x, True).sum().backward()
    alone(x, True).sum().backward()
    if dist.get_rank() == 0:
        model.head(x).sum().backward()
    model.finish_gradient_synchronization()
    assert_gradients_are_equal_over_ranks(model)
    extra = torch.autograd.grad(alone.head(x).sum(), alone.head.weight)[0] / dist.get_world_size()
    assert alone.head.weight.grad is not None
    torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad + extra)


@cases.in_a_small_world
def averages_live_where_peers_write_them() -> None:
    model = DataParallel(modules.plain(), "bucketed", 0.0005, transport=SharedMemory())
    x = torch.ones(2, 8, dtype=torch.float64)
    places = []
    for _ in range(2):
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert places[0] == places[1]


@cases.in_a_small_world
def what_it_does_not_serve_is_refused() -> None:
    refusals: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (Unsupported, "peer_copy on cpu.*copy engines.*collectives", {"transport": "peer_copy"}),
        (Unsupported, "compression to bf16", {"transport": "peer_copy", "compress": "bf16"}),
        (UserError, "no transport 'pigeon': choose collectives, peer_copy", {"transport": "pigeon"}),
    ]
    for error, words, options in refusals:
        with pytest.raises(error, match=words):
            DataParallel(modules.plain(), **options)
