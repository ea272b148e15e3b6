"""A device's limits: peaks and bandwidth.

An operator that does I FLOPs for each byte it moves cannot exceed min(peak, I x bandwidth) FLOP/s (Williams, Waterman
and Patterson 2009, "Roofline"). costs.rates has the shares that kernels reach.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from steplab.specs.hardware import HardwareSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    hardware: HardwareSpec | None

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s of matrix products in a number format; None if not stated."""
        stated = self.hardware.peak_flops(dtype) if self.hardware else None
        return stated.flops_per_s if stated else None

    def bandwidth(self) -> float | None:
        return self.hardware.memory_bandwidth_bytes_per_s if self.hardware else None

    def least_time_s(self, flops: float, moved_bytes: float, dtype: str) -> float | None:
        """Least seconds that the roofline allows; None if the peak or the bandwidth is unknown."""
        peak, bandwidth = self.peak(dtype), self.bandwidth()
        return max(flops / peak, moved_bytes / bandwidth) if peak and bandwidth else None

    def citations(self, dtypes: Sequence[str]) -> list[str]:
        if self.hardware is None:
            return []
        figures = ["memory_bandwidth_bytes_per_s", *(dtype for dtype in dtypes if dtype in self.hardware.peaks)]
        return list(dict.fromkeys(self.hardware.sources[figure] for figure in figures))
