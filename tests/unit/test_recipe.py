"""The recipe `fast`: what it sets, what it leaves, and what it says of that."""

import warnings

import pytest

from steplab.cli.app import main
from steplab.errors import Remark, UserError
from steplab.lab.machine import device_kind_here
from steplab.lab.measuring import asked_step
from steplab.lab.planning import plan_time
from steplab.specs.changes import CHANGES, recipe_help, resolve_with_recipe
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec


def resolved(kind: str, **fields: object) -> tuple[StepSpec, str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        spec = resolve_with_recipe({"recipe": "fast"} | fields, lambda name: kind)
    (remark,) = found
    assert remark.category is Remark
    return spec, str(remark.message)


def test_on_a_gpu_the_spec_is_that_of_the_options_that_it_names() -> None:
    spec, said = resolved("cuda", model="small")
    fields = {"precision": "bf16_master", "attention": "auto", "compile": "block", "cuda_graph": "step"}
    fields |= {"optimizer": "adamw_triton", "update": "overlapped"}
    fields |= {"model.projections": "merged", "block_ops": "triton"}
    assert spec == resolve_step({"model": "small"} | fields)
    assert said.startswith("recipe fast on cuda sets --precision bf16_master --attention auto --compile block ")
    assert said.endswith("which made steps faster on an H200; --precision bf16_master changes the numbers")


def test_on_a_cpu_it_sets_what_serves_there() -> None:
    spec, said = resolved("cpu", model="small", device="cpu")
    assert spec == resolve_step({"model": "small", "device": "cpu", "attention": "sdpa"})
    assert said == "recipe fast on cpu sets --attention sdpa, which made steps faster on a CPU"
    assert resolved("mps")[1] == "recipe fast on mps sets nothing"


def test_what_is_given_wins_even_if_it_is_a_default() -> None:
    spec, said = resolved("cuda", compile="off", precision="fp32", optimizer="sgd")
    assert (spec.compile, spec.precision, spec.optimizer, spec.cuda_graph) == ("off", "fp32", "sgd", "step")
    sets = "--attention auto --model.projections merged --block-ops triton --cuda-graph step --update overlapped"
    assert said == f"recipe fast on cuda sets {sets}, which made steps faster on an H200"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"optimizer": "adamw_fused"}, "the optimizer has to keep fp32 masters"),
        ({"accumulation": 2}, "gradients of micro-steps would be added up in bf16"),
        ({"layout": "dp=2"}, "ranks would add up their gradients in bf16"),
        ({"model": "mine:build"}, ""),
    ],
)
def test_precision_is_bf16_where_weights_cannot_have_masters(fields: dict[str, object], why: str) -> None:
    spec, said = resolved("cuda", **fields)
    assert spec.precision == "bf16"
    assert said.startswith("recipe fast on cuda sets --precision bf16 ")
    assert (f"--precision bf16_master is left out: {why}" in said) == bool(why)


@pytest.mark.parametrize(
    ("fields", "left_out"),
    [
        ({"precision": "fp16"}, ["--cuda-graph step is left out: its gradient scaler waits"]),
        ({"compile": "reduce-overhead"}, ["--cuda-graph step is left out: that mode records CUDA graphs of its own"]),
        (
            {"layout": "fsdp=2"},
            [f"--{field} is left out:" for field in ("block-ops triton", "optimizer adamw_triton", "cuda-graph step")],
        ),
    ],
)
def test_what_a_step_does_not_support_is_left_out_and_said(fields: dict[str, object], left_out: list[str]) -> None:
    spec, said = resolved("cuda", **fields)
    assert spec.cuda_graph == "off"
    assert all(part in said for part in left_out)
    assert "--attention auto" in said


def test_a_model_of_the_users_gets_what_every_model_bears() -> None:
    spec, _ = resolved("cuda", model="mine:build")
    assert spec == resolve_step({"model": "mine:build", "precision": "bf16", "compile": "default"})


def test_without_gradients_no_optimizer_is_set() -> None:
    assert "--optimizer" not in resolved("cuda", **{"pass": "forward"})[1]


def test_a_later_row_of_a_field_refines_the_earlier_one_and_the_help_names_both() -> None:
    for kind in ("cuda", "cpu", "mps"):
        for model in ("transformer", "hf", "factory"):
            before = dict[str, str]()
            for change in CHANGES:
                if model in change.fast.get(kind, ()):
                    assert change.field not in before or before[change.field] in change.replaces
                    before[change.field] = change.value
    assert "on cuda --precision bf16_master or bf16, --attention auto, --compile block" in recipe_help()
    assert "on cpu --attention sdpa" in recipe_help()


def test_a_recipe_is_a_field_for_python_and_a_plan_is_of_a_gpu() -> None:
    with pytest.warns(Remark, match="recipe fast on cuda"):
        planned = plan_time("small", context=512, recipe="fast")
    assert planned.spec is not None
    assert (planned.spec.compile, planned.spec.cuda_graph) == ("block", "step")
    with pytest.warns(Remark, match="recipe fast on cpu sets --attention sdpa"):
        assert asked_step("measure", "tiny", {"recipe": "fast", "device": "cpu"}).attention == "sdpa"
    with pytest.raises(UserError, match="recipe 'quick' is not known; choose one of fast"):
        asked_step("measure", "tiny", {"recipe": "quick"})
    assert device_kind_here("cuda:1") == "cuda"


def test_the_command_line_says_what_it_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "time", "--model", "small", "--recipe", "fast", "--optimizer", "adamw_fused"]) == 0
    out, said = capsys.readouterr()
    assert said.startswith("steplab: recipe fast on cuda sets --precision bf16 --attention auto")
    assert "adamw_triton" not in said
    assert "replayed as CUDA graphs" in out
