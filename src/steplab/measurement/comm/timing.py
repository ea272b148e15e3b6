"""Times one cell of the benchmark of collectives, in step with the other ranks.

On a device with its own timeline, calls are made back to back, in rows. A row begins with a barrier, also on the
device, because the root of a broadcast waits for no other rank; then with an uncounted call. An event takes some
microseconds itself, so there is one per millisecond of calls, and a sample is their mean.

Then, on every device, each call is timed alone: a barrier, then Python's clock around the call, with the device
synchronised at both ends. That is the time of a call without preparation.

All ranks must make the same number of calls, so they agree on it by the slowest rank's time.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from steplab.measurement.clock import HeadStart, Phase, Samples, repeats_within, run_synchronised, seconds_of
from steplab.measurement.comm.calls import Call
from steplab.measurement.machine.device import Device
from steplab.parallel.collectives import Collectives
from steplab.records.comm import RankTimes
from steplab.records.timing import find_phase
from steplab.specs.comm import CommStudy
from steplab.units import NS_PER_S

_LEAST_WARMUP_CALLS = 5
_LONGEST_WARMUP = 10
"""Longest warm-up, as a multiple of the requested one; then calls are timed even if they have not settled."""
_SETTLED = 1.5
_SAMPLE_S = 1e-3
_MOST_A_SAMPLE = 100
_IN_A_ROW = 200
"""Calls in a row; the device's launch queue must hold them all."""
_TRIED = 5
_LONGEST_HOLD_S = 0.25
"""The longest hold; Python launches a row of calls in less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    device: Device
    collectives: Collectives
    """The group's collectives, used for host values only."""

    def barrier(self) -> None:
        """Wait for all ranks, through the CPU."""
        self.collectives.host_maximum(torch.zeros(1, dtype=torch.int64))

    def slowest_s(self, seconds: float) -> float:
        """The longest time of any rank; equal on all ranks."""
        longest = self.collectives.host_maximum(torch.tensor([int(seconds * NS_PER_S)]))
        return max(int(longest), 1) / NS_PER_S


def time_calls(
    call: Call, together: Together, study: CommStudy, on_begin: Callable[[str], None] = lambda stage: None
) -> RankTimes:
    device = together.device
    on_begin("warm-up")
    call_s = _warmed_up(call, together, study.warmup_s)

    def samples_of(calls: int) -> int:
        """Equal on all ranks."""
        return repeats_within(study.measured_s, calls * call_s, least=study.least_repeats, most=study.most_repeats)

    rows = None
    if device.asynchronous:
        on_begin("back to back")
        rows = back_to_back(call, together, samples_of)
    on_begin("one by one")
    phases = [Phase(name="barrier", run=together.barrier), Phase(name="call", run=call)]
    samples, _ = run_synchronised(phases, device, samples_of(1), lambda repeat: None)
    alone = find_phase(samples, "call")
    assert alone is not None
    assert alone.host_s is not None  # run_synchronised times each phase by Python's clock
    rank = together.collectives.rank
    return dataclasses.replace(rows or RankTimes(rank=rank), alone_s=alone.host_s)


def back_to_back(call: Call, together: Together, samples_of: Callable[[int], int]) -> RankTimes:
    """This rank's times; `samples_of` maps calls per sample to the number of samples."""
    head_start = HeadStart(together.device, together.collectives, _LONGEST_HOLD_S)

    def row(num_samples: int, calls: int) -> tuple[list[float], int]:
        """Seconds per call of samples of `calls` calls each, and how many may contain Python's time even with the
        longest hold: the call itself may wait for the device.
        """

        def sample() -> None:
            for _ in range(calls):
                call()

        phases = [Phase(name="step", run=sample)]
        samples = head_start.run(
            phases, num_samples, lambda found: _waits(found) > 0, meet=together.barrier, before=call
        )
        return [seconds / calls for seconds in samples[0].best_s], _waits(samples)

    single_s = together.slowest_s(median(row(_TRIED, 1)[0]))
    calls = min(math.ceil(_SAMPLE_S / single_s), _MOST_A_SAMPLE)
    wanted = samples_of(calls)
    samples: list[float] = []
    num_waits = 0
    while len(samples) < wanted:
        found_s, waits = row(min(_IN_A_ROW // calls, wanted - len(samples)), calls)
        samples += found_s
        num_waits += waits
    return RankTimes(
        rank=together.collectives.rank,
        device_s=tuple(samples),
        calls_per_sample=calls,
        num_waits=num_waits,
        held_s=head_start.seconds,
    )


def _waits(samples: Samples) -> int:
    """Samples not fully launched when the device finished the previous one."""
    (found,) = samples
    return sum(lead < seconds for lead, seconds in zip(found.lead_s or (), found.best_s, strict=True))


def _warmed_up(call: Call, together: Together, warmup_s: float) -> float:
    """Call until the warm-up time has passed and times are stable; returns the seconds of a call.

    The first calls are among the slowest, so batches of half the time follow until two in a row agree, or the longest
    time has passed.
    """
    call_s, agree = _batch_s(call, together, _LEAST_WARMUP_CALLS), False
    spent_s = _LEAST_WARMUP_CALLS * call_s
    while spent_s < (warmup_s if agree else _LONGEST_WARMUP * warmup_s):
        before_s, count = call_s, math.ceil(warmup_s / 2 / call_s)
        call_s = _batch_s(call, together, count)
        spent_s += count * call_s
        agree = max(before_s, call_s) <= _SETTLED * min(before_s, call_s)
    return call_s


def _batch_s(call: Call, together: Together, count: int) -> float:
    def batch() -> None:
        for _ in range(count):
            call()

    together.barrier()
    return together.slowest_s(seconds_of(batch, together.device) / count)
