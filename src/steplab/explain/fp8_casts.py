import re

from steplab.errors import UserError
from steplab.explain.case import Case
from steplab.explain.waiting import host_limit
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.specs.resolve import with_fields
from steplab.specs.step import StepSpec
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.03

_PRODUCT = re.compile(r"nvjet_sm\d+_[qr]{2}|::_scaled_mm|cutlass.*(e4m3|e5m2)")
"""Names of products with fp8 operands: torch's operator and libraries' kernels (nvjet: q is e4m3, r is e5m2)."""
_CAST = re.compile(r"float8|AbsFunctor|launch_clamp|cast_transpose|^triton_\w+_fused_\w*(_scaled_mm|clamp|abs_)")
"""Names of casts and largest-magnitude kernels: torch's, Transformer Engine's, and Inductor's, which list operators."""
_FIX = {"precision": "fp8"}


def fp8_casts(case: Case) -> Finding | None:
    """Finding if another library's casts to fp8 take a considerable share of device time."""
    spec, profile = case.spec, case.profile
    if not _multiplies_in_fp8(profile):
        return None
    casts = [each for each in profile.kernels if each.category != "matmul" and _CAST.search(each.name)]
    now_s, busy_s = case.per_step(sum(each.total_s for each in casts)), case.busy_s
    if now_s <= CONSIDERABLE * busy_s:
        return None
    fields = _FIX if spec and _serves(spec) else {}
    num_kernels = sum(each.calls for each in casts) / profile.num_steps
    return Finding(
        kind="fp8_casts",
        title=f"Casts to fp8 take {format_percent(now_s / busy_s)} of the device's busy time",
        saw=f"{num_kernels:.0f} kernels per step search for largest magnitudes, scale and cast: {format_time(now_s)}.",
        why=(
            "A scale per tensor needs the tensor's largest magnitude before the cast, and Hopper's products need both "
            "operands contiguous along the summed dimension. So each operand is read several times and written by rows "
            "and by columns, which costs part of the time that the products save."
        ),
        change=case.change(fields, "y = fp8_linear(x, weight)  # steplab.ops.fp8.linear"),
        note="with --block-ops triton norms, SwiGLU and the rotary embedding also return largest magnitudes",
        evidence=(
            Evidence(what="casts to fp8 and searches for largest magnitudes", value=now_s, unit="s"),
            Evidence(what="their kernels per step", value=num_kernels, unit=""),
            Evidence(what="device busy", value=busy_s, unit="s"),
        ),
        saves_s=now_s,
        at_most=True,
        prediction=(
            "At most: all of them. steplab's kernel writes both layouts in one pass, which takes time too, and a fused "
            "kernel here may compute more than the cast." + host_limit(case, now_s)
        ),
        fields=fields,
    )


def _multiplies_in_fp8(profile: Profile) -> bool:
    names = [op.name for op in profile.ops] + [kernel.name for kernel in profile.kernels]
    return any(map(_PRODUCT.search, names))


def _serves(spec: StepSpec) -> bool:
    try:
        return spec.precision == "fp8_torchao" and with_fields(spec, _FIX) != spec
    except UserError:
        return False
