"""Runs a step's phases dry, in the order of measurement.step.step."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from steplab.ops.triton_places import implementation
from steplab.plan.dry_run.allocator import Ledger
from steplab.plan.dry_run.attention import attention_of
from steplab.plan.dry_run.compiled import CompiledTransformer
from steplab.plan.dry_run.events import Event, Listener, Operator
from steplab.plan.dry_run.head_loss import head_loss
from steplab.plan.dry_run.machine import Gathering, Machine
from steplab.plan.dry_run.operators import elementwise
from steplab.plan.dry_run.optimizers import Optimizer
from steplab.plan.dry_run.sizes import INT64, WHOLE, Count, Sizes, Split
from steplab.plan.dry_run.transformer import FusedBlock, HeadLoss, Transformer
from steplab.specs.attention_kernels import chosen_attention
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import WITH_MASTERS

_BATCHES = 2
_MICRO_STEPS = 4
"""Micro-steps that suffice for peak memory: from the second on, each adds to existing gradients."""


OpenStep = Callable[[StepSpec, Count, Listener], AbstractContextManager[Callable[[], None]]]
"""(spec, bytes of a cuBLAS handle, listener) -> a context that builds the step, and a function that runs it."""


@contextmanager
def dry_step(spec: StepSpec, workspace: Count, listen: Listener) -> Iterator[Callable[[], None]]:
    """Build a step of the plain Transformer that reports memory only, and yield the function that runs it."""
    spec = dataclasses.replace(spec, accumulation=min(spec.accumulation, _MICRO_STEPS))
    yield _Step(spec, workspace, listen, tells_operators=False).run


def memory_of(spec: StepSpec, *, workspace: Count, open_step: OpenStep = dry_step) -> Ledger:
    """Ledger of a step's allocations, once they repeat from step to step; workspace: bytes of a cuBLAS handle."""
    ledger = Ledger()
    with open_step(spec, workspace, ledger.listen) as run:
        run()  # makes the optimizer's state
        ledger.watch()
        run()  # fills the allocator's pools
        if not ledger.repeat():
            ledger.watch()
            run()
    return ledger


def run_dry(spec: StepSpec, listen: Listener, *, split: Split, gathering: Gathering | None) -> None:
    """Run one step of a tensor-parallel rank, and report its events to `listen`.

    The spec's own layout is ignored. gathering: how FSDP2 gathers the weights; None: they are kept whole.
    """
    _Step(spec, Count(0, ""), listen, split=split, gathering=gathering).run()


def operators_of(spec: StepSpec) -> tuple[Operator, ...]:
    """Operators of a step, in order, without fp16's GradScaler.

    A compiled step returns the eager step's operators, which plan.fusion merges.
    """
    found: list[Operator] = []

    def listen(event: Event) -> None:
        if isinstance(event, Operator):
            found.append(event)

    _Step(dataclasses.replace(spec, compile="off"), Count(0, ""), listen).run()
    return tuple(found)


def _head_loss_of(spec: StepSpec) -> HeadLoss | None:
    row = implementation(spec.loss)
    if not row.in_chunks:
        return None
    # The gradient of the loss is 1, except with several micro-steps or a gradient scaler.
    return partial(head_loss, row=row, scaled=spec.micro_steps > 1 or spec.precision == "fp16")


class _Step:
    def __init__(
        self,
        spec: StepSpec,
        workspace: Count,
        listen: Listener,
        *,
        split: Split = WHOLE,
        gathering: Gathering | None = None,
        tells_operators: bool = True,
    ) -> None:
        self._spec = spec = dataclasses.replace(spec, attention=chosen_attention(spec))
        assert spec.model.shape is not None
        self._machine = m = Machine(
            Sizes(spec.model.shape, spec.batch, spec.context, split),
            spec.precision,
            workspace,
            listen,
            gathering,
            tells_operators=tells_operators,
        )
        m.begin("build")
        self._model = (
            Transformer(
                m,
                attention_of(spec.attention),
                spec.checkpointing,
                _head_loss_of(spec),
                FusedBlock if spec.block_ops == "triton" else None,
            )
            if spec.compile == "off"
            else CompiledTransformer(m, spec, _head_loss_of(spec))
        )
        self._parameters = self._model.parameters.all
        for parameter in self._parameters:
            low = gathering is not None and gathering.low_precision and parameter not in self._model.parameters.tables
            parameter.convert(m, m.product_dtype if low else m.weight_dtype)
        if spec.precision in WITH_MASTERS:
            in_chunks = implementation(spec.loss).in_chunks  # then the head's weight stays in fp32
            for parameter in self._model.parameters.linear:
                if not in_chunks or parameter is not self._model.parameters.head:
                    parameter.keep_master(m, m.product_dtype)
        self._batches = [m.new(m.sizes.tokens, INT64, "tokens and targets", "inputs") for _ in range(2 * _BATCHES)]
        self._optimizer = Optimizer(m, self._parameters, spec.optimizer)

        if spec.pass_name != "train":
            for parameter in self._parameters:
                parameter.master = None

    def run(self) -> None:
        m, pass_name = self._machine, self._spec.pass_name
        for _ in range(self._spec.micro_steps):
            self._micro_step(gradients=pass_name != "forward")
        if pass_name == "train":
            if not self._spec.updates_in_backward:  # runs within backward, with the same peak
                m.begin("optimizer")
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.slot.gradient = None

    def _micro_step(self, *, gradients: bool) -> None:
        m = self._machine
        m.begin("forward")
        with m.forward_pass(gradients=gradients):
            loss = self._model.forward()
        if gradients:
            m.begin("backward")
            is_whole = self._spec.micro_steps == 1
            self._model.backward(loss if is_whole else elementwise(m, "div", loss, "loss, divided by the micro-steps"))
