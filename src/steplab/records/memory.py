"""Peak memory of a step, from the device's allocator and from the operating system."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """High-water marks of one phase, including memory that was allocated before it."""

    phase: str
    """The phase: step, or one of its parts."""
    peak_allocated_bytes: int
    """Most bytes in live tensors (torch.cuda.max_memory_allocated)."""
    peak_reserved_bytes: int
    """Most bytes the allocator held from the device (torch.cuda.max_memory_reserved)."""

    def with_larger_of(self, other: "PeakMemory") -> "PeakMemory":
        """The larger of two measurements of the phase, for each figure separately."""
        return PeakMemory(
            phase=self.phase,
            peak_allocated_bytes=max(self.peak_allocated_bytes, other.peak_allocated_bytes),
            peak_reserved_bytes=max(self.peak_reserved_bytes, other.peak_reserved_bytes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorState:
    """What the device's allocator held at one moment, by its own counts."""

    allocated_bytes: int
    """Bytes in live tensors."""
    reserved_bytes: int
    """Bytes held from the device."""
    num_device_allocations: int
    """Number of times that it has asked the device for memory so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory that one measured step needed."""

    peaks: tuple[PeakMemory, ...] = ()
    """The peak of each phase; empty on a device whose allocator keeps no count, such as a CPU."""
    during_warmup: tuple[AllocatorState, ...] = ()
    """The allocator before the first warm-up step and after each, when the host had started it; empty on a device whose
    allocator keeps no count."""
    total_bytes: int | None = None
    """Total memory of the device in bytes; None on a CPU."""
    host_peak_bytes: int | None = None
    """Largest resident set of the measuring process in bytes, including Python and libraries."""

    def peak(self, phase: str) -> PeakMemory | None:
        """The peak of one phase; None if it was not measured."""
        return next((peak for peak in self.peaks if peak.phase == phase), None)
