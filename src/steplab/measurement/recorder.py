"""Times the steps of a user's own training loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from steplab import __version__
from steplab.errors import UserError
from steplab.measurement.machine.device import host_peak_bytes, open_device
from steplab.measurement.machine.environment import read_clocks, read_environment
from steplab.measurement.machine.failures import failure_of
from steplab.records.codec import new_id, now_utc
from steplab.records.memory import Memory
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.units import counted

Span = tuple[Any, Any]


class Recorder:
    """Collects marks on the device's timeline, and converts them to seconds when the loop is over.

    It keeps two marks per step and two per phase, so it is meant for hundreds or thousands of steps.
    """

    def __init__(self, name: str, *, tokens_per_step: int | None, warmup: int, device: str) -> None:
        if warmup < 0:
            raise UserError(f"warmup must be at least 0, not {warmup}")
        if tokens_per_step is not None and tokens_per_step < 1:
            raise UserError(f"tokens_per_step must be at least 1, not {tokens_per_step}; leave it out if unknown")
        self.run: Run | None = None
        """The record, once the loop is over."""
        self._name, self._tokens_per_step, self._warmup = name, tokens_per_step, warmup
        self._device = open_device(device)
        self._environment = read_environment(self._device.torch_device)
        self._steps: list[dict[str, list[Span]]] = []
        self._current: dict[str, list[Span]] | None = None
        self._device.reset_peak()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the loop. A step that raises is not counted."""
        if self._current is not None:
            raise UserError("rec.step() inside another step; close the first one before the next begins")
        self._current = {}
        start = self._device.mark()
        try:
            yield
            self._current["step"] = [(start, self._device.mark())]
            self._steps.append(self._current)
        finally:
            self._current = None
        if len(self._steps) == self._warmup:
            self._device.reset_peak()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named part of the step; the times of a part that occurs several times in a step are summed."""
        if self._current is None:
            raise UserError(f"rec.phase('{name}') outside a step; open it inside `with rec.step():`")
        if name == "step":
            raise UserError("a phase must not be called 'step', the name of the whole step; choose another name")
        start = self._device.mark()
        yield
        self._current.setdefault(name, []).append((start, self._device.mark()))

    def finish(self, error: BaseException | None = None) -> Run:
        """The record of all complete steps; with `error`, as a failure."""
        self._device.synchronize()
        peak = self._device.peak("step")
        measured = self._steps[self._warmup :]
        notes = ["MFU: steplab does not know the FLOPs of a user's own loop"]
        if not measured:
            ran = counted(len(self._steps), "step")
            notes.append(f"step time: the loop ran {ran}, but {self._warmup} are warm-up")
        if peak is None:
            notes.append("peak device memory: torch keeps no high-water mark on this device")
        return Run(
            id=new_id(),
            created_utc=now_utc(),
            steplab_version=__version__,
            name=self._name,
            tokens_per_step=self._tokens_per_step,
            environment=read_clocks(self._environment, self._device.torch_device),
            timing=Timing(warmup=self._samples(self._steps[: self._warmup]), back_to_back=self._samples(measured)),
            memory=Memory(
                peaks=(peak,) if peak else (),
                total_bytes=self._environment.device.memory_bytes,
                host_peak_bytes=host_peak_bytes(),
            ),
            failure=failure_of(error, None) if error else None,
            notes=tuple(notes),
        )

    def _samples(self, steps: list[dict[str, list[Span]]]) -> tuple[PhaseSamples, ...]:
        names = dict.fromkeys(name for step in steps for name in step)
        columns = {
            name: tuple(
                sum(self._device.seconds_between(start, end) for start, end in step[name])
                for step in steps
                if name in step
            )
            for name in names
        }
        if self._device.asynchronous:
            return tuple(PhaseSamples(phase=name, device_s=seconds) for name, seconds in columns.items())
        return tuple(PhaseSamples(phase=name, host_s=seconds) for name, seconds in columns.items())
