from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steplab.lab.measuring import measure
from steplab.lab.profiling import profile
from steplab.measurement.machine.device import open_device
from steplab.measurement.observer import Observer
from steplab.measurement.step.graphed import CudaGraphs, GraphedStep
from steplab.measurement.step.step import ModelStep
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.plan.memory import predict_memory
from steplab.specs.resolve import resolve_step

STEPS, BEFORE = 5, 3
"""Compared steps, and GraphedStep's steps before recording."""


class KeepsLosses(CudaGraphs):
    def __init__(self, step: ModelStep) -> None:
        super().__init__(torch.device("cuda"))
        self._step = step
        self.losses: list[Tensor] = []

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        had = self._step.loss
        replay = super().record(run)
        if self._step.loss is not None and had is None:
            self.losses.append(self._step.loss.detach())
        return replay


def built(fields: dict[str, object]) -> ModelStep:
    torch.manual_seed(0)
    spec = resolve_step({"model": "tiny", "context": 128, "precision": "bf16"} | fields)
    device = torch.device("cuda")
    return ModelStep(build_workload(spec, device), spec, device)


def tokens(number: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator(device="cuda").manual_seed(1)
    return [tuple(torch.randint(512, (2, 4, 128), device="cuda", generator=made)) for _ in range(number)]


def state_of(step: ModelStep) -> list[Tensor]:
    parameters = list(step.module.parameters())
    kept = [] if step.optimizer is None else [v for p in parameters for v in step.optimizer.state[p].values()]
    return [*(p.detach() for p in parameters), *(value.detach().cuda() for value in kept)]


def launched(fields: dict[str, object], data: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    step = built(fields)
    step.batches, losses = data, []
    for _ in range(BEFORE + STEPS):
        for phase in step.phases:
            phase.run()
            if phase.name == "forward" and step.loss is not None:
                losses.append(step.loss.detach())
    return losses, state_of(step)


def replayed(fields: dict[str, object], data: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    inner = built(fields | {"cuda_graph": "step"})
    inner.batches = data
    step = GraphedStep(inner, open_device("cuda"), "tiny", keeps := KeepsLosses(inner))
    step.record()
    micro_steps = sum(phase.name == "forward" for phase in step.phases)
    step.batches, losses = data[BEFORE * micro_steps :], []
    for _ in range(STEPS):
        read = iter(keeps.losses)
        for phase in step.phases:
            phase.run()
            if phase.name == "forward" and keeps.losses:
                losses.append(next(read).clone())
    return losses, state_of(inner)


@pytest.mark.parametrize(
    "fields",
    [
        {"compile": "block", "precision": "bf16_master", "optimizer": "adamw_triton"},
        {"model.head": "tied", "optimizer": "adamw_fused", "accumulation": 2, "checkpointing": "full"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_updates_in_the_backward_pass_give_the_state_of_those_after_it_to_the_bit(fields: dict[str, object]) -> None:
    data = tokens((BEFORE + STEPS) * int(str(fields.get("accumulation", 1))))
    _, after = launched(fields, data)
    for overlapped in (
        launched(fields | {"update": "overlapped"}, data),
        replayed(fields | {"update": "overlapped"}, data),
    ):
        assert all(torch.equal(*pair) for pair in zip(overlapped[1], after, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "adamw_fused"},
        {"optimizer": "adamw_triton"},
        {"optimizer": "sgd", "precision": "fp32"},
        {"compile": "block", "optimizer": "adamw_triton"},
        {"compile": "block", "optimizer": "adamw_fused", "attention": "flash_triton"},
        {"compile": "block", "optimizer": "adamw_triton", "attention": "flash_triton", "loss": "fused"},
        {"compile": "block", "loss": "chunked"},
        {"compile": "block", "accumulation": 2, "optimizer": "adamw_triton"},
        {"compile": "block", "checkpointing": "full"},
        {"checkpointing": "selective", "precision": "bf16_pure"},
        {"compile": "block", "precision": "bf16_master", "optimizer": "adamw_triton"},
        {"compile": "block", "precision": "bf16_master", "optimizer": "adamw_triton", "update": "overlapped"},
        {"pass": "forward_backward", "compile": "block"},
        {"block_ops": "triton", "model.projections": "merged", "precision": "bf16_master", "optimizer": "adamw_triton"},
        {"block_ops": "triton", "model.projections": "merged", "compile": "block", "attention": "flash_triton"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_replayed_steps_give_the_losses_and_the_state_of_launched_ones_to_the_bit(fields: dict[str, object]) -> None:
    micro_steps = int(str(fields.get("accumulation", 1)))
    data = tokens((BEFORE + STEPS) * micro_steps)
    losses, state = launched(fields, data)
    found, found_state = replayed(fields, data)
    assert len(found) == STEPS * micro_steps
    # A batch that was not copied would give the loss, and the gradients, of another.
    assert [float(loss) for loss in found] == [float(loss) for loss in losses[BEFORE * micro_steps :]]
    assert all(torch.equal(one, other) for one, other in zip(found_state, state, strict=True))


def test_phases_and_memory_of_a_replayed_step_are_those_of_a_launched_one(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"context": 256, "precision": "bf16", "attention": "sdpa", "warmup": 3, "steps": 5}
    plain, graph = (
        measure("small", **fields, cuda_graph=value, store=tmp_path / "store.db") for value in ("off", "step")
    )  # in processes of their own, because what others left allocated decides which blocks are filled up
    assert plain.memory is not None, plain.failure
    assert plain.spec is not None
    assert graph.memory is not None, graph.failure
    filled_up = predict_memory(plain.spec, device=torch.cuda.get_device_name()).at_peak["rounding"]
    assert graph.timing is not None
    assert [samples.phase for samples in graph.timing.back_to_back] == ["forward", "backward", "optimizer", "step"]
    assert graph.timing.first_step_s is not None
    for phase in ("forward", "backward", "optimizer", "step"):
        peak, expected = graph.memory.peak(phase), plain.memory.peak(phase)
        assert peak is not None
        assert expected is not None
        # The same tensors, in blocks that are filled up less: a graph's pool was empty when it was recorded.
        saved = expected.peak_allocated_bytes - peak.peak_allocated_bytes  # 40.6 MB of 79 on an H200
        assert -(2**20) < saved < filled_up
        # Graphs leave blocks half empty that earlier steps' state uses.
        assert peak.peak_reserved_bytes <= 1.3 * expected.peak_reserved_bytes
    assert graph.median_s is not None
    assert plain.median_s is not None
    assert graph.median_s < 1.02 * plain.median_s


def test_kernels_of_a_replayed_step_are_profiled_in_their_phases(tmp_path: Path) -> None:
    run = profile(
        "tiny", compile="block", cuda_graph="step", precision="bf16", attention="sdpa", warmup=2, steps=3,
        profiled_steps=2, store=tmp_path / "store.db",
    )  # fmt: skip
    assert run.failure is None, run.failure
    assert run.profile is not None, run.notes
    assert any("replayed as CUDA graphs" in note for note in run.profile.notes)
    for name in ("forward", "backward", "optimizer"):
        phase = run.profile.phase(name)
        assert phase is not None
        assert phase.busy_s > 0


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x_BC: Tensor) -> Tensor:
        loss = self.layer(x_BC).square().mean()
        return loss * 2 if loss.item() > 1e9 else loss


def asks(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    return Asks().to(device), lambda: torch.ones(4, 8, device=device)


def test_a_compiled_model_whose_sums_have_no_order_learns_the_same_to_rounding() -> None:
    """The compiler sums the embedding's gradient by atomic additions."""
    fields: dict[str, object] = {"compile": "default", "precision": "fp32"}
    data = tokens(BEFORE + STEPS)
    losses, _ = launched(fields, data)
    found, _ = replayed(fields, data)
    assert [float(loss) for loss in found] == pytest.approx([float(loss) for loss in losses[BEFORE:]], rel=1e-4)


def test_a_model_that_waits_for_the_gpu_is_told_where() -> None:
    run = measure_here(resolve_step({"model": f"{__name__}:asks", "cuda_graph": "step"}), Observer())
    assert run.failure is not None
    assert "its forward cannot be captured at test_graphed_step_on_gpu.py:" in run.failure.message
    assert ".item()" in run.failure.message
    torch.rand(1, device="cuda")  # the process draws random numbers again
