"""Makes a module ready for a step: compiles it and, in a world of several processes, spreads it over them.

The order is always: split products, recompute, compile, then wrap or shard, so that averaging gradients stays outside
compiled code.

steplab's Transformer is divided by a layout: dp, fsdp, tp and pp, by torch's engines.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel

from steplab.measurement import compat
from steplab.measurement.machine.world import World
from steplab.model.checkpointing import wrap_block
from steplab.model.compiling import compiled, repeated_blocks
from steplab.model.layout import (
    TransformerStage,
    arrive_whole,
    blocks_of,
    cut,
    loss_over_ranks,
    tensor_plan,
)
from steplab.model.transformer import Transformer, call_plainly
from steplab.parallel import DataParallel, ShardedOptimizer
from steplab.parallel import layout as layouts
from steplab.specs.ddp import BYTES_PER_MB, Variant
from steplab.specs.layout import Layout
from steplab.specs.step import STAGES_A_RANK, StepSpec
from steplab.specs.step_choices import IN_FLIGHT, OVERLAPPED


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    module: nn.Module
    call: Callable[..., Any] | None
    """Function that runs a rank's batch; None for a pipeline."""
    data_index: int = 0
    """Number of this rank's batch; ranks with equal numbers share it."""
    finish_gradients: Callable[[], None] | None = None
    """Complete this rank's gradients after backward; None: backward does."""
    finish_in_parts: Callable[[], Iterator[Sequence[Tensor]]] | None = None
    """Like finish_gradients, but yield parameters as gradients complete; None: all are updated afterwards."""
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context for all micro-steps except the last: gradients accumulate on each rank, unsent."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    pipeline: layouts.Pipeline | None = None
    """Runs both passes of a batch interleaved; None: one after the other."""
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """Function of parameters, optimizer class and **options; None: the class makes its optimizer."""


Autocast = Callable[[], AbstractContextManager[object]]


def units_of(module: nn.Module) -> Sequence[layouts.Unit]:
    """Submodules that FSDP2 gathers as a whole; other parameters are gathered with the root."""
    if not isinstance(module, Transformer | TransformerStage):
        return [layouts.Unit(module=block) for block in repeated_blocks(module)]
    # Autocast reads an embedding in its stored dtype, so the residual stream is fp32: gathering it lower would change
    # results. All other weights autocast would cast itself, before each use.
    tables = [table for table in (module.embedding, module.positions) if table is not None]
    embeddings = [layouts.Unit(module=table, low_precision=False) for table in tables]
    return [*embeddings, *(layouts.Unit(module=block) for block in blocks_of(module).values())]


def policy_of(module: nn.Module, spec: StepSpec) -> MixedPrecisionPolicy:
    """Dtypes in which FSDP2 moves parameters and gradients. Third-party models are gathered in the stored dtype,
    because some of their modules may need it. Inputs are not cast: autocast decides on low precision, as on one rank.
    """
    autocast = spec.precision == "bf16" and isinstance(module, Transformer | TransformerStage)
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if autocast else None,
        reduce_dtype=torch.float32 if autocast else None,
        cast_forward_inputs=False,
    )


def _in_stages(
    model: Transformer, spec: StepSpec, mesh: DeviceMesh, device: torch.device, autocast: Autocast
) -> tuple[layouts.Pipeline, nn.Module]:
    shape, layout, loss = spec.model.shape, spec.layout, model.loss
    assert shape is not None
    stages_a_rank = STAGES_A_RANK[spec.pipeline_schedule]
    numbers = layouts.stage_numbers(mesh, stages_a_rank)
    stages = cut(model, numbers, layout.pp * stages_a_rank, autocast)
    for stage in stages:
        _lay_out(stage, spec, mesh)
    parts = spec.num_microbatches
    batch, context = spec.batch // parts, spec.context
    between_dtype = torch.bfloat16 if spec.precision == "bf16_pure" else torch.float32
    logits_dtype = torch.bfloat16 if spec.precision in ("bf16", "bf16_pure") else torch.float32
    on_meta = partial(torch.empty, device="meta", requires_grad=True)

    def mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        with autocast():
            return loss(logits_BTV.flatten(0, 1), targets_BT.flatten())

    pipeline = layouts.Pipeline(
        stages,
        mesh,
        device,
        schedule=spec.pipeline_schedule,
        microbatches=parts,
        first_input=torch.empty(batch, context, dtype=torch.int64, device="meta"),
        between=on_meta(batch, context // layout.tp, shape.d_model, dtype=between_dtype),
        last_output=on_meta(batch, context, shape.vocab_size // layout.tp, dtype=logits_dtype),
        loss=mean_loss,
    )
    return pipeline, nn.ModuleList(stages)


def forget_the_whole(device: torch.device) -> None:
    """Free the whole model's memory, which would count in peaks."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def make_ready(
    module: nn.Module, spec: StepSpec, world: World | None, autocast: Autocast, variant: Variant | None = None
) -> Distributed:
    """Compile the module, already on its device, and spread it over the ranks by the layout or the `variant`.

    `autocast` gives the forward pass's context. Raises UserError for ranks that do not fit the layout or built
    different modules, Unsupported for a module without separable blocks.
    """
    if spec.compile == "block":
        compat.compile_alike_in_all_wrappers()
    if world is None:
        return Distributed(module=module, call=_compiled(module, spec, by_block=spec.compile == "block"))
    if variant is None and spec.layout.world_size != spec.layout.dp:
        return _laid_out(module, spec, spec.layout, world, autocast)
    variant = variant or _variant_of(spec)
    if variant.kind == "fsdp2":
        return _laid_out(module, spec, Layout(fsdp=world.size), world, autocast)
    called = _compiled(module, spec, by_block=isinstance(module, Transformer) or spec.compile == "block")
    return _data_parallel(module, called, variant, world)


def _variant_of(spec: StepSpec) -> Variant:
    size_mb = spec.bucket_size_mb if spec.data_parallel == "bucketed" else None
    update = spec.update if spec.data_parallel in IN_FLIGHT and spec.pass_name == "train" else None
    return Variant(kind=spec.data_parallel, bucket_size_mb=size_mb, update=update)


def _compiled(module: nn.Module, spec: StepSpec, *, by_block: bool) -> Any:
    if by_block and isinstance(module, Transformer | TransformerStage):
        _prepare_blocks(module, spec)
    elif spec.compile == "block":
        for index, block in enumerate(repeated_blocks(module)):
            wrap_block(block, index, checkpointing="none", compile_mode="block", split=False)
    elif spec.compile != "off":
        return compiled(module, spec.compile)
    return module


def _prepare_blocks(module: Transformer | TransformerStage, spec: StepSpec) -> None:
    """Recompute and compile each block separately instead of in the model's forward pass."""
    if isinstance(module, Transformer):
        module.call_block = call_plainly
    split = spec.layout.tp > 1
    if split and spec.compile != "off" and module.embedding is not None:
        arrive_whole(module.embedding)
    checkpointing = spec.checkpointing if spec.checkpoints_apply else "none"
    for index, block in blocks_of(module).items():
        wrap_block(block, index, checkpointing=checkpointing, compile_mode=spec.compile, split=split)


def _data_parallel(module: nn.Module, called: Any, variant: Variant, world: World) -> Distributed:
    ready = Distributed(module=module, call=called, data_index=world.rank)
    if variant.kind == "none":
        return ready
    if variant.kind == "torch_ddp":
        assert variant.bucket_size_mb is not None
        device = world.device.torch_device
        wrapped = nn.parallel.DistributedDataParallel(
            called,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=variant.bucket_size_mb * BYTES_PER_MB / 2**20,  # torch's MB are MiB
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they never change
        )
        return replace(ready, call=wrapped, no_sync=wrapped.no_sync)
    choices: dict[str, Any] = {} if variant.bucket_size_mb is None else {"bucket_size_mb": variant.bucket_size_mb}
    if variant.transport is not None:
        choices["transport"] = variant.transport
    sharded = variant.kind == "sharded"
    strategy = "bucketed" if sharded else variant.kind
    parallel = DataParallel(called, strategy, group=world.collectives, to_owners=sharded, **choices)

    def make_sharded(
        parameters: Sequence[nn.Parameter], optimizer: type[torch.optim.Optimizer], **options: Any
    ) -> ShardedOptimizer:
        """Build an optimizer that sends parameters by the gradients' transport; each module waits for its own."""
        assert variant.bucket_size_mb is not None
        made = ShardedOptimizer(
            parameters,
            optimizer,
            world.collectives,
            bucket_size_mb=variant.bucket_size_mb,
            exchange="peer_copy" if variant.transport == "peer_copy" else "auto",
            owners=parallel.owners,
            **options,
        )
        made.overlap_with(*parts_of(module))
        return made

    return replace(
        ready,
        call=parallel,
        finish_gradients=parallel.finish_gradient_synchronization,
        finish_in_parts=parallel.finish_in_parts if variant.update == OVERLAPPED else None,
        no_sync=parallel.no_sync,
        make_optimizer=make_sharded if sharded else None,
    )


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Blocks, maybe compiled whole, and the modules with parameters outside of them.

    Raises Unsupported for a model without blocks.
    """
    blocks = [unit.module for unit in units_of(module)]
    inside = {inner for block in blocks for inner in block.modules()}
    outside = (inner for inner in module.modules() if inner not in inside)
    return [*blocks, *(inner for inner in outside if any(True for _ in inner.parameters(recurse=False)))]


def _laid_out(module: nn.Module, spec: StepSpec, layout: Layout, world: World, autocast: Autocast) -> Distributed:
    """Divide the module in place; all ranks call this together, each with the whole module on its device and equal
    weights. Raises UserError if the number of ranks does not fit the layout.
    """
    device = world.device.torch_device
    mesh = layouts.open_mesh({"pp": layout.pp, "dp": layout.dp, "fsdp": layout.fsdp, "tp": layout.tp}, device.type)
    data_index, _ = layouts.data_share(mesh)
    ready = Distributed(module=module, call=module, data_index=data_index)
    if isinstance(module, Transformer):
        spec = replace(spec, layout=layout)
        if layout.tp > 1:
            module.loss = loss_over_ranks(module.loss, mesh["tp"])
            ready = replace(ready, around=loss_parallel)
    if layout.pp > 1:
        assert isinstance(module, Transformer)
        pipeline, stages = _in_stages(module, spec, mesh, device, autocast)
        ready = replace(ready, module=stages, call=None, pipeline=pipeline)
    else:
        _lay_out(module, spec, mesh)
        if layout.data_ranks > 1:
            ready = replace(ready, no_sync=partial(layouts.no_gradient_sync, module, keep_gathered=not spec.reshards))
    forget_the_whole(device)
    return ready


def _lay_out(module: nn.Module, spec: StepSpec, mesh: DeviceMesh) -> None:
    shape = spec.model.shape
    layouts.lay_out(
        module,
        mesh,
        tensor_plan=tensor_plan(shape) if shape and isinstance(module, Transformer | TransformerStage) else {},
        units=units_of(module),
        wrap_units=lambda: _compiled(module, spec, by_block=True),
        policy=policy_of(module, spec),
        reshard_after_forward=spec.reshards,
    )
