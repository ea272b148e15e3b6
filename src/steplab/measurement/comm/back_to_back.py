"""Times calls of a collective back to back, in rows, so that the times contain only the device's work.

Nothing waits between calls, as in a training loop. A row begins with a barrier, on the device as well, because in a
broadcast the root waits for no other rank; then with a call that is not counted.

Short calls need two more measures. Python takes longer to launch one than the device takes to run it: if that shows,
the device is held for longer before the row, and the row is made again. And an event on the device's timeline takes
some microseconds itself: so there is one event after as many calls as take a millisecond together, and a sample is
their mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from steplab.measurement.comm.calls import Call
from steplab.measurement.machine.device import Device
from steplab.measurement.machine.head_start import HeadStart
from steplab.measurement.step.loop import Phase, run_ahead
from steplab.parallel.collectives import Collectives
from steplab.records.comm import RankTimes
from steplab.records.timing import PhaseSamples
from steplab.units import NS_PER_S

_SAMPLE_S = 1e-3
_MOST_A_SAMPLE = 100
_IN_A_ROW = 200
"""Calls in a row; each puts a few items into the device's launch queue, which has to hold them all."""
_TRIED = 5
"""The number of calls from which the time of one is estimated."""
_LONGEST_HOLD_S = 0.25
"""The longest hold; Python launches a row of calls in less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """This rank's device, and the ranks that time a call together."""

    device: Device
    """This rank's device."""
    collectives: Collectives
    """The group's collectives, used for host values only."""

    def barrier(self) -> None:
        """Wait for all ranks, through the CPU."""
        self.collectives.host_maximum(torch.zeros(1, dtype=torch.int64))

    def slowest_s(self, seconds: float) -> float:
        """The longest time of any rank; equal on all ranks."""
        longest = self.collectives.host_maximum(torch.tensor([int(seconds * NS_PER_S)]))
        return max(int(longest), 1) / NS_PER_S


def back_to_back(call: Call, together: Together, samples_of: Callable[[int], int]) -> RankTimes:
    """This rank's times; `samples_of` gives the number of samples for a number of calls per sample, equal on all
    ranks."""
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
    """Rows of one call, and how long the device is held before them."""

    def __init__(self, call: Call, together: Together) -> None:
        self._call, self._together = call, together
        self._head_start = HeadStart(together.device, together.collectives, _LONGEST_HOLD_S)

    @property
    def held_s(self) -> float:
        """The length of the hold so far, in seconds."""
        return self._head_start.seconds

    def run(self, num_samples: int, calls: int) -> tuple[list[float], int]:
        """Seconds per call of `num_samples` samples of `calls` calls each, and the number of samples that may contain
        Python's time.

        Those are the samples whose calls were not all launched when the device finished the sample before. If any rank
        has such samples, the row is made again with a longer hold, unless a longer hold has not helped: then the call
        itself waits for the device.
        """
        while True:
            found, started_s = self._row(num_samples, calls)
            times, leads = found.best_s, found.lead_s or ()
            waits = sum(lead < seconds for lead, seconds in zip(leads, times, strict=True))
            waits_anywhere = any(self._together.collectives.host_gather(waits > 0))
            if not waits_anywhere or not self._head_start.lengthen(started_s):
                return [seconds / calls for seconds in times], waits

    def _row(self, num_samples: int, calls: int) -> tuple[PhaseSamples, float]:
        """A row's samples, and the time that Python took to launch it."""

        def sample() -> None:
            for _ in range(calls):
                self._call()

        self._together.barrier()
        phases, device = [Phase(name="step", run=sample)], self._together.device
        (samples,), started_s = run_ahead(phases, device, num_samples, self._head_start, before=self._call)
        return samples, started_s
