"""A module spread over the processes of a world as the layout says: the one place that knows all axes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from steplab.measurement.distributed import Distributed
from steplab.measurement.laying_out import lay_out_transformer, prepare_blocks
from steplab.measurement.world import World
from steplab.model.transformer import Transformer
from steplab.parallel import DataParallel
from steplab.specs.step import StepSpec


def distribute(
    module: nn.Module, spec: StepSpec, world: World, autocast: Callable[[], AbstractContextManager[object]]
) -> Distributed:
    """Spread the module, which is on the rank's device, and compile it where the spec says so: the plain Transformer
    block by block, so that gradients are ready one after the other; any other as a whole.

    `autocast` gives the context that the forward pass runs in.
    Raises UserError where the ranks are not those of the layout, or have built different modules.
    """
    if spec.layout.world_size != spec.layout.dp:
        assert isinstance(module, Transformer)  # the spec refuses any other
        return lay_out_transformer(module, spec, world, autocast)
    called: Any = module
    if isinstance(module, Transformer):
        prepare_blocks(module, spec)
    elif spec.compile != "off":
        called = torch.compile(module, mode=None if spec.compile == "default" else spec.compile)
    parallel = DataParallel(called, spec.data_parallel, spec.bucket_size_mb, group=world.collectives)
    return Distributed(
        module=module,
        call=parallel,
        finish_gradients=parallel.finish_gradient_synchronization,
        data_index=world.rank,
    )
