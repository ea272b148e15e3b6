import re

from steplab.explain.case import Case, in_seconds
from steplab.records.finding import Finding
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.05
"""Least share of device time; a clock or loss may use fp64 on purpose."""
_DOUBLE = re.compile(r"dgemm|d884|f64f64|(Functor\w*|Ops)<double")


def fp64_work(case: Case) -> Finding | None:
    """Finding if fp64 operators or kernels take a considerable share of device time."""
    profile = case.profile
    ops_s = case.ops_s([op for op in profile.ops if op.dtype == "fp64"])
    named_s = case.per_step(sum(k.total_s for k in profile.kernels if _DOUBLE.search(k.name)))
    now_s, busy_s = min(max(ops_s, named_s), case.busy_s), case.busy_s
    if now_s <= CONSIDERABLE * busy_s:
        return None
    return Finding(
        kind="fp64_work",
        title=f"{format_percent(now_s / busy_s)} of the device's busy time is in fp64",
        saw=f"Operators on fp64 tensors take {format_time(now_s)} of {format_time(busy_s)} per step.",
        why=(
            "Doubles move twice the bytes of fp32, and most GPUs compute them at a half to a sixty-fourth of its rate. "
            "NumPy arrays and Python floats in torch.tensor(..., dtype=torch.float64) bring them in unasked."
        ),
        change="tensor.float() where the data enters; torch.set_default_dtype(torch.float32)",
        evidence=in_seconds({"work in fp64": now_s, "device busy": busy_s}),
        saves_s=now_s / 2,
        prediction="Half of it by the bytes alone; products gain more.",
    )
