"""Small profiles by hand for diagnoses: operator times are per step, records hold several steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.runs import make_run

from steplab.costs.rates import gpu_named
from steplab.explain.case import Case, case_of
from steplab.records.profile import HostCallStats, KernelStats, OpStats, PhaseTime, Profile
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing

STEPS = 2
MS = 1e-3

FP32, TF32, BF16 = 67e12, 494.5e12, 989.5e12
"""Dense peaks of an H200 SXM by its data sheet, in FLOP/s."""
BYTES_PER_S = 4.8e12
H200 = gpu_named("H200 SXM")
SHARES = H200.rates.streaming.shares


def op(
    name: str,
    category: str,
    ms: float,
    *,
    phase: str = "forward",
    where: str = "",
    inputs: str = "",
    dtype: str = "",
    calls: int = 1,
    flops: float | None = None,
    moved: float | None = None,
) -> OpStats:
    return OpStats(
        name=name,
        category=category,
        phase=phase,
        range=where,
        inputs=inputs,
        dtype=dtype,
        calls=calls * STEPS,
        kernels=calls * STEPS,
        device_s=ms * MS * STEPS,
        flops=None if flops is None else flops * STEPS,
        moved_bytes=None if moved is None else moved * STEPS,
    )


def kernel_of(of: OpStats, name: str | None = None) -> KernelStats:
    each_s = of.device_s / of.calls
    return KernelStats(
        name=name or f"kernel of {of.name}",
        category=of.category,
        phase=of.phase,
        range=of.range,
        stream=7,
        calls=of.calls,
        total_s=of.device_s,
        median_s=each_s,
        max_s=each_s,
    )


def host_call(name: str, *, phase: str, calls: int = 1, ms: float = 0.1) -> HostCallStats:
    return HostCallStats(name=name, phase=phase, range="", calls=calls * STEPS, total_s=ms * MS * STEPS)


def profile(
    ops: Sequence[OpStats],
    *,
    waiting_ms: Mapping[str, float] | None = None,
    kernel_names: Mapping[str, str] | None = None,
    launches: int = 1000,
    **fields: Any,
) -> Profile:
    waiting_ms = waiting_ms or {}
    names = list(dict.fromkeys([*(o.phase for o in ops), *waiting_ms]))
    phases = tuple(_phase(name, [o for o in ops if o.phase == name], waiting_ms.get(name, 0.0)) for name in names)
    values: dict[str, Any] = {
        "source": "torch.profiler",
        "device": "cuda",
        "num_steps": STEPS,
        "window_s": sum(p.window_s for p in phases),
        "phases": phases,
        "kernels": tuple(kernel_of(o, (kernel_names or {}).get(o.name)) for o in ops),
        "ops": tuple(ops),
        "num_launches": launches * STEPS,
    }
    return Profile(**(values | fields))


def _phase(name: str, ops: Sequence[OpStats], waiting_ms: float) -> PhaseTime:
    categories: dict[str, float] = {}
    for o in ops:
        categories[o.category] = categories.get(o.category, 0.0) + o.device_s
    busy_s, waiting_s = sum(categories.values()), waiting_ms * MS * STEPS
    return PhaseTime(
        phase=name,
        window_s=busy_s + waiting_s,
        busy_s=busy_s,
        host_bound_s=waiting_s,
        idle_s=0.0,
        categories=categories,
        num_kernels=sum(o.kernels for o in ops),
    )


def timing(step_ms: float, **phases_ms: float) -> Timing:
    times = {"step": step_ms, **phases_ms}
    return Timing(
        warmup=(), back_to_back=tuple(PhaseSamples(phase=name, device_s=(ms * MS,) * 3) for name, ms in times.items())
    )


def own(fields: Mapping[str, object], seen: Profile | None, timed: Timing | None) -> Run:
    return make_run(fields, profile=seen, timing=timed)


def foreign(seen: Profile, **fields: Any) -> Run:
    values: dict[str, Any] = {
        "id": "0123456789ab",
        "created_utc": "2026-11-21T09:00:00Z",
        "steplab_version": "0.1.0",
        "profile": seen,
    }
    return Run(**(values | fields))


def case(run: Run) -> Case:
    return case_of(run, None)
