"""Profiles some steps of a user's loop while it runs.

A profiler slows the host, so these steps are not timed. One step before them is recorded too, because a profiler's
first step differs from the others; its name is `warmup step`, by which readers leave it out.
"""

from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

from torch import nn
from torch.profiler import profile

from steplab.errors import UserError
from steplab.measurement.machine.device import Device
from steplab.measurement.machine.failures import failure_of
from steplab.measurement.step.spans import Spans, activities_on, note_on_left_out
from steplab.printing import text_of
from steplab.records.validation import LARGEST
from steplab.units import counted


class ProfiledSteps:
    """The steps of a loop that are profiled, and their trace."""

    def __init__(self, steps: range, module: nn.Module | None, trace: Path | None) -> None:
        """Take the numbers of the steps, from 0, of which the first cannot be profiled.

        `module` is the model, whose submodules mark their forward passes; `trace` is the file that is written, None on
        a rank that leaves the profile to another. Raises UserError for steps that are none, not consecutive, or begin
        with the first.
        """
        if not isinstance(steps, range) or not steps or steps.step != 1 or not 1 <= steps.start < steps.stop < LARGEST:
            raise UserError(
                f"profile must be consecutive steps after the first, which is 0, such as range(20, 23), not "
                f"{text_of(steps)[:80]}"
            )
        self.notes: list[str] = []
        """What the profile lacks, or why there is none."""
        self.trace: Path | None = None
        """The trace, once the last of the steps is over; None: not yet, or it failed."""
        self._steps, self._module, self._path = steps, module, trace
        self._spans = Spans(nvtx=False)
        self._running = ExitStack()
        self._profiler: profile | None = None
        self._has_failed = False

    def takes(self, number: int) -> bool:
        """Whether a step is one of them, or the one before."""
        return self._steps.start - 1 <= number < self._steps.stop

    def are_over(self, number: int) -> bool:
        """Whether step `number` is behind them; it is the same on all ranks, also where profiling fails."""
        return number >= self._steps.stop

    def range(self, name: str) -> AbstractContextManager[object]:
        """A range of this name, which is recorded while the profiler runs."""
        return self._spans(name)

    def around_step(self, number: int, device: Device) -> AbstractContextManager[object]:
        """The range around a step; before the first step, the profiler is started."""
        if number == self._steps.start - 1 and self._path and not self._profiler and not self._has_failed:
            self._start(device)
        return self._spans("warmup step" if number < self._steps.start else "step")

    def after_step(self, number: int, device: Device) -> None:
        """Stop the profiler after the last step, and write the trace."""
        if self._profiler is None or self._path is None or number != self._steps.stop - 1:
            return
        device.synchronize()
        try:
            self._running.close()
            self._profiler.export_chrome_trace(str(self._path))
            self.trace, self._profiler = self._path, None
        except Exception as error:  # such as a full disk: the training goes on
            self._give_up(failure_of(error, None).message)

    def end(self, num_steps: int) -> None:
        """Give up if the loop is over, after `num_steps` steps, and not all of the steps have run."""
        if self._path is None or self.trace or self._has_failed:
            return
        with suppress(Exception):  # the trace is not kept
            self._running.close()
        last = self._steps.stop - 1
        self._give_up(f"the loop ended after {counted(num_steps, 'step')}, before the last to profile, {last}")

    def _start(self, device: Device) -> None:
        device.synchronize()
        profiler = profile(activities=activities_on(device.torch_device), record_shapes=True)
        try:
            with ExitStack() as started:
                started.enter_context(profiler)
                left_out = started.enter_context(self._spans.on(self._module))
                self._running = started.pop_all()
        except Exception as error:  # such as another profiler that is running: the training goes on
            self._give_up(failure_of(error, None).message)
        else:
            self._profiler = profiler
            self.notes += note_on_left_out(left_out)

    def _give_up(self, why: str) -> None:
        self._profiler, self._has_failed = None, True
        self.notes.append(f"profile: {why}")
