"""One variant of a data-parallel study on this rank: the step of `run` with another averaging of gradients.

All variants compute the same step on the same weights, each rank on its own batches. They differ in who averages
gradients, when, and where the optimizer's state is.
"""

from dataclasses import replace

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.measurement.clock import Phase
from steplab.measurement.ddp.messages import RecordingCollectives, fsdp_messages
from steplab.measurement.machine.world import World
from steplab.measurement.step.laying_out import sharding_of, units_of
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.parallel import DataParallel, ShardedOptimizer
from steplab.parallel.buckets import refuse_sparse
from steplab.records.ddp import Messages
from steplab.specs.ddp import COLLECTIVES, OWN, Variant
from steplab.specs.step import StepSpec


class VariantStep(ModelStep):
    def __init__(self, spec: StepSpec, variant: Variant, world: World) -> None:
        """A collective call. Raises UserError or Unsupported on every rank if the variant is not possible."""
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
        """Device memory of the transport outside torch's allocator."""
        called, optimizer = self.distributed.call, self.optimizer
        gradients = called.shared_bytes if isinstance(called, DataParallel) else 0
        return gradients + (optimizer.shared_bytes if isinstance(optimizer, ShardedOptimizer) else 0)

    def messages(self) -> tuple[Messages, ...]:
        """A collective call that runs a step; empty if messages are unknown."""
        if self._variant.kind == "fsdp2":
            units, sharding = units_of(self.module), sharding_of(self.module, self._spec)
            return fsdp_messages(self.module, units, sharding, self._world_size, self._spec.micro_steps)
        if self._variant.kind == "torch_ddp":
            self.run()
            sizes = compat.bucket_bytes(self.distributed.call)
            return (Messages(collective="all_reduce", sizes_bytes=sizes),) if sizes else ()
        if self._variant.kind not in OWN or self._recording is None:
            return ()
        with self._recording.on() as found:
            self.run()
        return tuple(found)
