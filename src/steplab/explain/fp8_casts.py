"""Casts to fp8, as kernels between the products."""

import re

from steplab.errors import UserError
from steplab.explain.case import OWN_FP8, Case
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.specs.resolve import command, with_fields
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_choices import FP8
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.03
"""Least share of the device's time."""

_PRODUCT = re.compile(r"nvjet_sm\d+_[qr]{2}|_scaled_mm|e4m3|e5m2")
"""Products of fp8 operands: torch's operator and libraries' kernels (nvjet: q is e4m3, r is e5m2)."""
_CAST = re.compile(
    rf"{OWN_FP8.pattern}|float8|AbsFunctor|launch_clamp|cast_transpose"
    r"|^triton_\w+_fused_\w*(_scaled_mm|clamp|abs_)"
)
"""torch's casts and largest magnitudes, Transformer Engine's, steplab's, and Inductor's, whose names list operators."""
_AMAX = "amax_kernel"


def fp8_casts(case: Case) -> Finding | None:
    """Fires if casts of another library take a considerable share of the device's time, or if steplab's read each tensor
    once more for its largest magnitude."""
    spec, profile = case.spec, case.profile
    if profile is None or not _takes_fp8(spec, profile):
        return None
    casts = [each for each in profile.kernels if each.category != "matmul" and _CAST.search(each.name)]
    searches = [each for each in casts if each.name == _AMAX]
    ours = spec is not None and spec.precision == "fp8"
    now_s, search_s = (case.per_step(profile, sum(each.total_s for each in some)) for some in (casts, searches))
    saves_s, busy_s = search_s if ours else now_s, case.busy_s(profile)
    if saves_s <= CONSIDERABLE * busy_s:
        return None
    fields = _fields(spec)
    if ours and not fields:
        return None
    num_kernels = sum(each.calls for each in casts) / profile.num_steps
    return Finding(
        kind="fp8_casts",
        title=f"Casts to fp8 take {format_percent(now_s / busy_s)} of the device's work",
        saw=f"{num_kernels:.0f} kernels per step search for largest magnitudes, scale and cast: {format_time(now_s)}.",
        why=(
            "A scale per tensor needs the tensor's largest magnitude before the cast, and Hopper's products need both "
            "operands contiguous along the summed dimension. Each operand is therefore read several times and written "
            "by rows and by columns. That costs time which the products save."
        ),
        change=command(spec, fields) if spec and fields else "y = fp8_linear(x, weight)  # steplab.ops.fp8.linear",
        note="norms, SwiGLU and the rotary embedding return largest magnitudes with --block-ops triton",
        evidence=(
            Evidence(what="casts to fp8 and searches for largest magnitudes", value=now_s, unit="s"),
            Evidence(what="their kernels per step", value=num_kernels, unit=""),
            Evidence(what="device busy", value=busy_s, unit="s"),
        ),
        saves_s=saves_s,
        at_most=True,
        prediction=(
            "At most: all searches for largest magnitudes; attention's output and weights are still searched."
            if ours
            else "At most: all casts. steplab's kernel writes both layouts in one pass, which still takes time, and "
            "fused kernels of this profile also compute."
        )
        + case.host_limit(profile, saves_s),
        fields=fields,
    )


def _takes_fp8(spec: StepSpec | None, profile: Profile) -> bool:
    by_spec = spec is not None and spec.precision in FP8
    products = (each.name for each in (*profile.ops, *profile.kernels) if each.category == "matmul")
    return by_spec or any(map(_PRODUCT.search, products))


def _fields(spec: StepSpec | None) -> dict[str, str]:
    """The fix; empty if steplab has none for this model and these sizes."""
    if spec is None or spec.precision not in FP8 or (spec.block_ops == "triton" and spec.precision == "fp8"):
        return {}
    fused = {"block_ops": "triton", "model.projections": "merged"}
    for fields in ({"precision": "fp8"} | fused, {"precision": "fp8"}):
        changed = {name: value for name, value in fields.items() if str(FIELDS[name].read(spec)) != value}
        try:
            with_fields(spec, changed)
        except UserError:
            continue
        return changed
    return {}
