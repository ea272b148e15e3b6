"""A module spread over the processes of a world as the layout says: the one place that knows all axes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from steplab.errors import Unsupported
from steplab.measurement.world import World
from steplab.parallel import DataParallel
from steplab.specs.step import StepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    """What the step needs to know of it."""

    module: Callable[..., Any]
    """To be called with a rank's batch in place of the module."""
    finish_gradients: Callable[[], None]
    """To be called after the backward pass: then every rank has the gradients that its optimizer needs."""
    data_index: int
    """Which of the step's batches this rank works on; ranks that share a batch have the same."""


def distribute(module: nn.Module, spec: StepSpec, world: World) -> Distributed:
    """Spread the module, which is on the rank's device and may be compiled.

    Raises Unsupported for an axis that is not served, UserError where the ranks have built different modules.
    """
    layout = spec.layout
    if layout.world_size != layout.dp:
        raise Unsupported(f"layout {layout}", "only the axis dp is applied to a step so far", f"use dp={world.size}")
    parallel = DataParallel(module, spec.data_parallel, spec.bucket_size_mb, group=world.collectives)
    return Distributed(
        module=parallel, finish_gradients=parallel.finish_gradient_synchronization, data_index=world.rank
    )
