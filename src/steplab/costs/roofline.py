"""How fast a device could go, and what real kernels reach of that: peaks, bandwidth, ridges, and the assumed shares.

An operator that does I FLOPs for each byte it moves cannot exceed min(peak, I x bandwidth) FLOP/s (Williams, Waterman
and Patterson 2009, "Roofline"). The data sheet's figure comes first, then the ceiling that `steplab doctor` measured on
the device, and never another device's. A prediction needs what is *reached*: the shares below say how much of a stated
figure that is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from steplab.specs.hardware import HardwareSpec
from steplab.units import format_rate

STREAMING_SHARE = 0.72
"""Share of the stated memory bandwidth that a purely streaming kernel reaches. torch's fused AdamW moved 28 bytes
per parameter at 3.46e12 of 4.8e12 B/s in every golden H200 record from 0.13e9 to 3.4e9 parameters; a plain copy
reaches 0.9, so a fused kernel will rarely do worse than predicted."""

FUSED_ATTENTION_SHARE = 0.2
"""Share of the dense peak that fused attention reaches in bf16 and fp16, forward and backward together. Measured on an
H200 with torch's FlashAttention-2, causal: 0.19 at 1024 tokens and head dimension 128, 0.24 at 4096 and 64; cuDNN's
reaches up to 0.34, so the estimate is a low one."""

FUSED_ATTENTION_SHARE_FP32 = 0.5
"""Share of the peak outside the tensor cores that fused attention reaches in fp32. There is no FlashAttention in
fp32; torch's memory-efficient kernel is used. An assumption: it has not been measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A rate with its source."""

    per_s: float
    """The rate in FLOP/s or B/s."""
    source: str
    """The source in words, such as '989 TFLOP/s stated for H200 SXM in bf16'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The known limits of one device."""

    hardware: HardwareSpec | None
    """The device's entry in the catalogue; None if it is not listed."""
    measured_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Measured FLOP/s of matrix products, by number format."""
    measured_bytes_per_s: float | None = None
    """Measured B/s of a copy, reads and writes together."""

    def peak(self, dtype: str) -> Rate | None:
        """Dense FLOP/s of matrix products in a number format; None if neither stated nor measured."""
        stated = self.hardware.peak_flops(dtype) if self.hardware else None
        if stated and self.hardware:
            rate = format_rate(stated.flops_per_s, "FLOP/s")
            return Rate(per_s=stated.flops_per_s, source=f"{rate} stated for {self.hardware.name} in {dtype}")
        measured = self.measured_flops_per_s.get(dtype)
        if measured is None:
            return None
        return Rate(per_s=measured, source=f"{format_rate(measured, 'FLOP/s')} measured by steplab doctor in {dtype}")

    def bandwidth(self) -> Rate | None:
        """B/s of the device's memory: the stated figure, else that of a measured copy."""
        if self.hardware:
            stated = self.hardware.memory_bandwidth_bytes_per_s
            return Rate(per_s=stated, source=f"the {format_rate(stated, 'B/s')} stated for {self.hardware.name}")
        if self.measured_bytes_per_s is None:
            return None
        rate = format_rate(self.measured_bytes_per_s, "B/s")
        return Rate(per_s=self.measured_bytes_per_s, source=f"the {rate} of a copy measured by steplab doctor")

    def streaming(self) -> Rate | None:
        """B/s that a purely streaming kernel is expected to reach, reads and writes together."""
        bandwidth = self.bandwidth()
        if bandwidth is None or self.hardware is None:
            return bandwidth
        return Rate(per_s=STREAMING_SHARE * bandwidth.per_s, source=f"{STREAMING_SHARE:g} of {bandwidth.source}")

    def fused_attention(self, dtype: str) -> Rate | None:
        """FLOP/s that fused attention is expected to reach, forward and backward together."""
        peak = self.peak(dtype)
        if peak is None:
            return None
        share = FUSED_ATTENTION_SHARE if dtype in ("bf16", "fp16") else FUSED_ATTENTION_SHARE_FP32
        return Rate(per_s=share * peak.per_s, source=f"{share:g} of {peak.source}")

    def ridge(self, dtype: str) -> float | None:
        """FLOPs per byte above which the peak bounds an operator instead of the bandwidth."""
        peak, bandwidth = self.peak(dtype), self.bandwidth()
        return peak.per_s / bandwidth.per_s if peak and bandwidth else None

    def least_time_s(self, flops: float, moved_bytes: float, dtype: str) -> float | None:
        """The least time that the roofline allows; None if the peak or the bandwidth is unknown."""
        peak, bandwidth = self.peak(dtype), self.bandwidth()
        return max(flops / peak.per_s, moved_bytes / bandwidth.per_s) if peak and bandwidth else None

    def citations(self, dtypes: Sequence[str]) -> list[str]:
        """The sources of the bandwidth and of these peaks, each text once."""
        if self.hardware is None:
            return []
        figures = ["memory_bandwidth_bytes_per_s", *(dtype for dtype in dtypes if dtype in self.hardware.peaks)]
        return list(dict.fromkeys(self.hardware.sources[figure] for figure in figures))
