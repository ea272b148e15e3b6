"""The one way to time on a device (docs/measure.md).

Back to back: nothing waits between steps. Marks (CUDA events) border the phases and are read only after the loop, so
Python may run ahead. This is the reported step time.

Synchronised: the device is idle before and after every phase, timed by Python's clock and the device's.

With a head start: the device is first held idle for longer than Python takes to launch the work, so a few steps contain
no waits for Python. The driver's launch queue, of about a thousand kernels, limits how far ahead Python can get.

With cold caches: before each call the device's cache is overwritten, until Python has launched the call.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steplab.measurement.machine.device import Device, samples_by
from steplab.parallel.collectives import Collectives
from steplab.records.memory import PeakMemory
from steplab.records.timing import HARDLY_AHEAD, PhaseSamples, find_phase, joined
from steplab.units import MIB

OnStep = Callable[[int], None]
Samples = tuple[PhaseSamples, ...]
Marks = tuple[Any, Any]

LONGEST_HOLD_S = 0.5
"""Longest time to hold the device before a step; Python fills the launch queue in less."""
_MARGIN = 1.5
"""Factor on Python's measured launch time, because the next launch may take longer."""
_LEAST_FLUSH_BYTES = 256 * MIB
MOST_FLUSHES = 40
"""Most cache flushes before a call; they take milliseconds, while Python launches hundreds of kernels."""
_FLUSHES_TIMED = 20
_LEAST_WARMUP_CALLS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    name: str
    run: Callable[[], object]


def seconds_of(work: Callable[[], object], device: Device) -> float:
    """Seconds by Python's clock; the device is idle at both ends."""
    device.synchronize()
    started = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - started


def repeats_within(measured_s: float, call_s: float, *, least: int, most: int) -> int:
    return int(min(max(measured_s / call_s if call_s else most, least), most))


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

    Returns samples of each phase (summed over a step) and of the step, and Python's seconds for the loop. Both clocks
    begin on an idle device, which shows how far Python was ahead. `head_start` may launch untimed work before the first
    step; `before_drain` is called when the last one was launched.
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
        """A step begins where the previous one ends."""
        firsts = range(0, iterations * len(phases), len(phases))
        seconds = tuple(
            sum(device.seconds_between(marks[first + start], marks[first + end]) for start, end in parts)
            for first in firsts
        )
        leads = tuple(
            min(leads_s[first + border] for start, end in parts for border in range(start + 1, end + 1))
            for first in firsts
        )
        return samples_by(device, name, seconds, leads)

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


def run_synchronised(
    phases: Sequence[Phase], device: Device, iterations: int, on_step: OnStep
) -> tuple[tuple[PhaseSamples, ...], tuple[PeakMemory, ...]]:
    """Time each phase by both clocks, with the device idle around it, and record its peak memory."""
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


def lengthen_launch_queues() -> None:
    """Ask CUDA for its longest launch queue, unless the user set one; before CUDA is first used."""
    if torch.version.cuda is not None:
        os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")


class HeadStart:
    """Hold a GPU before timed work, equally on all ranks; methods are collective. CPUs are not held."""

    def __init__(self, device: Device, collectives: Collectives, longest_s: float = LONGEST_HOLD_S) -> None:
        self._device, self._collectives, self._longest_s = device, collectives, longest_s
        self._token = torch.zeros(1, device=device.torch_device)
        self.seconds = 0.0
        if device.asynchronous:  # the first call of either takes long and is not part of a hold
            device.hold(1e-3)
            self._meet()
            device.synchronize()

    def give(self) -> None:
        """Hold the device; returns at once."""
        if self._device.asynchronous:
            self._device.hold(self.seconds)
            self._meet()

    def lengthen(self, started_s: float) -> bool:
        """Lengthen the hold for work whose launch took `started_s` seconds here; the slowest rank counts. True if it
        grew.
        """
        slowest_s = max(self._collectives.host_gather(started_s))
        before_s, self.seconds = self.seconds, max(self.seconds, min(_MARGIN * slowest_s, self._longest_s))
        return self.seconds > before_s

    def run(
        self,
        phases: Sequence[Phase],
        iterations: int,
        is_behind: Callable[[Samples], bool],
        *,
        meet: Callable[[], object] = lambda: None,
        before: Callable[[], object] = lambda: None,
    ) -> Samples:
        """Time steps back to back after a head start; again with a longer hold while Python `is_behind` on some rank.
        Ranks `meet` before each attempt; `before` launches untimed work behind the hold.
        """
        begun_s = started_s = 0.0

        def give() -> None:
            nonlocal begun_s
            self.give()
            begun_s = time.perf_counter()
            before()

        def on_step(iteration: int) -> None:
            nonlocal started_s
            started_s = time.perf_counter() - begun_s

        while True:
            meet()
            samples, _ = run_back_to_back(phases, self._device, iterations, on_step, head_start=give)
            if not any(self._collectives.host_gather(is_behind(samples))) or not self.lengthen(started_s):
                return samples

    def _meet(self) -> None:
        self._collectives.all_reduce(self._token, average=False).wait()


def run_turns(
    variants: Sequence[Sequence[Phase]],
    device: Device,
    collectives: Collectives,
    steps: int,
    turn: int,
    on_step: OnStep,
) -> list[tuple[Samples, float | None]]:
    """Time alternating variants: of each, at least `steps` samples and the longest hold (seconds); a collective call.

    Variants take turns of `turn` steps. Python has a head start before each step. Every other round reverses the order.
    No work may be under way between steps.
    """
    head_starts = [HeadStart(device, collectives, LONGEST_HOLD_S) for _ in variants]
    found: list[list[Samples]] = [[] for _ in variants]
    done = 0
    while done < steps:
        order = list(range(len(variants)))
        if (done // turn) % 2:
            order.reverse()
        for number in order:
            phases, head_start = variants[number], head_starts[number]
            device.synchronize()
            collectives.host_gather(None)
            started = time.perf_counter()
            for phase in phases:  # a step that is not counted shows how long Python takes to launch one
                phase.run()
            head_start.lengthen(time.perf_counter() - started)
            found[number] += [head_start.run(phases, 1, _hardly_ahead) for _ in range(turn)]
        done += turn
        on_step(min(done, steps) - 1)
    held = [head_start.seconds if device.asynchronous else None for head_start in head_starts]
    return [(joined(turns), held_s) for turns, held_s in zip(found, held, strict=True)]


def _hardly_ahead(samples: Samples) -> bool:
    step = find_phase(samples, "step")
    assert step is not None
    return step.lead_s is not None and min(step.lead_s) < HARDLY_AHEAD * min(step.best_s)


@dataclass(kw_only=True, slots=True)
class ColdCall:
    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    num_flushes: int = 1
    num_waits: int = 0
    """Number of timed calls during which the device may have waited for Python."""


class ColdCaches:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._flush = flush_buffer(device)
        self._flush_s = 0.0
        if (flush := self._flush) is not None:
            self._flush_s = seconds_of(lambda: [flush.zero_() for _ in range(_FLUSHES_TIMED)], device) / _FLUSHES_TIMED

    def warm_up(self, call: ColdCall, warmup_s: float) -> float:
        """Call until the device is up to speed; returns the last seconds per call."""
        calls, batch = 0, 1
        self._device.synchronize()
        started = time.perf_counter()
        while True:
            batch_started = time.perf_counter()
            for _ in range(batch):
                self._run(call)
            self._device.synchronize()
            calls += batch
            now = time.perf_counter()
            if calls >= _LEAST_WARMUP_CALLS and now - started >= warmup_s:
                break
            batch *= 2
        call.num_flushes = self._enough_flushes(call)
        return (now - batch_started) / batch + (call.num_flushes - 1) * self._flush_s

    def run_ahead(self, call: ColdCall) -> Marks:
        """Marks around one call. If the device reaches it before Python has launched all, it is repeated behind more
        flushes; at the most flushes, a wait is counted.
        """
        while True:
            span = self._run(call)
            if self._flush is None or not self._device.has_passed(span[0]):
                return span
            if call.num_flushes == MOST_FLUSHES:
                call.num_waits += 1
                return span
            call.num_flushes = min(2 * call.num_flushes, MOST_FLUSHES)

    def in_turns(
        self,
        calls: Sequence[ColdCall],
        rounds: int,
        attempt: Callable[[int], Marks | None] | None = None,
        on_round: OnStep = lambda number: None,
    ) -> list[tuple[float, ...]]:
        """Seconds of each call; each round begins with another call. Once `attempt` (default: `run_ahead`) returns None
        for a call, it is dropped.
        """
        spans: list[list[Marks]] = [[] for _ in calls]
        left = list(range(len(calls)))
        self._device.reserve_marks(2 * rounds * len(calls))
        for number in range(rounds):
            first = number % len(left) if left else 0
            for place in left[first:] + left[:first]:
                span = attempt(place) if attempt else self.run_ahead(calls[place])
                if span is None:
                    left.remove(place)
                    spans[place].clear()
                else:
                    spans[place].append(span)
            on_round(number)
        self._device.synchronize()
        return [tuple(self._device.seconds_between(*span) for span in each) for each in spans]

    def _enough_flushes(self, call: ColdCall) -> int:
        if self._flush is None:
            return 1
        issued_s = []
        for _ in range(_LEAST_WARMUP_CALLS):
            self._device.synchronize()
            started = time.perf_counter()
            self._run(call)
            issued_s.append(time.perf_counter() - started)
        self._device.synchronize()
        return max(1, min(math.ceil(_MARGIN * min(issued_s) / self._flush_s), MOST_FLUSHES))

    def _run(self, call: ColdCall) -> Marks:
        given = call.prepare()
        if self._flush is not None:
            for _ in range(call.num_flushes):
                self._flush.zero_()
        start = self._device.mark()
        call.run(given)
        return start, self._device.mark()


def flush_buffer(device: Device) -> torch.Tensor | None:
    """Buffer for flushing the device's cache; None if it has none."""
    if device.torch_device.type != "cuda":
        return None
    cache_bytes = int(getattr(torch.cuda.get_device_properties(device.torch_device), "L2_cache_size", 0))
    return torch.empty(max(_LEAST_FLUSH_BYTES, 2 * cache_bytes), dtype=torch.uint8, device=device.torch_device)
