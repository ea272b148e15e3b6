"""The device behind a small interface: a clock, a barrier and a memory gauge.

The measuring loop knows only this, so that its order of events and its statistics are tested with a fake.
"""

import sys
import time
from typing import Any, Protocol

import torch

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.records.memory import PeakMemory
from steplab.specs.device import check_device
from steplab.units import KIB, NS_PER_S

_SPINS_TIMED = 10_000_000
"""Some milliseconds."""


class Device(Protocol):
    """What a measurement asks of a device."""

    asynchronous: bool
    """Whether work goes on after a call returns: then marks lie on the device's own timeline."""
    torch_device: torch.device
    """Where tensors go."""

    def reserve_marks(self, count: int) -> None:
        """Prepare for that many marks, so that making one in a loop costs next to nothing."""

    def mark(self) -> Any:
        """A point on the device's timeline, after all work given to it so far."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the device is done with all that it was given before a mark."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one; the device must have been synchronised since."""

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""

    def hold(self, seconds: float) -> None:
        """Have the device do nothing for about that long before what it is given next; returns at once."""

    def reset_peak(self) -> None:
        """Start a new high-water mark at what is allocated now."""

    def peak(self, phase: str) -> PeakMemory | None:
        """The high-water mark since the last reset; None where the device keeps none."""


class CudaDevice:
    """A CUDA GPU: marks are events on the current stream."""

    asynchronous = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._reserved: list[torch.cuda.Event] = []
        self._spins_per_s = 0.0

    def reserve_marks(self, count: int) -> None:
        self._reserved = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in self._reserved:
            event.record()  # torch asks CUDA for the event only when it is first recorded

    def mark(self) -> torch.cuda.Event:
        event = self._reserved.pop() if self._reserved else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def hold(self, seconds: float) -> None:
        if seconds > 0:
            compat.spin(round(seconds * self._spin_rate()))

    def _spin_rate(self) -> float:
        """Cycles a second, timed once: which clock they are of differs between GPUs."""
        if not self._spins_per_s:
            compat.spin(1)  # loads the kernel
            start = self.mark()
            compat.spin(_SPINS_TIMED)
            end = self.mark()
            self.synchronize()
            self._spins_per_s = _SPINS_TIMED / self.seconds_between(start, end)
        return self._spins_per_s

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak(self, phase: str) -> PeakMemory:
        return PeakMemory(
            phase=phase,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self.torch_device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self.torch_device),
        )


class HostClockDevice:
    """A CPU, or MPS: marks are the host's clock, taken with the device idle."""

    asynchronous = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def reserve_marks(self, count: int) -> None:
        """A number needs no preparation."""

    def mark(self) -> int:
        self.synchronize()
        return time.perf_counter_ns()

    def has_passed(self, mark: int) -> bool:
        return True

    def seconds_between(self, start: int, end: int) -> float:
        return (end - start) / NS_PER_S

    def hold(self, seconds: float) -> None:
        """It has no queue to be ahead of."""

    def synchronize(self) -> None:
        if self.torch_device.type == "mps":
            torch.mps.synchronize()

    def reset_peak(self) -> None:
        """Neither allocator keeps a high-water mark."""

    def peak(self, phase: str) -> None:
        return None


def open_device(name: str) -> Device:
    """The device a spec names; `auto` is cuda, else mps, else cpu. The only place where a name becomes a device.

    Raises UserError for a name that no device has, Unsupported for a device that is not there.
    """
    there = _devices_here()
    check_device(name, there)
    kind, _, index = name.partition(":")
    if kind == "auto":
        kind = there[0].partition(":")[0]
    number = int(index or 0)
    found = f"cuda:{number}" if kind == "cuda" else kind
    if found not in there:
        why = f"this machine has {', '.join(there)}"
        if kind == "cuda" and not torch.cuda.is_available():
            built = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
            why = f"{built}, and {why}"
        raise Unsupported(f"device {name}", why, f"use --device {there[0]}")
    if kind == "cuda":
        torch.cuda.set_device(number)
        return CudaDevice(torch.device("cuda", number))
    return HostClockDevice(torch.device(kind))


def _devices_here() -> list[str]:
    """The devices of this machine that torch sees, that which `auto` takes first."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def host_peak_bytes() -> int | None:
    """Largest resident set of this process so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows has no getrusage
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB  # macOS counts bytes, Linux KiB


def has_tf32(device: torch.device) -> bool:
    """Whether matmuls of fp32 tensors can run in TF32: on NVIDIA GPUs from compute capability 8.0 on."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def refuse_unserved(precision: str, device: torch.device) -> None:
    """Raise Unsupported where a device would silently compute in another precision."""
    if precision == "tf32" and not has_tf32(device):
        why = f"{device} has no such matmuls, and would compute in fp32"
        raise Unsupported("precision tf32", why, "use --precision fp32")


def allocated_bytes(device: Device) -> int | None:
    """Bytes in live tensors; None where the allocator does not count."""
    return torch.cuda.memory_allocated(device.torch_device) if device.torch_device.type == "cuda" else None
