"""Records further steps under a profiler, once everything is timed.

A profiler slows Python, so these are no step times. As in the timed loop, nothing waits between steps. The first, named
`warmup step`, differs, and is left out when the trace is read.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import profile

from steplab.measurement.clock import OnStep, Phase
from steplab.measurement.machine.device import Device
from steplab.measurement.profile.nsys import is_watched_by_nsys
from steplab.measurement.step.graphed import Step
from steplab.measurement.step.spans import Spans, activities_on, note_on_left_out
from steplab.ops.attention.plain import Span, no_span
from steplab.printing import MARK
from steplab.specs.step import StepSpec


class StepProfiler:
    """Built before the model, which marks its parts by `span`."""

    stage, export_stage = "profile", "trace"

    def __init__(self, spec: StepSpec, device: Device, *, num_steps: int, trace: Path) -> None:
        self._device = device
        self._on_cuda = device.torch_device.type == "cuda"
        self.num_steps = num_steps
        self._trace = trace
        self._spans = Spans(nvtx=self._on_cuda)
        self._compiled, self._replayed = spec.compile != "off", spec.cuda_graph == "step"

    @property
    def span(self) -> Span:
        """Marks work outside modules, unless it would be compiled or recorded."""
        return no_span if self._compiled or self._replayed else self._spans

    def record(self, step: Step, on_step: OnStep, on_export: Callable[[], None] = lambda: None) -> tuple[str, ...]:
        """Record further steps; returns notes on what was not recorded. Raises a step's or the profiler's error."""
        phases = step.phases
        with self._spans.on(None if self._compiled or self._replayed else step.module) as left_out:
            notes = self._notes(left_out)
            if self._on_cuda and is_watched_by_nsys():
                self._record_with_nsys(phases, on_step)
                notes.append(
                    "profile: torch.profiler cannot run under nsys, which has the steps with their ranges in its own "
                    "report; export that with `nsys export --type sqlite` for `steplab import-trace`"
                )
            else:
                self._record_with_torch(phases, on_step, on_export)
        return tuple(notes)

    def _notes(self, left_out: tuple[str, ...]) -> list[str]:
        notes = []
        if self._replayed:
            notes.append("ranges: a step replayed as CUDA graphs has ranges for phases only, and no operators")
        elif self._compiled:
            notes.append("ranges: a compiled step has ranges for phases only, because its graph has no modules")
        notes += note_on_left_out(left_out)
        if self._device.torch_device.type == "mps":
            notes.append("kernels: torch.profiler records only the host's operators on mps, not its kernels")
        return notes

    def _record_with_torch(self, phases: Sequence[Phase], on_step: OnStep, on_export: Callable[[], None]) -> None:
        self._device.synchronize()
        # Without a schedule: after the last cycle of one, torch has nothing left to export.
        with profile(activities=activities_on(self._device.torch_device), record_shapes=True) as profiler:
            profiler.add_metadata("comment", MARK)
            self._step(phases, "warmup step")
            self._steps(phases, on_step)
        on_export()
        unfinished = self._trace.with_name(f"unfinished-{self._trace.name}")
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(self._trace)  # the trace is either whole or missing

    def _record_with_nsys(self, phases: Sequence[Phase], on_step: OnStep) -> None:
        self._step(phases, "warmup step")
        self._device.synchronize()
        torch.cuda.profiler.start()
        try:
            self._steps(phases, on_step)
        finally:
            torch.cuda.profiler.stop()

    def _steps(self, phases: Sequence[Phase], on_step: OnStep) -> None:
        for iteration in range(self.num_steps):
            self._step(phases, "step")
            on_step(iteration)
        self._device.synchronize()

    def _step(self, phases: Sequence[Phase], name: str) -> None:
        with self._spans(name):
            for phase in phases:
                # A user's whole step is one phase, and has this range already.
                with nullcontext() if phase.name == "step" else self._spans(phase.name):
                    phase.run()
