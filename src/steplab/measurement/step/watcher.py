"""The interface of what may record further steps once everything is timed: a profiler, or the recorder of memory."""

from collections.abc import Callable
from typing import Protocol

from steplab.measurement.clock import OnStep
from steplab.measurement.machine.device import Device
from steplab.measurement.step.graphed import Step
from steplab.ops.attention.plain import Span
from steplab.specs.step import StepSpec


class Watcher(Protocol):
    """Runs steps and records them; it is made before the model is built."""

    @property
    def stage(self) -> str:
        """The stage that is under way while the steps run; the watcher's notes begin with it."""

    @property
    def export_stage(self) -> str:
        """The stage that is under way while the files are written."""

    @property
    def num_steps(self) -> int:
        """The number of steps that are recorded."""

    @property
    def span(self) -> Span:
        """The ranges that the model is built with."""

    def record(self, step: Step, on_step: OnStep, on_export: Callable[[], None] = lambda: None) -> tuple[str, ...]:
        """Run the steps, write the files, and return notes on what the files lack.

        `on_export` is called when the steps are over and writing begins. Whatever a step or torch raises passes
        through.
        """


Watch = Callable[[StepSpec, Device], Watcher]
"""Makes the watcher of a step. Raises Unsupported if it does not work on this device."""
