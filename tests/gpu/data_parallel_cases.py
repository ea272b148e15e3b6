"""What each rank of test_data_parallel_on_gpus.py does: a process a GPU, joined over NCCL."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.parallel import DataParallel, ShardedOptimizer

STEPS = 3
WAYS = [
    (strategy, transport)
    for transport in ("collectives", "peer_copy")
    for strategy in ("naive", "flat", "overlap", "bucketed")
]


class Awkward(nn.Module):
    """Tied weights, a frozen layer, an expert a rank, one that nobody uses, two dtypes, strides that are not dense."""

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


def in_a_group(rank: int, size: int, port: int, what: str) -> None:
    """Join, and do one of the functions below."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=size, device_id=device)
    try:
        globals()[what](rank, size, device)
    finally:
        dist.destroy_process_group()


def expert_of(rank: int) -> int:
    return -1 if rank == 1 else rank % 2


def trains_as_one_process_does(rank: int, size: int, device: torch.device) -> None:
    """Weights after each step, with two backward passes of which the first is silent."""
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


def gradients_are_those_of_torch_ddp(rank: int, size: int, device: torch.device) -> None:
    """Bit for bit between two ranks, where a sum has one order; else within a rounding a rank."""
    torch.manual_seed(rank)
    inner = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(device)
    x = torch.randn(64, 512, device=device)
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(inner), device_ids=[rank], bucket_cap_mb=1)
    reference(x).square().mean().backward()
    right = [p.grad for p in reference.parameters()]
    for strategy, transport in WAYS:
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


def the_current_device_may_be_another(rank: int, size: int, device: torch.device) -> None:
    """Where the module is built and its gradients are waited for."""
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


def many_steps_of_many_buckets_race_for_nothing(rank: int, size: int, device: torch.device) -> None:
    """Thirty steps with work of another length on every rank before each backward pass; every gradient is checked."""
    inner = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12))).to(device)
    waste = torch.randn(2048, 2048, device=device)
    for transport in ("collectives", "peer_copy"):
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


def a_sharded_optimizer_does_what_the_whole_one_does(rank: int, size: int, device: torch.device) -> None:
    torch.manual_seed(5)
    first = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 7)).to(device)
    x = torch.randn(16, 64, device=device)
    whole, inner = copy.deepcopy(first), copy.deepcopy(first)
    optimizers: list[Any] = [
        torch.optim.AdamW(whole.parameters(), lr=0.01, fused=True),
        ShardedOptimizer(inner.parameters(), torch.optim.AdamW, lr=0.01, fused=True),
    ]
    for _ in range(STEPS):
        for module, optimizer in zip((whole, inner), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for right, found in zip(whole.parameters(), inner.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def assert_alike_on_all_ranks(tensors: list[Tensor | None]) -> None:
    """Bit for bit."""
    for tensor in tensors:
        if tensor is None:
            continue
        smallest, largest = (tensor.detach().clone(memory_format=torch.contiguous_format) for _ in range(2))
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert torch.equal(smallest, largest)
