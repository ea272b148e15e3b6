"""Peak memory of a step, as the device's allocator and the operating system saw it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """High-water marks of one phase (with everything that was alive before it)."""

    phase: str
    """step, or one of its parts."""
    peak_allocated_bytes: int
    """Most bytes in live tensors (torch.cuda.max_memory_allocated)."""
    peak_reserved_bytes: int
    """Most bytes the allocator held from the device (torch.cuda.max_memory_reserved)."""

    def with_larger_of(self, other: "PeakMemory") -> "PeakMemory":
        """The phase's peak over two looks at it, each figure by itself."""
        return PeakMemory(
            phase=self.phase,
            peak_allocated_bytes=max(self.peak_allocated_bytes, other.peak_allocated_bytes),
            peak_reserved_bytes=max(self.peak_reserved_bytes, other.peak_reserved_bytes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What one measured step needed."""

    peaks: tuple[PeakMemory, ...] = ()
    """A peak a phase; empty on a device whose allocator keeps no count (the CPU's)."""
    total_bytes: int | None = None
    """Memory of the device; None on a CPU."""
    host_peak_bytes: int | None = None
    """Largest resident set of the measuring process, Python and libraries included."""

    def peak(self, phase: str) -> PeakMemory | None:
        """The peak of one phase, if it was measured."""
        return next((peak for peak in self.peaks if peak.phase == phase), None)
