"""The training step taken apart into phases: forward, backward, optimizer, under the spec's precision.

In a world of several processes that average gradients by steplab's own DataParallel a phase `gradient sync` follows the
backward pass: what is left of the communication then, and the wait for the slowest rank. A pipeline runs forward and
backward passes of its microbatches in turn, in one phase `pipeline`.

zero_grad belongs to the phase that ends the use of the gradients: the optimizer's when training, the
backward's when only gradients are asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported, UserError
from steplab.measurement.distribute import distribute
from steplab.measurement.distributed import Distributed
from steplab.measurement.loop import Phase
from steplab.measurement.world import World
from steplab.model.workload import Workload, call, loss_of
from steplab.parallel.pipeline import Pipeline
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
        self._autocast = _autocast(spec, device)
        self._called: Any = module
        self._distributed: Distributed | None = None
        if world is not None:
            self._distributed = distribute(module, spec, world, self._autocast)
            self.module, self._called = self._distributed.module, self._distributed.call
            torch.manual_seed((spec.seed * _DATA_SEEDS + self._distributed.data_index + 1) % 2**63)
        elif spec.compile != "off":
            self._called = torch.compile(module, mode=None if spec.compile == "default" else spec.compile)
        self._finish_gradients = self._distributed.finish_gradients if self._distributed else None
        self._around = self._distributed.around if self._distributed else nullcontext
        # Made before any timing, and swapped between steps: the loader is not what is measured here.
        self.batches = [workload.make_batch() for _ in range(_BATCHES)]
        if spec.precision == "bf16_pure":
            self.batches = [to_bf16(batch) for batch in self.batches]
        self._steps_begun = 0
        self.loss: Tensor | None = None
        """Between the forward and the backward pass; of a pipeline, after both, on ranks that have its last stage."""
        self.on_gradients: Callable[[], None] = _nothing
        """Called when the backward pass has made its gradients and none is freed yet."""
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._gradients = spec.pass_name != "forward"
        self._keeps_gradients = spec.pass_name == "train"
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.optimizer = _optimizer(spec, self._parameters) if spec.pass_name == "train" else None
        self._cuda_graphs = device.type == "cuda" and spec.compile in ("reduce-overhead", "max-autotune")
        self.phases = self._phases(spec)
        """What is run, in order."""

    def _phases(self, spec: StepSpec) -> list[Phase]:
        if self._distributed is not None and self._distributed.pipeline is not None:
            phases = [Phase(name="pipeline", run=partial(self.run_pipeline, self._distributed.pipeline))]
        else:
            phases = [Phase(name="forward", run=self.forward)]
            if spec.pass_name != "forward":
                phases.append(Phase(name="backward", run=self.backward))
                if self._finish_gradients is not None:
                    phases.append(
                        Phase(name="gradient sync", run=partial(self.synchronise_gradients, self._finish_gradients))
                    )
        if spec.pass_name == "train":
            phases.append(Phase(name="optimizer", run=self.optimizer_step))
        return phases

    def forward(self) -> None:
        if self._cuda_graphs:
            # The static buffers of the last replay may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self._gradients), self._around(), self._autocast():
            output = call(self._called, self._next_batch())
        if self._gradients:
            self.loss = loss_of(output)

    def backward(self) -> None:
        assert self.loss is not None
        with self._around():
            self.scaler.scale(self.loss).backward()
        self.loss = None
        if self._finish_gradients is None:
            self._end_backward()

    def synchronise_gradients(self, finish: Callable[[], None]) -> None:
        finish()
        self._end_backward()

    def run_pipeline(self, pipeline: Pipeline) -> None:
        """Both passes; autocast is entered by the stages, as it is for forward passes alone."""
        tokens_BT, targets_BT = self._next_batch()
        with self._around():
            self.loss = pipeline.step(tokens_BT, targets_BT)
        self._end_backward()

    def _next_batch(self) -> Any:
        batch = self.batches[self._steps_begun % len(self.batches)]
        self._steps_begun += 1
        return batch

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
