import copy
import gc
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from tests.distributed import modules, parity
from tests.distributed.ranks import Cases
from tests.distributed.shared_memory import SharedMemory
from tests.first import first
from torch import Tensor, nn

from steplab.parallel import DataParallel, sizes
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.data_parallel import buckets_of
from steplab.parallel.errors import Unsupported, UserError

cases = Cases()


@pytest.mark.parametrize("size", first(1, [2, 4]))
def test_peer_copies(size: int, subtests: pytest.Subtests) -> None:
    cases.run(size, subtests)


def every_way(module: Any, **options: Any) -> None:
    for strategy in parity.STRATEGIES:
        parity.assert_trains_alike(
            module(), strategy=strategy, bucket_size_mb=parity.TINY_MB, transport=SharedMemory(), **options
        )


def awkward_loss(module: nn.Module, batch: Tensor, rank: int) -> Tensor:
    return module(batch, -1 if rank == 1 else rank % 2).square().mean()


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


def short_chunks() -> Any:
    return patch.object(sizes, "PART_BYTES", sizes.PAGE)


@cases
def gradients_are_those_of_torch_ddp() -> None:
    inner = modules.plain()
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(inner))
    reference(x).square().mean().backward()
    expected = [parameter.grad for parameter in reference.parameters()]
    for part_bytes in (sizes.PART_BYTES, sizes.PAGE):
        with patch.object(sizes, "PART_BYTES", part_bytes):
            model = DataParallel(copy.deepcopy(inner), bucket_size_mb=parity.TINY_MB, transport=SharedMemory())
        assert len(model.buckets) > 2
        model(x).square().mean().backward()
        model.finish_gradient_synchronization()
        torch.testing.assert_close(
            [parameter.grad for parameter in model.parameters()], expected, rtol=1e-15, atol=1e-17
        )


@cases
def landing_places_are_used_again() -> None:
    with patch.object(sizes, "WINDOW_BYTES", 1), short_chunks():
        model = parity.assert_trains_alike(
            modules.Awkward(), loss=awkward_loss, tolerance=1e-5, strategy="overlap", steps=4,
            transport=SharedMemory(delay_s=0.002),
        )  # fmt: skip
    assert len(model.buckets) > 5


@cases
def several_late_passes_of_an_awkward_module() -> None:
    with patch.object(sizes, "WINDOW_BYTES", 1), short_chunks():
        parity.assert_trains_alike(
            modules.Awkward(), loss=awkward_loss, tolerance=1e-5, steps=2, silent_passes=(False, True, False),
            bucket_size_mb=parity.TINY_MB, transport=SharedMemory(delay_s=0.001),
        )  # fmt: skip


@cases
def averages_may_be_changed_as_soon_as_they_are_there() -> None:
    with short_chunks():
        model = DataParallel(modules.plain(), "flat", transport=SharedMemory(delay_s=0.001))
    for _ in range(4):
        model(torch.full((2, 8), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
        model.finish_gradient_synchronization()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        parity.assert_gradients_are_equal_over_ranks(model)
        model.zero_grad()


@cases
def parts_updated_as_they_arrive() -> None:
    for strategy in ("overlap", "bucketed"):
        parity.assert_updates_in_parts_are_those_afterwards(
            modules.Awkward(), loss=awkward_loss, strategy=strategy, bucket_size_mb=parity.TINY_MB,
            transport=SharedMemory(delay_s=0.002),
        )  # fmt: skip


@cases.in_a_small_world
def two_models_whose_steps_overlap() -> None:
    x = torch.full((2, 8), 1.0 + dist.get_rank(), dtype=torch.float64)
    pairs = [
        (DataParallel(modules.plain(), "overlap", transport=SharedMemory(delay_s=0.002)), modules.plain())
        for _ in range(2)
    ]
    for model, alone in pairs:
        alone.load_state_dict(model.state_dict())
        sum(alone(torch.full((2, 8), 1.0 + rank).double()).square().mean() / 2 for rank in range(2)).backward()
    for model, _ in pairs:
        model(x).square().mean().backward()
    for model, alone in reversed(pairs):
        model.finish_gradient_synchronization()
        expected = [p.grad for p in alone.parameters()]
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@cases.in_a_small_world
def a_backward_pass_that_raised_leaves_nothing_once_finished() -> None:
    parity.assert_recovers(DataParallel(modules.TwoWays(), "overlap", transport=SharedMemory()))


@cases.in_a_small_world
def memory_goes_with_the_model() -> None:
    memory = SharedMemory()
    model = DataParallel(modules.plain(), transport=memory)
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    model.finish_gradient_synchronization()
    gone = ref(memory)
    gc.disable()
    try:
        del model, memory
        assert gone() is None
    finally:
        gc.enable()


@cases
def the_memory_that_is_shared_is_counted() -> None:
    """All gradients, and the other ranks' in flight: the whole mapped file."""
    memory = SharedMemory()
    model = DataParallel(modules.plain(), "flat", transport=memory)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    whole_pages = sizes.PAGE * (1 + memory.size)
    assert model.shared_bytes == memory.everyone[memory.rank].nbytes
    assert 0 <= model.shared_bytes - num_bytes * (2 - 1 / memory.size) <= whole_pages
    assert DataParallel(modules.plain()).shared_bytes == 0


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


class Copied(NamedTuple):
    target: int
    lands: bool
    began_s: float
    ended_s: float


class LoggedMemory(SharedMemory):
    def __init__(self) -> None:
        super().__init__(delay_s=0.002)
        self.averages_bytes = 0
        self.log: list[Copied] = []

    def copy(self, line: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        began_s: list[float] = []
        self._queues[line].put(lambda: began_s.append(time.monotonic()))
        super().copy(line, targets, sources, sizes_bytes)
        (rank,) = {self.rank_of(target) for target in targets}
        lands = targets[0] - self.everyone[rank].data_ptr() >= self.averages_bytes
        self._queues[line].put(lambda: self.log.append(Copied(rank, lands, began_s[0], time.monotonic())))

    def rank_of(self, address: int) -> int:
        starts = [memory.data_ptr() for memory in self.everyone]
        return next(r for r, start in enumerate(starts) if start <= address < start + self.everyone[r].nbytes)


@cases
def ranks_send_in_turns_and_the_next_chunk_before_the_means_of_the_last() -> None:
    """In a turn each rank receives from one other; the next turn waits for the turn before."""
    memory = LoggedMemory()
    rank, size = memory.rank, memory.size
    layers = [nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)] * 2
    part_bytes = 4096 // size // 2
    with patch.object(sizes, "PART_BYTES", part_bytes):
        model = DataParallel(nn.Sequential(*map(copy.deepcopy, layers)).double(), "overlap", transport=memory)
    memory.averages_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    steps, count = 3, memory.averages_bytes // (size * part_bytes)
    assert count == 2 * len(model.buckets)
    for _ in range(steps):
        model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        model.finish_gradient_synchronization()
        model.zero_grad()
    while len(memory.log) < steps * count * 2 * (size - 1):  # the means of the last bucket are there before its log is
        time.sleep(0.001)
    everyone: list[list[Copied]] = [[]] * size
    dist.all_gather_object(everyone, memory.log)
    for turn, mine in enumerate(memory.log):
        assert sorted(logs[turn].target for logs in everyone) == list(range(size))
        before = everyone[(rank + 1) % size][turn - 1]
        assert size == 2 or turn == 0 or mine.began_s >= before.ended_s
    if size == 2:  # a bucket has two chunks, and both come home before the next one
        expected = steps * len(model.buckets) * [True, True, False, False]
    else:
        expected = steps * [True, *[True, False] * (count - 1), False]
    assert [copied.lands for copied in memory.log[:: size - 1]] == expected


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
    parity.assert_gradients_are_equal_over_ranks(model)
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
        (UserError, "no transport 'pigeon': choose collectives, peer_copy", {"transport": "pigeon"}),
    ]
    for error, words, options in refusals:
        with pytest.raises(error, match=words):
            DataParallel(modules.plain(), **options)
    with pytest.raises(Unsupported, match="complex"):
        DataParallel(nn.Linear(2, 2, dtype=torch.complex64), transport=SharedMemory())
    pair = [nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")]
    with pytest.raises(Unsupported, match="on cpu and meta"):
        buckets_of([pair], SharedMemory(), GroupCollectives(), None)


@cases
def collectives_of_some_processes_are_refused() -> None:
    if dist.get_world_size() == 4:
        first = dist.get_rank() // 2 * 2
        groups = [dist.new_group([rank, rank + 1]) for rank in (0, 2)]
        with pytest.raises(Unsupported, match=r"among 2 of 4 processes.*give the process group"):
            DataParallel(modules.plain(), transport="peer_copy", group=GroupCollectives(groups[first // 2]))
