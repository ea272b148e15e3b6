import re
from pathlib import Path

import msgspec
import pytest

from steplab.errors import Unsupported, UserError
from steplab.lab.layout_planning import plan_layout
from steplab.specs.layout import Layout
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.specs.study import study_from_grids

CONFIGURATION = f"hf:{Path(__file__).parents[2]}/examples/hf/llama-tiny.json"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "xl", "layout": "tp=2"}, "tp=2 does not divide the 25 heads; valid for tp: 1"),
        (
            {"model": "small", "layout": "tp=8", "context": 512},
            "tp=8 does not divide the 12 heads; valid for tp: 1, 2, 4",
        ),
        ({"model": "small", "layout": "tp=4", "context": 510}, "context of 510 tokens; valid for tp: 1, 2"),
        (
            {"model": "tiny", "layout": "tp=4", "model.num_kv_heads": 2},
            "tp=4 does not divide the 2 heads of keys and values; valid for tp: 1, 2",
        ),
        (
            {"model": "tiny", "layout": "tp=2", "model.projections": "merged"},
            "layout tp=2 with merged projections is not supported: tp splits queries, keys and values each by its "
            "heads; use --model.projections separate",
        ),
        (
            {"model": "tiny", "layout": "fsdp=2", "model.head": "tied"},
            "model.head tied with layout fsdp=2 is not supported: the embedding and the head share a weight, and are "
            "split and gathered apart; use --model.head untied, or use dp=2",
        ),
        (
            {"model": "tiny", "layout": "pp=3"},
            "pp=3 makes 3 stages (schedule 1f1b), but the model has 2 blocks; valid for pp: 1 to 2",
        ),
        (
            {"model": "tiny", "layout": "pp=2", "pipeline_schedule": "interleaved"},
            "makes 4 stages (schedule interleaved), but the model has 2 blocks; valid for pp: 1 to 1",
        ),
        (
            {"model": "small", "layout": "pp=2", "batch": 6, "microbatches": 4},
            "a batch of 6 sequences cannot be split into 4 microbatches for a pipeline of pp=2: "
            "their number must be at least pp and divide the batch; valid: 2, 3, 6",
        ),
        ({"model": "small", "layout": "pp=4", "batch": 2}, "use --batch 4 or a multiple"),
        ({"layout": "fsdp=2", "microbatches": 0}, "microbatches must be at least 1"),
        ({"layout": "fsdp=2", "reshard_after_forward": "often"}, "choose one of auto, always, never"),
    ],
    ids=lambda value: value["layout"] if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_divide(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        resolve_step(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "fsdp=2", "data_parallel": "naive"}, "data_parallel has no effect here: .* use --layout dp=2"),
        ({"layout": "dp=2,tp=2", "data_parallel": "flat"}, "FSDP2 averages the gradients of layout dp=2,tp=2"),
        ({"layout": "tp=2", "bucket_size_mb": 25}, "no data-parallel ranks .* use --layout dp=2"),
        ({"data_parallel": "bucketed"}, "one process .* leave it out, or start several: --layout dp=2"),
        ({"layout": "dp=2", "data_parallel": "flat", "bucket_size_mb": "5"}, "use --data-parallel bucketed"),
        ({"layout": "dp=2", "microbatches": 2}, "layout dp=2 has no pipeline; .* --layout pp=2.* --accumulation"),
        ({"pass": "forward", "accumulation": 1}, "accumulation .* no gradients to accumulate; .* --pass train"),
        ({"pipeline_schedule": "1f1b"}, "a step of one process has no pipeline"),
        ({"layout": "dp=2", "reshard_after_forward": "auto"}, "use a layout with fsdp, as --layout fsdp=2"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_field_that_changes_nothing_is_refused_even_with_the_value_it_has(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve_step(fields)


def test_a_record_of_a_step_that_would_be_refused_now_can_be_read() -> None:
    spec = StepSpec(model=resolve_step({}).model, layout=Layout(fsdp=2), data_parallel="naive", microbatches=2)
    assert msgspec.convert(msgspec.to_builtins(spec), StepSpec) == spec


def test_a_sweep_leaves_a_field_out_of_the_cells_in_which_it_has_no_say() -> None:
    strategies: dict[str, list[object]] = {
        "layout": ["dp=2"],
        "data_parallel": ["flat", "bucketed"],
        "bucket_size_mb": [1, 10],
    }
    cells = study_from_grids("sweep", "", [strategies]).cells
    assert [(cell.data_parallel, cell.bucket_mb) for cell in cells] == [
        ("flat", None),
        ("bucketed", 1),
        ("bucketed", 10),
    ]
    with pytest.raises(UserError, match="flat has no buckets"):
        study_from_grids("sweep", "", [strategies | {"data_parallel": ["flat", "naive"]}])


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "package.module:function", "layout": "tp=2"},
        {"model": "package.module:function", "compile": "default"},
        {"precision": "fp16"},
        {"compile": "reduce-overhead"},
        {"pass": "forward", "layout": "pp=2"},
        {"accumulation": 2, "layout": "pp=2"},
        {"loss": "fused", "layout": "pp=2"},
        {"loss": "chunked", "layout": "dp=2,tp=2"},
    ],
    ids=str,
)
def test_what_no_layout_serves_says_what_to_use_instead(fields: dict[str, object]) -> None:
    with pytest.raises(
        Unsupported,
        match=r"; .*use .*(dp=2|default|--compile block|forward_backward|--microbatches 2 times|--loss plain)",
    ):
        resolve_step({"layout": "fsdp=2", **fields})


def test_a_configuration_is_planned_on_the_layouts_that_run_it() -> None:
    with pytest.raises(Unsupported, match=r"use dp=2 or fsdp=2; pp=2 can be planned$"):
        resolve_step({"layout": "tp=2", "model": "examples.my_model:build"})
    assert plan_layout(CONFIGURATION, gpus=2, global_batch=2).candidates


def test_data_parallelism_alone_serves_all_of_them() -> None:
    resolve_step({"layout": "dp=2", "model": "package.module:function", "precision": "fp16"})


def test_a_model_of_ones_own_is_sharded_over_ranks() -> None:
    spec = resolve_step({"layout": "dp=2,fsdp=2", "model": "package.module:function", "compile": "block"})
    assert spec.layout.data_ranks == 4


def test_a_batch_goes_through_a_pipeline_one_sequence_at_a_time() -> None:
    assert resolve_step({"layout": "pp=2", "batch": 6}).num_microbatches == 6
    assert resolve_step({"layout": "pp=2", "batch": 6, "microbatches": 3}).num_microbatches == 3


def test_the_tokens_of_a_step_are_those_of_all_micro_steps_and_ranks() -> None:
    spec = resolve_step({"layout": "dp=2,fsdp=3", "batch": 5, "context": 7, "accumulation": 11})
    assert (spec.micro_steps, spec.tokens_of_all) == (11, 5 * 7 * 11 * 2 * 3)
    grid: dict[str, list[object]] = {"pass": ["forward", "train"], "accumulation": [1, 2]}
    cells = study_from_grids("sweep", "", [grid]).cells
    assert [(cell.pass_name, cell.micro_steps) for cell in cells] == [("forward", 1), ("train", 1), ("train", 2)]
    with pytest.raises(UserError, match="accumulation must be at least 1"):
        resolve_step({"accumulation": 0})
