"""One variant of a data-parallel study on this rank: the step of `run` with another averaging of gradients.

Variants differ in who averages gradients, when, and where the optimizer's state is; weights and batches are equal.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.measurement.clock import Phase
from steplab.measurement.machine.world import World
from steplab.measurement.step.distribute import policy_of, units_of
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.parallel import DataParallel, ShardedOptimizer
from steplab.parallel.buckets import refuse_sparse
from steplab.parallel.collectives import Collectives, Pending
from steplab.parallel.layout import Unit
from steplab.records.ddp import Messages
from steplab.specs.ddp import COLLECTIVES, OWN, Variant
from steplab.specs.step import StepSpec


class VariantStep(ModelStep):
    def __init__(self, spec: StepSpec, variant: Variant, world: World) -> None:
        """Build the step; a collective call. Raises UserError or Unsupported on every rank if the variant is not
        possible.
        """
        device = world.device.torch_device
        workload = build_workload(spec, device)
        if workload.module is None or workload.make_batch is None:
            raise Unsupported(f"comparing strategies on {spec.model.label}", "it gives a whole step", "give a module")
        refuse_sparse(workload.module, "comparing strategies", "messages")
        self._spec, self._variant, self._world_size = spec, variant, world.size
        self.knows_tokens = workload.knows_tokens
        self._recording: RecordingCollectives | None = None
        if variant.transport in (None, COLLECTIVES):  # any other transport reaches its ranks directly
            self._recording = RecordingCollectives(world.collectives)
            world = replace(world, collectives=self._recording)
        super().__init__(workload, spec, device, world, variant)

    @property
    def cycle(self) -> list[Phase]:
        """The phases of a step, from a moment without messages under way. `sharded` sends parameters during the next
        forward pass, so its step begins with the optimizer, on the previous gradients.
        """
        first = -1 if self._variant.kind == "sharded" else 0
        return [*self.phases[first:], *self.phases[:first]]

    @property
    def shared_bytes(self) -> int:
        """Device bytes that the transport holds outside torch's allocator."""
        called, optimizer = self.distributed.call, self.optimizer
        gradients = called.shared_bytes if isinstance(called, DataParallel) else 0
        return gradients + (optimizer.shared_bytes if isinstance(optimizer, ShardedOptimizer) else 0)

    def messages(self) -> tuple[Messages, ...]:
        """Messages of one step; empty if unknown. All ranks call this, because it may run a step."""
        if self._variant.kind == "fsdp2":
            units, policy = units_of(self.module), policy_of(self.module, self._spec)
            return fsdp_messages(self.module, units, policy, self._world_size, self._spec.micro_steps)
        if self._variant.kind == "torch_ddp":
            self.run()
            sizes = compat.bucket_bytes(self.distributed.call)
            return (Messages(collective="all_reduce", sizes_bytes=sizes),) if sizes else ()
        if self._variant.kind not in OWN or self._recording is None:
            return ()
        with self._recording.on() as found:
            self.run()
        return tuple(found)


_ALIGNED = 128
"""Alignment of messages in elements, as for separate tensors."""


class RecordingCollectives:
    """Collectives that record messages; consecutive ones of one kind are one entry."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._found: list[Messages] | None = None

    @contextmanager
    def on(self) -> Iterator[list[Messages]]:
        found: list[Messages] = []
        self._found = found
        try:
            yield found
        finally:
            self._found = None

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Pending:
        return self._writing("all_reduce", tensor).all_reduce(tensor, average=average)

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        return self._writing("all_gather", output).all_gather(output, part)

    def reduce_scatter(self, part: Tensor, tensor: Tensor, *, average: bool) -> Pending:
        return self._writing("reduce_scatter", tensor).reduce_scatter(part, tensor, average=average)

    def reduce(self, tensor: Tensor, *, destination: int, average: bool) -> Pending:
        return self._writing("reduce", tensor).reduce(tensor, destination=destination, average=average)

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        return self._writing("broadcast", tensor).broadcast(tensor, source=source)

    def host_maximum(self, values: Tensor) -> Tensor:
        return self._inner.host_maximum(values)

    def host_gather(self, value: Any) -> list[Any]:
        return self._inner.host_gather(value)

    def _writing(self, collective: str, tensor: Tensor) -> Collectives:
        if self._found is not None:
            continues = self._found and self._found[-1].collective == collective
            before = self._found.pop().sizes_bytes if continues else ()
            self._found.append(Messages(collective=collective, sizes_bytes=(*before, tensor.nbytes)))
        return self._inner


def fsdp_messages(
    module: nn.Module, units: Sequence[Unit], policy: MixedPrecisionPolicy, size: int, micro_steps: int
) -> tuple[Messages, ...]:
    """The messages of a step over `size` ranks with parallel.layout.shard_parameters, from the shapes of parameters.

    Each forward pass gathers the parameters of the root and of each unit. Each backward pass gathers the units' again;
    the root's are kept. The last backward pass reduces and scatters all gradients. Every parameter is padded so that
    the ranks divide its first dimension evenly.
    """
    inside = {parameter for unit in units for parameter in unit.module.parameters()}
    root = Unit(module=nn.ParameterList(p for p in module.parameters() if p not in inside))
    gathered = [_padded_bytes(unit, policy.param_dtype, size) for unit in (root, *units)]
    scattered = [_padded_bytes(unit, policy.reduce_dtype, size) for unit in (*units[::-1], root)]
    both_passes = (*gathered, *gathered[:0:-1])
    return (
        Messages(collective="all_gather", sizes_bytes=both_passes * micro_steps),
        Messages(collective="reduce_scatter", sizes_bytes=tuple(scattered)),
    )


def _padded_bytes(unit: Unit, dtype: torch.dtype | None, size: int) -> int:
    return sum(
        math.ceil(parameter.shape[0] / size)
        * size
        * math.prod(parameter.shape[1:])
        * (dtype if dtype and unit.low_precision else parameter.dtype).itemsize
        for parameter in unit.module.parameters()
    )


class MessagesAlone:
    def __init__(self, messages: Sequence[Messages], world: World, dtype: torch.dtype, *, one_at_a_time: bool) -> None:
        """Each message has its own memory, as in the step, so none finds its data in a cache."""
        self._world, self._one_at_a_time = world, one_at_a_time
        sizes = [(sent.collective, size // dtype.itemsize) for sent in messages for size in sent.sizes_bytes]
        aligned = [-(-size // _ALIGNED) * _ALIGNED for _, size in sizes]
        flat = torch.zeros(sum(aligned), dtype=dtype, device=world.device.torch_device)
        self._sent: list[tuple[str, Tensor]] = []
        begin = 0
        for (collective, size), taken in zip(sizes, aligned, strict=True):
            self._sent.append((collective, flat[begin : begin + size]))
            begin += taken

    def send(self) -> None:
        pending = []
        for number, (collective, tensor) in enumerate(self._sent):
            under_way = self._send(collective, tensor, number)
            if self._one_at_a_time:
                under_way.wait()
            else:
                pending.append(under_way)
        for under_way in pending:
            under_way.wait()

    def _send(self, collective: str, tensor: Tensor, number: int) -> Pending:
        collectives = self._world.collectives
        if collective == "all_reduce":
            return collectives.all_reduce(tensor, average=True)
        if collective == "reduce":
            return collectives.reduce(tensor, destination=number % collectives.size, average=True)
        if collective == "broadcast":
            return collectives.broadcast(tensor, source=number % collectives.size)
        share = tensor.numel() // collectives.size
        part = tensor[collectives.rank * share : (collectives.rank + 1) * share]  # in place, as collectives may be
        if collective == "all_gather":
            return collectives.all_gather(tensor, part)
        return collectives.reduce_scatter(part, tensor, average=True)
