"""One variant of a data-parallel study on one rank: its time, its memory and its messages."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function

from steplab.measurement.clock import HeadStart, Samples, run_turns, seconds_of
from steplab.measurement.ddp.messages import MessagesAlone
from steplab.measurement.ddp.variant import VariantStep
from steplab.measurement.machine.device import Device, allocated_bytes
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.step.spans import activities_on
from steplab.measurement.tensors import local_part
from steplab.printing import MARK
from steplab.records.ddp import DdpCell, DdpRank, Messages, StateMemory
from steplab.records.memory import PeakMemory
from steplab.specs.ddp import DdpStudy, Variant
from steplab.specs.step_choices import OVERLAPPED

_REPEATS_BEFORE = 2
"""Uncounted repeats: the first messages of a kind open connections."""


class MeasuredVariant:
    def __init__(
        self,
        study: DdpStudy,
        variant: Variant,
        world: World,
        baseline_bytes: int | None,
        observer: Observer,
    ) -> None:
        """A collective call; `baseline_bytes` are already allocated."""
        self._study, self._variant, self._world, self._device = study, variant, world, world.device
        self._baseline_bytes, self._observer = baseline_bytes, observer
        self.memory: list[StateMemory] = []
        self.peak: PeakMemory | None = None
        self._begin("build", 0)
        self.step = VariantStep(study.step, variant, world)
        self._look("initialised")

    def cell(self, baseline: VariantStep | None, trace: Path | None) -> DdpCell:
        """The variant's cell, equal on all ranks; a collective call.

        It alternates with `baseline`, if given. Rank 0 writes the trace to `trace`; None: no trace.
        """
        first_step_s = self._first_step()
        self._warm_up()
        messages = self.step.messages()  # once torch has rebuilt its buckets
        self._begin("measure", self._study.step.steps)
        together = [baseline.cycle, self.step.cycle] if baseline else [self.step.cycle]
        *others, (samples, held_s) = run_turns(
            together,
            self._device,
            self._world.collectives,
            self._study.step.steps,
            self._study.turn,
            self._observer.on_step,
        )
        alone_s, notes = self._alone(messages)
        if trace is not None:
            self._begin("profile", self._study.profiled_steps)
            trace_steps(self.step, self._world, self._study.profiled_steps, trace if self._world.rank == 0 else None)
        mine = DdpRank(
            rank=self._world.rank,
            phases=samples,
            baseline=others[0][0] if others else (),
            held_s=held_s,
            alone_s=alone_s,
            memory=tuple(self.memory),
            peak=self.peak,
            beside_bytes=self._baseline_bytes,
        )
        return DdpCell(
            contender=self._variant,
            ranks=tuple(self._world.collectives.host_gather(mine)),
            messages=messages,
            turns="interleaved" if baseline else "",
            first_step_s=first_step_s,
            notes=notes,
        )

    def timed_by_itself(self, steps: int) -> Samples:
        """Samples of `steps` steps, after the warm-up."""
        self._warm_up()
        ((samples, _),) = run_turns(
            [self.step.cycle], self._device, self._world.collectives, steps, self._study.turn, self._observer.on_step
        )
        return samples

    def _first_step(self) -> float:
        self._begin("compile" if self._study.step.compile != "off" else "first step", 0)
        optimizer = self.step.optimizer
        assert optimizer is not None
        looks = [optimizer.register_step_post_hook(lambda *_: self._look("after_step"))]
        if self._variant.update != OVERLAPPED:  # else there is no moment with all gradients before any update
            looks.append(optimizer.register_step_pre_hook(lambda *_: self._look("before_step")))
        first_step_s = seconds_of(self.step.run, self._device)
        for look in looks:
            look.remove()
        return first_step_s

    def _warm_up(self) -> None:
        num_steps = max(self._study.step.warmup, 1)
        self._begin("warmup", num_steps)
        self._device.reset_peak()
        for iteration in range(num_steps):
            self.step.run()
            self._observer.on_step(iteration)
        self._device.synchronize()
        self.peak = self._device.peak("step")

    def _alone(self, messages: Sequence[Messages]) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Times only the communication: messages sent again or, with another transport, gradients averaged."""
        kind = self._variant.kind
        if kind == "none":
            return (), ()
        self._begin("communication alone", self._study.repeats)
        if messages:
            dtype = next(self.step.module.parameters()).dtype
            alone = MessagesAlone(messages, self._world, dtype, one_at_a_time=kind == "naive")
            return self._repeat(alone.send, lambda: None), ()
        if kind == "sharded":
            return (), ("communication alone: not timed, because the optimizer sends the parameters",)
        synchronise = self.step.distributed.finish_gradients
        if synchronise is None:
            return (), ("communication alone: not timed, because torch does not report its messages",)
        note = "communication alone: times the averaging of existing gradients, including copies into buckets"
        return self._repeat(synchronise, self._gradients_unsent), (note,)

    def _repeat(self, send: Callable[[], None], before: Callable[[], None]) -> tuple[float, ...]:
        device, found = self._device, []
        head_start = HeadStart(device, self._world.collectives)
        for repeat in range(-_REPEATS_BEFORE, self._study.repeats):
            before()
            device.synchronize()
            self._world.collectives.host_gather(None)  # a barrier: the wait for a late rank is not part of it
            head_start.give()
            started = time.perf_counter()
            start = device.mark()
            send()
            end = device.mark()
            if repeat == -1:
                head_start.lengthen(time.perf_counter() - started)
            device.synchronize()
            if repeat >= 0:
                found.append(device.seconds_between(start, end))
                self._observer.on_step(repeat)
        return tuple(found)

    def _gradients_unsent(self) -> None:
        assert self.step.optimizer is not None
        self.step.optimizer.zero_grad(set_to_none=True)
        self.step.make_gradients_unsent()

    def _look(self, moment: str) -> None:
        assert self.step.optimizer is not None
        held = state_memory(
            moment,
            self.step.module,
            self.step.optimizer,
            self._device,
            before_bytes=self._baseline_bytes,
            uncounted_bytes=self.step.shared_bytes,
        )
        self.memory = [*(memory for memory in self.memory if memory.moment != moment), held]

    def _begin(self, stage: str, num_steps: int) -> None:
        self._observer.on_stage(f"{self._variant.label}: {stage}", num_steps)


def trace_steps(step: VariantStep, world: World, num_steps: int, target: Path | None) -> None:
    """Record `num_steps` steps, and one before under another name, into `target`; None: this rank writes no file.

    All ranks record at once, so no rank waits for a slowed one. Python gets a head start, because a profiler slows it
    most.
    """
    head_start = HeadStart(world.device, world.collectives)
    world.device.synchronize()
    with profile(activities=activities_on(world.device.torch_device)) as profiler:
        profiler.add_metadata("comment", MARK)
        for name in ("warmup step", *("step" for _ in range(num_steps))):
            head_start.give()
            started = time.perf_counter()
            with record_function(name):
                for phase in step.cycle:
                    with record_function(phase.name):
                        phase.run()
            head_start.lengthen(time.perf_counter() - started)
            world.device.synchronize()
    if target is not None:
        profiler.export_chrome_trace(str(target))


def state_memory(
    moment: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: Device,
    *,
    before_bytes: int | None,
    uncounted_bytes: int,
) -> StateMemory:
    """The memory held now; `before_bytes` were allocated before the variant was built.

    `uncounted_bytes` are held outside of torch's allocator, and gradients may be in them.
    """
    now_bytes = allocated_bytes(device)
    parameters = list(module.parameters())
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    return StateMemory(
        moment=moment,
        parameters_bytes=storage_bytes(parameters),
        gradients_bytes=storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer_bytes=storage_bytes(tensor for tensor in state if tensor.device.type == device.torch_device.type),
        allocated_bytes=None
        if now_bytes is None or before_bytes is None
        else max(now_bytes - before_bytes, 0) + uncounted_bytes,
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors' storages on this rank, each counted once and in full, also for views."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
