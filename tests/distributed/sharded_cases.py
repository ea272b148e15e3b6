"""What ranks do in the tests of the sharded optimizer: each function runs on every rank of a world at once."""

import copy
import random
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.parallel import ShardedOptimizer, merge_shards
from steplab.parallel.collectives import Collectives, GroupCollectives, Pending

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
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
}


class Tiny(nn.Module):
    """A tied embedding, a frozen layer, a scalar, a parameter no step uses, one in bfloat16, one of no elements."""

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


class Recorder:
    """Collectives that are counted, and may come late."""

    def __init__(self, inner: Collectives, delays: random.Random | None = None) -> None:
        self.inner, self.delays = inner, delays
        self.rank, self.size = inner.rank, inner.size
        self.calls: list[tuple[str, int]] = []

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        return self._under_way("all_gather", output, lambda: self.inner.all_gather(output, part))

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        return self._under_way("broadcast", tensor, lambda: self.inner.broadcast(tensor, source=source))

    def host_gather(self, value: Any) -> list[Any]:
        return self.inner.host_gather(value)

    def _under_way(self, name: str, tensor: Tensor, start: Callable[[], Pending]) -> Pending:
        self.calls.append((name, tensor.nbytes))
        if self.delays is None:
            return start()
        time.sleep(self.delays.uniform(0, 0.02))
        return Late(start(), self.delays.uniform(0, 0.02))


class Late:
    """Shows what is received some time after it came."""

    def __init__(self, inner: Pending, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds

    def wait(self) -> None:
        time.sleep(self.seconds)
        self.inner.wait()


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def give_gradients(params: Iterable[nn.Parameter], seed: int) -> None:
    """The same on every rank, as after averaging; none where none is wanted."""
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
    """Three groups with options of their own; the tied weight twice in one of them."""
    return [
        {"params": [model.embedding.weight, model.head.weight], "lr": 0.03},
        {"params": [*model.hidden.parameters(), model.scale, model.empty], "weight_decay": 0.0},
        {"params": [*model.back.parameters(), *model.frozen.parameters(), model.unused]},
    ]


def once(parameter_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For the unsharded optimizer, which does not take a weight twice."""
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


# --- parity -----------------------------------------------------------------------------------------------


def case_parity(name: str) -> None:
    """Weights and gathered state are those of the unsharded optimizer, bit by bit, and nobody has state of others."""
    optimizer_cls, options = OPTIMIZERS[name]
    model, reference = tiny(), tiny()
    sharded = ShardedOptimizer(model.parameters(), optimizer_cls, **options)
    plain = optimizer_cls(reference.parameters(), **options)
    train(model, sharded, range(STEPS))
    train(reference, plain, range(STEPS))
    assert_same(model, reference)
    assert all(sharded.owner(param) == dist.get_rank() for param in sharded.state)
    gathered = sharded.state_dict(gather=True)
    if dist.get_rank() == 0:
        assert_same_state(gathered, plain.state_dict())
    else:
        assert gathered == {}


def case_several_groups_with_a_schedule() -> None:
    """The scheduler writes into the groups of the sharded optimizer, and the update reads them there."""
    model, reference = tiny(), tiny()
    sharded = ShardedOptimizer(groups(model), torch.optim.Adam, lr=0.01, weight_decay=0.1)
    plain = torch.optim.Adam(once(groups(reference)), lr=0.01, weight_decay=0.1)
    for net, optimizer in (model, sharded), (reference, plain):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2, 0.3], total_steps=STEPS + 1)
        for step in range(STEPS):
            train(net, optimizer, [step])
            scheduler.step()
    assert_same(model, reference)
    assert [group["lr"] for group in sharded.param_groups] == [group["lr"] for group in plain.param_groups]
    assert [group["betas"] for group in sharded.param_groups] == [group["betas"] for group in plain.param_groups]


def case_a_group_added_later() -> None:
    """Also one whose parameters were frozen, and are thawed some steps later."""
    model, reference = tiny(), tiny()
    nets = []
    for net, sharded in (model, True), (reference, False):
        first = list(net.embedding.parameters())
        optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(first, torch.optim.AdamW, lr=0.01) if sharded else torch.optim.AdamW(first, lr=0.01)
        )
        nets.append(optimizer)
        train(net, optimizer, [0])
        optimizer.add_param_group({"params": list(net.hidden.parameters()), "lr": 0.1})
        optimizer.add_param_group({"params": list(net.frozen.parameters())})
        train(net, optimizer, [1])
        net.frozen.requires_grad_()
        train(net, optimizer, [2, 3])
        net.hidden.requires_grad_(False)
        train(net, optimizer, [4])
    assert_same(model, reference)
    state = nets[0].state_dict(gather=True)  # type: ignore[call-arg]
    if dist.get_rank() == 0:
        assert_same_state(state, nets[1].state_dict())


def case_a_closure_is_evaluated_once() -> None:
    model, calls = tiny(), count()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def closure() -> float:
        next(calls)
        loss = model(torch.arange(5)).square().mean()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == tiny()(torch.arange(5)).square().mean().item()
    assert next(calls) == 1


def case_more_ranks_than_parameters() -> None:
    model, reference = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    dist.broadcast(model.weight.detach(), 0)
    reference.load_state_dict(model.state_dict())
    sharded = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(reference.named_parameters(), lr=0.1)
    for step in range(STEPS):
        give_gradients(model.parameters(), step)
        give_gradients(reference.parameters(), step)
        sharded.step()
        plain.step()
    assert_same(model, reference)
    state = sharded.state_dict(gather=True)
    if dist.get_rank() == 0:
        assert_same_state(state, plain.state_dict())


def case_random_delays() -> None:
    """With buckets that arrive late and modules that wait for them, and with a rank that is late to each call."""
    model, reference = tiny(), tiny()
    recorder = Recorder(GroupCollectives(), random.Random(dist.get_rank()))
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, recorder, bucket_size_mb=2e-4, lr=0.01)
    sharded.overlap_with(model.embedding, model.hidden, model.back, model.frozen)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train(model, sharded, range(STEPS))
    train(reference, plain, range(STEPS))
    sharded.wait()
    assert_same(model, reference)


# --- calls and memory -------------------------------------------------------------------------------------


def case_calls_and_bytes() -> None:
    """One all-gather a dtype and step, of what the parameters and their padding take; nothing for what is frozen."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 64).bfloat16())
    model.append(nn.Linear(64, 64).requires_grad_(False))
    recorder = Recorder(GroupCollectives())
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, recorder, lr=0.1)
    assert recorder.calls == []
    give_gradients(model.parameters(), 0)
    sharded.step()
    # fp32: matrices of 16384 bytes and vectors of 256, all multiples of 256: 8 of each over 2 or 4 ranks come out even
    even = ("all_gather", 8 * (16384 + 256))
    # bf16: a matrix of 8192 bytes and a vector of 128, in 256: an owner's slot each, and more padding than is worth it
    assert recorder.calls == [even, ("broadcast", 8192), ("broadcast", 256)]
    assert sharded.padding_bytes == 128
    for _ in range(3):
        recorder.calls.clear()
        sharded.step()
        assert recorder.calls == [even, ("broadcast", 8192), ("broadcast", 256)]
    model[-1].requires_grad_()
    recorder.calls.clear()
    sharded.step()
    assert recorder.calls[3:] == [("broadcast", 16384), ("broadcast", 256)]


def case_buckets_arrive_before_they_are_used() -> None:
    """A bucket a layer; all are under way when `step` returns, and each layer waits for its own."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    recorder = Recorder(GroupCollectives(), random.Random(0))
    arrived: list[int] = []
    size = dist.get_world_size()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, recorder, bucket_size_mb=size * 16384e-6, lr=0.1)
    sharded.overlap_with(*model)
    give_gradients(model.parameters(), 0)
    sharded.step()
    assert recorder.calls == [("all_gather", size * 16384)] * (8 // size)
    flats = sharded._flats
    assert all(flat._under_way for flat in flats)
    for index, layer in enumerate(model):
        layer(torch.ones(64))
        arrived.append(sum(not flat._under_way for flat in flats))
        assert arrived[-1] == index // size + 1
    sharded.step()
    model.state_dict()
    assert not any(flat._under_way for flat in flats)


def case_state_memory(sizes: list[int]) -> None:
    """Elements of state on each rank: two a parameter that it owns, at most 2 · (total + (N − 1) · largest) / N."""
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    sharded = ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)
    give_gradients(params, 0)
    sharded.step()
    state = sum(t.numel() for values in sharded.state.values() for key, t in values.items() if key != "step")
    size, rank = dist.get_world_size(), dist.get_rank()
    assert state == 2 * sharded.shares[rank]
    assert sum(sharded.shares) == sum(sizes)
    assert state <= 2 * (sum(sizes) + (size - 1) * max(sizes)) / size


def case_parameters_stay_what_they_were() -> None:
    """The same objects with the same values, strides and gradients; moved out and back in between, still exchanged."""
    model, reference = tiny(), tiny()
    turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    other = nn.Parameter(turned.detach().clone())
    before = {name: id(param) for name, param in model.named_parameters()}
    give_gradients(model.parameters(), 0)
    gradients = {name: param.grad for name, param in model.named_parameters()}
    sharded = ShardedOptimizer([*model.parameters(), turned], torch.optim.SGD, lr=0.1)
    assert_same(model, reference)
    assert turned.stride() == (1, 4)
    assert before == {name: id(param) for name, param in model.named_parameters()}
    assert all(param.grad is gradients[name] for name, param in model.named_parameters())
    plain = torch.optim.SGD([*reference.parameters(), other], lr=0.1)
    for param in model.parameters():
        param.data = param.data.clone()
    for step in range(2):
        for net, weight, optimizer in (model, turned, sharded), (reference, other, plain):
            give_gradients([*net.parameters(), weight], step)
            optimizer.step()
        assert_same(model, reference)
        assert torch.equal(turned, other)


def case_an_old_graph_is_refused() -> None:
    """Backward through weights that a step has changed since fails on every rank, not on the owners alone."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    sharded.step()
    assert "modified by an inplace operation" in raised(loss.backward)


# --- state ------------------------------------------------------------------------------------------------


def case_save(folder: str) -> None:
    """Leaves the shard of each rank, and the gathered state and weights of rank 0, in the folder."""
    model = tiny()
    sharded = ShardedOptimizer(groups(model), torch.optim.AdamW, lr=0.01, amsgrad=True)
    train(model, sharded, range(STEPS))
    sharded.param_groups[0]["lr"] = 0.07
    torch.save(sharded.state_dict(), f"{folder}/shard{dist.get_rank()}.pt")
    gathered = sharded.state_dict(gather=True)
    if dist.get_rank() == 0:
        torch.save(gathered, f"{folder}/full.pt")
        torch.save(model.state_dict(), f"{folder}/model.pt")


def case_restore(folder: str, of: int) -> None:
    """From the files of a world of another size: training goes on as it does unsharded from the same files."""
    full = torch.load(f"{folder}/full.pt")
    shards = [torch.load(f"{folder}/shard{rank}.pt") for rank in range(of)]
    merged = merge_shards(shards)
    assert_same_state(merged, full)
    reference = tiny()
    reference.load_state_dict(torch.load(f"{folder}/model.pt"))
    plain = torch.optim.AdamW(once(groups(reference)), lr=0.5, amsgrad=True)
    plain.load_state_dict(torch.load(f"{folder}/full.pt"))
    train(reference, plain, range(STEPS, 2 * STEPS))
    size, rank = dist.get_world_size(), dist.get_rank()
    for state in [full, merged] + ([shards[rank]] if of == size else []):
        model = tiny()
        model.load_state_dict(torch.load(f"{folder}/model.pt"))
        sharded = ShardedOptimizer(groups(model), torch.optim.AdamW, lr=0.5, amsgrad=True)
        sharded.load_state_dict(copy.deepcopy(state))
        assert sharded.param_groups[0]["lr"] == 0.07
        assert all(sharded.owner(param) == rank for param in sharded.state)
        train(model, sharded, range(STEPS, 2 * STEPS))
        assert_same(model, reference)
    if of != size:
        other = ShardedOptimizer(groups(tiny()), torch.optim.AdamW, lr=0.5, amsgrad=True)
        # with fewer ranks each owns what two shards have; with more, the ranks that share one find theirs in it or not
        said = raised(lambda: other.load_state_dict(shards[(rank + 1) % of]))
        assert f"of {of}, and parameters are assigned otherwise" in said


# --- what is refused --------------------------------------------------------------------------------------


def raised(call: Callable[[], object]) -> str:
    """What the call raises, as text; an AssertionError if it does not."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def case_refusals() -> None:
    weight = torch.zeros(4, 4)
    sgd = torch.optim.SGD
    shared = [nn.Parameter(weight), nn.Parameter(weight[1:])]
    assert "one nn.Parameter in both places" in raised(lambda: ShardedOptimizer(shared, sgd, lr=0.1))
    gaps = [nn.Parameter(weight[:, :3])]
    assert "gaps" in raised(lambda: ShardedOptimizer(gaps, sgd, lr=0.1))
    good = [nn.Parameter(weight)]
    assert "Unsupported: sharding LBFGS" in raised(lambda: ShardedOptimizer(good, torch.optim.LBFGS))
    assert "bucket_size_mb must be above 0" in raised(lambda: ShardedOptimizer(good, sgd, bucket_size_mb=0))
    assert "empty parameter list" in raised(lambda: ShardedOptimizer([], sgd, lr=0.1))
    both = [{"params": good}, {"params": good}]
    assert "more than one parameter group" in raised(lambda: ShardedOptimizer(both, sgd, lr=0.1))
    optimizer = ShardedOptimizer(good, sgd, lr=0.1)
    plain = sgd([nn.Parameter(weight), nn.Parameter(weight)], lr=0.1)
    assert "groups of [2] parameters, and this optimizer has [1]" in raised(
        lambda: optimizer.load_state_dict(plain.state_dict())
    )
    good[0].data = good[0].data.double()
    assert "move the model first" in raised(optimizer.step)


def case_ranks_that_differ_are_told() -> None:
    """Each rank says which two differ and from where on, instead of waiting for the others."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3 + (dist.get_rank() == 1)))]
    said = raised(lambda: ShardedOptimizer(params, torch.optim.SGD, lr=0.1))
    assert "from number 1 on (2 and 2 in all)" in said


def case_a_group_of_some_ranks() -> None:
    """Owners and sources are ranks of the group, which are other numbers than those in the world."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(size - 1, size // 2 - 1, -1)))
    params = [nn.Parameter(torch.zeros(40 + n)) for n in range(3)]
    if rank < size // 2:
        assert "not in the group" in raised(lambda: ShardedOptimizer(params, torch.optim.SGD, group, lr=0.1))
        return
    sharded = ShardedOptimizer(params, torch.optim.SGD, group, lr=1.0, momentum=0.5)
    assert len(sharded.shares) == size // 2
    give_gradients(params, 0)
    sharded.step()
    assert all(torch.equal(param, -param.grad) for param in params if param.grad is not None)
    assert bool(sharded.state_dict(gather=True)) == (dist.get_rank(group) == 0)
