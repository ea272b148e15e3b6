"""Casts between fp32 and low precision in a profile. Autocast casts every weight in each step."""

from dataclasses import replace

from steplab.errors import UserError
from steplab.explain.case import Case
from steplab.explain.shapes import shapes_of
from steplab.explain.waiting import host_limit
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import OpStats, Profile
from steplab.specs.resolve import command, with_fields
from steplab.units import format_bytes, format_percent, format_time

_LOW = ("bf16", "fp16")


def weight_cast_ops(profile: Profile) -> list[OpStats]:
    """Casts of weights and their gradients: weights have two dimensions, activations three. Weights are cast down in
    forward, gradients up in backward. Logits flattened to two dimensions are cast the opposite ways."""
    return [op for op in profile.ops if op.category == "copy" and _is_cast(op)]


def cast_ops(profile: Profile) -> list[OpStats]:
    return [op for op in profile.ops if op.category == "copy" and _changes_precision(op)]


def cast_bytes(op: OpStats) -> float:
    return op.calls * sum(shape.size_bytes or 0 for shape in shapes_of(op))


def _changes_precision(op: OpStats) -> bool:
    dtypes = {shape.dtype for shape in shapes_of(op)}
    return "fp32" in dtypes and not dtypes.isdisjoint(_LOW)


def _is_cast(op: OpStats) -> bool:
    shapes = shapes_of(op)
    if len(shapes) != 2 or shapes[0].sizes != shapes[1].sizes or len(shapes[0].sizes) != 2:
        return False
    # copy_(to, from); Inductor's kernels name their inputs first.
    to, source = reversed(shapes) if op.name.startswith("triton_") else shapes
    down, up = to.dtype in _LOW and source.dtype == "fp32", to.dtype == "fp32" and source.dtype in _LOW
    return up if op.phase == "backward" else down


CONSIDERABLE = 0.03
"""Least share of device time; the change alters numerics, so little time is not worth it."""

_BY_BYTES = ("softmax", "normalisation", "elementwise", "reduction")


def weight_casts(case: Case) -> Finding | None:
    """Finding if casts of weights and their gradients take a considerable share of device time."""
    spec, profile = case.spec, case.profile
    if spec is not None and spec.precision not in _LOW:
        return None
    ops = weight_cast_ops(profile)
    now_s, busy_s = case.ops_s(ops), case.busy_s
    if now_s <= CONSIDERABLE * busy_s:
        return None
    moved = sum(cast_bytes(op) for op in ops) / profile.num_steps
    finding = Finding(
        kind="weight_casts",
        title=f"Casting weights takes {format_percent(now_s / busy_s)} of the device's busy time",
        saw=(
            f"Autocast copies fp32 weights to low precision, and their gradients back: {format_time(now_s)} and "
            f"{format_bytes(moved)} per step."
        ),
        why=(
            "Tensor cores need low precision and the optimizer's small updates need fp32, so autocast keeps weights in "
            "fp32 and casts all of them in every step. The casts compute nothing, and their cost does not depend on "
            "the batch."
        ),
        change="model.to(torch.bfloat16)",
        evidence=(
            Evidence(what="casts of weights and of their gradients", value=now_s, unit="s"),
            Evidence(what="bytes they move", value=moved, unit="B"),
            Evidence(what="device busy", value=busy_s, unit="s"),
        ),
    )
    found = _with_masters(finding, case, now_s) or _with_bf16_throughout(finding, case, now_s)
    return replace(found, change=command(spec, found.fields)) if spec else found


def _with_masters(finding: Finding, case: Case, weights_s: float) -> Finding | None:
    spec = case.spec
    if spec is None or spec.precision != "bf16" or not case.is_gpu:
        return None
    fields = {"precision": "bf16_master"}
    if spec.pass_name == "train":
        if not spec.optimizer.startswith("adamw"):
            return None
        fields |= {} if spec.optimizer == "adamw_triton" else {"optimizer": "adamw_triton"}
    try:
        with_fields(spec, fields)
    except UserError:
        return None
    return replace(
        finding,
        fields=fields,
        note=(
            "the numerics stay autocast's: masters, moments and update are fp32; in your own code: masters = "
            "bf16_with_masters(model) and OneKernelAdamW(..., masters=masters), of steplab.ops.adamw"
        ),
        saves_s=weights_s,
        prediction=(
            "No weight or gradient is cast; AdamW moves 28 bytes a parameter either way. Left "
            "out: AdamW's other costs." + host_limit(case, weights_s)
        ),
    )


def _with_bf16_throughout(finding: Finding, case: Case, weights_s: float) -> Finding:
    saves_s, work_s, prediction = _gain(case, weights_s)
    share = format_percent(work_s / case.busy_s)
    return replace(
        finding,
        title=f"Autocast's casts and fp32 work take {share} of the device's busy time",
        fields={"precision": "bf16_pure"} if case.spec else {},
        note=(
            "numerics: bf16 has 7 bits of mantissa, so updates smaller than 1/256 of a weight are lost; train so only "
            "with stochastic rounding or a master copy in the optimizer. A larger batch spreads the casts instead"
        ),
        saves_s=saves_s,
        at_most=True,
        prediction=prediction,
    )


def _gain(case: Case, weights_s: float) -> tuple[float, float, str]:
    """Seconds saved, seconds of casts and fp32 work, and the derivation. bf16 weights need no casts; autocast's fp32
    work (softmax, norms, loss, residual stream) and AdamW move half the bytes."""
    profile = case.profile
    others_s = case.ops_s(cast_ops(profile)) - weights_s
    wide = [op for op in profile.ops if op.dtype == "fp32" and op.phase != "optimizer" and op.category in _BY_BYTES]
    wide_s = case.ops_s(wide)
    update_s = case.run.phase_s("optimizer") if case.spec and case.spec.optimizer.startswith("adamw") else None
    saves_s = weights_s + others_s + wide_s / 2 + (update_s / 2 if update_s else 0.0)
    prediction = (
        f"At most: no casts, also of activations ({format_time(others_s)}), and autocast's work "
        f"in fp32 moves half as many bytes: half of {format_time(wide_s)}"
        + (f", and of the {format_time(update_s)} of AdamW" if update_s else "")
        + "."
        + host_limit(case, saves_s)
    )
    return saves_s, weights_s + others_s + wide_s, prediction
