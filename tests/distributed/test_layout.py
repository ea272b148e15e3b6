"""A Transformer laid out by torch's engine, against one process that has the whole batch; bytes, calls, refusals."""

import pytest
from tests.distributed import layout_cases as cases
from tests.distributed.ranks import on_ranks

FOUR = ["fsdp=4", "dp=2,fsdp=2", "dp=2,tp=2", "tp=2,fsdp=2", "tp=4", "pp=2,fsdp=2", "pp=2,dp=2", "pp=2,tp=2", "pp=4"]
TWO = ["fsdp=2", "tp=2", "pp=2"]


@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_train_as_one(layout: str) -> None:
    on_ranks(4, cases.case_trains_alike, layout, {"microbatches": 4} if layout == "pp=4" else {})


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("fsdp=2", {}),
        ("tp=2", {}),
        ("pp=2", {}),
        ("fsdp=2", {"reshard_after_forward": "never", "checkpointing": "full"}),
        ("tp=2", {"checkpointing": "selective"}),
        ("pp=2", {"pipeline_schedule": "gpipe", "microbatches": 2, "checkpointing": "every_2"}),
        ("pp=2", {"pipeline_schedule": "interleaved", "reshard_after_forward": "always"}),
    ],
    ids=str,
)
def test_two_ranks_train_as_one(layout: str, fields: dict[str, object]) -> None:
    on_ranks(2, cases.case_trains_alike, layout, fields)


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_blocks_are_compiled_alike(layout: str, checkpointing: str) -> None:
    on_ranks(2, cases.case_compiled_trains_alike, layout, {"checkpointing": checkpointing})


@pytest.mark.parametrize("layout", FOUR)
def test_a_rank_keeps_the_bytes_of_the_formula(layout: str) -> None:
    on_ranks(4, cases.case_bytes_of_a_rank, layout)


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "pp=2"])
def test_bf16(layout: str) -> None:
    on_ranks(2, cases.case_bf16_is_autocast_over_fp32_weights, layout)


def test_batches_are_shared_where_they_have_to_be() -> None:
    on_ranks(4, cases.case_batches_are_shared_where_they_have_to_be)


def test_another_number_of_ranks() -> None:
    on_ranks(2, cases.case_another_number_of_ranks)


@pytest.mark.parametrize(
    ("layout", "fields"), [("fsdp=2", {}), ("fsdp=2", {"reshard_after_forward": "never"}), ("tp=2", {})], ids=str
)
def test_collectives(layout: str, fields: dict[str, object]) -> None:
    on_ranks(2, cases.case_collectives, layout, fields, [])
