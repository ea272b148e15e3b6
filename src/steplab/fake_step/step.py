"""Builds and runs a step of any model on torch's fake tensors, as the dry run's stream of events."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_leaves

from steplab.errors import ERRORS, Unsupported, own_error
from steplab.fake_step.cuda import as_on_cuda
from steplab.fake_step.host_made import HostMade
from steplab.fake_step.storages import Storages
from steplab.fake_step.tensor_parallel import split_for_tp
from steplab.fake_step.watching import Watcher
from steplab.measurement.machine.failures import place_of, place_of_call
from steplab.measurement.step.step import ModelStep, set_fp32_matmuls
from steplab.model.build import build_workload, knows_tokens
from steplab.model.compiling import repeated_blocks
from steplab.plan.dry_run.events import Event, Listener, Operator
from steplab.plan.dry_run.sizes import Count
from steplab.specs.layout import Layout
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import AFTER, ALONE

_CPU = torch.device("cpu")
_READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@contextmanager
def fake_step(
    spec: StepSpec,
    workspace: Count,
    listen: Listener,
    *,
    cut: Callable[[ModelStep], None] = lambda step: None,
    compiled: bool = False,
    with_state: bool = False,
) -> Iterator[Callable[[], None]]:
    """Build the step on fake tensors, and yield a function that runs it eagerly, as one process on CUDA does.

    Args:
        workspace: bytes of cuBLAS's workspace, which a thread's first matmul allocates.
        listen: receives every event.
        cut: removes blocks once the step is built.
        compiled: run as the spec's `compile`; memory is reported, but no operators of compiled code.
        with_state: create the optimizer's state before the first run.

    The model's prints go to stderr. A value that the model reads off a tensor (`.item()`) is a symbol, which it may add
    up and put into tensors.

    Raises UserError as `build_workload` does. Raises Unsupported for control flow that depends on such values, and for
    operators of unknown cost.
    """
    doing = f"predicting a step of {spec.model.name}"
    storages = Storages(listen, workspace)
    watcher = Watcher(
        doing,
        listen,
        storages,
        tf32=spec.precision == "tf32",
        fused_optimizer=spec.optimizer == "adamw_fused",
        updates_in_backward=spec.updates_in_backward,
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watcher.on_value = partial(_admit_values, mode)
    try:
        with (
            redirect_stdout(sys.stderr),
            # it logs errors that it also raises
            mock.patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True),
            _settings_of_torch(),
            _conversion_by_data(),
            mode,
            as_on_cuda(),
            watcher,
        ):
            watcher.begin("build")
            step = _built(spec, storages, watcher, doing, cut)
            if with_state and step.optimizer is not None:
                watcher.begin("optimizer")
                _make_state(step, storages)
            if compiled and spec.compile != "off":
                from steplab.fake_step.compiled import compile_on_fakes  # it takes a second to import

                compile_on_fakes(step, spec.compile, watcher, storages)
            elif spec.compile not in ("off", "block"):
                step.module.register_forward_hook(_return_as_a_graph)
            with _masks_as_they_are(traced=spec.compile not in ("off", "block")):
                yield partial(_run, step, storages, watcher)
    except ERRORS as error:
        raise own_error(error) from error.__cause__
    except Exception as error:
        place = place_of(error)
        where = f"at {place} " if place else ""
        if _depends_on_values(error):
            why = f"{where}it computes with values of tensors, which are not known before it runs ({_said(error)})"
            raise Unsupported(doing, why, "measure it with `steplab run` and `steplab memory`") from error
        if isinstance(error, RuntimeError) and any(words in str(error) for words in ("overflow", "negative dimension")):
            why = "a tensor of it has a size below zero or beyond 64 bits"
            raise Unsupported(doing, why, "give other sizes") from error
        if place:  # user code may do things that fake tensors do not support
            why = f"{where}it fails on tensors without content ({type(error).__name__}: {_said(error)})"
            raise Unsupported(doing, why, "measure it with `steplab run` and `steplab memory`") from error
        raise


def _admit_values(mode: FakeTensorMode) -> str:
    """Turn values that the model reads off tensors into symbols instead of errors, and return the source line.

    torch's modules for it take half a second to import, and few models read values.
    """
    if mode.shape_env is None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode.shape_env = ShapeEnv(allow_dynamic_output_shape_ops=False)
    return place_of_call()


def _depends_on_values(error: Exception) -> bool:
    is_guard = type(error).__name__ == "GuardOnDataDependentSymNode"  # its module takes half a second to import
    return is_guard or isinstance(error, _READS_VALUES) or "SymFloat" in str(error) or "SymInt" in str(error)


def tokens_of(spec: StepSpec) -> int | None:
    return spec.tokens_of_all if knows_tokens(spec) else None


def operators_of_fake(spec: StepSpec) -> tuple[Operator, ...]:
    found: list[Event] = []
    with fake_step(spec, Count(0, ""), found.append) as run:
        run()  # makes the optimizer's state
        found.clear()
        run()
        return tuple(event for event in found if isinstance(event, Operator))


@contextmanager
def built_on_fakes(spec: StepSpec) -> Iterator[ModelStep]:
    found: list[ModelStep] = []
    alone = dataclasses.replace(spec, layout=Layout(tp=spec.layout.tp), pass_name="forward_backward", **ALONE)
    with fake_step(alone, Count(0, ""), lambda event: None, cut=found.append):
        yield found[0]


def _built(
    spec: StepSpec, storages: Storages, watcher: Watcher, doing: str, cut: Callable[[ModelStep], None]
) -> ModelStep:
    workload = build_workload(spec, _CPU)
    if workload.module is None:
        why = "its factory returns a whole step, which cannot be divided into phases"
        raise Unsupported(doing, why, "have it return (module, make_batch)")
    if spec.layout.tp > 1:
        split_for_tp(workload.module, spec.layout.tp, spec.model.label)
    # An overlapped update needs the same memory and operators; without overlap a phase makes its state.
    step = ModelStep(workload, dataclasses.replace(spec, update=AFTER, compile="off"), _CPU)
    cut(step)
    step.scaler = torch.amp.GradScaler("cpu", enabled=False)  # it would read values
    storages.call(step.module.buffers(), "parameters")
    for name, parameter in step.module.named_parameters():
        number, within = storages.number(parameter), _within_its_block(name)
        if number is not None:
            storages.call([parameter], "parameters", within)
            watcher.parameters[number] = within
    storages.call_rest("inputs")
    watcher.follow(blocks_of(step.module))
    return step


def _run(step: ModelStep, storages: Storages, watcher: Watcher) -> None:
    for phase in step.phases:
        watcher.begin(phase.name)
        with HostMade(lambda made: _tell_place(watcher, made)) if phase.name == "forward" else nullcontext():
            phase.run()
        if phase.name == "optimizer":
            _name_state(step, storages)
        elif phase.name == "forward":
            storages.call_rest("activations")


def _return_as_a_graph(module: nn.Module, given: object, made: object) -> None:
    """Give each output except the loss, such as logits, a gradient of zeros, as autograd does for a compiled graph."""
    for each in tree_leaves(made):
        if isinstance(each, torch.Tensor) and each.requires_grad and each.numel() > 1:
            each.register_hook(lambda gradient: gradient + torch.ops.aten.zero(gradient))


def _make_state(step: ModelStep, storages: Storages) -> None:
    assert step.optimizer is not None
    for parameter in step.module.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    step.optimizer_step()
    _name_state(step, storages)


def _name_state(step: ModelStep, storages: Storages) -> None:
    for state in step.optimizer.state.values() if step.optimizer else ():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                storages.call([value], "optimizer_state", f"{key} of a weight")


def _tell_place(watcher: Watcher, made: torch.Tensor) -> None:
    if place := place_of_call():
        watcher.tell_host_made(place, made)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    try:
        return repeated_blocks(module)
    except Unsupported:
        return []


def _within_its_block(name: str) -> str:
    """A parameter's name within its block: transformer.h.3.attn.c_attn.weight -> attn.c_attn.weight."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return name if number is None else ".".join(parts[number + 1 :])


@contextmanager
def _conversion_by_data() -> Iterator[None]:
    """Let nn.Module.to convert fake tensors by assigning their data; its torch.utils.swap_tensors fails on them.

    Initialization by a truncated normal is skipped: it reads the values that it drew, which fake tensors do not have.
    """

    def convert(there: torch.Tensor, converted: torch.Tensor) -> None:
        there.data = converted.data

    undrawn = mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
    with mock.patch.object(torch.utils, "swap_tensors", convert), undrawn:
        yield


def _masks_as_they_are(*, traced: bool) -> AbstractContextManager[None]:
    """Make transformers build an attention mask only if it would in a real step of sequences that are not packed.

    It detects packing by reading token positions. An eager step finds none, and attention is causal without a mask. A
    compiler (`traced`) cannot read them, so a compiled step has a mask. Nor can fake tensors be read.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    packed = getattr(masks, "find_packed_sequence_indices", None)
    if packed is None:
        return nullcontext()

    def none_packed(positions_BT: torch.Tensor) -> None:
        (packed(positions_BT)[:, -1] == 0).all()

    others: dict[str, Any] = {"find_packed_sequence_indices": packed if traced else none_packed}
    if traced:  # dynamo before torch 2.14 also takes a compiled model for an exported one, which keeps every mask
        others |= {"is_tracing": lambda *_: True, "is_torchdynamo_exporting": lambda: torch.__version__ < "2.14"}
    return mock.patch.multiple(masks, **{name: each for name, each in others.items() if hasattr(masks, name)})


@contextmanager
def _settings_of_torch() -> Iterator[None]:
    """Restore the precision of fp32 matmuls, which the step sets for the whole process."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        set_fp32_matmuls(before)
        torch.backends.cudnn.allow_tf32 = cudnn


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
