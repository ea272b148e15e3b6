import copy
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.ops.update import UpdateByParts
from steplab.parallel import DataParallel, ShardedOptimizer, sizes
from steplab.parallel.flat_parameters import Exchange

STEPS = 3
LONGEST_CASE_S = 40
"""Seconds after which a rank prints its place and ends, which ends the others."""
WAYS = [
    ("bucketed", "collectives"),
    *((strategy, "peer_copy") for strategy in ("naive", "flat", "overlap", "bucketed")),
]
Case = Callable[[int, int, torch.device], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 48)
        self.body = nn.Sequential(nn.Linear(48, 200), nn.GELU(), nn.Linear(200, 48))
        self.experts = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.unused = nn.Linear(48, 3)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        self.narrow = nn.Linear(48, 48, bias=False).to(torch.bfloat16)
        self.strided = nn.Parameter(torch.randn(48, 48).t())
        self.head = nn.Linear(48, 61, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, expert: int) -> Tensor:
        x = self.embedding(tokens)
        # A term of its own, as roundings to bf16 would be everywhere.
        apart = self.narrow(nn.functional.one_hot(tokens % 48, 48).to(torch.bfloat16)).float().square().mean()
        x = x + self.body(x) + self.frozen(x) + x @ self.strided
        if expert >= 0:
            x = x + self.experts[expert](x)
        return apart + nn.functional.cross_entropy(self.head(x).flatten(0, -2), tokens.flatten())


def in_a_group(rank: int, size: int, port: int) -> None:
    """Join and run all cases; rank 0 prints their times. A failing rank ends at once, since leaving the group would
    wait for others.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=size, device_id=device)
    for function in CASES:
        faulthandler.dump_traceback_later(LONGEST_CASE_S, exit=True)
        torch.cuda.set_device(device)
        started = time.perf_counter()
        function(rank, size, device)
        torch.cuda.synchronize(device)
        dist.barrier()
        if rank == 0:
            print(f"{size} ranks, {function.__name__}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def expert_of(rank: int) -> int:
    return -1 if rank == 1 else rank % 2


@case
def trains_as_one_process_does(rank: int, size: int, device: torch.device) -> None:
    torch.manual_seed(3)
    first = Awkward().to(device)
    tokens = torch.randint(61, (STEPS, 2, size, 4, 16), device=device)
    for strategy, transport in WAYS:
        alone, inner = copy.deepcopy(first), copy.deepcopy(first)
        model = DataParallel(inner, strategy, bucket_size_mb=0.02, transport=transport)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
        for step in tokens:
            for passage, batch in enumerate(step):
                for other in range(size):
                    (alone(batch[other], expert_of(other)) / size).backward()
                if passage == 0:
                    with model.no_sync():
                        model(batch[rank], expert_of(rank)).backward()
                else:
                    model(batch[rank], expert_of(rank)).backward()
            model.finish_gradient_synchronization()
            assert_alike_on_all_ranks([p.grad for p in model.parameters()])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, right), found in zip(alone.named_parameters(), model.parameters(), strict=True):
            tolerance = 2e-2 if right.dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(
                found, right, rtol=tolerance, atol=tolerance, msg=f"{name}, {strategy} over {transport}"
            )


@case
def parts_updated_as_they_arrive_are_updated_to_the_bit_as_afterwards(
    rank: int, size: int, device: torch.device
) -> None:
    torch.manual_seed(3)
    first = Awkward().to(device)
    tokens = torch.randint(61, (STEPS, size, 4, 16), device=device)
    for transport in ("collectives", "peer_copy"):
        found = []
        for in_parts in (False, True):
            model = DataParallel(copy.deepcopy(first), bucket_size_mb=0.02, transport=transport)
            optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
            update = UpdateByParts(optimizer)
            for step in tokens:
                model(step[rank], expert_of(rank)).backward()
                for parameters in model.finish_in_parts(4 if in_parts else 1):
                    update.of(parameters)
                optimizer.zero_grad()
            found.append([parameter.detach().clone() for parameter in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), transport


@case
def gradients_are_those_of_torch_ddp(rank: int, size: int, device: torch.device) -> None:
    """Bit for bit between two ranks, where a sum has one order; otherwise within a rounding per rank."""
    torch.manual_seed(rank)
    inner = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(device)
    x = torch.randn(64, 512, device=device)
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(inner), device_ids=[rank], bucket_cap_mb=1)
    reference(x).square().mean().backward()
    right = [p.grad for p in reference.parameters()]
    for strategy, transport in WAYS:
        with patch.object(sizes, "PART_BYTES", 2**16):
            model = DataParallel(copy.deepcopy(inner), strategy, bucket_size_mb=1.0, transport=transport)
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            model.finish_gradient_synchronization()
        for found, wanted in zip((p.grad for p in model.parameters()), right, strict=True):
            assert found is not None
            assert wanted is not None
            relative, absolute = (0.0, 0.0) if size == 2 else (1e-6, 1e-9)
            message = f"{strategy} over {transport}"
            torch.testing.assert_close(found, wanted, rtol=relative, atol=absolute, msg=message)


@case
def the_current_device_may_be_another(rank: int, size: int, device: torch.device) -> None:
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 7)).to(device)
    x = torch.randn(16, 64, device=device)
    alone = copy.deepcopy(first)
    for other in range(size):
        (alone(x * (other + 1)).square().mean() / size).backward()
    torch.cuda.set_device((rank + 1) % size)
    for strategy, transport in WAYS:
        model = DataParallel(copy.deepcopy(first), strategy, bucket_size_mb=0.02, transport=transport)
        for _ in range(2):
            model.zero_grad()
            model(x * (rank + 1)).square().mean().backward()
            model.finish_gradient_synchronization()
        for right, found in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, right.grad, msg=f"{strategy} over {transport}")
    assert torch.cuda.current_device() == (rank + 1) % size


@case
def many_steps_of_many_buckets_race_for_nothing(rank: int, size: int, device: torch.device) -> None:
    """Thirty steps with uneven work before each backward pass; every gradient is checked, also by peer copies in one
    and many chunks.
    """
    inner = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12))).to(device)
    waste = torch.randn(2048, 2048, device=device)
    for transport, part_bytes in (("collectives", 0), ("peer_copy", sizes.PART_BYTES), ("peer_copy", 2**17)):
        with patch.object(sizes, "PART_BYTES", part_bytes):
            model = DataParallel(inner, "overlap", transport=transport)
        for step in range(30):
            for _ in range((step * (rank + 1)) % 4 * 5):
                waste = waste @ waste.softmax(-1)
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = None
                value = torch.full_like(parameter, float((rank + 1) * (index + 1) + step))
                (parameter * value).sum().backward()
            model.finish_gradient_synchronization()
            for index, parameter in enumerate(model.parameters()):
                mean = sum((r + 1) * (index + 1) + step for r in range(size)) / size
                assert parameter.grad is not None
                assert bool((parameter.grad == mean).all()), f"{transport}: step {step}, parameter {index}"
                parameter.grad = None


@case
def a_sharded_optimizer_of_owners_trains_as_the_whole_one_does(rank: int, size: int, device: torch.device) -> None:
    torch.manual_seed(7)
    steps, width = 6, 192
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]
    first = nn.Sequential(*layers, nn.Linear(width, 7)).to(device)
    kind: Any = torch.optim.AdamW if size == 2 else torch.optim.SGD
    options: dict[str, Any] = {"lr": 0.01, "fused": True} | ({} if size == 2 else {"momentum": 0.9})
    ways: list[tuple[str, Exchange]] = [("collectives", "all_gather"), ("peer_copy", "peer_copy")]
    for transport, exchange in ways:
        inner, whole = copy.deepcopy(first), DataParallel(copy.deepcopy(first), bucket_size_mb=0.3)
        model = DataParallel(inner, bucket_size_mb=0.3, transport=transport, to_owners=True)
        sharded = ShardedOptimizer(
            model.parameters(), kind, owners=model.owners, bucket_size_mb=0.3, exchange=exchange, **options
        )
        sharded.overlap_with(*inner)
        for net, optimizer in ((whole, kind(whole.parameters(), **options)), (model, sharded)):
            data = torch.Generator(device).manual_seed(rank)
            for step in range(steps):
                idle(0.002 * ((rank + step) % size))
                net(torch.randn(64, width, device=device, generator=data)).square().mean().backward()
                net.finish_gradient_synchronization()
                optimizer.step()
                optimizer.zero_grad()
        sharded.wait()
        assert_alike_on_all_ranks(list(model.parameters()))
        tolerance = 0.0 if size == 2 else steps * size * 4 * torch.finfo(torch.float32).eps
        for right, found in zip(whole.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance, msg=f"by {transport}")


@case
def nobody_overwrites_parameters_that_others_still_read(rank: int, size: int, device: torch.device) -> None:
    layers = [nn.Linear(1024, 1024, bias=False, device=device) for _ in range(8)]
    for layer in layers:
        nn.init.zeros_(layer.weight)
    weights = [layer.weight for layer in layers]
    sharded = ShardedOptimizer(weights, torch.optim.SGD, bucket_size_mb=8, exchange="peer_copy", lr=1.0)
    sharded.overlap_with(*layers)
    x, wrong = torch.zeros(1, 1024, device=device), torch.zeros((), device=device)
    for step in range(20):
        idle(0.001 * ((3 * rank + step) % 4))
        for layer in layers:
            layer(x)  # waits for its weight
            wrong += torch.ne(layer.weight, -step).sum()
        idle(0.001 * ((rank + 2 * step) % 3))
        for weight in weights:
            wrong += torch.ne(weight, -step).sum()
            weight.grad = torch.ones_like(weight)
        sharded.step()
    assert wrong.item() == 0


def idle(seconds: float) -> None:
    sleep: Any = torch.cuda._sleep
    if seconds:
        sleep(round(seconds * 1.8e9))


def assert_alike_on_all_ranks(tensors: list[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is None:
            continue
        smallest, largest = (tensor.detach().clone(memory_format=torch.contiguous_format) for _ in range(2))
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert torch.equal(smallest, largest)
