import random
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import sharded_kit
from torch import nn

from steplab.parallel import ShardedOptimizer
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.flat_parameters import Exchange

# --- parity -----------------------------------------------------------------------------------------------


def case_parity(name: str, exchange: Exchange) -> None:
    optimizer_cls, options = sharded_kit.OPTIMIZERS[name]
    model, reference = sharded_kit.tiny(), sharded_kit.tiny()
    sharded = ShardedOptimizer(sharded_kit.trained(model, name), optimizer_cls, exchange=exchange, **options)
    plain = optimizer_cls(sharded_kit.trained(reference, name), **options)
    sharded_kit.train(model, sharded, range(sharded_kit.STEPS))
    sharded_kit.train(reference, plain, range(sharded_kit.STEPS))
    sharded_kit.assert_same(model, reference)
    assert all(sharded.owner(param) == dist.get_rank() for param in sharded.state)
    gathered = sharded.state_dict(gather=True)
    if dist.get_rank() == 0:
        sharded_kit.assert_same_state(gathered, plain.state_dict())
    else:
        assert gathered == {}


def case_several_groups_with_a_schedule() -> None:
    model, reference = sharded_kit.tiny(), sharded_kit.tiny()
    sharded = ShardedOptimizer(sharded_kit.groups(model), torch.optim.Adam, lr=0.01, weight_decay=0.1)
    plain = torch.optim.Adam(sharded_kit.once(sharded_kit.groups(reference)), lr=0.01, weight_decay=0.1)
    for net, optimizer in (model, sharded), (reference, plain):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.1, 0.2, 0.3], total_steps=sharded_kit.STEPS + 1
        )
        for step in range(sharded_kit.STEPS):
            sharded_kit.train(net, optimizer, [step])
            scheduler.step()
    sharded_kit.assert_same(model, reference)
    assert [group["lr"] for group in sharded.param_groups] == [group["lr"] for group in plain.param_groups]
    assert [group["betas"] for group in sharded.param_groups] == [group["betas"] for group in plain.param_groups]


def case_a_group_added_later() -> None:
    model, reference = sharded_kit.tiny(), sharded_kit.tiny()
    nets = []
    for net, sharded in (model, True), (reference, False):
        first = list(net.embedding.parameters())
        optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(first, torch.optim.AdamW, lr=0.01) if sharded else torch.optim.AdamW(first, lr=0.01)
        )
        nets.append(optimizer)
        sharded_kit.train(net, optimizer, [0])
        optimizer.add_param_group({"params": list(net.hidden.parameters()), "lr": 0.1})
        optimizer.add_param_group({"params": list(net.frozen.parameters())})
        sharded_kit.train(net, optimizer, [1])
        net.frozen.requires_grad_()
        sharded_kit.train(net, optimizer, [2, 3])
        net.hidden.requires_grad_(False)
        sharded_kit.train(net, optimizer, [4])
    sharded_kit.assert_same(model, reference)
    state = nets[0].state_dict(gather=True)  # type: ignore[call-arg]
    if dist.get_rank() == 0:
        sharded_kit.assert_same_state(state, nets[1].state_dict())


def case_a_closure_is_evaluated_once() -> None:
    model, calls = sharded_kit.tiny(), count()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def closure() -> float:
        next(calls)
        loss = model(torch.arange(5)).square().mean()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == sharded_kit.tiny()(torch.arange(5)).square().mean().item()
    assert next(calls) == 1


def case_more_ranks_than_parameters() -> None:
    model, reference = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    dist.broadcast(model.weight.detach(), 0)
    reference.load_state_dict(model.state_dict())
    sharded = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(reference.named_parameters(), lr=0.1)
    for step in range(sharded_kit.STEPS):
        sharded_kit.give_gradients(model.parameters(), step)
        sharded_kit.give_gradients(reference.parameters(), step)
        sharded.step()
        plain.step()
    sharded_kit.assert_same(model, reference)
    state = sharded.state_dict(gather=True)
    if dist.get_rank() == 0:
        sharded_kit.assert_same_state(state, plain.state_dict())


def case_random_delays(exchange: Exchange) -> None:
    model, reference = sharded_kit.tiny(), sharded_kit.tiny()
    recorder = sharded_kit.Recorder(GroupCollectives(), random.Random(dist.get_rank()))
    sharded = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, recorder, bucket_size_mb=2e-4, exchange=exchange, lr=0.01
    )
    sharded.overlap_with(model.embedding, model.hidden, model.back, model.frozen)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    sharded_kit.train(model, sharded, range(sharded_kit.STEPS))
    sharded_kit.train(reference, plain, range(sharded_kit.STEPS))
    sharded.wait()
    sharded_kit.assert_same(model, reference)


# --- with other parts of torch ----------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 30), nn.Sequential(nn.Tanh(), nn.Linear(30, 20)), nn.Linear(20, 2))


def fit(model: nn.Module, step: Callable[[], object], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sharded_kit.STEPS):
        model.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        step()


def case_with_torch_ddp(optimizer_first: bool) -> None:
    model, reference = layers(), layers()
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3}
    if optimizer_first:
        sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    fit(wrapped, sharded.step, dist.get_rank())
    plain = nn.parallel.DistributedDataParallel(reference, **options)
    fit(plain, torch.optim.AdamW(reference.parameters(), lr=0.01).step, dist.get_rank())
    sharded_kit.assert_same(model, reference)


def case_with_compiled_layers(in_place: bool) -> None:
    model, reference = layers(), layers()
    if in_place:
        for layer in model:
            layer.compile(backend="eager")
    else:
        compiled: list[Any] = [torch.compile(layer, backend="eager", fullgraph=True) for layer in model]
        model = nn.Sequential(*compiled)
    recorder = sharded_kit.Recorder(GroupCollectives(), random.Random(dist.get_rank()))
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, recorder, bucket_size_mb=1e-4, lr=0.01)
    sharded.overlap_with(*model)
    fit(model, sharded.step, 0)
    sharded.wait()
    fit(reference, torch.optim.AdamW(reference.parameters(), lr=0.01).step, 0)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param, expected)


def case_with_a_gradient_scaler() -> None:
    model, reference = layers(), layers()
    for net, optimizer in (
        (model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, fused=True)),
        (reference, torch.optim.AdamW(reference.parameters(), lr=0.01, fused=True)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(sharded_kit.STEPS):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(4)).sum() * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(param.isfinite().all() for param in model.parameters())
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param, expected)


def case_hooks_run_and_gradients_are_dropped() -> None:
    model, seen = sharded_kit.tiny(), []
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    sharded.register_step_post_hook(lambda *_: seen.append("after"))
    sharded_kit.give_gradients(model.parameters(), 0)
    sharded.step()
    sharded.zero_grad()
    assert seen == ["after"]
    assert all(param.grad is None for param in model.parameters())
