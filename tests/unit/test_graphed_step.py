import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.test_loop import FakeDevice
from torch import Tensor, nn

from steplab.costs.rates import gpu_named
from steplab.errors import Unsupported
from steplab.measurement.machine.device import open_device
from steplab.measurement.memory.recorder import MemoryRecorder
from steplab.measurement.step.graphed import CudaGraphs, GraphedStep, Step
from steplab.measurement.step.step import ModelStep, WholeStep
from steplab.model.workload import Workload
from steplab.plan.memory import predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.memory_marks import Marks
from steplab.specs.resolve import resolve_step

CPU = torch.device("cpu")
STEPS = 5
pytestmark = pytest.mark.usefixtures("torch_settings_put_back")


class CallsAgain(CudaGraphs):
    def __init__(self) -> None:
        self.recorded: list[Callable[[], object]] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        yield

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        self.recorded.append(run)
        return run

    def forget(self) -> None:
        self.recorded.clear()


class DoesNotBearIt(CallsAgain):
    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))

    def forward(self, x_BC: Tensor, y_B: Tensor) -> Tensor:
        return (x_BC @ self.weight - y_B).square().mean()


def batches(number: int) -> list[Any]:
    made = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 3, generator=made, dtype=torch.float64), torch.randn(4, generator=made, dtype=torch.float64))
        for _ in range(number)
    ]


def step_of(module: nn.Module, given: list[Any], **fields: object) -> ModelStep:
    spec = resolve_step({"model": "toy", "device": "cpu"} | fields)
    step = ModelStep(Workload(module=module, make_batch=lambda: given[0]), spec, CPU)
    step.batches = given
    return step


def graphed(
    step: ModelStep | WholeStep, recorder: CallsAgain | None = None, device: FakeDevice | None = None
) -> GraphedStep:
    return GraphedStep(step, device or FakeDevice(), "mine", recorder or CallsAgain())


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_replayed_steps_take_each_batch_in_turn_and_learn_what_plain_ones_do(micro_steps: int) -> None:
    given = batches(STEPS * micro_steps)
    before = batches(3 * micro_steps)[-3 * micro_steps :]
    recorded = step_of(Squares(), before, accumulation=micro_steps)
    plain = step_of(copy.deepcopy(recorded.module), before, accumulation=micro_steps)
    step = graphed(recorded)
    step.record()
    for _ in range(3):
        plain.run()
    plain.batches = step.batches = given
    plain._micro_steps_begun = 0
    assert [phase.name for phase in step.phases] == ["forward", "backward"] * micro_steps + ["optimizer"]
    for _ in range(STEPS):
        for phase in step.phases:
            phase.run()
        plain.run()
        torch.testing.assert_close(step.module.state_dict(), plain.module.state_dict(), rtol=0, atol=0)


def test_what_is_recorded_reads_memory_of_its_own() -> None:
    given = [{"x_BC": x, "y_B": y} for x, y in batches(2)]
    kept = copy.deepcopy(given)
    step = graphed(inner := step_of(Squares(), given))
    step.record()
    (inputs,) = inner.batches
    for phase in step.phases * 2:
        phase.run()
    assert all(inputs[key].data_ptr() != batch[key].data_ptr() for batch in given for key in batch)
    assert torch.equal(inputs["x_BC"], given[1]["x_BC"])
    assert all(torch.equal(one[key], other[key]) for one, other in zip(given, kept, strict=True) for key in one)


@pytest.mark.parametrize(
    "other",
    [lambda x, y: (x[:2], y[:2]), lambda x, y: (x,), lambda x, y: {"x_BC": x, "y_B": y}, lambda x, y: (x, 3)],
    ids=["shape", "length", "kind", "value"],
)
def test_a_batch_of_another_form_is_refused(other: Callable[[Tensor, Tensor], Any]) -> None:
    first, second = batches(2)
    step = graphed(step_of(Squares(), [first]))
    step.record()
    step.batches = [first, other(*second)]
    for phase in step.phases:
        phase.run()
    with pytest.raises(Unsupported, match="cuda_graph step for mine is not supported: its batches differ in shape"):
        step.phases[0].run()


def test_the_peak_is_that_of_the_recording_and_the_step_has_the_largest() -> None:
    device = FakeDevice(peaks=[(30, 40), (70, 90), (50, 90)])
    step = graphed(step_of(Squares(), batches(1)), device=device)
    step.record()
    found = {name: peak.peak_allocated_bytes for name, peak in step.phase_peaks.items()}
    assert found == {"forward": 30, "backward": 70, "optimizer": 50}
    assert step.peak is not None
    assert (step.peak.phase, step.peak.peak_allocated_bytes, step.peak.peak_reserved_bytes) == ("step", 70, 90)
    phases = ("forward", "backward", "optimizer")
    watched = [event for phase in phases for event in ("reset peak", f"peak of {phase}")]
    assert device.events[-len(watched) :] == watched


def test_a_step_whose_memory_is_looked_at_is_launched_again() -> None:
    given = batches(2)
    recorder = CallsAgain()
    step = graphed(inner := step_of(Squares(), given), recorder)
    step.record()
    assert len(recorder.recorded) == 3
    launched = step.launched()
    assert launched is inner
    assert launched.batches == given
    assert recorder.recorded == []
    launched.run()


def test_the_memory_of_a_replayed_step_is_watched_as_that_of_the_launched_one(tmp_path: Path) -> None:
    device, found = open_device("cpu"), []
    spec = resolve_step({"model": "toy", "device": "cpu"})
    (plain := step_of(Squares(), batches(2))).run()
    (replayed := GraphedStep(step_of(Squares(), batches(2)), device, "mine", CallsAgain())).record()
    steps: tuple[Step, ...] = (plain, replayed)
    for step in steps:
        watch = partial(MemoryRecorder, snapshot=tmp_path / "step.pickle", marks=tmp_path / "marks.json")
        watch(spec, device).record(step, lambda number: None)
        found.append(msgspec.json.decode((tmp_path / "marks.json").read_bytes(), type=Marks))
    assert found[0].block_bytes
    assert found[0].block_bytes == found[1].block_bytes


def test_a_step_that_cannot_be_captured_is_told_in_one_line_with_what_causes_that() -> None:
    step = graphed(step_of(Squares(), batches(1)), DoesNotBearIt())
    with pytest.raises(Unsupported) as refused:
        step.record()
    said = str(refused.value)
    assert "\n" not in said
    assert "its forward cannot be captured at test_graphed_step.py:" in said
    assert "operation not permitted when stream is capturing" in said
    assert ".item()" in said


def test_an_error_of_the_step_itself_is_its_own() -> None:
    x, y = batches(1)[0]
    step = graphed(step_of(Squares(), [(x, y[:3])]))
    with pytest.raises(RuntimeError, match="size of tensor"):
        step.record()


def test_a_users_whole_step_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"cuda_graph step for mine .* have it return \(module, make_batch\)"):
        graphed(WholeStep(phases=[]))


# --- the spec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": "cpu"}, "cuda_graph step on cpu .* or --device cuda"),
        ({"device": "mps"}, "cuda_graph step on mps"),
        ({"compile": "reduce-overhead"}, "records its own CUDA graphs; use --compile block"),
        ({"compile": "max-autotune"}, "records its own CUDA graphs"),
        ({"precision": "fp16"}, "gradient scaler waits .* use --precision bf16"),
        ({"layout": "dp=2"}, "with 2 processes .* use one process"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused_with_what_to_type(fields: dict[str, object], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        resolve_step({"cuda_graph": "step"} | fields)


def test_graphs_take_the_hosts_time_out_of_a_plan_and_leave_the_devices_but_for_gaps() -> None:
    gpu = gpu_named("H200 SXM")
    fields = {"model": "small", "context": 512, "precision": "bf16", "compile": "block"}
    plain, replayed = (
        predict_step_time(resolve_step(fields | {"cuda_graph": value}), gpu) for value in ("off", "step")
    )
    assert plain.step.host_s > 0
    assert replayed.step.host_s == replayed.step.slow_host_s == 0
    shorter_s = gpu.rates.step.gap_s - gpu.rates.step.replayed_gap_s
    assert shorter_s > 0
    for before, after in zip(plain.phases[:-1], replayed.phases[:-1], strict=True):
        kernels = sum(part.kernels for part in plain.parts if part.phase == before.phase)
        assert before.device_s - after.device_s == pytest.approx(kernels * shorter_s, rel=0.01)
    assert all(phase.seconds == phase.device_s for phase in replayed.phases)
    assert any(note.startswith("CUDA graphs:") for note in replayed.notes)


@pytest.mark.parametrize("compile", ["off", "block", "default"])
def test_their_memory_is_planned_as_that_of_the_step_without_them(compile: str) -> None:
    fields = {"model": "tiny", "precision": "bf16", "attention": "sdpa_flash", "compile": compile}
    plain, replayed = (predict_memory(resolve_step(fields | {"cuda_graph": value})) for value in ("off", "step"))
    assert replayed.peak_bytes == plain.peak_bytes
    assert replayed.kind == "estimate"
    assert any(note.startswith("CUDA graphs:") for note in replayed.notes)
