"""The training step in phases: forward, backward, optimizer. This is the only builder of a step.

Micro-steps run forward and backward on their own batch, with the loss divided by their number; gradients are exchanged
after the last.

With steplab's DataParallel a phase `gradient sync` is the communication left after backward; where parameters are
updated as gradients arrive, it belongs to the optimizer. A pipeline has one phase. An overlapped update belongs to
backward, zero_grad to the last phase that uses gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported, UserError
from steplab.measurement.clock import Phase
from steplab.measurement.machine.world import World
from steplab.measurement.step.distribute import make_ready, parts_of
from steplab.measurement.tensors import TORCH_DTYPES, with_tensors
from steplab.model.transformer import Transformer
from steplab.model.workload import Workload, call, loss_of
from steplab.ops.adamw import OneKernelAdamW, bf16_with_masters
from steplab.ops.update import UpdateByParts, UpdateInBackward
from steplab.parallel import ShardedOptimizer
from steplab.parallel.layout import Pipeline
from steplab.specs.ddp import Variant
from steplab.specs.step import AUTOCAST, StepSpec
from steplab.specs.step_choices import FP8, RECORD_THEIR_OWN, WITH_MASTERS

_BATCHES = 2
LEARNING_RATE = 1e-4
FIRST = -1
"""Priority of a CUDA stream above the lowest, 0."""
_DATA_SEEDS = 1_000_003
"""Distance of batch seeds between two specs' seeds: a prime above any number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeStep:
    phases: Sequence[Phase]
    module: nn.Module | None = None


def make_step(workload: Workload, spec: StepSpec, device: torch.device, world: World | None = None) -> "BuiltStep":
    """Build a step; a user's whole step is one phase, `step`. Raises Unsupported for an impossible layout."""
    if workload.step is not None:
        if world is not None:
            why = "its factory returns a whole step, which steplab cannot divide into phases"
            instead = (
                "have it return (module, make_batch), or spread it in the factory and measure it by steplab.recorder"
            )
            raise Unsupported(f"layout {spec.layout} for {spec.model.name}", why, instead)
        return WholeStep(phases=[Phase(name="step", run=workload.step)])
    return ModelStep(workload, spec, device, world)


class ModelStep:
    def __init__(
        self,
        workload: Workload,
        spec: StepSpec,
        device: torch.device,
        world: World | None = None,
        variant: Variant | None = None,
    ) -> None:
        """With `world`, all ranks call it together. `variant`, not the layout, decides how ranks are data parallel."""
        assert workload.module is not None
        assert workload.make_batch is not None
        self.workload, module = workload, workload.module
        if spec.precision == "bf16_pure":
            for parameter in module.parameters():  # not buffers: a rotary table in bf16 confuses late positions
                parameter.data = _to_bf16(parameter.data)
        masters = _masters(module, spec) if spec.precision in WITH_MASTERS else {}
        if spec.precision in FP8:
            from steplab.model.fp8_blocks import products_by_torchao, products_in_fp8  # kernels that few steps need

            (products_in_fp8 if spec.precision == "fp8" else products_by_torchao)(module)
        set_fp32_matmuls("high" if spec.precision == "tf32" else "highest")
        module.train(spec.pass_name != "forward")
        self._autocast = _autocast(spec, device)
        self.distributed = make_ready(module, spec, world, self._autocast, variant)
        self.module = self.distributed.module
        if world is not None:
            torch.manual_seed((spec.seed * _DATA_SEEDS + self.distributed.data_index + 1) % 2**63)
        # Made before any timing and swapped between micro-steps: the data loader is not measured here.
        self.batches = [workload.make_batch() for _ in range(_BATCHES)]
        if spec.precision == "bf16_pure":
            self.batches = [with_tensors(batch, _to_bf16) for batch in self.batches]
        self._num_micro_steps = spec.micro_steps
        self._micro_steps_begun = 0
        self.loss: Tensor | None = None
        """A micro-step's mean loss, between its passes; a pipeline's after both, on ranks with the last stage."""
        self.on_gradients: Callable[[], None] = lambda: None
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._gradients = spec.pass_name != "forward"
        self._keeps_gradients = spec.pass_name == "train" and not spec.updates_in_backward
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.optimizer = self._make_optimizer(spec, masters) if spec.pass_name == "train" else None
        self._update: UpdateInBackward | None = None
        if self.optimizer is not None and spec.updates_in_backward:
            self._update = UpdateInBackward(self.optimizer, parts_of(self.module))
        by_itself = self._update is not None and device.type == "cuda" and spec.cuda_graph == "off"
        # Above the updates' priority; a recorded step has such a stream already.
        self._stream = torch.cuda.Stream(device, priority=FIRST) if by_itself else None
        self._cuda_graphs = device.type == "cuda" and spec.compile in RECORD_THEIR_OWN
        self.phases = self._phases(spec)

    def run(self) -> None:
        for phase in self.phases:
            phase.run()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.wait()  # else parameters may be on their way until the next forward pass

    def _phases(self, spec: StepSpec) -> list[Phase]:
        pipeline, finish = self.distributed.pipeline, self.distributed.finish_gradients
        in_parts = self.distributed.finish_in_parts
        if pipeline is not None:
            phases = [Phase(name="pipeline", run=partial(self.run_pipeline, pipeline))]
        else:
            phases = [Phase(name="forward", run=self.forward)]
            if spec.pass_name != "forward":
                phases.append(Phase(name="backward", run=self.backward))
                phases *= self._num_micro_steps
                if finish is not None and in_parts is None:
                    phases.append(Phase(name="gradient sync", run=partial(self.synchronise_gradients, finish)))
        if in_parts is not None:
            phases.append(Phase(name="optimizer", run=partial(self.update_in_parts, in_parts)))
        elif spec.pass_name == "train" and self._update is None:
            phases.append(Phase(name="optimizer", run=self.optimizer_step))
        return phases

    def forward(self) -> None:
        if self._cuda_graphs and self._is_last:  # of the previous step
            # From here on the static buffers of the last replay may be overwritten, gradients among them.
            torch.compiler.cudagraph_mark_step_begin()
        self._micro_steps_begun += 1
        called = self.distributed.call
        assert called is not None  # without a pipeline
        with (
            on_stream(self._stream),
            torch.set_grad_enabled(self._gradients),
            self._synchronising(),
            self.distributed.around(),
            self._autocast(),
        ):
            output = call(called, self._batch())
        if self._gradients:
            self.loss = loss_of(output)

    def backward(self) -> None:
        assert self.loss is not None
        with on_stream(self._stream), self._synchronising(), self._updating(), self.distributed.around():
            self.scaler.scale(self.loss / self._num_micro_steps if self._num_micro_steps > 1 else self.loss).backward()
        self.loss = None
        if self._is_last and self.distributed.finish_gradients is None:
            self._end_backward()

    def make_gradients_unsent(self) -> None:
        """Run both passes without communication; the next synchronisation sends the gradients."""
        with self.distributed.no_sync():
            for _ in range(self._num_micro_steps):
                self.forward()
                self.backward()

    def synchronise_gradients(self, finish: Callable[[], None]) -> None:
        finish()
        self._end_backward()

    def run_pipeline(self, pipeline: Pipeline) -> None:
        """Run a pipeline; its stages enter autocast, as forward passes do."""
        self._micro_steps_begun += 1
        tokens_BT, targets_BT = self._batch()
        with self.distributed.around():
            self.loss = pipeline.step(tokens_BT, targets_BT)
        self._end_backward()

    @property
    def _is_last(self) -> bool:
        return self._micro_steps_begun % self._num_micro_steps == 0

    def _synchronising(self) -> AbstractContextManager[object]:
        return nullcontext() if self._is_last else self.distributed.no_sync()

    def _updating(self) -> AbstractContextManager[object]:
        return nullcontext() if self._update is None or self._is_last else self._update.paused()

    def _batch(self) -> Any:
        return self.batches[(self._micro_steps_begun - 1) % len(self.batches)]

    def _end_backward(self) -> None:
        if self._update is not None:
            self._update.finish()
        self.on_gradients()
        if not self._keeps_gradients:
            for parameter in self._parameters:
                parameter.grad = None

    def optimizer_step(self) -> None:
        assert self.optimizer is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def update_in_parts(self, finish_in_parts: Callable[[], Iterator[Sequence[Tensor]]]) -> None:
        assert self.optimizer is not None
        update = UpdateByParts(self.optimizer)
        for parameters in finish_in_parts():
            update.of(parameters)
        self._end_backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _make_optimizer(self, spec: StepSpec, masters: Mapping[Tensor, Tensor]) -> torch.optim.Optimizer:
        name = spec.optimizer
        kind, options = _optimizer(name)
        if masters:
            options["masters"] = masters
        if kind is torch.optim.AdamW and spec.cuda_graph == "step":
            options["capturable"] = any(parameter.is_cuda for parameter in self._parameters)
        make = self.distributed.make_optimizer
        try:
            return make(self._parameters, kind, **options) if make else kind(self._parameters, **options)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{name} cannot take this model's parameters: {error}") from error


BuiltStep = ModelStep | WholeStep


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run work on `stream`, after what was launched before and ahead of what follows; None: on the current one."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _optimizer(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if name == "sgd":
        return torch.optim.SGD, {"lr": LEARNING_RATE}
    if name == "adamw_triton":
        return OneKernelAdamW, {"lr": LEARNING_RATE}
    options = {"fused": name == "adamw_fused", "foreach": name == "adamw_foreach"}
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **options}


def _masters(module: nn.Module, spec: StepSpec) -> dict[Tensor, Tensor]:
    masters = bf16_with_masters(module, stay=_added_up(module))
    if not masters:
        why = "it has no linear layer (torch.nn.Linear) in fp32 with weights of its own"
        raise Unsupported(f"precision {spec.precision} for {spec.model.name}", why, "use --precision bf16")
    return masters


def _added_up(module: nn.Module) -> Sequence[Tensor]:
    """Weights that stay in float32, as does the sum of their gradients: the head's, if its loss is computed in chunks.
    In bf16 the sum over chunks would be rounded.
    """
    return [module.head.weight] if isinstance(module, Transformer) and module.head_loss is not None else []


def _autocast(spec: StepSpec, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if spec.precision not in AUTOCAST:
        return nullcontext
    dtype = TORCH_DTYPES[AUTOCAST[spec.precision]]
    return lambda: torch.autocast(device.type, dtype=dtype)


def set_fp32_matmuls(precision: str) -> None:
    """fp32 products run in TF32 ("high") or IEEE fp32; process-wide in torch."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"


def _to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
