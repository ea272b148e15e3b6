"""The device behind a small interface: a clock, a barrier and a memory gauge."""

import resource
import sys
import time
from typing import Any

import torch

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.records.memory import AllocatorState, PeakMemory
from steplab.records.timing import PhaseSamples
from steplab.specs.layout import check_device
from steplab.specs.step_choices import FP8
from steplab.units import KIB, NS_PER_S

_SPINS_TIMED = 10_000_000


class Device:
    """A CPU or MPS device by Python's clock, with the device idle at each mark. CUDA devices and fakes replace it."""

    asynchronous = False
    """True if work continues after a call returns; marks then lie on the device's timeline."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def reserve_marks(self, count: int) -> None:
        """Create `count` marks ahead, so that a loop spends no time on it."""

    def mark(self) -> Any:
        """A point on the device's timeline, after all work launched so far."""
        self.synchronize()
        return time.perf_counter_ns()

    def has_passed(self, mark: Any) -> bool:
        return True

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds between marks; synchronise the device after both first."""
        return float((end - start) / NS_PER_S)

    def synchronize(self) -> None:
        """Wait until the device has finished all work launched so far."""
        if self.torch_device.type == "mps":
            torch.mps.synchronize()

    def hold(self, seconds: float) -> None:
        """Keep the device idle before the work that is launched next; returns at once."""

    def reset_peak(self) -> None:
        """Start a new high-water mark at the memory allocated now."""

    def allocator_state(self) -> AllocatorState | None:
        """Bytes that the allocator holds now; None if it does not count."""
        return None

    def peak(self, phase: str) -> PeakMemory | None:
        """The high-water mark since the last reset; None if the device keeps none."""
        return None

    def free_unused(self) -> None:
        """Give the allocator's cached memory back to other processes."""
        if self.torch_device.type == "mps":
            torch.mps.empty_cache()


class CudaDevice(Device):
    asynchronous = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._reserved: list[torch.cuda.Event] = []
        self._spins_per_s = 0.0

    def reserve_marks(self, count: int) -> None:
        self._reserved = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in self._reserved:
            event.record()  # torch creates the CUDA event only when it is first recorded

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
        """Clock cycles per second of the spinning kernel, timed once: GPUs count different clocks."""
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

    def allocator_state(self) -> AllocatorState:
        found = torch.cuda.memory_stats(self.torch_device)
        return AllocatorState(
            allocated_bytes=found.get("allocated_bytes.all.current", 0),
            reserved_bytes=found.get("reserved_bytes.all.current", 0),
            num_device_allocations=found.get("num_device_alloc", 0),
        )

    def peak(self, phase: str) -> PeakMemory:
        return PeakMemory(
            phase=phase,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self.torch_device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self.torch_device),
        )

    def free_unused(self) -> None:
        torch.cuda.empty_cache()


def samples_by(
    device: Device, phase: str, seconds: tuple[float, ...], lead_s: tuple[float, ...] | None = None
) -> PhaseSamples:
    """Samples between marks: by the device's clock if it has one, else by Python's."""
    if device.asynchronous:
        return PhaseSamples(phase=phase, device_s=seconds, lead_s=lead_s)
    return PhaseSamples(phase=phase, host_s=seconds)


def open_device(name: str) -> Device:
    """The device that a spec names; `auto` is cuda, else mps, else cpu.

    Raises UserError for an unknown name, and Unsupported for an absent device.
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
    return Device(torch.device(kind))


def _devices_here() -> list[str]:
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def host_peak_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB  # macOS counts bytes, Linux KiB


def has_tf32(device: torch.device) -> bool:
    return _has_capability(device, (8, 0))


def _has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= least


def refuse_unserved(precision: str, device: torch.device) -> None:
    """Raise Unsupported if the device would silently compute in another precision."""
    if precision == "tf32" and not has_tf32(device):
        why = f"{device} has no such matmuls, and would compute in fp32"
        raise Unsupported("precision tf32", why, "use --precision fp32")
    if precision in FP8 and device.type != "cpu" and not _has_capability(device, (8, 9)):
        why = f"{device} has no products of fp8, which NVIDIA GPUs have from compute capability 8.9 on"
        raise Unsupported(f"precision {precision}", why, "use --precision bf16")
    if precision == "fp8_torchao" and device.type == "cpu":
        raise Unsupported(f"precision {precision} on a CPU", "torchao's products are a GPU's", "use --precision fp8")


def allocated_bytes(device: Device) -> int | None:
    return torch.cuda.memory_allocated(device.torch_device) if device.torch_device.type == "cuda" else None
