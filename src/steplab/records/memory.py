"""Peak memory of a step, from the allocator and the operating system."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """High-water marks of one phase, including memory allocated before it."""

    phase: str
    peak_allocated_bytes: int
    """Most bytes in live tensors (torch.cuda.max_memory_allocated)."""
    peak_reserved_bytes: int
    """Most bytes held from the device (torch.cuda.max_memory_reserved)."""

    def with_larger_of(self, other: "PeakMemory") -> "PeakMemory":
        return PeakMemory(
            phase=self.phase,
            peak_allocated_bytes=max(self.peak_allocated_bytes, other.peak_allocated_bytes),
            peak_reserved_bytes=max(self.peak_reserved_bytes, other.peak_reserved_bytes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorState:
    """The allocator's counts at one moment."""

    allocated_bytes: int
    reserved_bytes: int
    num_device_allocations: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    peaks: tuple[PeakMemory, ...] = ()
    """Peak of each phase; empty without allocator counts, as on a CPU."""
    during_warmup: tuple[AllocatorState, ...] = ()
    """Allocator before the first warm-up step and after each, once the host had started it; empty without allocator
    counts.
    """
    total_bytes: int | None = None
    host_peak_bytes: int | None = None
    """Largest resident set of the measuring process in bytes, with Python and libraries."""

    def peak(self, phase: str) -> PeakMemory | None:
        return next((peak for peak in self.peaks if peak.phase == phase), None)
