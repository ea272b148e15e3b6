import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.distributed import sharded_cases as cases
from tests.distributed import sharded_contract_cases as contract
from tests.distributed import sharded_kit
from tests.distributed.ranks import on_ranks
from tests.first import first
from torch import nn

from steplab.parallel import ShardedOptimizer, merge_shards
from steplab.parallel.errors import UserError
from steplab.parallel.flat_parameters import Exchange, _gathers
from steplab.parallel.sizes import owners_of, runs_of

WORLDS = pytest.mark.parametrize("size", [2, 4])
FEW_RANKS = pytest.mark.parametrize("size", first(1, [2, 4]))
EXCHANGES = pytest.mark.parametrize("exchange", ["all_gather", "broadcast"])


@FEW_RANKS
@pytest.mark.parametrize("name", sharded_kit.OPTIMIZERS)
def test_weights_and_state_are_those_of_the_unsharded_optimizer(size: int, name: str) -> None:
    on_ranks(size, cases.case_parity, name, "all_gather" if size == 2 else "broadcast")


@WORLDS
@EXCHANGES
@pytest.mark.parametrize("case", [contract.case_calls_and_bytes, cases.case_random_delays])
def test_either_exchange(size: int, exchange: str, case: Callable[..., None]) -> None:
    on_ranks(size, case, exchange)


@FEW_RANKS
@pytest.mark.parametrize(
    "case",
    [
        cases.case_several_groups_with_a_schedule,
        cases.case_a_group_added_later,
        cases.case_a_closure_is_evaluated_once,
        cases.case_more_ranks_than_parameters,
        cases.case_with_a_gradient_scaler,
        cases.case_hooks_run_and_gradients_are_dropped,
        contract.case_buckets_arrive_before_they_are_used,
        contract.case_parameters_stay_what_they_were,
        contract.case_an_old_graph_is_refused,
        contract.case_refusals,
        contract.case_ranks_that_differ_are_told,
    ],
    ids=lambda case: case.__name__,
)
def test_on_ranks(size: int, case: Callable[[], None]) -> None:
    on_ranks(size, case)


@WORLDS
def test_a_group_of_some_ranks(size: int) -> None:
    on_ranks(size, contract.case_a_group_of_some_ranks)


@pytest.mark.parametrize(
    "case",
    [
        contract.case_parameters_that_are_given_memory_with_gaps_stay_apart,
        contract.case_what_is_added_to_a_module_later_has_arrived_after_the_step,
        contract.case_a_group_that_is_refused_leaves_no_trace,
        contract.case_a_group_without_parameters,
    ],
    ids=lambda case: case.__name__,
)
def test_on_two_ranks(case: Callable[[], None]) -> None:
    on_ranks(2, case)


@FEW_RANKS
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_ddp_may_be_built_before_or_after(size: int, optimizer_first: bool) -> None:
    on_ranks(size, cases.case_with_torch_ddp, optimizer_first)


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_layers_wait(in_place: bool) -> None:
    on_ranks(2, cases.case_with_compiled_layers, in_place)


@WORLDS
@settings(max_examples=10)
@example([1000, 1, 1, 1])
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_state_on_a_rank_is_bounded(size: int, sizes: list[int]) -> None:
    on_ranks(size, contract.case_state_memory, sizes)


@pytest.mark.parametrize(("saved", "restored"), [(2, 4), (4, 2), (2, 2)])
def test_state_goes_to_another_world_size(tmp_path: Path, saved: int, restored: int) -> None:
    on_ranks(saved, contract.case_save, str(tmp_path))
    on_ranks(restored, contract.case_restore, str(tmp_path), saved)


# --- without other processes ------------------------------------------------------------------------------


def test_other_processes_are_needed() -> None:
    with pytest.raises(UserError, match="torchrun"):
        ShardedOptimizer([nn.Parameter(torch.zeros(1))], torch.optim.SGD, lr=0.1)


def shard(rank: int, world_size: int) -> dict[str, object]:
    return {"state": {}, "param_groups": [], "shard": {"rank": rank, "world_size": world_size, "params": []}}


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ([], "only shards"),
        ([{"state": {}, "param_groups": []}], "only shards"),
        ([shard(0, 2)], "not all of one run: rank 0 of 2;"),
        ([shard(0, 2), shard(0, 2)], "rank 0 of 2, rank 0 of 2"),
        ([shard(0, 2), shard(1, 3)], "rank 0 of 2, rank 1 of 3"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(shards: list[dict[str, object]], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        merge_shards(shards)


@given(st.lists(st.lists(st.integers(0, 1000), max_size=20), max_size=3), st.integers(1, 9))
def test_shares_are_bounded_however_many_groups_come(groups: list[list[int]], ranks: int) -> None:
    loads = [0] * ranks
    for group in groups:
        owners = owners_of(group, loads)
        assert len(owners) == len(group)
    everything = [elements for group in groups for elements in group]
    assert sum(loads) == sum(everything)
    assert max(loads) <= sharded_kit.largest_share_bound(everything, ranks)


def test_the_largest_go_first_and_ties_go_to_the_lowest_rank() -> None:
    loads = [0, 0, 0]
    assert owners_of([1, 5, 5, 3, 2, 2], loads) == [1, 0, 1, 2, 2, 0]
    assert loads == [7, 6, 5]


@given(st.lists(st.integers(0, 50)), st.one_of(st.integers(1, 100), st.just(float("inf"))))
def test_runs_keep_the_order_and_are_full_but_for_the_last(sizes_bytes: list[int], bucket_bytes: float) -> None:
    found = runs_of(sizes_bytes, bucket_bytes)
    assert [index for bucket in found for index in bucket] == list(range(len(sizes_bytes)))
    for bucket in found[:-1]:
        filled = [sizes_bytes[index] for index in bucket]
        assert sum(filled) >= bucket_bytes > sum(filled[:-1])


@pytest.mark.parametrize(
    ("device", "shares", "exchange", "gathers"),
    [
        ("cuda", [8, 8, 8, 8], "auto", True),
        ("cuda", [9, 8, 8, 7], "auto", True),
        ("cuda", [10, 8, 8, 6], "auto", False),
        ("cpu", [8, 8], "auto", False),
        ("cpu", [8, 0], "all_gather", True),
        ("cuda", [8, 8], "broadcast", False),
    ],
)
def test_auto_pads_for_an_all_gather_on_gpus_only_and_not_much(
    device: str, shares: list[int], exchange: Exchange, gathers: bool
) -> None:
    assert _gathers(shares, torch.device(device), exchange) is gathers
