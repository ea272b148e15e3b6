"""Lays the plain Transformer out over ranks, by a spec's layout and torch's engine."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from steplab.measurement.machine.world import World
from steplab.model.checkpointing import wrap_block
from steplab.model.compiling import repeated_blocks
from steplab.model.layout import (
    TransformerStage,
    arrive_whole,
    blocks_of,
    cut,
    loss_over_ranks,
    ready_for_loss,
    tensor_plan,
)
from steplab.model.transformer import LossFn, Transformer, call_plainly
from steplab.parallel.layout import (
    Pipeline,
    Sharding,
    Unit,
    data_share,
    lay_out,
    no_gradient_sync,
    open_mesh,
    stage_numbers,
)
from steplab.specs.layout import Layout
from steplab.specs.step import STAGES_A_RANK, StepSpec

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""(parameters, class of the optimizer, **its options) -> the optimizer"""


def make_whole(
    parameters: Sequence[nn.Parameter], optimizer: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """State is whole on each rank, or divided like its parameters."""
    return optimizer(parameters, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    module: nn.Module
    """Has the parameters that this rank updates."""
    call: Callable[..., Any] | None
    """Runs a rank's batch; None for a pipeline."""
    data_index: int = 0
    """Number of this rank's batch; ranks with equal numbers share it."""
    finish_gradients: Callable[[], None] | None = None
    """Called after the backward pass to complete this rank's gradients. None: the backward pass completes them."""
    finish_in_parts: Callable[[], Iterator[Sequence[Tensor]]] | None = None
    """The same, but yields parameters as soon as their gradients are complete; None: all are updated afterwards."""
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context for all micro-steps except the last: gradients accumulate on each rank, unsent."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    pipeline: Pipeline | None = None
    """Runs both passes of a batch interleaved; None: one after the other."""
    make_optimizer: MakeOptimizer = make_whole


Autocast = Callable[[], AbstractContextManager[object]]


def lay_out_transformer(model: Transformer, spec: StepSpec, world: World, autocast: Autocast) -> Distributed:
    """Lay the model out in place; all ranks call this together, with equal weights.

    Before, the whole model is on each rank's device, in its stored dtype. Raises UserError if the number of ranks does
    not fit the layout.
    """
    device = world.device.torch_device
    mesh = open_mesh(_sizes(spec.layout), device.type)
    split = spec.layout.tp > 1
    loss = loss_over_ranks(model.loss, mesh["tp"]) if split else model.loss
    around = ready_for_loss if split else nullcontext
    data_index, _ = data_share(mesh)
    if spec.layout.pp > 1:
        pipeline, module = _in_stages(model, spec, mesh, device, autocast, loss)
        laid_out = Distributed(module=module, call=None, data_index=data_index, around=around, pipeline=pipeline)
    else:
        model.loss = loss
        _lay_out(model, spec, mesh)
        laid_out = Distributed(module=model, call=model, data_index=data_index, around=around)
        if spec.layout.data_ranks > 1:
            keep = not sharding_of(model, spec).reshard_after_forward
            laid_out = replace(laid_out, no_sync=lambda: no_gradient_sync(model, keep_gathered=keep))
    forget_the_whole(device)
    return laid_out


def prepare_blocks(module: Transformer | TransformerStage, spec: StepSpec) -> None:
    """Recompute and compile each block separately instead of in the model's forward pass."""
    if isinstance(module, Transformer):
        module.call_block = call_plainly
    split = spec.layout.tp > 1
    if split and spec.compile != "off" and module.embedding is not None:
        arrive_whole(module.embedding)
    checkpointing = spec.checkpointing if spec.checkpoints_apply else "none"
    for index, block in blocks_of(module).items():
        wrap_block(block, index, checkpointing=checkpointing, compile_mode=spec.compile, split=split)


def _sizes(layout: Layout) -> dict[str, int]:
    return {"pp": layout.pp, "dp": layout.dp, "fsdp": layout.fsdp, "tp": layout.tp}


def _lay_out(module: Transformer | TransformerStage, spec: StepSpec, mesh: DeviceMesh) -> None:
    shape = spec.model.shape
    assert shape is not None
    lay_out(
        module,
        mesh,
        tensor_plan=tensor_plan(shape),
        units=units_of(module),
        wrap_units=lambda: prepare_blocks(module, spec),
        sharding=sharding_of(module, spec),
    )


def units_of(module: nn.Module) -> Sequence[Unit]:
    """Submodules that FSDP2 gathers as a whole; other parameters are gathered with the root."""
    if not isinstance(module, Transformer | TransformerStage):
        return [Unit(module=block) for block in repeated_blocks(module)]
    # Autocast reads an embedding in its stored dtype, so the residual stream is fp32: gathering it lower would change
    # results. All other weights autocast would cast itself, before each use.
    tables = [table for table in (module.embedding, module.positions) if table is not None]
    embeddings = [Unit(module=table, low_precision=False) for table in tables]
    return [*embeddings, *(Unit(module=block) for block in blocks_of(module).values())]


def sharding_of(module: nn.Module, spec: StepSpec) -> Sharding:
    """How FSDP2 stores and moves the parameters. Foreign models are gathered in the stored dtype, because some of
    their modules may need it."""
    autocast = spec.precision == "bf16" and isinstance(module, Transformer | TransformerStage)
    return Sharding(
        gather_dtype=torch.bfloat16 if autocast else None,
        reduce_dtype=torch.float32 if autocast else None,
        reshard_after_forward=spec.reshards,
    )


def _in_stages(
    model: Transformer, spec: StepSpec, mesh: DeviceMesh, device: torch.device, autocast: Autocast, loss: LossFn
) -> tuple[Pipeline, nn.Module]:
    shape, layout = spec.model.shape, spec.layout
    assert shape is not None
    stages_a_rank = STAGES_A_RANK[spec.pipeline_schedule]
    numbers = stage_numbers(mesh, stages_a_rank)
    stages = cut(model, numbers, layout.pp * stages_a_rank, autocast)
    for stage in stages:
        _lay_out(stage, spec, mesh)
    parts = spec.num_microbatches
    batch, low = spec.batch // parts, torch.bfloat16
    on_meta = partial(torch.empty, device="meta", requires_grad=True)

    def mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        with autocast():
            return loss(logits_BTV.flatten(0, 1), targets_BT.flatten())

    pipeline = Pipeline(
        stages,
        mesh,
        device,
        schedule=spec.pipeline_schedule,
        microbatches=parts,
        first_input=torch.empty(batch, spec.context, dtype=torch.int64, device="meta"),
        between=on_meta(
            batch,
            spec.context // layout.tp,
            shape.d_model,
            dtype=low if spec.precision == "bf16_pure" else torch.float32,
        ),
        last_output=on_meta(
            batch,
            spec.context,
            shape.vocab_size // layout.tp,
            dtype=low if spec.precision in ("bf16", "bf16_pure") else torch.float32,
        ),
        loss=mean_loss,
    )
    return pipeline, nn.ModuleList(stages)


def forget_the_whole(device: torch.device) -> None:
    """Frees the whole model's memory, which would count in the step's peaks."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
