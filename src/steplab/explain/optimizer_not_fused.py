import re
from functools import partial

from steplab.costs.kernel_time import streaming_s
from steplab.costs.operators import UPDATE_PASSES
from steplab.explain.case import Case, in_seconds, reached_bandwidth
from steplab.records.finding import Evidence, Finding
from steplab.specs.resolve import command
from steplab.units import format_bytes, format_time

FUSED_BYTES, STEPWISE_BYTES = (4 * UPDATE_PASSES[name] for name in ("adamw_fused", "adamw_foreach"))
"""Bytes that AdamW moves per fp32 parameter: fused in one kernel, and operator by operator."""
_FUSED_KERNEL = "_fused_adamw_"
MANY_KERNELS = 50
"""Kernels from which the optimizer of an imported trace counts as not fused. Fused AdamW needs one per thirty to a
hundred tensors, foreach about eight per group, a loop about eight per tensor."""
CONSIDERABLE = 0.01
"""Least saving as a share of the step; small, because the change is one word."""

_FUSED_ON = ("cuda", "cpu")
"""Devices for which torch has fused optimizers. On a CPU, operators are counted instead of kernels."""
_IN_CODE = "torch.optim.AdamW(..., fused=True)"
_NOT_FUSED = ("adamw_loop", "adamw_foreach")
_SMALL = ("elementwise", "optimizer", "reduction", "other")
_FUSED = re.compile(r"_?fused_?(adam|optimizer)", re.IGNORECASE)
_ADAM = re.compile(r"addcdiv")
"""Name of Adam's last operation, parameter += first moment / root of the second; SGD has none."""


_FOUND = partial(
    Finding,
    kind="optimizer_not_fused",
    title="The optimizer passes over its state many times",
    why=(
        "An optimizer computes little and moves all of its state, so memory bandwidth limits it. Operator by operator "
        "it reads and writes the same numbers about three times as often as one fused kernel, and launches a kernel "
        "for each operator."
    ),
)


def optimizer_not_fused(case: Case) -> Finding | None:
    """Finding for AdamW as a loop or foreach, and for imported traces with many small Adam kernels."""
    return _from_kernels(case) if case.spec is None else _from_spec(case)


def _from_spec(case: Case) -> Finding | None:
    """Finding without a profile, from the measured optimizer time and the bytes that AdamW must move."""
    spec, model, now_s = case.spec, case.run.model, case.run.phase_s("optimizer")
    gpu = case.gpu
    if spec is None or spec.optimizer not in _NOT_FUSED or spec.pass_name != "train" or now_s is None:
        return None
    saves_s, step_s, prediction = None, case.step_s, "The memory bandwidth of the device is not known."
    moved = None
    if model is not None:
        moved = model.num_parameters * FUSED_BYTES * (0.5 if spec.precision == "bf16_pure" else 1.0)
    if moved is not None and gpu is not None:
        saves_s = max(0.0, now_s - streaming_s(_FUSED_KERNEL, moved, gpu))
        if step_s is not None and saves_s <= CONSIDERABLE * step_s:
            return None
        prediction = (
            f"Fused, the step moves {format_bytes(moved)} once, in {format_time(now_s - saves_s)} at "
            f"{reached_bandwidth(_FUSED_KERNEL, gpu)}."
        )
    fields = {"optimizer": "adamw_fused"}
    evidence = [Evidence(what="optimizer step, unprofiled", value=now_s, unit="s")]
    if moved is not None:
        evidence.append(Evidence(what="bytes AdamW must move", value=moved, unit="B"))
    if phase := case.profile.phase("optimizer"):
        kernels = phase.num_kernels / case.profile.num_steps
        evidence.append(Evidence(what="kernels of an optimizer step", value=kernels, unit=""))
    return _FOUND(
        saw=f"The optimizer ({spec.optimizer}) takes {format_time(now_s)} per step"
        + (f", for an update that must read and write {format_bytes(moved)}." if moved is not None else "."),
        change=command(spec, fields),
        note=f"in your own code: {_IN_CODE}",
        evidence=tuple(evidence),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _from_kernels(case: Case) -> Finding | None:
    profile, phase = case.profile, case.profile.phase("optimizer")
    kernels = [k for k in profile.kernels if k.phase == "optimizer" and k.category in _SMALL]
    num_kernels = sum(kernel.calls for kernel in kernels) / profile.num_steps
    if phase is None or profile.device not in _FUSED_ON or num_kernels < MANY_KERNELS:
        return None
    names = {k.name for k in kernels} | {op.name for op in profile.ops if op.phase == "optimizer"}
    if any(map(_FUSED.search, names)):
        return None
    now_s, busy_s = case.per_step(phase.window_s), case.per_step(phase.busy_s)
    is_adam = any(map(_ADAM.search, names))
    saves_s = now_s - busy_s * (FUSED_BYTES / STEPWISE_BYTES if is_adam else 1.0)
    if saves_s <= CONSIDERABLE * case.length_s:
        return None
    work = "operators" if profile.device == "cpu" else "kernels"
    return _FOUND(
        saw=(
            f"The optimizer's step is {num_kernels:.0f} {work}, none of them fused: {format_time(now_s)} per step, "
            f"the device busy for {format_time(busy_s)} of it."
        ),
        change=_IN_CODE if is_adam else "torch.optim.SGD(..., fused=True)  # or your optimizer",
        note="Adam, AdamW, SGD and Adagrad of torch have fused=True; parameters must be floating-point",
        evidence=(
            *in_seconds({"optimizer phase": now_s, "device busy in it": busy_s}),
            Evidence(what=f"{work} of an optimizer step", value=num_kernels, unit=""),
        ),
        saves_s=saves_s,
        prediction=(
            f"Operator by operator Adam moves {STEPWISE_BYTES} bytes for an fp32 parameter, fused {FUSED_BYTES}: that "
            "share of the busy time is left, and no waiting. Left out: gradient clipping, if it is part of the phase."
            if is_adam
            else "The device's idle time in the phase: a single launch avoids it. The bytes moved are assumed to stay."
        ),
    )
