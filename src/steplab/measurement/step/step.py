"""The training step taken apart into phases: forward, backward, optimizer, under the spec's precision.

The one builder of a step for all commands. With accumulation, forward and backward follow each other once for every
micro-step, each over a batch of its own; the loss is divided by their number, so that the gradients are those of the
mean over all of their sequences, and ranks exchange gradients after the last one alone.

In a world of several processes that average gradients by steplab's own DataParallel a phase `gradient sync` follows the
backward pass: what is left of the communication then, and the wait for the slowest rank. A pipeline runs forward and
backward passes of its microbatches in turn, in one phase `pipeline`.

zero_grad belongs to the phase that ends the use of the gradients: the optimizer's when training, the
backward's when only gradients are asked for.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported, UserError
from steplab.measurement.machine.world import World
from steplab.measurement.step.distribute import make_ready
from steplab.measurement.step.loop import Phase
from steplab.model.workload import Workload, call, loss_of
from steplab.parallel.pipeline import Pipeline
from steplab.specs.ddp import Variant
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

    def __init__(
        self,
        workload: Workload,
        spec: StepSpec,
        device: torch.device,
        world: World | None = None,
        variant: Variant | None = None,
    ) -> None:
        """In a world it is a collective call. With a `variant` the ranks are data parallel in that way, and not by the
        spec's layout."""
        assert workload.module is not None
        assert workload.make_batch is not None
        module = workload.module
        if spec.precision == "bf16_pure":
            for parameter in module.parameters():  # not buffers: a rotary table in bf16 confuses late positions
                parameter.data = to_bf16(parameter.data)
        set_fp32_matmuls("high" if spec.precision == "tf32" else "highest")
        module.train(spec.pass_name != "forward")
        self._autocast = _autocast(spec, device)
        self.distributed = make_ready(module, spec, world, self._autocast, variant)
        """The module as it is called, and how its gradients travel."""
        self.module = self.distributed.module
        """The model, as it is before compilation."""
        if world is not None:
            torch.manual_seed((spec.seed * _DATA_SEEDS + self.distributed.data_index + 1) % 2**63)
        # Made before any timing, and swapped between micro-steps: the loader is not what is measured here.
        self.batches = [workload.make_batch() for _ in range(_BATCHES)]
        if spec.precision == "bf16_pure":
            self.batches = [to_bf16(batch) for batch in self.batches]
        self._num_micro_steps = spec.micro_steps
        self._micro_steps_begun = 0
        self.loss: Tensor | None = None
        """The mean over a micro-step's batch, between its forward and its backward pass; of a pipeline, after both, on
        ranks that have its last stage."""
        self.on_gradients: Callable[[], None] = _nothing
        """Called when the last backward pass of a step has made its gradients and none is freed yet."""
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._gradients = spec.pass_name != "forward"
        self._keeps_gradients = spec.pass_name == "train"
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.optimizer = self._make_optimizer(spec.optimizer) if spec.pass_name == "train" else None
        self._cuda_graphs = device.type == "cuda" and spec.compile in ("reduce-overhead", "max-autotune")
        self.phases = self._phases(spec)
        """What is run, in order: a phase as often as there are micro-steps in which it runs."""

    def run(self) -> None:
        """One step, its phases in order."""
        for phase in self.phases:
            phase.run()

    def _phases(self, spec: StepSpec) -> list[Phase]:
        pipeline, finish = self.distributed.pipeline, self.distributed.finish_gradients
        if pipeline is not None:
            phases = [Phase(name="pipeline", run=partial(self.run_pipeline, pipeline))]
        else:
            phases = [Phase(name="forward", run=self.forward)]
            if spec.pass_name != "forward":
                phases.append(Phase(name="backward", run=self.backward))
                phases *= self._num_micro_steps
                if finish is not None:
                    phases.append(Phase(name="gradient sync", run=partial(self.synchronise_gradients, finish)))
        if spec.pass_name == "train":
            phases.append(Phase(name="optimizer", run=self.optimizer_step))
        return phases

    def forward(self) -> None:
        """The forward pass of the next micro-step."""
        if self._cuda_graphs and self._is_last:  # of the step before
            # The static buffers of the last replay may be overwritten from here on, gradients among them.
            torch.compiler.cudagraph_mark_step_begin()
        self._micro_steps_begun += 1
        called = self.distributed.call
        assert called is not None  # without a pipeline
        with (
            torch.set_grad_enabled(self._gradients),
            self._synchronising(),
            self.distributed.around(),
            self._autocast(),
        ):
            output = call(called, self._batch())
        if self._gradients:
            self.loss = loss_of(output)

    def backward(self) -> None:
        """The backward pass of the micro-step whose forward pass was run last."""
        assert self.loss is not None
        with self._synchronising(), self.distributed.around():
            self.scaler.scale(self._share(self.loss)).backward()
        self.loss = None
        if self._is_last and self.distributed.finish_gradients is None:
            self._end_backward()

    def make_gradients_unsent(self) -> None:
        """The forward and backward passes of a step, after which every rank has gradients of its own, and the next
        synchronisation sends them."""
        with self.distributed.no_sync():
            for _ in range(self._num_micro_steps):
                self.forward()
                self.backward()

    def synchronise_gradients(self, finish: Callable[[], None]) -> None:
        finish()
        self._end_backward()

    def run_pipeline(self, pipeline: Pipeline) -> None:
        """Both passes; autocast is entered by the stages, as it is for forward passes alone."""
        self._micro_steps_begun += 1
        tokens_BT, targets_BT = self._batch()
        with self.distributed.around():
            self.loss = pipeline.step(tokens_BT, targets_BT)
        self._end_backward()

    def _share(self, loss: Tensor) -> Tensor:
        """What a micro-step's loss adds to the step's, which is the mean over all of them."""
        return loss if self._num_micro_steps == 1 else loss / self._num_micro_steps

    @property
    def _is_last(self) -> bool:
        """Whether the micro-step under way is the last of its step."""
        return self._micro_steps_begun % self._num_micro_steps == 0

    def _synchronising(self) -> AbstractContextManager[object]:
        """Gradients are sent in the last micro-step alone."""
        return nullcontext() if self._is_last else self.distributed.no_sync()

    def _batch(self) -> Any:
        """That of the micro-step under way."""
        return self.batches[(self._micro_steps_begun - 1) % len(self.batches)]

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

    def _make_optimizer(self, name: str) -> torch.optim.Optimizer:
        kind, options = _optimizer(name)
        try:
            return self.distributed.make_optimizer(self._parameters, kind, **options)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{name} cannot take this model's parameters: {error}") from error


Step = ModelStep | WholeStep


def _optimizer(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class behind StepSpec's name for an optimizer, and its options."""
    if name == "sgd":
        return torch.optim.SGD, {"lr": LEARNING_RATE}
    options = {"fused": name == "adamw_fused", "foreach": name == "adamw_foreach"}
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **options}


def _autocast(spec: StepSpec, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    dtype = _AUTOCAST_DTYPES.get(spec.precision)
    if dtype is None:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)


def set_fp32_matmuls(precision: str) -> None:
    """TF32 or IEEE fp32 for matmuls of fp32 tensors. Process-wide in torch: one process measures one cell."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"


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
