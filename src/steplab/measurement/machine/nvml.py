"""Clocks, power limit and driver of one GPU, read through NVML (package nvidia-ml-py, extra `nvidia`).

The GPU is found by UUID: NVML numbers all GPUs of the machine, torch only the visible ones.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from steplab.records.timing import Energy

T = TypeVar("T")
_CLOCK_LIMITS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's bits for the reasons of a lower clock (nvml.h, nvmlClocksEventReasons), without those that a user chose."""

_MOST_HZ, _MOST_W, _LEAST_C, _MOST_C = 20e9, 100e3, -100.0, 300.0
"""Bounds beyond any GPU's: a driver in trouble answers 0, negative numbers, or 2^32 - 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    driver: str
    sm_clock_hz: float | None
    memory_clock_hz: float | None
    power_limit_w: float | None
    temperature_c: float | None
    clock_limits: tuple[str, ...] | None
    other_processes: int | None


def read(uuid: str) -> Reading | str:
    """Present state of the GPU, or the reason that it cannot be read."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed (pip install 'steplab[nvidia]')"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # of a driver's library that is not there or does not fit, anything
        return _in_one_line(f"NVML cannot be started: {error}")

    def ask(function, *arguments, scale: float, most: float, least: float = 0.0):  # type: ignore[no-untyped-def]
        """Value in base units; None if unreported or impossible."""
        value = _unless_unreported(lambda: function(handle, *arguments) * scale)
        return value if value is not None and least < value < most else None

    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return Reading(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            sm_clock_hz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM, scale=1e6, most=_MOST_HZ),
            memory_clock_hz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM, scale=1e6, most=_MOST_HZ),
            power_limit_w=ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, scale=1e-3, most=_MOST_W),
            temperature_c=ask(
                pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU, scale=1.0, least=_LEAST_C, most=_MOST_C
            ),
            clock_limits=_unless_unreported(lambda: _clock_limits(pynvml, handle)),
            other_processes=_unless_unreported(lambda: _other_processes(pynvml, handle)),
        )
    except Exception as error:  # a measurement is worth more than its description
        return _in_one_line(f"NVML cannot read GPU {uuid}: {error}")
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


class Meter:
    """Energy of one GPU between `start` and `stop`; every call does nothing where NVML cannot be asked.

    The driver advances the counter of energy some ten times a second, so an interval below LEAST_S seconds gives None.
    """

    LEAST_S = 1.0

    def __init__(self, uuid: str | None) -> None:
        self._nvml: Any = None
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()  # takes longer than a step: before the steps
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid and uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml

    def start(self) -> None:
        self._began = self._counters()

    def stop(self, num_steps: int) -> Energy | None:
        """Stop, and return the energy of `num_steps` steps."""
        began, ended = self._began, self._counters()
        seconds, joules, limited_s = (end - begin for begin, end in zip(began, ended, strict=True))
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()
        if not seconds >= self.LEAST_S or not joules > 0:
            return None
        limited = min(limited_s, seconds) if limited_s >= 0 else None
        return Energy(joules=joules, seconds=seconds, num_steps=num_steps, limited_s=limited)

    def _counters(self) -> tuple[float, float, float]:
        joules = limited_s = float("nan")
        with contextlib.suppress(Exception):
            joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        with contextlib.suppress(Exception):
            held = self._nvml.nvmlDeviceGetViolationStatus(self._handle, self._nvml.NVML_PERF_POLICY_POWER)
            limited_s = held.violationTime / 1e9
        return perf_counter(), joules, limited_s


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _unless_unreported(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:  # not every GPU and driver has every value
        return None


def _clock_limits(pynvml: Any, handle: Any) -> tuple[str, ...]:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(words for bit, words in _CLOCK_LIMITS.items() if reasons & bit)


def _other_processes(pynvml: Any, handle: Any) -> int:
    """Number of other processes on the GPU; in a container only its own are visible."""
    return sum(process.pid != os.getpid() for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
