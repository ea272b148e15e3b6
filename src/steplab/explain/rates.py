"""How fast a device could go: its peaks, and what real kernels reach of them.

As for MFU, the data sheet's figure comes first, then the ceiling that `steplab doctor` measured on the machine, and
never another device's. A prediction needs what is *reached*, so a stated rate comes with a share of it.
"""

from dataclasses import dataclass

from steplab.records.ceilings import Ceilings
from steplab.records.run import Run
from steplab.specs.hardware import HardwareSpec, find_hardware
from steplab.units import format_rate

STREAMING_SHARE = 0.72
"""Share of the stated memory bandwidth that a kernel reaches which only streams. torch's fused AdamW moved 28 bytes a
parameter at 3.46e12 of 4.8e12 B/s in every golden H200 record from 0.13e9 to 3.4e9 parameters; a plain copy reaches
0.9, so a fused kernel will rarely do worse than predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A rate, and where it comes from."""

    per_s: float
    """FLOP/s or B/s."""
    source: str
    """'of 989 TFLOP/s (bf16, stated for H200 SXM)'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one device can do, as far as it is known."""

    hardware: HardwareSpec | None
    """Its entry in the catalogue."""
    ceilings: Ceilings | None
    """What was measured on it."""

    def peak(self, dtype: str) -> Rate | None:
        """Dense FLOP/s of matrix products in a number format; None where it is neither stated nor measured."""
        stated = self.hardware.peak_flops(dtype) if self.hardware else None
        if stated and self.hardware:
            rate = format_rate(stated.flops_per_s, "FLOP/s")
            return Rate(per_s=stated.flops_per_s, source=f"{rate} stated for {self.hardware.name} in {dtype}")
        measured = self.ceilings.matmul(dtype) if self.ceilings else None
        if measured is None:
            return None
        rate = format_rate(measured.best_per_s, "FLOP/s")
        return Rate(per_s=measured.best_per_s, source=f"{rate} measured by steplab doctor in {dtype}")

    def streaming(self) -> Rate | None:
        """Bytes a second that a kernel which only streams will reach, reads and writes together."""
        if self.hardware:
            stated = self.hardware.memory_bandwidth_bytes_per_s
            source = f"{STREAMING_SHARE:g} of the {format_rate(stated, 'B/s')} stated for {self.hardware.name}"
            return Rate(per_s=STREAMING_SHARE * stated, source=source)
        copies = [c for c in self.ceilings.ceilings if c.name == "copy"] if self.ceilings else []
        if not copies:
            return None
        rate = format_rate(copies[0].best_per_s, "B/s")
        return Rate(per_s=copies[0].best_per_s, source=f"the {rate} of a copy measured by steplab doctor")


def rates_of(run: Run, ceilings: Ceilings | None) -> Rates:
    """The rates of the device a run was made on; ceilings count only if they are of a device of the same name."""
    name = run.device_name
    same = ceilings is not None and ceilings.environment.device.name == name
    return Rates(hardware=find_hardware(name) if name else None, ceilings=ceilings if same else None)
