"""Autocast copies every weight to low precision, each step."""

from steplab.explain.case import AUTOCAST, Case
from steplab.explain.casts import cast_bytes, weight_cast_ops
from steplab.explain.words import command
from steplab.records.finding import Evidence, Finding
from steplab.units import format_bytes, format_percent, format_time

CONSIDERABLE = 0.03
"""Least share of the device's time: the remedy changes the numerics, so a trifle is not worth telling."""


def weight_casts(case: Case) -> Finding | None:
    """Fires where casts of weights, and of their gradients back, take a considerable share of the device's time."""
    spec, profile = case.spec, case.profile
    if profile is None or (spec is not None and spec.precision not in AUTOCAST):
        return None
    ops = weight_cast_ops(profile)
    now_s, busy_s = case.ops_s(profile, ops), case.busy_s(profile)
    if now_s <= CONSIDERABLE * busy_s:
        return None
    moved = sum(cast_bytes(op) for op in ops) / profile.num_steps
    fields = {"precision": "bf16_pure"} if spec else {}
    update_s = case.phase_s("optimizer") if spec and spec.optimizer.startswith("adamw") else None
    return Finding(
        kind="weight_casts",
        title=f"Casting weights takes {format_percent(now_s / busy_s)} of the device's work",
        saw=(
            f"Autocast copies fp32 weights to low precision, and their gradients back: {format_time(now_s)} and "
            f"{format_bytes(moved)} a step."
        ),
        why=(
            "Tensor cores want low precision while the optimizer's small updates want fp32, so autocast keeps weights "
            "in fp32 and copies all of them in every step. The copies compute nothing, and their cost does not depend "
            "on the batch."
        ),
        change=command(spec, fields) if spec else "model.to(torch.bfloat16)",
        note=(
            "numerics: bf16 has 8 bits of mantissa, so updates smaller than 1/256 of a weight are lost; train so only "
            "with stochastic rounding or a master copy in the optimizer. A larger batch spreads the casts instead"
        ),
        evidence=(
            Evidence(what="casts of weights and of their gradients", value=now_s, unit="s"),
            Evidence(what="bytes they move", value=moved, unit="B"),
            Evidence(what="device busy", value=busy_s, unit="s"),
        ),
        saves_s=now_s + (update_s / 2 if update_s else 0.0),
        prediction=(
            "The casts go"
            + (f", and AdamW moves half as many bytes: half of its {format_time(update_s)}" if update_s else "")
            + ". Left out: norms and the residual stream are then in bf16 too, and move half as much."
            + case.host_limit(profile, now_s)
        ),
        fields=fields,
    )
