"""Measures one step in this process, and then records further steps if requested.

A step has its own process: peak memory, torch's process-wide settings and memory kept by a failure must not affect the
next.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from steplab.errors import ERRORS, UNSUPPORTED
from steplab.measurement.clock import Phase, run_back_to_back, run_synchronised, seconds_of
from steplab.measurement.jobs import StepTask
from steplab.measurement.machine.device import Device, host_peak_bytes, open_device
from steplab.measurement.machine.environment import samples_of_rank
from steplab.measurement.machine.failures import failure_of, failure_of_step, lack_of_host_memory
from steplab.measurement.machine.load import OtherProcesses, Suspension
from steplab.measurement.machine.nvml import Meter
from steplab.measurement.machine.world import World
from steplab.measurement.memory.recorder import MemoryRecorder
from steplab.measurement.observer import Observer
from steplab.measurement.profile.profiler import StepProfiler
from steplab.measurement.runner import Runner, refuse_unserved_step
from steplab.measurement.step.flop_count import count_flops
from steplab.measurement.step.graphed import GraphedStep, Step
from steplab.measurement.step.step import make_step
from steplab.measurement.tensors import not_finite
from steplab.model.build import build_workload, count_parameters
from steplab.model.workload import Workload, num_lookup_parameters, num_parameters
from steplab.records.codec import new_head
from steplab.records.failure import Failure
from steplab.records.memory import Memory, PeakMemory
from steplab.records.run import NOT_FINITE, ModelFacts, RankSamples, Run
from steplab.records.timing import PhaseSamples, Timing, Turn, Turns, find_phase, joined, part
from steplab.specs.checkpointing import checkpointing_remark
from steplab.specs.step import StepSpec, refuse_unserved_graph
from steplab.specs.step_choices import OVERLAPPED, WITH_MASTERS

Watcher = StepProfiler | MemoryRecorder
Watch = Callable[[StepSpec, Device], Watcher]


def measure_step(task: StepTask, observer: Observer, world: World | None) -> Run:
    """Measure the step. Raises UserError or Unsupported for an impossible request."""
    return measure_here(task.spec, observer, _watch(task, world), world, task.turns)


def _watch(task: StepTask, world: World | None) -> Watch | None:
    def place(path: str) -> Path:
        """All ranks record, so that all run the same steps; the first's files are kept."""
        if world is None or world.rank == 0:
            return Path(path)
        assert world.folder is not None  # ranks of torchrun are not recorded
        return world.folder / f"{world.rank}.{Path(path).name}"

    if task.snapshot and task.marks:
        return partial(MemoryRecorder, snapshot=place(task.snapshot), marks=place(task.marks))
    if not task.trace:
        return None
    return partial(StepProfiler, num_steps=task.profiled_steps, trace=place(task.trace))


def measure_here(
    spec: StepSpec,
    observer: Observer,
    watch: Watch | None = None,
    world: World | None = None,
    turns: Turns | None = None,
) -> Run:
    """Measure the step; a collective call. A failure of the model or for lack of memory is recorded. A failure of
    `watch`'s steps, which follow all timing, becomes a note. A record without a failure has all ranks' samples. Raises
    UserError or Unsupported for an impossible request.
    """
    device = world.device if world else open_device(spec.device)
    refuse_unserved_step(spec, device.torch_device)
    if spec.cuda_graph == "step":
        refuse_unserved_graph(device.torch_device.type)
    runner = Runner(device, observer)
    watcher = watch(spec, device) if watch else None
    cell = _Cell(spec, runner, world)
    if device.torch_device.type != "cuda" and (lack := lack_of_host_memory(_least_state_bytes(spec))):
        return cell.record(failure=lack)
    try:
        return cell.take_turns(turns) if turns else cell.measure(watcher)
    except ERRORS as error:
        if not isinstance(error, UNSUPPORTED) or runner.stage == "build":
            raise
        # An operator that refuses its inputs only when the step runs is a result, like any other failure.
        return cell.record(failure=Failure(kind="error", message=str(error), phase=runner.stage))
    except (Exception, SystemExit) as error:  # the model's code may call sys.exit, as argparse does
        return cell.record(failure=failure_of_step(error, runner.stage, spec, device))


def _least_state_bytes(spec: StepSpec) -> int:
    if spec.model.shape is None or not spec.model.shape.num_heads:
        return 0
    width = 2 if spec.precision in ("bf16_pure", *WITH_MASTERS) else 4
    moment = 2 if spec.precision == "bf16_pure" else 4
    gradients = width if spec.pass_name != "forward" and spec.update != OVERLAPPED else 0
    moments = 2 * moment if spec.pass_name == "train" and spec.optimizer != "sgd" else 0
    return count_parameters(spec.model.shape) * (width + gradients + moments)


_LEAD_IN, _LEAD_IN_OF_SHORT = 1, 2
"""Uncounted steps before a turn: the first takes memory from the driver again; if GPU steps are shorter than _SHORT_S
seconds, a second lets Python run ahead.
"""
_SHORT_S = 0.1
_WITH_ONE_THREAD, _LONGEST_WITH_ONE_THREAD_S = 6, 10.0
"""Number of steps timed with one thread, for comparison. They are skipped if one could take longer than the second
figure, in seconds: the step time with all threads, times the number of threads.
"""


class _Cell:
    def __init__(self, spec: StepSpec, runner: Runner, world: World | None) -> None:
        self.spec, self.runner, self.world = spec, runner, world
        self.device, self.observer = runner.device, runner.observer
        self.model: ModelFacts | None = None
        self.tokens_per_step: int | None = spec.tokens_of_all
        self.notes: list[str] = []

    def warm_up(self, watcher: Watcher | None = None) -> None:
        spec, device, on_step = self.spec, self.device, self.observer.on_step
        layers = spec.model.shape.num_layers if spec.model.shape else None
        gradients = spec.pass_name != "forward"
        if remark := checkpointing_remark(spec.checkpointing, num_layers=layers, gradients=gradients):
            self.notes.append(remark)
        self.runner.begin("build", 0)
        marked = {"span": watcher.span} if isinstance(watcher, StepProfiler) else {}
        workload = build_workload(spec, device.torch_device, **marked)
        self.model = facts_of(workload)
        self.notes += workload.notes
        if not workload.knows_tokens:
            self.tokens_per_step = None
        built = make_step(workload, spec, device.torch_device, self.world)
        self.step: Step = GraphedStep(built, device, spec.model.name) if spec.cuda_graph == "step" else built
        compiles = spec.compile != "off" or spec.cuda_graph == "step"
        self.first_step_s = self.compile() if compiles else None
        if self.world is not None:  # samples must not contain other ranks' build or compile time
            self.world.collectives.host_gather(None)
        self.others, self.suspension = OtherProcesses(), Suspension()
        self.meter = Meter(self.runner.environment.device.uuid)
        self.runner.begin("warmup", spec.warmup)
        states = [device.allocator_state()]

        def on_warmup_step(iteration: int) -> None:
            states.append(device.allocator_state())
            on_step(iteration)

        self.warmup, _ = run_back_to_back(
            self.step.phases, device, spec.warmup, on_warmup_step, before_drain=self.runner.read_clocks
        )
        self.states = tuple(state for state in states if state)
        if not device.asynchronous:
            self.notes.append(f"peak device memory: torch keeps no high-water mark on {device.torch_device.type}")

    def measure(self, watcher: Watcher | None) -> Run:
        spec, device, on_step = self.spec, self.device, self.observer.on_step
        self.warm_up(watcher)
        phases = self.step.phases
        self.runner.begin("measure", spec.steps)
        device.reset_peak()
        # Without warm-up steps the clocks read above were an idle GPU's.
        before_drain = (lambda: None) if spec.warmup else self.runner.read_clocks
        self.meter.start()
        measured, host_s = run_back_to_back(phases, device, spec.steps, on_step, before_drain=before_drain)
        energy = self.meter.stop(spec.steps)
        step_peak = self.peak()
        # The other ranks would be counted as other processes.
        other_cpus = self.others.mean_cpus() if self.world is None else None
        self.note_surroundings(other_cpus=other_cpus, suspended_s=self.suspension.seconds())
        synchronised: tuple[PhaseSamples, ...] = ()
        phase_peaks: tuple[PeakMemory, ...] = ()
        if device.asynchronous:
            self.runner.begin("phases", spec.steps)
            synchronised, phase_peaks = run_synchronised(phases, device, spec.steps, on_step)
            if isinstance(self.step, GraphedStep):
                phase_peaks = tuple(self.step.phase_peaks.values())
        self.check_weights()
        if self.model is not None and self.model.is_counted:
            self.count_flops(self.model, phases)
        peaks = (step_peak, *(p for p in phase_peaks if p.phase != "step")) if step_peak else ()
        timing = Timing(
            warmup=self.warmup,
            back_to_back=measured,
            synchronised=synchronised,
            back_to_back_host_s=host_s,
            first_step_s=self.first_step_s,
            one_thread_s=() if watcher else self.with_one_thread(phases, measured),
            energy=energy,
        )
        memory = self.memory(peaks)
        run = self.record(timing=timing, memory=memory, ranks=self.gather(timing, memory))
        return self.watch(watcher, run) if watcher else run

    def with_one_thread(self, phases: Sequence[Phase], measured: Sequence[PhaseSamples]) -> tuple[float, ...]:
        """Step times with one thread; empty unless faster: on a busy CPU threads wait for each other."""
        threads, step = torch.get_num_threads(), find_phase(measured, "step")
        on_cpu = self.device.torch_device.type == "cpu" and self.world is None and self.spec.compile == "off"
        if not on_cpu or threads == 1 or not step or threads * min(step.best_s) > _LONGEST_WITH_ONE_THREAD_S:
            return ()
        self.runner.begin("one thread", 0)
        torch.set_num_threads(1)
        try:
            if seconds_of(partial(_run, phases), self.device) >= median(step.best_s):
                return ()
            alone, _ = run_back_to_back(phases, self.device, _WITH_ONE_THREAD, self.observer.on_step)
        finally:
            torch.set_num_threads(threads)
        found = find_phase(alone, "step")
        return found.best_s if found else ()

    def take_turns(self, turns: Turns) -> Run:
        """Between requested turns the device holds the state for the next step, and no cache of the allocator."""
        device = self.device
        self.warm_up()
        warm = find_phase(self.warmup, "step")
        is_short = device.asynchronous and not (warm and warm.best_s and warm.best_s[-1] >= _SHORT_S)
        lead_in = _LEAD_IN_OF_SHORT if is_short else _LEAD_IN
        # Other processes of the session have the device open, and are no disturbance.
        self.note_surroundings(device=dataclasses.replace(self.runner.environment.device, other_processes=None))
        found: list[tuple[PhaseSamples, ...]] = []
        taken: list[Turn] = []
        run = self.record()
        device.reset_peak()
        device.free_unused()
        for turn in iter(self.observer.next_turn, None):
            self.runner.begin("measure", lead_in + turn.steps)
            samples, _ = run_back_to_back(self.step.phases, device, lead_in + turn.steps, self.observer.on_step)
            self.check_weights()
            device.free_unused()
            found.append(part(samples, lead_in))
            step = find_phase(samples, "step")
            assert step is not None
            taken.append(dataclasses.replace(turn, lead_in_s=step.best_s[:lead_in]))
            peak = self.peak()
            self.note_surroundings(suspended_s=self.suspension.seconds())
            timing = Timing(warmup=self.warmup, back_to_back=joined(found), first_step_s=self.first_step_s)
            run = dataclasses.replace(
                self.record(timing=timing, memory=self.memory((peak,) if peak else ())),
                turns=dataclasses.replace(turns, turns=tuple(taken)),
            )
            self.observer.on_measured(run)
        return run

    def note_surroundings(self, **found: Any) -> None:
        self.runner.environment = dataclasses.replace(self.runner.environment, **found)

    def peak(self) -> PeakMemory | None:
        return self.step.peak if isinstance(self.step, GraphedStep) else self.device.peak("step")

    def memory(self, peaks: tuple[PeakMemory, ...]) -> Memory:
        return Memory(
            peaks=peaks,
            during_warmup=self.states,
            total_bytes=self.runner.environment.device.memory_bytes,
            host_peak_bytes=host_peak_bytes(),
        )

    def gather(self, timing: Timing, memory: Memory) -> tuple[RankSamples, ...]:
        if self.world is None:
            return ()
        own = samples_of_rank(self.world.rank, self.runner.environment, timing.back_to_back, memory)
        return tuple(self.world.collectives.host_gather(own))

    def compile(self) -> float:
        """Seconds of the first step, which compiles or records graphs."""
        self.runner.begin("compile", 1)
        step = self.step
        return seconds_of(step.record if isinstance(step, GraphedStep) else partial(_run, step.phases), self.device)

    def check_weights(self) -> None:
        """Note infinite or NaN weights: a GPU draws less power on them, and may clock higher."""
        said = any(note.startswith(NOT_FINITE) for note in self.notes)
        if said or self.spec.pass_name != "train" or self.step.module is None:
            return
        if name := not_finite(self.step.module):
            self.notes.append(
                f"{NOT_FINITE} in these steps (the first is {name}): a GPU may be faster on such numbers, and `steplab "
                "precision` shows where a step overflows"
            )

    def count_flops(self, model: ModelFacts, phases: Sequence[Phase]) -> None:
        """Count FLOPs of third-party models only, and after all timing, because counting slows a step down."""
        if self.spec.cuda_graph == "step":
            self.notes.append("MFU and HFU: torch's FLOP counter does not see what CUDA graphs replay")
            return
        compiled = self.spec.compile != "off"
        if compiled and self.world is not None:  # eagerly it may run out of memory, and then all ranks would fail
            self.notes.append("MFU and HFU: torch's FLOP counter cannot count a compiled model on several ranks")
            return
        try:
            counted = count_flops(phases, self.device.torch_device)
        except Exception as error:  # no exception of a third-party model may cost the measurement
            if self.world is not None:  # the other ranks would wait for this one in vain
                raise
            self.notes.append(f"MFU and HFU: counting the FLOPs failed: {failure_of(error, None).message}")
        else:
            if compiled:
                self.notes.append("HFU: torch's FLOP counter does not see what a compiled model executes")
            self.model = dataclasses.replace(
                model, counted_flops=None if compiled else counted.executed, needed_flops=counted.needed
            )

    def watch(self, watcher: Watcher, run: Run) -> Run:
        self.observer.on_measured(run)
        self.runner.begin(watcher.stage, watcher.num_steps)
        try:
            notes = watcher.record(
                self.step, self.observer.on_step, on_export=lambda: self.runner.begin(watcher.export_stage, 0)
            )
        except Exception as error:  # out of memory or any other error must not cost what was measured
            if self.world is not None:
                raise
            notes = (f"{watcher.stage}: {failure_of_step(error, self.runner.stage, self.spec, self.device).message}",)
        return dataclasses.replace(run, notes=run.notes + notes)

    def record(self, **found: Any) -> Run:
        return Run(
            **new_head(),
            spec=self.spec,
            tokens_per_step=self.tokens_per_step,
            environment=self.runner.environment,
            model=self.model,
            notes=tuple(self.notes),
            **found,
        )


def _run(phases: Sequence[Phase]) -> None:
    for phase in phases:
        phase.run()


def facts_of(workload: Workload) -> ModelFacts | None:
    if workload.module is None:
        return None
    return ModelFacts(
        num_parameters=num_parameters(workload.module),
        num_embedding_parameters=num_lookup_parameters(workload.module),
        num_layers=workload.num_layers,
        attention_width=workload.attention_width,
        is_causal=workload.is_causal,
        num_active_parameters=workload.num_active_parameters,
    )
