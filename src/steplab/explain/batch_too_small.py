from steplab.costs.kernel_time import product_rates
from steplab.explain.case import Case, in_seconds
from steplab.explain.casts import weight_cast_ops
from steplab.explain.waiting import is_launch_bound, wait_s
from steplab.records.finding import Finding
from steplab.specs.resolve import command
from steplab.units import format_bytes, format_percent, format_time

CONSIDERABLE = 0.20
"""Least share of the step whose time does not grow with the batch; doubling the batch then saves a tenth per token."""

FACTORS = (8, 4, 2)
"""Candidate multiples of the batch size; the largest fitting one is proposed."""
FITS = 0.9
"""Share of device memory that a batch may need if all memory grew with it. Weights and states do not, so the real peak
is lower."""


def batch_too_small(case: Case) -> Finding | None:
    """Finding if a considerable share of the step does not grow with the batch and a larger batch fits."""
    spec, step_s = case.spec, case.step_s
    if spec is None or step_s is None or spec.model.kind == "factory":
        return None
    fixed = _fixed(case)
    fixed_s = sum(fixed.values())
    factor = _factor(case)
    if factor is None or fixed_s <= CONSIDERABLE * step_s:
        return None
    saves_s = fixed_s * (1 - 1 / factor)
    fields = {"batch": str(spec.batch * factor)}
    listed = ", ".join(f"{what} {format_time(seconds)}" for what, seconds in fixed.items() if seconds)
    return Finding(
        kind="batch_too_small",
        title=f"{format_percent(fixed_s / step_s)} of the step would be the same for a larger batch",
        saw=(
            f"{format_time(fixed_s)} of {format_time(step_s)} for {spec.tokens * spec.micro_steps} tokens do "
            f"not depend on the batch: {listed}."
        ),
        why=(
            "The weights are updated, cast and read once per step, however many tokens it has. With few tokens that is "
            "a large part of the time per token, and matmuls wait for weights longer than they compute."
        ),
        change=command(spec, fields),
        note="a larger batch changes the training; adjust the learning rate",
        evidence=in_seconds({"step, unprofiled": step_s, **fixed}),
        saves_s=saves_s,
        tokens_ratio=factor,
        prediction=(
            f"With {factor} times the batch, as many tokens as now in one step take {format_time(step_s - saves_s)} "
            f"instead of {format_time(step_s)}: {step_s / (step_s - saves_s):.2f} times the tokens per second. "
            f"Left out: larger matmuls are also more efficient.{_memory(case, factor)}"
        ),
        fields=fields,
    )


def _fixed(case: Case) -> dict[str, float]:
    """Seconds that do not grow with the batch: Python launches equally many kernels for any."""
    found = {"optimizer": case.run.phase_s("optimizer") or 0.0}
    if case.run.profile is not None:
        found["casts of weights"] = case.ops_s(weight_cast_ops(case.profile))
        found["products bound by their weights' bytes"] = _narrow_s(case)
        found["waiting for Python"] = wait_s(case) if is_launch_bound(case) else 0.0
    return found


def _narrow_s(case: Case) -> float:
    """Seconds of memory-bound products (FLOPs per byte below peak over bandwidth)."""
    gpu, found_s = case.gpu, 0.0
    for op in case.profile.ops:
        is_linear = op.category == "matmul" and "bmm" not in op.name
        if gpu and is_linear and op.dtype in gpu.peaks and op.flops and op.moved_bytes:
            rates = product_rates(op.dtype, gpu)
            compute_s = op.flops / (gpu.peaks[op.dtype] * rates.peak_share)
            memory_s = op.moved_bytes / (gpu.bandwidth_bytes_per_s * rates.bandwidth_share)
            found_s += op.device_s if compute_s < memory_s else 0.0
    return case.per_step(found_s)


def _factor(case: Case) -> int | None:
    memory, peak = case.run.memory, case.run.peak
    if memory is None or memory.total_bytes is None or peak is None:
        return FACTORS[-1]
    fitting = (f for f in FACTORS if f * peak.peak_allocated_bytes <= FITS * memory.total_bytes)
    return next(fitting, None)


def _memory(case: Case, factor: int) -> str:
    peak = case.run.peak
    if peak is None:
        return " Whether the larger batch fits is not known: the record has no peak of memory."
    return f" The larger batch needs at most {format_bytes(factor * peak.peak_allocated_bytes)}."
