"""Predict the memory of a step of any model."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial

from steplab.errors import Unsupported
from steplab.lab.traces import kept, kept_facts
from steplab.plan.dry_run.events import Event, Listener, Operator
from steplab.plan.dry_run.repeated import RepeatedBlocks
from steplab.plan.dry_run.sizes import Count
from steplab.plan.layout.model import ForeignModel, Spread, SpreadModel
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.specs.ddp import Variant
from steplab.specs.hardware import HardwareSpec
from steplab.specs.layout import SINGLE
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import AFTER


def memory_of(
    spec: StepSpec,
    variant: Variant | None = None,
    *,
    gpu: HardwareSpec | None = None,
    sequence_parallel: bool = True,
    operators: list[Operator] | None = None,
) -> MemoryPrediction:
    """Predict the memory of any model; one that is not steplab's own is traced where that is possible, and `operators`
    gets the operators of the traced step.

    gpu: the GPU whose cuBLAS workspace is counted; None: a Hopper.
    """
    device = gpu.device_names[0] if gpu and gpu.device_names else None
    if is_traced(spec) and spec.layout.world_size > 1:
        return predict_memory(spec, device=device, variant=variant, model=spread_model(spec))
    if is_traced(spec) and (deep := _deep_model(spec)):
        if operators is not None and spec.compile == "off":
            operators.extend(operators_of(spec))
        return predict_memory(spec, device=device, model=deep)
    if is_traced(spec):
        return predict_memory(spec, device=device, open_step=partial(_open_traced, operators))
    return predict_memory(spec, device=device, variant=variant, sequence_parallel=sequence_parallel)


@contextmanager
def _open_traced(
    operators: list[Operator] | None, spec: StepSpec, workspace: Count, listen: Listener
) -> Iterator[Callable[[], None]]:
    """The step by a trace. At the end `operators` has those of the last step that was run; compiled code tells none."""

    def trace(tell: Listener) -> AbstractContextManager[Callable[[], None]]:
        from steplab.fake_step.step import fake_step

        return fake_step(spec, workspace, tell, compiled=True)

    found: list[Operator] = []

    def listen_too(event: Event) -> None:
        listen(event)
        if isinstance(event, Operator):
            found.append(event)

    with kept(spec, f"memory {workspace.value}", trace)(listen_too) as run:

        def run_once_more() -> None:
            found.clear()
            run()

        yield run_once_more
        if operators is not None and spec.compile == "off":
            operators.extend(found)


_DEEP = 12
"""Blocks from which on two of them are traced, and stand for all."""


def _deep_model(spec: StepSpec) -> SpreadModel | None:
    """A configuration of many blocks that are alike, whose step is put together from the parts of one with two; None:
    it is traced whole. Optimizers that hold memory of their own while they update are followed there alone."""
    if spec.model.kind != "hf" or spec.optimizer not in ("adamw_fused", "sgd"):
        return None
    if spec.updates_in_backward or spec.micro_steps > 1:
        return None
    with suppress(Unsupported):
        model = spread_model(spec)
        return model if model is not None and model.num_layers >= _DEEP else None
    return None


def operators_of(spec: StepSpec) -> Sequence[Operator]:
    """The operators of an eager step of a traced model after the first, in order; they are those that a compiler joins.

    Raises Unsupported for a model that cannot be run on tensors without content.
    """
    deep = _deep_model(spec)
    if deep is None:
        return _operators_of(spec, None)
    few, more = _operators_of(spec, 2), _operators_of(spec, 3)
    return RepeatedBlocks(few, more, deep.num_layers)


def _operators_of(spec: StepSpec, blocks: int | None) -> tuple[Operator, ...]:
    """blocks: how many of them; None: all."""

    def trace(tell: Listener) -> AbstractContextManager[Callable[[], None]]:
        from steplab.fake_step.spread import with_blocks
        from steplab.fake_step.step import fake_step

        if blocks is None:
            return fake_step(spec, Count(0, ""), tell)
        return with_blocks(spec, tell, blocks=blocks, compiled=False)

    found: list[Event] = []
    with kept(spec, f"operators {blocks}", trace)(found.append) as run:
        run()  # makes the optimizer's state
        found.clear()
        run()
        return tuple(event for event in found if isinstance(event, Operator))


def spread_model(spec: StepSpec) -> SpreadModel | None:
    """The model as layouts spread it, where it is not steplab's own: by a trace, which takes seconds."""
    if not is_traced(spec):
        return None
    alone = replace(spec, layout=SINGLE, compile="off", checkpointing="none", update=AFTER, data_parallel="bucketed")
    return ForeignModel(spread=kept_facts(alone, "spread", Spread, partial(_spread, spec)), trace=_trace_two_blocks)


def _spread(spec: StepSpec) -> Spread:
    from steplab.fake_step.spread import spread

    return spread(spec)


def _trace_two_blocks(spec: StepSpec, listen: Listener, *, compiled: bool) -> None:
    def trace(tell: Listener) -> AbstractContextManager[Callable[[], None]]:
        from steplab.fake_step.spread import with_blocks

        return with_blocks(spec, tell, blocks=2, compiled=compiled)

    with kept(spec, f"two blocks {compiled}", trace)(listen) as run:
        run()


def is_traced(spec: StepSpec) -> bool:
    """Whether the operators of the model are known by running it on tensors without content, which needs torch."""
    needed = {"hf": ("torch", "transformers"), "factory": ("torch",)}.get(spec.model.kind, ())
    return bool(needed) and all(importlib.util.find_spec(name) is not None for name in needed)
