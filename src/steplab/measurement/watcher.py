"""Who looks at some steps more once everything is timed: a profiler, or the recorder of memory."""

from collections.abc import Callable
from typing import Protocol

from steplab.measurement.device import Device
from steplab.measurement.loop import OnStep
from steplab.measurement.memory_recorder import MemoryRecorder, MemoryWatch
from steplab.measurement.profiler import Profiling, StepProfiler
from steplab.measurement.step import Step
from steplab.ops.attention.plain import Span
from steplab.specs.step import StepSpec

Watch = Profiling | MemoryWatch
"""What to look at."""


class Watcher(Protocol):
    """Runs steps and writes down what it sees of them; to be made before the model is built."""

    stage: str
    """What is under way meanwhile, and what its notes begin with."""
    export_stage: str
    """What is under way while it writes."""
    num_steps: int
    """Steps it tells of."""

    @property
    def span(self) -> Span:
        """Marks for the model to be built with."""

    def record(self, step: Step, on_step: OnStep, on_export: Callable[[], None] = lambda: None) -> tuple[str, ...]:
        """Run the steps, write the files, and give notes on what they will lack.

        `on_export` is called when the steps are over and writing begins. Whatever a step or torch raises passes
        through.
        """


def open_watcher(watch: Watch, spec: StepSpec, device: Device) -> Watcher:
    """The watcher that does it. Raises Unsupported where none can on this device."""
    if isinstance(watch, MemoryWatch):
        return MemoryRecorder(watch, spec, device)
    return StepProfiler(watch, spec, device)
