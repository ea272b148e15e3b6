import pytest
import torch
from tests.unit.test_own_loop import check_loop, some_batches, steps

from steplab.specs.changes import resolve_with_recipe
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

BEFORE = 3
"""Steps on its first batch before a loop records a CUDA graph."""
EAGER = {
    "precision": ("fp32", "bf16", "bf16_master"),
    "optimizer": ("adamw_fused", "adamw_triton"),
    "update": ("after", "overlapped"),
    "cuda_graph": ("off", "step"),
    "accumulation": (1, 3),
}
COMPILED = (
    {"compile": "block"},
    {"compile": "block", "cuda_graph": "step", "checkpointing": "selective"},
    {"compile": "reduce-overhead"},
)


def check(spec: StepSpec) -> None:
    check_loop(spec, some_batches("cuda"), first_again=BEFORE * (spec.cuda_graph == "step"))


def test_eager_loops_and_those_in_a_cuda_graph() -> None:
    for spec in steps(EAGER):
        check(spec)


@pytest.mark.parametrize("fields", COMPILED, ids=lambda fields: " ".join(fields.values()))
def test_compiled_loops(fields: dict[str, object]) -> None:
    torch._dynamo.reset()
    check(resolve_step({"model": "tiny", "precision": "bf16", **fields}))


@pytest.mark.filterwarnings("ignore:recipe fast")
def test_the_loop_of_the_recipe() -> None:
    torch._dynamo.reset()
    check(resolve_with_recipe({"model": "small", "recipe": "fast"}, lambda _: "cuda"))
