"""Calls of a collective back to back, in rows, with nothing in their time but the device's work.

Nothing waits between them, as in a loop of training. A row begins with a barrier, and with a call that is not counted,
in which the ranks wait for each other on the device.

Short calls need two things more. Python takes longer to start one than the device to make it: where that shows, the
device is held before the row for longer, and the row is made again. And an event on the device's timeline takes some
microseconds of it: so there is one after as many calls as take a millisecond together, and a sample is their mean.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from steplab.measurement.comm.calls import Call
from steplab.measurement.machine.device import Device
from steplab.measurement.machine.head_start import HeadStart
from steplab.measurement.step.loop import Phase, run_back_to_back
from steplab.parallel.collectives import Collectives
from steplab.records.comm import RankTimes
from steplab.records.timing import PhaseSamples
from steplab.units import NS_PER_S

_SAMPLE_S = 1e-3
_MOST_A_SAMPLE = 100
_IN_A_ROW = 200
"""Calls, of which each puts a few things into the device's queue; it is to hold them all."""
_TRIED = 5
"""Calls by which it is found out how long one takes."""
_LONGEST_HOLD_S = 0.25
"""Python starts so many calls in less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """A device, and the ranks that time a call on theirs at the same time."""

    device: Device
    """This rank's."""
    collectives: Collectives
    """Those of the group; host values alone go through them."""

    def barrier(self) -> None:
        """Wait for all ranks, from CPU to CPU."""
        self.collectives.host_maximum(torch.zeros(1, dtype=torch.int64))

    def slowest_s(self, seconds: float) -> float:
        """The longest time that a rank has; the same answer on all."""
        longest = self.collectives.host_maximum(torch.tensor([int(seconds * NS_PER_S)]))
        return max(int(longest), 1) / NS_PER_S


def back_to_back(call: Call, together: Together, samples_of: Callable[[int], int]) -> RankTimes:
    """This rank's times; `samples_of` says how many samples to take of so many calls each, the same on all ranks."""
    rows = _Rows(call, together)
    single_s = together.slowest_s(median(rows.run(_TRIED, 1)[0]))
    calls = min(math.ceil(_SAMPLE_S / single_s), _MOST_A_SAMPLE)
    wanted = samples_of(calls)
    samples: list[float] = []
    num_waits = 0
    while len(samples) < wanted:
        found_s, waits = rows.run(min(_IN_A_ROW // calls, wanted - len(samples)), calls)
        samples += found_s
        num_waits += waits
    return RankTimes(
        rank=together.collectives.rank,
        device_s=tuple(samples),
        calls_per_sample=calls,
        num_waits=num_waits,
        held_s=rows.held_s,
    )


class _Rows:
    """Rows of one call, and for how long the device is held before them."""

    def __init__(self, call: Call, together: Together) -> None:
        self._call, self._together = call, together
        self._head_start = HeadStart(together.device, together.collectives, _LONGEST_HOLD_S)

    @property
    def held_s(self) -> float:
        """For how long so far."""
        return self._head_start.seconds

    def run(self, num_samples: int, calls: int) -> tuple[list[float], int]:
        """Seconds a call of so many samples of `calls` each, and how many of them may have Python's time in them.

        Those are the samples whose calls were not all started when the device had ended the sample before. If a rank
        has such, the row is made again with the device held for longer, unless that has been of no use: then the call
        waits for the device itself.
        """
        while True:
            found, started_s = self._row(num_samples, calls)
            times, leads = found.best_s, found.lead_s or ()
            waits = sum(lead < seconds for lead, seconds in zip(leads, times, strict=True))
            waits_anywhere = any(self._together.collectives.host_gather(waits > 0))
            if not waits_anywhere or not self._head_start.lengthen(started_s):
                return [seconds / calls for seconds in times], waits

    def _row(self, num_samples: int, calls: int) -> tuple[PhaseSamples, float]:
        """A row's samples, and how long Python took to start it."""
        begun_s, started_s = 0.0, 0.0

        def head_start() -> None:
            nonlocal begun_s
            self._head_start.hold()
            begun_s = time.perf_counter()
            self._call()

        def sample() -> None:
            nonlocal started_s
            for _ in range(calls):
                self._call()
            started_s = time.perf_counter() - begun_s

        self._together.barrier()
        phases, device = [Phase(name="step", run=sample)], self._together.device
        (samples,), _ = run_back_to_back(phases, device, num_samples, _unheard, head_start=head_start)
        return samples, started_s


def _unheard(repeat: int) -> None:
    """Repeats are too short to be told of."""
