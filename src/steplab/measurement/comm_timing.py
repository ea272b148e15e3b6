"""How one cell of the benchmark of collectives is timed, in step with the other ranks.

On a device with a timeline of its own, calls go back to back in rows after a barrier, with an event around each:
nothing waits between them, as in a loop of training. Where Python takes longer to start a call than the device to make
it, the device is held before a row. After that, on every device, each call by itself: a barrier, then the host's clock
around the call with the device synchronised at both ends. That is what one call takes which nobody prepared.

All ranks have to make the same number of calls, so they agree on it by the slowest rank's time.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from steplab.measurement.comm_calls import Call
from steplab.measurement.device import Device
from steplab.measurement.loop import Phase, run_back_to_back, run_synchronised
from steplab.parallel.collectives import Collectives
from steplab.records.comm import RankTimes
from steplab.records.timing import PhaseSamples, find_phase
from steplab.specs.comm import CommStudy
from steplab.units import NS_PER_S

_LEAST_WARMUP_CALLS = 5
_LONGEST_WARMUP = 10
"""Times the warm-up asked for, after which calls that have not settled are timed as they are."""
_SETTLED = 1.5
"""Up to which ratio two batches of calls agree."""
_IN_A_ROW = 50
"""Calls after one barrier: a few things for a device's queue each, which is to hold them all."""
_FIRST_HOLD_S, _LONGEST_HOLD_S = 1e-3, 0.1
_LONG_CALL_S = 1e-3
"""Python starts any call in less: where one that long is waited for, it is the call itself that waits."""


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


def time_calls(
    call: Call, together: Together, study: CommStudy, on_begin: Callable[[str], None] = lambda stage: None
) -> RankTimes:
    """Warm a call up and time it; every rank of the group has to be here."""
    device = together.device
    on_begin("warm-up")
    call_s = _warmed_up(call, together, study.warmup_s)
    repeats = int(min(max(study.measured_s / call_s, study.least_repeats), study.most_repeats))
    device_s, num_waits = None, None
    if device.asynchronous:
        on_begin("back to back")
        device_s, num_waits = back_to_back(call, together, repeats)
    on_begin("one by one")
    phases = [Phase(name="barrier", run=together.barrier), Phase(name="call", run=call)]
    samples, _ = run_synchronised(phases, device, repeats, _unheard)
    alone = find_phase(samples, "call")
    assert alone is not None
    assert alone.host_s is not None  # run_synchronised times each phase by the host's clock
    rank = together.collectives.rank
    return RankTimes(rank=rank, device_s=device_s, num_waits=num_waits, alone_s=alone.host_s)


def _warmed_up(call: Call, together: Together, warmup_s: float) -> float:
    """Call until the time has passed and calls no longer change; gives the seconds that one takes by then.

    The first calls are among the slowest: so batches of half the time follow until two in a row agree, or the longest
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


def back_to_back(call: Call, together: Together, repeats: int) -> tuple[tuple[float, ...], int]:
    """Seconds of each of so many calls by the device's events, and how many of them may have Python's time in them.

    Those are the calls that were not all started when the device had ended the one before. If a rank has such, the
    device is held for longer before the first, on all ranks, and the calls are made again.
    """
    samples: list[float] = []
    num_waits, hold_s = 0, 0.0
    while len(samples) < repeats:
        found = _row(call, together, min(_IN_A_ROW, repeats - len(samples)), hold_s)
        times, leads = found.best_s, found.lead_s or ()
        waits = sum(lead < seconds for lead, seconds in zip(leads, times, strict=True))
        hurried = waits > 0 and min(times) < _LONG_CALL_S and hold_s < _LONGEST_HOLD_S
        if any(together.collectives.host_gather(hurried)):
            hold_s = max(2 * hold_s, _FIRST_HOLD_S)
        else:
            samples += times
            num_waits += waits
    return tuple(samples), num_waits


def _row(call: Call, together: Together, count: int, hold_s: float) -> PhaseSamples:
    """So many calls after one barrier, and after a call more in which the ranks wait for each other on the device."""

    def head_start() -> None:
        together.device.hold(hold_s)
        call()

    together.barrier()
    phases = [Phase(name="step", run=call)]
    (samples,), _ = run_back_to_back(phases, together.device, count, _unheard, head_start=head_start)
    return samples


def _batch_s(call: Call, together: Together, count: int) -> float:
    """Seconds a call, of so many in a row on the slowest rank."""
    together.barrier()
    together.device.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    together.device.synchronize()
    return together.slowest_s((time.perf_counter() - started) / count)


def _unheard(repeat: int) -> None:
    """Repeats are too short to be told of."""
