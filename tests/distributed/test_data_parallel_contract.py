import math
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import modules
from tests.distributed.parity import TINY_MB, assert_gradients_are_equal_over_ranks
from tests.distributed.ranks import Cases
from tests.distributed.transports import Recorder
from torch import Tensor, nn

from steplab.parallel import DataParallel
from steplab.parallel.buckets import is_shared
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.errors import Unsupported, UserError

cases = Cases()


@pytest.mark.parametrize("size", [2, 4])
def test_the_contract(size: int, subtests: pytest.Subtests) -> None:
    cases.run(size, subtests)


def recorded(module: nn.Module, *arguments: Any, **options: Any) -> tuple[DataParallel, Recorder]:
    recorder = Recorder(GroupCollectives())
    return DataParallel(module, *arguments, group=recorder, **options), recorder  # type: ignore[misc]


def refused(error: type[Exception], words: str, build: Callable[[], Any]) -> None:
    """A case in which another rank waits would time out."""
    with pytest.raises(error, match=words):
        build()


def linear_sizes(module: nn.Module) -> list[int]:
    return [p.numel() * p.element_size() for p in reversed(list(module.parameters())) if p.requires_grad]


# --- collectives ------------------------------------------------------------------------------------------


@cases
def collectives_of_each_strategy_are_counted() -> None:
    x = torch.ones(2, 8, dtype=torch.float64)
    sizes = linear_sizes(modules.plain())  # 64, 1024, 128, 128, 128, 1024 bytes
    expected = {
        ("naive", 25.0): sizes,
        ("overlap", 25.0): sizes,
        ("flat", 25.0): [sum(sizes)],
        ("bucketed", 25.0): [sum(sizes)],
        ("bucketed", 1e-9): sizes,
        ("bucketed", 0.0005): [64, 1024, 128 * 3, 1024],
        ("bucketed", 0.0012): [64 + 1024, 128 * 3, 1024],
    }
    for (strategy, bucket_size_mb), reductions in expected.items():
        model, recorder = recorded(modules.plain(), strategy, bucket_size_mb)
        start = recorder.taken()
        assert start[0] == ("host_gather", 0)
        assert sorted(start[1:]) == sorted(("broadcast", size) for size in sizes)
        for _ in range(3):
            with model.no_sync():
                model(x).sum().backward()
            assert recorder.taken() == []
            model(x).sum().backward()
            early = recorder.taken()
            model.finish_gradient_synchronization()
            sent = [("all_reduce", size) for size in reductions]
            assert early == (sent if strategy in ("overlap", "bucketed") else [])
            assert early + recorder.taken() == [*sent, ("host_maximum", 0)]
        assert recorder.under_way == 0
        recorder.most_under_way = 0
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        assert recorder.most_under_way == (1 if strategy == "naive" else len(reductions))


@cases
def late_gradients_send_their_bucket_again_and_no_other() -> None:
    model, recorder = recorded(modules.TwoWays(), "overlap")
    x = torch.ones(2, 8, dtype=torch.float64)
    model(x, True).sum().backward()
    recorder.taken()
    if dist.get_rank() == 0:
        model.head(x).sum().backward()
    model.finish_gradient_synchronization()
    assert [name for name, _ in recorder.taken()] == ["host_maximum", "all_reduce", "all_reduce"]
    assert_gradients_are_equal_over_ranks(model)


@cases
def what_is_never_used_holds_up_the_first_step_alone() -> None:
    model, recorder = recorded(modules.Awkward(), "overlap")
    x = torch.ones(2, 8, dtype=torch.float64)
    early = []
    for _ in range(2):
        recorder.taken()
        model(x, -1).sum().backward()
        early.append(len(recorder.taken()))
        model.finish_gradient_synchronization()
    assert early == [0, len(model.buckets)]  # the last expert comes first, and is not used


# --- memory -----------------------------------------------------------------------------------------------


@cases.in_a_small_world
def gradients_live_in_their_bucket() -> None:
    model = DataParallel(modules.plain(), "bucketed", 0.0005)
    x = torch.ones(2, 8, dtype=torch.float64)
    places = []
    for step in range(3):
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        for parameter in itemgetter(0, 4, 5)(list(model.parameters())):  # each alone
            while is_shared(parameter.grad):  # gloo's threads release memory a moment after completion
                time.sleep(0.001)
        shared = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
        assert len(shared) == len(model.buckets) == 4
        model.zero_grad(set_to_none=step == 0)
    shared_places = [place[1:4] for place in places]  # the three small ones: the buffer is there for good
    assert shared_places[0] == shared_places[1] == shared_places[2]
    assert places[1] == places[2]  # zeroed gradients are added to where they are


@cases.in_a_small_world
def a_gradient_alone_in_its_bucket_is_reduced_where_it_was_born() -> None:
    for strategy, bucket_size_mb in (("naive", 25.0), ("overlap", 25.0), ("bucketed", TINY_MB)):
        module = nn.Linear(16, 16, bias=False).double()
        born: list[int] = []
        module.weight.register_post_accumulate_grad_hook(lambda p, born=born: born.append(p.grad.data_ptr()))
        model = DataParallel(module, strategy, bucket_size_mb)
        model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
        model.finish_gradient_synchronization()
        assert [model.weight.grad.data_ptr()] == born


@cases.in_a_small_world
def a_module_outlives_its_wrapper() -> None:
    module = modules.plain()
    x = torch.ones(2, 8, dtype=torch.float64)
    first, recorder = recorded(module, "overlap")
    del first
    recorder.taken()
    model = DataParallel(module, "bucketed")
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    assert recorder.taken() == []


# --- the start --------------------------------------------------------------------------------------------


@cases
def all_begin_with_the_first_ranks_weights() -> None:
    torch.manual_seed(dist.get_rank())
    norm = nn.BatchNorm2d(4)
    module = nn.Sequential(modules.in_channels_last(nn.Conv2d(2, 4, 3)), norm)
    nn.init.normal_(norm.weight.requires_grad_(False))
    assert norm.running_mean is not None
    norm.running_mean.fill_(dist.get_rank() + 5)
    DataParallel(module)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, [*module.parameters(), *module.buffers()])
    for mine, first in zip(values[dist.get_rank()], values[0], strict=True):
        assert torch.equal(mine, first)
    assert norm.running_mean.tolist() == [5.0] * 4


@cases
def modules_that_differ_are_refused_on_all_ranks() -> None:
    odd = dist.get_rank() == 1
    refused(UserError, r"^weight is \(3, 4\).* rank 0 and \(3, 5\)", lambda: DataParallel(nn.Linear(4 + odd, 3)))
    refused(UserError, "bias is absent on rank 0 and", lambda: DataParallel(nn.Linear(4, 3, bias=odd)))
    refused(UserError, "^bias is .* and absent on rank 1", lambda: DataParallel(nn.Linear(4, 3, bias=not odd)))
    refused(UserError, "float32 .* float64", lambda: DataParallel(nn.Linear(4, 3).to(torch.float64 if odd else None)))
    refused(UserError, "not trained on rank 1", lambda: DataParallel(nn.Linear(4, 3).requires_grad_(not odd)))
    refused(UserError, "strategy is 'naive' on", lambda: DataParallel(nn.Linear(4, 3), "flat" if odd else "naive"))
    refused(UserError, "bucket_size_mb is 25.0", lambda: DataParallel(nn.Linear(4, 3), bucket_size_mb=25.0 + odd))
    names = "ba" if odd else "ab"
    ordered = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in names})
    ordered._parameters = {name: ordered._parameters[name] for name in names}
    refused(UserError, "another order", lambda: DataParallel(ordered))


@cases.in_a_small_world
def requests_that_are_wrong_are_refused() -> None:
    plain = modules.plain
    refused(UserError, "choose naive, flat, overlap, bucketed", lambda: DataParallel(plain(), "fast"))
    refused(UserError, "positive bucket_size_mb", lambda: DataParallel(plain(), bucket_size_mb=0))
    refused(UserError, "positive bucket_size_mb", lambda: DataParallel(plain(), bucket_size_mb=math.nan))
    refused(Unsupported, "sparse=False", lambda: DataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True))))
    model = DataParallel(modules.Awkward())
    with model.no_sync():
        refused(UserError, "leave it first", model.finish_gradient_synchronization)
    model.frozen.weight.requires_grad_(True)
    refused(UserError, "frozen.weight required no gradient", model.finish_gradient_synchronization)


# --- names ------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.answer = nn.Linear(2, 2), nn.BatchNorm1d(2), 42

    def forward(self, x: Tensor, *, factor: float = 1.0) -> dict[str, Tensor]:
        return {"out": self.norm(self.layer(x)) * factor}

    def twice(self, x: Tensor) -> Tensor:
        return 2 * x


@cases.in_a_small_world
def names_are_the_inner_modules() -> None:
    inner = Named()
    model = DataParallel(inner)
    assert model.answer == 42
    assert model.twice(torch.ones(1)).item() == 2
    assert torch.equal(model(torch.eye(2), factor=0.0)["out"], torch.zeros(2, 2))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in inner.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in inner.named_buffers()]
    assert model.buckets == [["norm.bias", "norm.weight", "layer.bias", "layer.weight"]]
    refused(AttributeError, "question", lambda: model.question)
    model.eval()
    assert not inner.norm.training


@cases.in_a_small_world
def state_is_saved_and_loaded_as_the_inner_modules() -> None:
    model, other = DataParallel(Named()), Named()
    state: Any = model.state_dict()
    assert list(state) == list(other.state_dict())
    assert vars(state) == vars(other.state_dict())  # versions of modules among them
    other.load_state_dict(state)
    nn.init.zeros_(other.layer.weight)
    model.load_state_dict(other.state_dict())
    assert not model.layer.weight.any()
    fresh = Named()
    around, plain_around = nn.Sequential(model), nn.Sequential(fresh)
    assert list(around.state_dict()) == list(plain_around.state_dict())
    around.load_state_dict(plain_around.state_dict())
    assert torch.equal(model.layer.weight, fresh.layer.weight)
    refused(UserError, "assign=True", lambda: model.load_state_dict(state, assign=True))
