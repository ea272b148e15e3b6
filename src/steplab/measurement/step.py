"""The training step taken apart into phases: forward, backward, optimizer, under the spec's precision.

In a world of several processes a phase `gradient sync` follows the backward pass: what is left of the communication
then, and the wait for the slowest rank.

zero_grad belongs to the phase that ends the use of the gradients: the optimizer's when training, the
backward's when only gradients are asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported, UserError
from steplab.measurement.distribute import Distributed, distribute
from steplab.measurement.loop import Phase
from steplab.measurement.world import World
from steplab.model.workload import Workload, call, loss_of
from steplab.specs.step import StepSpec

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BATCHES = 2
LEARNING_RATE = 1e-4
_DATA_SEEDS = 1_000_003
"""Seeds of batches are this far apart from one seed of a spec to the next: a prime, more than there are ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeStep:
    """A step of which only its phases are known."""

    phases: Sequence[Phase]
    """What is run, in order."""
    module: nn.Module | None = None
    """The model; None: not known."""


def make_step(workload: Workload, spec: StepSpec, device: torch.device, world: World | None = None) -> "Step":
    """The step of the spec's pass over the workload. A user's whole step is one phase, `step`.

    Raises Unsupported for a layout that cannot be applied to it.
    """
    if workload.step is not None:
        if world is not None:
            why = "its factory returns a whole step, which steplab does not take apart"
            instead = (
                "have it return (module, make_batch), or spread it in the factory and measure it by steplab.recorder"
            )
            raise Unsupported(f"layout {spec.layout} for {spec.model.name}", why, instead)
        whole_step = workload.step
        return WholeStep(phases=[Phase(name="step", run=lambda: _discard(whole_step()))])
    return ModelStep(workload, spec, device, world)


class ModelStep:
    """One model, its batches and its optimizer; each phase leaves what the next one needs."""

    def __init__(self, workload: Workload, spec: StepSpec, device: torch.device, world: World | None = None) -> None:
        assert workload.module is not None
        assert workload.make_batch is not None
        self.module = module = workload.module
        """The model, as it is before compilation."""
        if spec.precision == "bf16_pure":
            for parameter in module.parameters():  # not buffers: a rotary table in bf16 confuses late positions
                parameter.data = to_bf16(parameter.data)
        set_fp32_matmuls("high" if spec.precision == "tf32" else "highest")
        module.train(spec.pass_name != "forward")
        self._called: Any = module
        if spec.compile != "off":
            self._called = torch.compile(module, mode=None if spec.compile == "default" else spec.compile)
        self._distributed: Distributed | None = None
        if world is not None:
            self._distributed = distribute(self._called, spec, world)
            self._called = self._distributed.module
            torch.manual_seed((spec.seed * _DATA_SEEDS + self._distributed.data_index + 1) % 2**63)
        # Made before any timing, and swapped between steps: the loader is not what is measured here.
        self.batches = [workload.make_batch() for _ in range(_BATCHES)]
        if spec.precision == "bf16_pure":
            self.batches = [to_bf16(batch) for batch in self.batches]
        self._steps_begun = 0
        self.loss: Tensor | None = None
        """Between the forward and the backward pass."""
        self.on_gradients: Callable[[], None] = _nothing
        """Called when the backward pass has made its gradients and none is freed yet."""
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._gradients = spec.pass_name != "forward"
        self._keeps_gradients = spec.pass_name == "train"
        self._autocast = _autocast(spec, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.optimizer = _optimizer(spec, self._parameters) if spec.pass_name == "train" else None
        self._cuda_graphs = device.type == "cuda" and spec.compile in ("reduce-overhead", "max-autotune")
        self.phases = [Phase(name="forward", run=self.forward)]
        """What is run, in order."""
        if spec.pass_name != "forward":
            self.phases.append(Phase(name="backward", run=self.backward))
            if self._distributed is not None:
                self.phases.append(Phase(name="gradient sync", run=self.synchronise_gradients))
        if spec.pass_name == "train":
            self.phases.append(Phase(name="optimizer", run=self.optimizer_step))

    def forward(self) -> None:
        if self._cuda_graphs:
            # The static buffers of the last replay may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()
        batch = self.batches[self._steps_begun % len(self.batches)]
        self._steps_begun += 1
        with torch.set_grad_enabled(self._gradients), self._autocast():
            output = call(self._called, batch)
        if self._gradients:
            self.loss = loss_of(output)

    def backward(self) -> None:
        assert self.loss is not None
        self.scaler.scale(self.loss).backward()
        self.loss = None
        if self._distributed is None:
            self._end_backward()

    def synchronise_gradients(self) -> None:
        assert self._distributed is not None
        self._distributed.finish_gradients()
        self._end_backward()

    def _end_backward(self) -> None:
        self.on_gradients()
        if not self._keeps_gradients:
            for parameter in self._parameters:
                parameter.grad = None

    def optimizer_step(self) -> None:
        assert self.optimizer is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


Step = ModelStep | WholeStep


def _autocast(spec: StepSpec, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    dtype = _AUTOCAST_DTYPES.get(spec.precision)
    if dtype is None:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)


def set_fp32_matmuls(precision: str) -> None:
    """TF32 or IEEE fp32 for matmuls of fp32 tensors. Process-wide in torch: one process measures one cell."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"


def _optimizer(spec: StepSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    fused, foreach = spec.optimizer == "adamw_fused", spec.optimizer == "adamw_foreach"
    try:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused, foreach=foreach)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{spec.optimizer} cannot take this model's parameters: {error}") from error


def to_bf16(batch: Any) -> Any:
    """Floating-point inputs in the weights' type; token ids stay what they are."""
    if isinstance(batch, Tensor):
        return batch.to(torch.bfloat16) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: to_bf16(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(to_bf16(value) for value in batch)
    return batch


def _nothing() -> None:
    """Nobody looks at the gradients."""


def _discard(_: object) -> None:
    """A step's return value is the user's business."""
