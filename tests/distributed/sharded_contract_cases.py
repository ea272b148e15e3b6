import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import sharded_kit
from torch import nn

from steplab.parallel import ShardedOptimizer, merge_shards
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.flat_parameters import Exchange

# --- calls and memory -------------------------------------------------------------------------------------


def case_calls_and_bytes(exchange: Exchange) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 64).bfloat16())
    model.append(nn.Linear(64, 64).requires_grad_(False))
    recorder = sharded_kit.Recorder(GroupCollectives())
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, recorder, exchange=exchange, lr=0.1)
    assert recorder.calls == []
    size = dist.get_world_size()
    # fp32: 8 matrices of 16384 bytes and 8 vectors of 256 come out even; bf16: an owner for 8192 bytes, one for 128
    padding_bytes = sum(flat.num_bytes - sum(param.nbytes for param in flat.params) for flat in sharded._flats)
    if exchange == "all_gather":
        expected = [("all_gather", 8 * 16640), ("all_gather", size * 8192)]
        thawed = [("all_gather", size * 16384)]
        assert padding_bytes == size * 8192 - 8320 + size * 16384 - 16640
    else:
        expected = [("broadcast", 8 * 16640 // size)] * size + [("broadcast", 8192), ("broadcast", 256)]
        thawed = [("broadcast", 16384), ("broadcast", 256)]
        assert padding_bytes == 128
    sharded_kit.give_gradients(model.parameters(), 0)
    for _ in range(3):
        recorder.calls.clear()
        sharded.step()
        assert recorder.calls == expected
    model[-1].requires_grad_()
    recorder.calls.clear()
    sharded.step()
    assert recorder.calls == expected + thawed


def case_buckets_arrive_before_they_are_used() -> None:
    size = dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3 * size)))
    recorder = sharded_kit.Recorder(GroupCollectives())
    sharded = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, recorder, bucket_size_mb=size * 16384e-6, exchange="all_gather", lr=0.1
    )
    sharded.overlap_with(*list(model)[:-1])
    sharded_kit.give_gradients(model.parameters(), 0)

    def under_way() -> list[bool]:
        return [bool(flat._under_way) for flat in sharded._flats]

    sharded.step()
    assert recorder.calls == [("all_gather", size * 16384)] * 3
    assert under_way() == [True, True, False]
    model[0](torch.ones(64))
    assert under_way() == [False, True, False]
    model[2 * size - 1](torch.ones(64))
    assert under_way() == [False, False, False]
    sharded.step()
    assert under_way() == [True, True, False]
    model.state_dict()
    assert under_way() == [False, False, False]
    sharded.step()
    seen: list[list[bool]] = []

    def closure() -> float:
        seen.append(under_way())
        return 0.0

    sharded.step(closure)
    assert seen == [[False, False, False]]


def case_state_memory(sizes: list[int]) -> None:
    """Elements of state on each rank: two per owned parameter, at most 2 · (total + (N − 1) · largest) / N."""
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    sharded = ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)
    sharded_kit.give_gradients(params, 0)
    sharded.step()
    state = sum(t.numel() for values in sharded.state.values() for key, t in values.items() if key != "step")
    size, rank = dist.get_world_size(), dist.get_rank()
    assert state == 2 * sharded._loads[rank]
    assert sum(sharded._loads) == sum(sizes)
    assert state <= 2 * (sum(sizes) + (size - 1) * max(sizes)) / size


def case_parameters_stay_what_they_were() -> None:
    model, reference = sharded_kit.tiny(), sharded_kit.tiny()
    turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    other = nn.Parameter(turned.detach().clone())
    before = {name: id(param) for name, param in model.named_parameters()}
    sharded_kit.give_gradients(model.parameters(), 0)
    gradients = {name: param.grad for name, param in model.named_parameters()}
    sharded = ShardedOptimizer([*model.parameters(), turned], torch.optim.SGD, lr=0.1)
    sharded_kit.assert_same(model, reference)
    assert turned.stride() == (1, 4)
    assert before == {name: id(param) for name, param in model.named_parameters()}
    assert all(param.grad is gradients[name] for name, param in model.named_parameters())
    plain = torch.optim.SGD([*reference.parameters(), other], lr=0.1)
    for param in model.parameters():
        param.data = param.data.clone()
    for step in range(2):
        for net, weight, optimizer in (model, turned, sharded), (reference, other, plain):
            sharded_kit.give_gradients([*net.parameters(), weight], step)
            optimizer.step()
        sharded_kit.assert_same(model, reference)
        assert torch.equal(turned, other)


def case_parameters_that_are_given_memory_with_gaps_stay_apart() -> None:
    """They are moved back without their gaps, which would contain neighbours' elements."""
    first, second = (nn.Parameter(torch.zeros(64)) for _ in range(2))
    sharded = ShardedOptimizer([first, second], torch.optim.SGD, lr=0.5)
    first.data = torch.ones(128)[::2]
    sharded_kit.give_gradients([first, second], 0)
    sharded.step()
    assert first.grad is not None
    assert second.grad is not None
    assert torch.equal(first, 1 - first.grad / 2)
    assert torch.equal(second, -second.grad / 2)
    first.grad, first.data = None, torch.ones(65)
    assert "of 64 elements was given 65" in raised(sharded.step)


def case_what_is_added_to_a_module_later_has_arrived_after_the_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    ranks = sharded_kit.Recorder(GroupCollectives())
    sharded = ShardedOptimizer(list(model[0].parameters()), torch.optim.SGD, ranks, bucket_size_mb=1.0, lr=0.1)
    sharded.overlap_with(model)
    sharded.add_param_group({"params": list(model[1].parameters())})
    sharded_kit.give_gradients(model.parameters(), 0)
    sharded.step()
    assert [bool(flat._under_way) for flat in sharded._flats] == [True, False]
    model(torch.ones(1, 8))
    assert not any(flat._under_way for flat in sharded._flats)


def case_a_group_that_is_refused_leaves_no_trace() -> None:
    with_gaps, half = nn.Parameter(torch.ones(4, 8)[:, ::2]), nn.Parameter(torch.ones(4).half())
    for refused, options in ((with_gaps, {}), (nn.Parameter(torch.ones(4)), {"lr": -1.0}), (half, {})):
        model, reference = sharded_kit.tiny(), sharded_kit.tiny()
        sharded = ShardedOptimizer(model.parameters(), Picky, lr=0.1)
        shares, flats = list(sharded._loads), len(sharded._flats)
        assert raised(lambda: sharded.add_param_group({"params": [refused], **options}))  # noqa: B023
        assert (sharded._loads, len(sharded._flats), len(sharded.param_groups)) == (shares, flats, 1)
        sharded_kit.train(model, sharded, range(2))
        sharded_kit.train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(2))
        sharded_kit.assert_same(model, reference)


class Picky(torch.optim.SGD):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("lr", 1.0) < 0:
            raise ValueError("a negative learning rate")
        if any(param.dtype == torch.half for param in param_group["params"]):
            raise ValueError("no half precision")
        super().add_param_group(param_group)


def case_a_group_without_parameters() -> None:
    sharded = ShardedOptimizer([{"params": []}], torch.optim.SGD, lr=0.1)
    sharded.step()
    assert sharded.state_dict(gather=True).get("state", {}) == {}


def case_an_old_graph_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    sharded.step()
    assert "modified by an inplace operation" in raised(loss.backward)


# --- state ------------------------------------------------------------------------------------------------


def case_save(folder: str) -> None:
    model = sharded_kit.tiny()
    sharded = ShardedOptimizer(sharded_kit.groups(model), torch.optim.AdamW, lr=0.01, amsgrad=True)
    sharded_kit.train(model, sharded, range(sharded_kit.STEPS))
    sharded.param_groups[0]["lr"] = 0.07
    torch.save(sharded.state_dict(), f"{folder}/shard{dist.get_rank()}.pt")
    gathered = sharded.state_dict(gather=True)
    if dist.get_rank() == 0:
        torch.save(gathered, f"{folder}/full.pt")
        torch.save(model.state_dict(), f"{folder}/model.pt")


def case_restore(folder: str, of: int) -> None:
    full = torch.load(f"{folder}/full.pt")
    shards = [torch.load(f"{folder}/shard{rank}.pt") for rank in range(of)]
    merged = merge_shards(shards)
    sharded_kit.assert_same_state(merged, full)
    reference = sharded_kit.tiny()
    reference.load_state_dict(torch.load(f"{folder}/model.pt"))
    plain = torch.optim.AdamW(sharded_kit.once(sharded_kit.groups(reference)), lr=0.5, amsgrad=True)
    plain.load_state_dict(torch.load(f"{folder}/full.pt"))
    sharded_kit.train(reference, plain, range(sharded_kit.STEPS, 2 * sharded_kit.STEPS))
    size, rank = dist.get_world_size(), dist.get_rank()
    for state in [full, merged] + ([shards[rank]] if of == size else []):
        model = sharded_kit.tiny()
        model.load_state_dict(torch.load(f"{folder}/model.pt"))
        sharded = ShardedOptimizer(sharded_kit.groups(model), torch.optim.AdamW, lr=0.5, amsgrad=True)
        sharded.load_state_dict(copy.deepcopy(state))
        assert sharded.param_groups[0]["lr"] == 0.07
        assert all(sharded.owner(param) == rank for param in sharded.state)
        sharded_kit.train(model, sharded, range(sharded_kit.STEPS, 2 * sharded_kit.STEPS))
        sharded_kit.assert_same(model, reference)
    if of != size:
        other = ShardedOptimizer(sharded_kit.groups(sharded_kit.tiny()), torch.optim.AdamW, lr=0.5, amsgrad=True)
        # with fewer ranks each owns what two shards have; with more, the ranks that share one find theirs in it or not
        said = raised(lambda: other.load_state_dict(shards[(rank + 1) % of]))
        assert f"of {of}, and parameters have other owners" in said


# --- what is refused --------------------------------------------------------------------------------------


def raised(call: Callable[[], object]) -> str:
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
    built = torch.optim.SGD(good, lr=0.1)
    assert "must be a class" in raised(lambda: ShardedOptimizer(good, built))  # type: ignore[arg-type]
    assert "bucket_size_mb must be above 0" in raised(lambda: ShardedOptimizer(good, sgd, bucket_size_mb=0))
    wrong: Any = "gather"
    assert "one of auto, all_gather, broadcast" in raised(lambda: ShardedOptimizer(good, sgd, exchange=wrong))
    assert "empty parameter list" in raised(lambda: ShardedOptimizer([], sgd, lr=0.1))
    both = [{"params": good}, {"params": good}]
    assert "more than one parameter group" in raised(lambda: ShardedOptimizer(both, sgd, lr=0.1))
    optimizer = ShardedOptimizer(good, sgd, lr=0.1)
    plain = sgd([nn.Parameter(weight), nn.Parameter(weight)], lr=0.1)
    assert "groups of [2] parameters, and this optimizer has [1]" in raised(
        lambda: optimizer.load_state_dict(plain.state_dict())
    )
    assert "cannot be copied or pickled" in raised(lambda: copy.deepcopy(optimizer))
    good[0].data = good[0].data.double()
    assert "move the model first" in raised(optimizer.step)


def case_ranks_that_differ_are_told() -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3 + (dist.get_rank() == 1)))]
    said = raised(lambda: ShardedOptimizer(params, torch.optim.SGD, lr=0.1))
    assert "parameter 1 of the optimizer is (3,) float32 on cpu" in said
    assert "every rank has to build the same model" in said


def case_a_group_of_some_ranks() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(size - 1, size // 2 - 1, -1)))
    params = [nn.Parameter(torch.zeros(40 + n)) for n in range(3)]
    if rank < size // 2:
        assert "not in the group" in raised(lambda: ShardedOptimizer(params, torch.optim.SGD, group, lr=0.1))
        return
    sharded = ShardedOptimizer(params, torch.optim.SGD, group, lr=1.0, momentum=0.5)
    assert len(sharded._loads) == size // 2
    sharded_kit.give_gradients(params, 0)
    sharded.step()
    assert all(torch.equal(param, -param.grad) for param in params if param.grad is not None)
    assert bool(sharded.state_dict(gather=True)) == (dist.get_rank(group) == 0)
