"""A data-parallel study on one rank: one variant after the other, each alternating with the baseline.

Every rank runs this, and rank 0 reports. The baseline stays in memory; both take a few steps at a time, so a
disturbance affects both. Without room for two models, the baseline is built and timed before and after each variant.
Each variant is freed before the next is built.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function

from steplab.errors import ERRORS, SteplabError
from steplab.measurement.clock import HeadStart, Phase, Samples, run_turns, seconds_of
from steplab.measurement.ddp.one_process import CHECKED_STEPS, OneProcess
from steplab.measurement.ddp.variant import MessagesAlone, VariantStep
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import Device, allocated_bytes
from steplab.measurement.machine.failures import failure_of
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.runner import Runner, refuse_unserved_step
from steplab.measurement.step.spans import activities_on
from steplab.measurement.tensors import local_part, storage_sizes
from steplab.printing import MARK
from steplab.records.ddp import DdpCell, DdpFacts, DdpRank, Messages, StateMemory
from steplab.records.memory import PeakMemory
from steplab.records.record import RankPlace
from steplab.records.timing import joined
from steplab.specs.ddp import DdpStudy, Variant
from steplab.specs.step_choices import OVERLAPPED
from steplab.units import format_bytes

_REPEATS_BEFORE = 2
"""Uncounted repeats: the first messages of a kind open connections."""


class MeasuredVariant:
    def __init__(
        self, study: DdpStudy, variant: Variant, world: World, baseline_bytes: int | None, observer: Observer
    ) -> None:
        """Build the variant; a collective call. `baseline_bytes` were allocated before."""
        self._study, self._variant, self._world, self._device = study, variant, world, world.device
        self._baseline_bytes, self._observer = baseline_bytes, observer
        self.memory: list[StateMemory] = []
        self.peak: PeakMemory | None = None
        self._begin("build", 0)
        self.step = VariantStep(study.step, variant, world)
        self._look("initialised")

    def cell(self, baseline: VariantStep | None, trace: Path | None, one_process: OneProcess | None = None) -> DdpCell:
        """The variant's cell, equal on all ranks; a collective call.

        It alternates with `baseline`, if given. Rank 0 writes the trace to `trace`; None: no trace. None for
        `one_process`: parameters are not checked.
        """
        first_step_s = self._first_step()
        deviation = None if one_process is None else self._deviation(one_process)
        self._warm_up()
        messages = self.step.messages()  # once torch has rebuilt its buckets
        self._begin("measure", self._study.step.steps)
        together = [baseline.cycle, self.step.cycle] if baseline else [self.step.cycle]
        *others, (samples, held_s) = self._turns(together, self._study.step.steps)
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
            deviation=deviation,
            notes=notes,
        )

    def timed_by_itself(self, steps: int) -> Samples:
        self._warm_up()
        ((samples, _),) = self._turns([self.step.cycle], steps)
        return samples

    def _turns(self, variants: Sequence[Sequence[Phase]], steps: int) -> list[tuple[Samples, float | None]]:
        turn, on_step = self._study.turn, self._observer.on_step
        return run_turns(variants, self._device, self._world.collectives, steps, turn, on_step)

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

    def _deviation(self, one_process: OneProcess) -> float:
        self._run("check", CHECKED_STEPS - 1)
        return one_process.deviation_of(self.step.module)

    def _warm_up(self) -> None:
        self._device.reset_peak()
        self._run("warmup", max(self._study.step.warmup, 1))
        self._device.synchronize()
        self.peak = self._device.peak("step")

    def _run(self, stage: str, num_steps: int) -> None:
        self._begin(stage, num_steps)
        for iteration in range(num_steps):
            self.step.run()
            self._observer.on_step(iteration)

    def _alone(self, messages: Sequence[Messages]) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Time a step's communication without computation: send its messages, or if these are unknown, average existing
        gradients. Returns seconds and notes.
        """
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
    """Profile steps, after one named `warmup step`, and write the trace to `target`; None: this rank writes no file.

    All ranks record, so that none waits for a slowed one.
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
    """The variant's memory now, by use; `before_bytes` were allocated before it was built.

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
    """Bytes of these tensors' storages on this rank."""
    return sum(storage_sizes(map(local_part, tensors)).values())


_ROOM = 0.92
_LET_GO_S = 3.0
_SPARE = 1.2
"""Assumed ratio of a variant's peak to the baseline's, for buckets and gaps between blocks."""


def measure_ddp(task: CellsTask[DdpStudy], observer: Observer, world: World | None) -> None:
    """Measure the requested cells; a collective call. Rank 0 writes traces, named by the cells' numbers. Raises
    UserError or Unsupported for an impossible step.
    """
    assert world is not None  # the study has at least two processes
    study, device = task.study, world.device.torch_device
    refuse_unserved_step(study.step, device)
    traces = Path(task.traces) if task.traces and study.profiled_steps else None
    session = _Session(study, world, Runner(world.device, observer), traces)
    session.measure_baseline(reported=0 in task.numbers)
    session.runner.run([[number] for number in task.numbers if number != 0], session.measure)


class _Session:
    def __init__(self, study: DdpStudy, world: World, runner: Runner, traces: Path | None) -> None:
        self._study, self._world, self.runner, self._traces = study, world, runner, traces
        self._baseline: VariantStep | None = None
        self._before: Samples = ()
        self._one_process: OneProcess | None = None
        runner.idle_bytes = runner.free()

    def measure_baseline(self, *, reported: bool) -> None:
        """Measure the first variant; its model stays if there is room. `reported`: report its cell too."""
        self.runner.observer.on_under_way([0])
        measured = self._built(self._study.contenders[0])
        self.runner.observer.on_facts(_facts(measured.step, self._world))
        if reported:
            self.runner.observer.on_cell(0, measured.cell(None, self._trace_of(0)))
        else:
            measured.timed_by_itself(1)
        self._tell_clocks(measured.step)
        if self._has_room_beside(measured):
            self._baseline = measured.step
        del measured
        self.runner.free()
        self._one_process = self._trained_by_one_process()
        self.runner.idle_bytes = self.runner.free()
        if self._baseline is None:
            self._before = self._baseline_by_itself()

    def measure(self, numbers: Sequence[int]) -> None:
        (number,) = numbers
        variant = self._study.contenders[number]
        cell = self._cell_of(number, variant)
        cell = dataclasses.replace(cell, notes=(*cell.notes, *self._left_behind()))
        if self._baseline is None and cell.failure is None:
            cell = self._beside_the_baseline(cell)
        self.runner.observer.on_cell(number, cell)

    def _cell_of(self, number: int, variant: Variant) -> DdpCell:
        measured, refusal = None, None
        try:
            measured = self._built(variant)
        except ERRORS as error:
            refusal = error
        refused = self._world.collectives.host_gather(refusal is not None)
        if measured is not None and not any(refused):
            return measured.cell(self._baseline, self._trace_of(number), self._one_process)
        if refusal is not None and all(refused):
            return DdpCell(contender=variant, failure=failure_of(refusal, "build"))
        ranks = ", ".join(str(rank) for rank, refuses in enumerate(refused) if refuses)
        raise refusal or SteplabError(f"{variant.label}: rank {ranks} refuses a step that other ranks can run")

    def _left_behind(self) -> tuple[str, ...]:
        """Free a variant's memory; a note if some is not freed and later variants lack it.

        On GPUs buckets of torch's DDP are freed some time after the variant.
        """
        stays = self.runner.stays(patience_s=_LET_GO_S)
        self.runner.settle()
        return (f"memory: {format_bytes(stays)} were not freed after the variant was measured",) if stays else ()

    def _tell_clocks(self, step: VariantStep) -> None:
        step.run()
        step.run()
        self.runner.tell_clocks()

    def _beside_the_baseline(self, cell: DdpCell) -> DdpCell:
        after = self._baseline_by_itself()
        around = self._world.collectives.host_gather(joined([self._before, after]))
        self._before = after
        ranks = [dataclasses.replace(rank, baseline=around[rank.rank]) for rank in cell.ranks]
        return dataclasses.replace(cell, ranks=tuple(ranks), turns="before_and_after")

    def _baseline_by_itself(self) -> Samples:
        measured = self._built(self._study.contenders[0])
        samples = measured.timed_by_itself(max(self._study.step.steps // 2, 1))
        del measured
        self.runner.free()
        return samples

    def _trained_by_one_process(self) -> OneProcess | None:
        self.runner.begin("one process", CHECKED_STEPS)
        try:
            trained = OneProcess(self._study.step, self._world)
        except torch.OutOfMemoryError:  # gradients stay while the next rank's batch is computed
            trained = None
        return trained if all(self._world.collectives.host_gather(trained is not None)) else None

    def _built(self, variant: Variant) -> MeasuredVariant:
        return MeasuredVariant(self._study, variant, self._world, self.runner.idle_bytes, self.runner.observer)

    def _has_room_beside(self, baseline: MeasuredVariant) -> bool:
        fits, device = True, self._world.device.torch_device
        if baseline.peak is not None:
            _, total_bytes = torch.cuda.mem_get_info(device)
            kept = max(memory.known_bytes for memory in baseline.memory)
            fits = kept + _SPARE * baseline.peak.peak_allocated_bytes <= _ROOM * total_bytes
        return all(self._world.collectives.host_gather(fits))

    def _trace_of(self, number: int) -> Path | None:
        return self._traces / self._study.trace_name(number) if self._traces else None


def _facts(step: VariantStep, world: World) -> DdpFacts:
    device = world.device.torch_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    places = world.collectives.host_gather(RankPlace(rank=world.rank, host=world.host, device=name))
    parameters = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
    return DdpFacts(
        backend=world.backend,
        places=tuple(places),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        gradient_bytes=sum(parameter.nbytes for parameter in parameters),
        knows_tokens=step.knows_tokens,
    )
