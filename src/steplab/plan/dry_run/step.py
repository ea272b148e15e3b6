"""A step's phases, run dry as measurement.step runs them."""

import dataclasses

from steplab.plan.dry_run.attention import Attend, plain
from steplab.plan.dry_run.compiled import CompiledTransformer
from steplab.plan.dry_run.fused_attention import FUSED
from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.memory import Ledger
from steplab.plan.dry_run.optimizers import Optimizer
from steplab.plan.dry_run.sizes import INT64, Count, Sizes
from steplab.plan.dry_run.transformer import Transformer
from steplab.specs.attention_kernels import chosen_attention
from steplab.specs.step import StepSpec

_STEPS = 3
"""The optimizer's state is made in the first; after another the allocator has seen everything."""
_BATCHES = 2

_ATTENTION: dict[str, Attend] = {"plain": plain} | FUSED


def run_dry(spec: StepSpec, *, workspace: Count) -> Ledger:
    """The ledger of a step after some others, its peak among them; workspace: the bytes of a cuBLAS handle."""
    spec = dataclasses.replace(spec, attention=chosen_attention(spec))
    assert spec.model.shape is not None
    sizes = Sizes(spec.model.shape, spec.batch, spec.context)
    m = Machine(sizes, spec.precision, workspace)
    m.ledger.begin("build")
    step = _Step(m, spec)
    for number in range(_STEPS):
        if number == _STEPS - 1:
            m.ledger.watch()
        step.run()
    return m.ledger


class _Step:
    """measurement.step.ModelStep."""

    def __init__(self, m: Machine, spec: StepSpec) -> None:
        self._machine, self._spec = m, spec
        self._model = (
            Transformer(m, _ATTENTION[spec.attention], spec.checkpointing)
            if spec.compile == "off"
            else CompiledTransformer(m, spec)
        )
        self._parameters = self._model.parameters.all
        for parameter in self._parameters:
            parameter.convert(m, m.weight_dtype)
        self._batches = [m.new(m.sizes.tokens, INT64, "tokens and targets", "inputs") for _ in range(2 * _BATCHES)]
        self._optimizer = Optimizer(m, self._parameters, spec.optimizer)

    def run(self) -> None:
        m, pass_name = self._machine, self._spec.pass_name
        m.ledger.begin("forward")
        with m.forward_pass(gradients=pass_name != "forward"):
            loss = self._model.forward()
        if pass_name == "forward":
            return
        m.ledger.begin("backward")
        self._model.backward(loss)
        del loss
        if pass_name == "train":
            m.ledger.begin("optimizer")
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.slot.gradient = None
