import pytest
import torch
import torch.distributed as dist
from tests.distributed.parity import assert_gradients_are_equal_over_ranks
from tests.distributed.ranks import Cases
from torch import nn

from steplab.parallel import DataParallel
from steplab.parallel.collectives import GroupCollectives, collectives_of
from steplab.parallel.errors import UserError

cases = Cases()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size: int, subtests: pytest.Subtests) -> None:
    cases.run(size, subtests)


def test_without_other_processes_the_message_says_how_to_have_some() -> None:
    with pytest.raises(UserError, match="init_process_group first"):
        DataParallel(nn.Linear(2, 2))


@cases
def tensors() -> None:
    group = GroupCollectives()
    rank, size = group.rank, group.size
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    for dtype in DTYPES:
        mine = torch.full((3,), rank + 1, dtype=dtype)
        total, mean = mine.clone(), mine.clone()
        group.all_reduce(total, average=False).wait()
        assert total.tolist() == [size * (size + 1) / 2] * 3
        group.all_reduce(mean, average=True).wait()
        assert mean.tolist() == [(size + 1) / 2] * 3
        gathered = torch.empty(3 * size, dtype=dtype)
        group.all_gather(gathered, mine).wait()
        assert gathered.tolist() == [r + 1 for r in range(size) for _ in range(3)]
        part = torch.empty(2, dtype=dtype)
        group.reduce_scatter(part, torch.arange(2 * size).to(dtype), average=True).wait()
        assert part.tolist() == [2 * rank, 2 * rank + 1]
        group.broadcast(mine, source=size - 1).wait()
        assert mine.tolist() == [size] * 3


@cases
def several_under_way_at_once() -> None:
    group = GroupCollectives()
    tensors = [torch.full((1000,), float(i + group.rank)) for i in range(20)]
    under_way = [group.all_reduce(tensor, average=True) for tensor in tensors]
    for pending in reversed(under_way):
        pending.wait()
    assert [tensor[0].item() for tensor in tensors] == [i + (group.size - 1) / 2 for i in range(20)]


@cases
def host_values() -> None:
    group = GroupCollectives()
    values = torch.tensor([group.rank, -group.rank, 7])
    assert group.host_maximum(values).tolist() == [group.size - 1, 0, 7]
    assert values.tolist() == [group.rank, -group.rank, 7]
    assert group.host_gather({"rank": group.rank}) == [{"rank": rank} for rank in range(group.size)]
    assert collectives_of(group) is group


@cases
def gradients_of_low_precision_and_of_no_elements() -> None:
    for strategy in ("naive", "flat", "overlap", "bucketed"):
        module = nn.Module()
        for index, dtype in enumerate(DTYPES):
            module.register_parameter(f"some{index}", nn.Parameter(torch.ones(5, dtype=dtype)))
        module.register_parameter("none", nn.Parameter(torch.ones(0)))
        model = DataParallel(module, strategy)
        total = torch.stack([parameter.sum().double() for parameter in model.parameters()]).sum()
        (total * (dist.get_rank() + 1)).backward()
        model.finish_gradient_synchronization()
        assert_gradients_are_equal_over_ranks(model)
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            assert (parameter.grad == (dist.get_world_size() + 1) / 2).all()
