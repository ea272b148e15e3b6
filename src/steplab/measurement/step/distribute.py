"""Makes a module ready for a step: compiles it and, in a world of several processes, spreads it over them.

The order is always: split products, recompute, compile, then wrap or shard, so that averaging gradients stays outside
compiled code.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from steplab.measurement import compat
from steplab.measurement.machine.world import World
from steplab.measurement.step.laying_out import (
    Autocast,
    Distributed,
    forget_the_whole,
    lay_out_transformer,
    make_whole,
    prepare_blocks,
    sharding_of,
    units_of,
)
from steplab.model.compiling import compile_blocks, compiled
from steplab.model.transformer import Transformer
from steplab.parallel import DataParallel, ShardedOptimizer
from steplab.parallel.layout import data_share, lay_out, no_gradient_sync, open_mesh
from steplab.specs.ddp import BYTES_PER_MB, Variant
from steplab.specs.layout import Layout
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import IN_FLIGHT, OVERLAPPED


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
    if by_block and isinstance(module, Transformer):
        prepare_blocks(module, spec)
    elif spec.compile == "block":
        compile_blocks(module)
    elif spec.compile != "off":
        return compiled(module, spec.compile)
    return module


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
    return replace(
        ready,
        call=parallel,
        finish_gradients=parallel.finish_gradient_synchronization,
        finish_in_parts=parallel.finish_in_parts if variant.update == OVERLAPPED else None,
        no_sync=parallel.no_sync,
        make_optimizer=partial(_make_sharded, module, parallel, variant, world) if sharded else make_whole,
    )


def _make_sharded(
    module: nn.Module,
    parallel: DataParallel,
    variant: Variant,
    world: World,
    parameters: Sequence[nn.Parameter],
    optimizer: type[torch.optim.Optimizer],
    **options: Any,
) -> ShardedOptimizer:
    """Parameters travel as gradients do, and each part of the model waits for its own."""
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


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Blocks, maybe compiled whole, and the modules with parameters outside of them.

    Raises Unsupported for a model without blocks.
    """
    blocks = [unit.module for unit in units_of(module)]
    inside = {inner for block in blocks for inner in block.modules()}
    outside = (inner for inner in module.modules() if inner not in inside)
    return [*blocks, *(inner for inner in outside if any(True for _ in inner.parameters(recurse=False)))]


def _laid_out(module: nn.Module, spec: StepSpec, layout: Layout, world: World, autocast: Autocast) -> Distributed:
    if isinstance(module, Transformer):
        return lay_out_transformer(module, replace(spec, layout=layout), world, autocast)
    device, sharding = world.device.torch_device, sharding_of(module, spec)
    mesh = open_mesh({"dp": layout.dp, "fsdp": layout.fsdp}, device.type)
    data_index, _ = data_share(mesh)
    lay_out(
        module,
        mesh,
        tensor_plan={},
        units=units_of(module),
        wrap_units=lambda: _compiled(module, spec, by_block=True),
        sharding=sharding,
    )
    forget_the_whole(device)
    keep = not sharding.reshard_after_forward
    no_sync = partial(no_gradient_sync, module, keep_gathered=keep)
    return Distributed(module=module, call=module, data_index=data_index, no_sync=no_sync)
