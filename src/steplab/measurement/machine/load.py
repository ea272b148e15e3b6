"""How busy other processes keep the processors while this one measures."""

import time

import psutil  # type: ignore[import-untyped]  # it has no types

_SHORTEST_S = 0.5
"""The shortest useful interval: processor clocks count in steps of 10 ms."""
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")
"""Processor states that are not work, and those of Linux that are part of user and nice as well."""


class OtherProcesses:
    """Counts the time that the machine's processors spend on other processes, from when it is made."""

    def __init__(self) -> None:
        self._started_s, self._elsewhere_s = time.perf_counter(), _elsewhere_s()

    def mean_cpus(self) -> float | None:
        """Mean number of processors that others kept busy until now; None after too short a time to tell."""
        elapsed_s = time.perf_counter() - self._started_s
        if elapsed_s < _SHORTEST_S:
            return None
        return max(_elsewhere_s() - self._elsewhere_s, 0.0) / elapsed_s


def _elsewhere_s() -> float:
    """Busy seconds of all processors together, less those of this process."""
    machine, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
    return sum(seconds for state, seconds in machine.items() if state not in _NOT_BUSY) - own.user - own.system
