"""Disturbances while this process measures: work of other processes, and suspension."""

import time

import psutil  # type: ignore[import-untyped]  # it has no types

_SHORTEST_S = 0.5
"""Shortest useful interval in seconds: processor clocks count in steps of 10 ms."""
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")
"""States without work; Linux counts the guest states in user and nice too."""


class OtherProcesses:
    def __init__(self) -> None:
        self._started_s, self._elsewhere_s = time.perf_counter(), _elsewhere_s()

    def mean_cpus(self) -> float | None:
        """Mean number of processors that other processes used; None after too short a time."""
        elapsed_s = time.perf_counter() - self._started_s
        if elapsed_s < _SHORTEST_S:
            return None
        return max(_elsewhere_s() - self._elsewhere_s, 0.0) / elapsed_s


class Suspension:
    """Detect suspension of the machine, during which the samples' clock stops."""

    def __init__(self) -> None:
        self._before_s = _suspended_s()

    def seconds(self) -> float | None:
        now_s = _suspended_s()
        return None if now_s is None or self._before_s is None else max(now_s - self._before_s, 0.0)


def _suspended_s() -> float | None:
    for counting, not_counting in (("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"), ("CLOCK_MONOTONIC", "CLOCK_UPTIME_RAW")):
        if hasattr(time, counting) and hasattr(time, not_counting):
            return time.clock_gettime(getattr(time, counting)) - time.clock_gettime(getattr(time, not_counting))
    return None


def _elsewhere_s() -> float:
    machine, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
    return sum(seconds for state, seconds in machine.items() if state not in _NOT_BUSY) - own.user - own.system
