"""The check of a variant: its parameters after the first steps against those of one process.

The process takes the batches of all ranks one after the other, adds up their gradients and updates once a step. The
weights, batches and kernels are the variant's, so only the order of sums differs.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from steplab.measurement.ddp.variant import VariantStep
from steplab.measurement.machine.world import World
from steplab.measurement.tensors import with_tensors
from steplab.specs.ddp import Variant
from steplab.specs.step import StepSpec

CHECKED_STEPS = 2
"""Number of compared steps: the second step reads parameters and optimizer state of the first."""


class OneProcess:
    def __init__(self, spec: StepSpec, world: World) -> None:
        """Train as one process would, and keep the tensors in CPU memory, a share on each rank; a collective call.

        Raises torch.OutOfMemoryError.
        """
        self._world = world
        step = VariantStep(replace(spec, accumulation=spec.micro_steps * world.size), Variant(kind="none"), world)
        own = [with_tensors(batch, Tensor.cpu) for batch in step.batches]
        everyones = zip(*world.collectives.host_gather(own), strict=True)
        step.batches = [with_tensors(batch, self._on_device) for batches in everyones for batch in batches]
        initial = [tensor.to("cpu", copy=True) for tensor in self._share_of(step.module)]
        for _ in range(CHECKED_STEPS):
            step.run()
        self._expected = [tensor.to("cpu", copy=True) for tensor in self._share_of(step.module)]
        self._changes = [torch.dist(*pair).item() for pair in zip(initial, self._expected, strict=True)]

    def deviation_of(self, module: nn.Module) -> float:
        """Largest deviation of a tensor from that of the one process, relative to the tensor's change in these steps
        (2-norms).

        A collective call; equal on all ranks.
        """
        found = 0.0
        for tensor, expected, change in zip(self._share_of(module), self._expected, self._changes, strict=True):
            if change:
                found = max(found, torch.dist(tensor, self._on_device(expected)).item() / change)
        return max(self._world.collectives.host_gather(found))

    def _share_of(self, module: nn.Module) -> Iterator[Tensor]:
        """Yield this rank's tensors; a collective call, because sharded parameters are gathered."""
        return islice(map(_whole, module.parameters()), self._world.rank, None, self._world.size)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._world.device.torch_device)


def _whole(parameter: Tensor) -> Tensor:
    sharded: Any = parameter.detach()
    whole: Tensor = sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded
    return whole.float()
