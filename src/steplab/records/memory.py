"""Peak memory of a step, from the allocator and the operating system."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """Peak memory of one phase, including memory allocated before it."""

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
    """Counts of torch's caching allocator at one moment."""

    allocated_bytes: int
    reserved_bytes: int
    num_device_allocations: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    peaks: tuple[PeakMemory, ...] = ()
    """Peak of each phase; empty if the allocator keeps no counts, as on a CPU."""
    during_warmup: tuple[AllocatorState, ...] = ()
    """Allocator state before the first warm-up step, then after launching each. Empty if it keeps no counts."""
    total_bytes: int | None = None
    host_peak_bytes: int | None = None
    """Largest resident set of the measuring process, including Python and libraries."""

    def peak(self, phase: str) -> PeakMemory | None:
        return next((peak for peak in self.peaks if peak.phase == phase), None)
