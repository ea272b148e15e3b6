import re

from steplab.costs.kernel_time import product_s
from steplab.explain.case import Case, in_seconds, stated_peak
from steplab.explain.shapes import product_of
from steplab.explain.waiting import host_limit
from steplab.records.finding import Finding
from steplab.records.profile import OpStats, Profile
from steplab.units import format_percent, format_time, three_digits

CONSIDERABLE = 0.10

_WITHOUT_TF32 = re.compile(r"simt|sgemm|ffma", re.IGNORECASE)
_WITH_TF32 = re.compile(r"tf32|s1688|tensorop", re.IGNORECASE)
_FIRST_WITH_TF32 = 8
_AMPERE_OR_LATER = re.compile(r"ampere|nvjet|(sm|cutlass_)(8|9|1\d)\d", re.IGNORECASE)
"""Kernel names on Ampere and later, for traces without a device name."""


def fp32_matmul(case: Case) -> Finding | None:
    """Finding if matrix products in full fp32 take a considerable share of time on a GPU with TF32."""
    profile = case.profile
    if profile.device != "cuda" or not _has_tf32(case):
        return None
    if case.spec.precision != "fp32" if case.spec else not _names_show_it(profile):
        return None
    ops = [op for op in profile.ops if op.category == "matmul" and op.dtype == "fp32"]
    now_s, busy_s = case.ops_s(ops), case.busy_s
    if now_s <= CONSIDERABLE * busy_s:
        return None
    fields = {"precision": "tf32"} if case.spec else {}
    saves_s, prediction = _gain(case, ops)
    own = 'torch.set_float32_matmul_precision("high")'
    return Finding(
        kind="fp32_matmul",
        title=f"Matmuls in full fp32 take {format_percent(now_s / busy_s)} of the device's busy time",
        saw=f"Products of fp32 tensors without TF32 take {format_time(now_s)} of {format_time(busy_s)} per step.",
        why=(
            "Tensor cores, the part of the GPU that makes matmuls fast, do not multiply full fp32. With TF32 they take "
            "fp32 tensors, round each factor to 10 bits of mantissa (of 23) and add up in fp32, which training rarely "
            "notices."
        ),
        change=case.change(fields, own),
        note=("" if not case.spec else f"in your own code: {own}; ")
        + "bf16 autocast goes further: twice the peak again, and half the bytes, with 7 bits of mantissa",
        evidence=in_seconds({"fp32 matmul": now_s, "device busy": busy_s}),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _has_tf32(case: Case) -> bool:
    device = case.run.environment.device if case.run.environment else None
    if device is None or device.compute_capability is None:
        return (case.gpu is not None and "tf32" in case.gpu.peaks) or any(
            _AMPERE_OR_LATER.search(k.name) for k in case.profile.kernels
        )
    return int(device.compute_capability.partition(".")[0]) >= _FIRST_WITH_TF32


def _names_show_it(profile: Profile) -> bool:
    names = {kernel.name for kernel in profile.kernels if kernel.category == "matmul"}
    return any(map(_WITHOUT_TF32.search, names)) and not any(map(_WITH_TF32.search, names))


def _gain(case: Case, ops: list[OpStats]) -> tuple[float | None, str]:
    gpu = case.gpu
    if gpu is None or not {"fp32", "tf32"} <= gpu.peaks.keys():
        return None, "The device's peaks in fp32 and TF32 are not known; their ratio is 7 to 8 on A100 and later."
    ratio = gpu.peaks["tf32"] / gpu.peaks["fp32"]

    def left(op: OpStats) -> float:
        product = product_of(op)
        return product_s(product, "tf32", gpu) / product_s(product, "fp32", gpu) if product else 1 / ratio

    # A product that memory already bounds does not change.
    saves_s = case.per_step(sum(op.device_s * max(0.0, 1 - left(op)) for op in ops))
    return saves_s, (
        f"Each product is shortened according to its sizes, a large one by the ratio of the peaks, "
        f"{three_digits(ratio)} ({stated_peak('tf32', gpu)}; {stated_peak('fp32', gpu)}): TF32 is assumed to reach the "
        "same share of its peak as fp32, which holds for large products (0.77 and 0.76 on an H200 at 8192)."
        + host_limit(case, saves_s)
    )
