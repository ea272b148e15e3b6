from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed import layout_cases as cases
from tests.distributed.ranks import on_ranks
from tests.first import first
from tests.shapes import GPT_2
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from steplab.parallel.buckets import refuse_sparse
from steplab.parallel.errors import Unsupported, UserError
from steplab.parallel.layout import SCHEDULES, Unit, open_mesh, refuse_shared, shard_parameters
from steplab.specs.layout import blocks_of_stage
from steplab.specs.step import CHOICES, STAGES_A_RANK

L = cases.LAYERS
OF_OTHER_PARTS = GPT_2 | {"model.num_kv_heads": 2, "model.head": "untied"}


@pytest.mark.parametrize(
    "layout", first(2, ["tp=2,fsdp=2", "pp=2,tp=2", "dp=2,fsdp=2", "pp=2,fsdp=2", "dp=2,tp=2", "fsdp=4"])
)
def test_four_ranks_train_as_one(layout: str) -> None:
    on_ranks(4, cases.case_trains_alike, layout, {})


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("dp=2", {"checkpointing": "every_2"}),
        ("tp=2", {"checkpointing": "selective"}),
        ("fsdp=2", {"reshard_after_forward": "never", "checkpointing": "full"}),
        ("pp=2", {"pipeline_schedule": "gpipe", "microbatches": 2, "checkpointing": "every_2"}),
        ("pp=2", {"pipeline_schedule": "interleaved", "model.num_layers": 4}),
        ("tp=2", OF_OTHER_PARTS),
        ("pp=2", OF_OTHER_PARTS),
        ("fsdp=2", OF_OTHER_PARTS),
        ("dp=2", OF_OTHER_PARTS | {"model.head": "tied"}),
        ("fsdp=2", {"loss": "chunked"}),
    ],
    ids=str,
)
def test_two_ranks_train_as_one(layout: str, fields: dict[str, object]) -> None:
    on_ranks(2, cases.case_trains_alike, layout, fields)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [("fsdp=4", {}), ("dp=2,fsdp=2", {"accumulation": 2, "reshard_after_forward": "never"})],
    ids=str,
)
def test_a_model_of_ones_own_trains_as_one(layout: str, fields: dict[str, object]) -> None:
    on_ranks(4, cases.case_foreign_trains_alike, layout, fields)


@pytest.mark.parametrize("how", first(1, ["fsdp=2 selective", "tp=2 selective", "tp=2 full"]))
def test_alike_blocks_are_compiled_once(how: str) -> None:
    layout, checkpointing = how.split()
    on_ranks(2, cases.case_compiled_trains_alike, layout, {"checkpointing": checkpointing})


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "pp=2"])
def test_bf16(layout: str) -> None:
    on_ranks(2, cases.case_bf16_is_autocast_over_fp32_weights, layout)


def test_batches_are_shared_where_they_have_to_be() -> None:
    on_ranks(4, cases.case_batches_are_shared_where_they_have_to_be)


def test_another_number_of_ranks() -> None:
    on_ranks(2, cases.case_another_number_of_ranks)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "ep": 2}, "axis 'ep' is not known; choose among pp, dp, fsdp, tp"),
        ({"tp": 0}, "tp must be at least 1, not 0"),
        ({"tp": 2}, "there are no other processes"),
    ],
)
def test_a_mesh_that_cannot_be(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_mesh(sizes, "cpu")


def test_parameters_that_would_be_gathered_apart_are_refused_by_name() -> None:
    """A block used twice shares nothing with another; a weight of two blocks, or of a block and the head, does."""
    linear = [nn.Linear(2, 2) for _ in range(5)]
    blocks = nn.ModuleList([nn.Sequential(*linear[:2]), nn.Sequential(*linear[2:4])])
    model = nn.ModuleDict({"blocks": blocks, "head": linear[4]})
    units = [Unit(module=block) for block in blocks]
    blocks.append(blocks[0])
    refuse_shared(model, units)
    for module in linear[3:]:
        own, module.weight = module.weight, linear[0].weight
        with pytest.raises(Unsupported, match=r"sharding blocks.0.0.weight and (blocks.1.1|head).weight .* use .* dp"):
            refuse_shared(model, units)
        module.weight = own


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_the_name_of_what_makes_them(
    kind: type[nn.Embedding | nn.EmbeddingBag],
) -> None:
    refuse_sparse(nn.ModuleDict({"words": kind(4, 2)}), "sharding", "shards")
    model = nn.ModuleDict({"words": kind(4, 2, sparse=True)})
    with pytest.raises(Unsupported, match=r"sharding of words with sparse gradients .* build .* sparse=False"):
        shard_parameters(model, cast("Any", None), [], MixedPrecisionPolicy(), True)  # refused before the mesh is used


@given(st.integers(1, 12), st.integers(0, 60))
def test_stages_have_all_blocks_once_and_are_even(num_stages: int, more: int) -> None:
    stages = [blocks_of_stage(number, num_stages, num_stages + more) for number in range(num_stages)]
    assert [block for stage in stages for block in stage] == list(range(num_stages + more))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_schedules_are_those_of_the_spec() -> None:
    assert SCHEDULES.keys() == STAGES_A_RANK.keys() == set(CHOICES["pipeline_schedule"])


SHARDED = {"_allgather_base_": L + 2}, {"_reduce_scatter_base_": L + 2}
SPLIT = {"all_gather_into_tensor": 2 * L + 1, "reduce_scatter_tensor": 2 * L + 1}


@pytest.mark.parametrize(
    ("layout", "fields", "expected"),
    [
        # All but the root are gathered once more.
        ("fsdp=2", {}, [SHARDED[0], SHARDED[1] | {"_allgather_base_": L + 1}, {}]),
        ("fsdp=2", {"reshard_after_forward": "never"}, [*SHARDED, {}]),
        # The loss takes the largest logit, the sum of exponentials and the target's logit. The optimizer sums norm
        # gradients, which each rank has for its tokens.
        ("tp=2", {}, [SPLIT | {"all_reduce": 3}, SPLIT, {"all_reduce": 2 * L + 1}]),
    ],
    ids=["sharded", "sharded and kept", "split"],
)
def test_collectives_are_as_many_as_the_formula_says(
    layout: str, fields: dict[str, object], expected: list[dict[str, int]]
) -> None:
    on_ranks(2, cases.case_collectives, layout, fields, expected)
