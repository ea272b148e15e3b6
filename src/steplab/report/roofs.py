"""The roofline's roofs: what the device could do at most, and with which of its peaks an operator is compared.

An operator that does I FLOPs for each byte it moves cannot exceed min(peak, I x bandwidth) FLOP/s (Williams, Waterman
and Patterson 2009, "Roofline"). The roofs are the vendor's figures, never another device's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from steplab.records.profile import OpStats, Profile
from steplab.records.run import Run
from steplab.specs.hardware import HardwareSpec, find_hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofs:
    """The roofs of one device, or why there are none."""

    hardware: HardwareSpec | None
    """Vendor's figures; None: no roof."""
    why_none: str
    """Why there is no roof; empty where there is one."""

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s in a number format."""
        peak = self.hardware.peak_flops(dtype) if self.hardware else None
        return peak.flops_per_s if peak else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of the device's memory."""
        return self.hardware.memory_bandwidth_bytes_per_s if self.hardware else None

    def least_time_s(self, flops: float, moved_bytes: float, dtype: str) -> float | None:
        """The least time the roofline allows; None where a roof it needs is not known."""
        peak, bandwidth = self.peak(dtype), self.bandwidth
        return None if peak is None or bandwidth is None else max(flops / peak, moved_bytes / bandwidth)

    def sources(self, dtypes: Sequence[str]) -> list[str]:
        """Where the bandwidth and these peaks are stated, each text once."""
        if self.hardware is None:
            return []
        figures = ["memory_bandwidth_bytes_per_s", *(dtype for dtype in dtypes if dtype in self.hardware.peaks)]
        return list(dict.fromkeys(self.hardware.sources[figure] for figure in figures))


def find_roofs(run: Run) -> Roofs:
    """The roofs of the device the run was made on, by its exact name."""
    name = run.device_name
    if name is None:
        return Roofs(hardware=None, why_none="the record does not say what device this was")
    hardware = find_hardware(name)
    return Roofs(hardware=hardware, why_none="" if hardware else f"no data sheet's figures are known for {name}")


def roof_dtype(run: Run, profile: Profile, op: OpStats) -> str:
    """The number format whose peak an operator is compared with; '' where it is not known.

    float32 products have the peak of TF32 where the run, or the name of one of its kernels, says that TF32 was used.
    """
    if op.dtype != "fp32" or op.category not in ("matmul", "attention"):
        return op.dtype
    asked = run.spec is not None and run.spec.precision == "tf32"
    return "tf32" if asked or (run.spec is None and _runs_tf32(profile)) else "fp32"


def _runs_tf32(profile: Profile) -> bool:
    products = (kernel.name for kernel in profile.kernels if kernel.category in ("matmul", "attention"))
    return any("tf32" in name or "_s1688" in name for name in products)
