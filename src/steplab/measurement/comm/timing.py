"""Times one cell of the benchmark of collectives, in step with the other ranks.

On a device with a timeline of its own, calls are made back to back (`back_to_back`). Then, on every device, each call
is timed by itself: a barrier, then the host's clock around the call, with the device synchronised at both ends. That is
the time of a call for which nothing was prepared.

All ranks have to make the same number of calls, so they agree on it by the slowest rank's time.
"""

import dataclasses
import math
import time
from collections.abc import Callable

from steplab.measurement.comm.back_to_back import Together, back_to_back
from steplab.measurement.comm.calls import Call
from steplab.measurement.step.loop import Phase, run_synchronised
from steplab.records.comm import RankTimes
from steplab.records.timing import find_phase
from steplab.specs.comm import CommStudy

_LEAST_WARMUP_CALLS = 5
_LONGEST_WARMUP = 10
"""The longest warm-up, as a multiple of the requested one; calls that have not settled by then are timed as they
are."""
_SETTLED = 1.5
"""The largest ratio of two batches of calls that are taken to agree."""


def time_calls(
    call: Call, together: Together, study: CommStudy, on_begin: Callable[[str], None] = lambda stage: None
) -> RankTimes:
    """Warm a call up and time it; every rank of the group calls this."""
    device = together.device
    on_begin("warm-up")
    call_s = _warmed_up(call, together, study.warmup_s)

    def samples_of(calls: int) -> int:
        return int(min(max(study.measured_s / (calls * call_s), study.least_repeats), study.most_repeats))

    rows = None
    if device.asynchronous:
        on_begin("back to back")
        rows = back_to_back(call, together, samples_of)
    on_begin("one by one")
    phases = [Phase(name="barrier", run=together.barrier), Phase(name="call", run=call)]
    samples, _ = run_synchronised(phases, device, samples_of(1), _unheard)
    alone = find_phase(samples, "call")
    assert alone is not None
    assert alone.host_s is not None  # run_synchronised times each phase by the host's clock
    rank = together.collectives.rank
    return dataclasses.replace(rows or RankTimes(rank=rank), alone_s=alone.host_s)


def _unheard(repeat: int) -> None:
    """Repeats are too short to be reported."""


def _warmed_up(call: Call, together: Together, warmup_s: float) -> float:
    """Call until the warm-up time has passed and the times are stable; returns the seconds of a call by then.

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
    """Seconds per call of `count` calls in a row, on the slowest rank."""
    together.barrier()
    together.device.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    together.device.synchronize()
    return together.slowest_s((time.perf_counter() - started) / count)
