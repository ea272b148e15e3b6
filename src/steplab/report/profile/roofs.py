"""The device's roofs for a run's operators, and with which of its peaks each is compared: see costs.roofline."""

from steplab.costs.roofline import Roofline
from steplab.records.profile import OpStats, Profile
from steplab.records.run import Run
from steplab.specs.hardware import find_hardware


def find_roofs(run: Run) -> Roofline:
    """The roofs of the device the run was made on, by its exact name: the vendor's figures or none."""
    return Roofline(hardware=find_hardware(run.device_name) if run.device_name else None)


def why_no_roof(run: Run) -> str:
    """Why the run's device has no roof."""
    if run.device_name is None:
        return "the record does not say what device this was"
    return f"no data sheet's figures are known for {run.device_name}"


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
