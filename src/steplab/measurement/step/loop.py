"""The measuring loop: run a step again and again, and know when each part began and ended.

Two ways of timing the same step answer two questions.

Back to back: nothing waits between steps, as in training. Marks (CUDA events) are put on the device's
timeline at the borders of the phases and read only once the loop is over, so that the host may run ahead of
the device exactly as it does without steplab. This is the step time people mean. (Where the device's time alone
is asked for, whoever calls gives the host a head start.)

Synchronised: the device is idle before and after every phase, and both clocks run, the host's and the
device's. The phase is alone, so its times do not hide in a neighbour's; where the host's figure is much the
larger of the two, launching kernels costs more than running them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steplab.measurement.machine.device import Device
from steplab.measurement.machine.head_start import HeadStart
from steplab.records.memory import PeakMemory
from steplab.records.timing import PhaseSamples

OnStep = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A named part of the step."""

    name: str
    run: Callable[[], None]


def run_back_to_back(
    phases: Sequence[Phase],
    device: Device,
    iterations: int,
    on_step: OnStep,
    *,
    head_start: Callable[[], None] | None = None,
    before_drain: Callable[[], None] = lambda: None,
) -> tuple[tuple[PhaseSamples, ...], float]:
    """Time `iterations` steps without waiting between them.

    Returns the samples of each phase (summed if it runs several times in a step) and of the whole step, and the host's
    seconds for the whole loop. The device is idle when its first mark is made, so that both clocks begin together
    there; this shows how far the host was ahead. `head_start` is called before the first step, and may launch work that
    is not timed with the steps; `before_drain` is called when the last step has been launched and may still be running.
    """
    device.reserve_marks(iterations * len(phases) + (1 if head_start is None else 2))
    device.synchronize()
    started = time.perf_counter()
    both_clocks_begin = device.mark()
    marks, given_s = [both_clocks_begin], [0.0]
    if head_start is not None:
        head_start()
        marks, given_s = [device.mark()], [time.perf_counter() - started]
    for iteration in range(iterations):
        for phase in phases:
            phase.run()
            marks.append(device.mark())
            given_s.append(time.perf_counter() - started)
        on_step(iteration)
    before_drain()
    device.synchronize()
    host_s = time.perf_counter() - started

    def column(name: str, parts: Sequence[tuple[int, int]]) -> PhaseSamples:
        """Seconds between these pairs of a step's borders, summed; a step begins where the previous one ends."""
        firsts = range(0, iterations * len(phases), len(phases))
        seconds = tuple(
            sum(device.seconds_between(marks[first + start], marks[first + end]) for start, end in parts)
            for first in firsts
        )
        if not device.asynchronous:
            return PhaseSamples(phase=name, host_s=seconds)
        leads = tuple(
            min(leads_s[first + border] for start, end in parts for border in range(start + 1, end + 1))
            for first in firsts
        )
        return PhaseSamples(phase=name, device_s=seconds, lead_s=leads)

    leads_s = [
        max(device.seconds_between(both_clocks_begin, mark) - given, 0.0)
        for mark, given in zip(marks, given_s, strict=True)
    ]
    parts: dict[str, list[tuple[int, int]]] = {}
    for index, phase in enumerate(phases):
        parts.setdefault(phase.name, []).append((index, index + 1))
    columns = [column(name, of_phase) for name, of_phase in parts.items()]
    if "step" not in parts:
        columns.append(column("step", [(0, len(phases))]))
    return tuple(columns), host_s


def run_ahead(
    phases: Sequence[Phase],
    device: Device,
    iterations: int,
    head_start: HeadStart,
    before: Callable[[], object] = lambda: None,
) -> tuple[tuple[PhaseSamples, ...], float]:
    """Time `iterations` steps back to back after a head start for Python; returns the samples, and the seconds that
    Python took to launch all of it. `before` launches work behind the head start that is not timed. On all ranks
    together."""
    begun_s = started_s = 0.0

    def give() -> None:
        nonlocal begun_s
        head_start.give()
        begun_s = time.perf_counter()
        before()

    def on_step(iteration: int) -> None:
        nonlocal started_s
        started_s = time.perf_counter() - begun_s

    samples, _ = run_back_to_back(phases, device, iterations, on_step, head_start=give)
    return samples, started_s


def run_synchronised(
    phases: Sequence[Phase], device: Device, iterations: int, on_step: OnStep
) -> tuple[tuple[PhaseSamples, ...], tuple[PeakMemory, ...]]:
    """Time each phase by both clocks with the device idle before and after it, and take its peak memory.

    The peak of a phase is the largest of all iterations; the times of a phase that runs several times in a step are
    summed.
    """
    host_s: dict[str, list[float]] = {phase.name: [0.0] * iterations for phase in phases}
    device_s: dict[str, list[float]] = {phase.name: [0.0] * iterations for phase in phases}
    peaks: dict[str, PeakMemory] = {}
    for iteration in range(iterations):
        for phase in phases:
            device.synchronize()
            device.reset_peak()
            started = time.perf_counter()
            start = device.mark()
            phase.run()
            end = device.mark()
            device.synchronize()
            host_s[phase.name][iteration] += time.perf_counter() - started
            device_s[phase.name][iteration] += device.seconds_between(start, end)
            peak = device.peak(phase.name)
            if peak is not None:
                peaks[phase.name] = peak.with_larger_of(peaks.get(phase.name, peak))
        on_step(iteration)
    samples = tuple(
        PhaseSamples(phase=name, device_s=tuple(device_s[name]), host_s=tuple(host_s[name])) for name in host_s
    )
    return samples, tuple(peaks.values())
