import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.first import first
from tests.unit.test_graphed_step import Squares
from torch import Tensor, nn

from steplab.errors import Unsupported
from steplab.lab.utilization import PeakFigure, utilizations
from steplab.measurement.observer import Observer
from steplab.measurement.step.step import ModelStep
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.model.compiling import repeated_blocks
from steplab.model.workload import Workload
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

CPU = torch.device("cpu")
TINY: dict[str, object] = {
    "model.num_layers": 2, "model.d_model": 16, "model.d_ff": 24, "model.num_heads": 2, "model.vocab_size": 31,
    "batch": 2, "context": 5, "warmup": 1, "steps": 2, "device": "cpu",
}  # fmt: skip
PEAK = PeakFigure(flops_per_s=1e12, source="a data sheet")

pytestmark = pytest.mark.usefixtures("torch_settings_put_back")

# --- accumulation -----------------------------------------------------------------------------------------


def gradient(x_BC: Tensor, y_B: Tensor, micro_steps: int) -> Tensor:
    spec = resolve_step({"model": "toy", "pass": "forward_backward", "accumulation": micro_steps, "device": "cpu"})
    step = ModelStep(Workload(module=Squares(), make_batch=lambda: ()), spec, CPU)
    step.batches = list(zip(x_BC.chunk(micro_steps), y_B.chunk(micro_steps), strict=True))
    found: list[Tensor] = []
    step.on_gradients = lambda: found.extend(p.grad.clone() for p in step.module.parameters() if p.grad is not None)
    step.run()
    (gradient,) = found
    assert all(parameter.grad is None for parameter in step.module.parameters())
    return gradient


@pytest.mark.parametrize("micro_steps", [1, 2, 4, 8])
def test_the_gradient_is_that_of_all_sequences_together_to_the_last_bit(micro_steps: int) -> None:
    """Small integers and power-of-two divisors: float64 holds every sum, and 2 / N X^T (X w - y), exactly."""
    numbers = torch.randint(-8, 8, (16, 4), generator=torch.Generator().manual_seed(3)).double()
    x, y = numbers[:, :3], numbers[:, 3]
    w = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert torch.equal(gradient(x, y, micro_steps), 2 / 16 * (x.T @ (x @ w - y)))


def test_a_record_counts_the_work_of_all_micro_steps() -> None:
    one, four = (measure_here(resolve_step(TINY | {"accumulation": n}), Observer()) for n in (1, 4))
    assert (one.tokens_per_step, four.tokens_per_step) == (10, 40)
    assert four.timing is not None
    assert [phase.phase for phase in four.timing.back_to_back] == ["forward", "backward", "optimizer", "step"]
    for of_one, of_four in zip(utilizations(one, PEAK), utilizations(four, PEAK), strict=True):
        assert of_four.flops == 4 * of_one.flops


def own_step() -> Callable[[], object]:
    return lambda: None


def test_what_a_model_of_ones_own_executes_is_counted_in_all_micro_steps() -> None:
    spec = resolve_step({"model": "toy", "device": "cpu", "warmup": 0, "steps": 1})
    one, three = (measure_here(dataclasses.replace(spec, accumulation=n), Observer()).model for n in (1, 3))
    assert one is not None
    assert three is not None
    assert one.counted_flops
    assert three.counted_flops == 3 * one.counted_flops


def test_a_whole_step_of_ones_own_has_no_micro_steps() -> None:
    with pytest.raises(Unsupported, match=r"accumulation 2 for .*own_step is not supported: .* returns a whole step"):
        measure_here(resolve_step({"model": f"{__name__}:own_step", "device": "cpu", "accumulation": 2}), Observer())


# --- blocks compiled by themselves ------------------------------------------------------------------------


@pytest.fixture
def num_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, optimize_ddp=True):
        yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def gradients(spec: StepSpec) -> list[Tensor]:
    step = ModelStep(build_workload(spec, CPU), spec, CPU)
    found: list[Tensor] = []
    step.on_gradients = lambda: found.extend(p.grad.clone() for p in step.module.parameters() if p.grad is not None)
    step.run()
    return found


@pytest.mark.parametrize("checkpointing", first(2, ["none", "selective", "full"]))
def test_blocks_compiled_by_themselves_compute_what_the_model_does(
    num_graphs: Callable[[], int], checkpointing: str
) -> None:
    spec = resolve_step(TINY | {"pass": "forward_backward", "checkpointing": checkpointing})
    eager = gradients(spec)
    assert num_graphs() == 0
    for own, expected in zip(gradients(dataclasses.replace(spec, compile="block")), eager, strict=True):
        torch.testing.assert_close(own, expected)
    assert num_graphs() == 1, "alike blocks are compiled once"


def test_decoder_layers_of_transformers_are_its_blocks(num_graphs: Callable[[], int], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 31, "max_position_embeddings": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields: dict[str, Any] = {"model": f"hf:{tmp_path}/config.json", "batch": 2, "context": 5, "device": "cpu"}
    spec = resolve_step(fields | {"pass": "forward_backward"})
    eager = gradients(spec)
    for own, expected in zip(gradients(dataclasses.replace(spec, compile="block")), eager, strict=True):
        torch.testing.assert_close(own, expected)
    assert num_graphs() == 1, "alike layers are compiled once"


def test_a_block_that_stands_twice_in_the_list_is_one() -> None:
    """Sharding, compiling or recomputing it twice would fail or wrap the wrapped."""
    block, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert repeated_blocks(nn.Sequential(nn.ModuleList([block, other, block]))) == [block, other]


def test_a_model_without_a_list_of_blocks_is_refused_with_the_reason() -> None:
    said = r"block by block is not supported: the model has no nn.ModuleList of blocks; .* leave out --compile block"
    with pytest.raises(Unsupported, match=said):
        measure_here(resolve_step({"model": "toy", "compile": "block", "device": "cpu"}), Observer())
