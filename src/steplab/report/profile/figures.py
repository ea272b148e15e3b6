"""Computes figures of a profile that several tables and sentences share.

Records hold totals over all profiled steps; times here are per step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import median

from steplab.records.profile import CATEGORIES, OUTSIDE, PHASES, KernelStats, PhaseTime, Profile
from steplab.records.run import Run
from steplab.report.kit.grouping import grouped
from steplab.report.kit.kernel_names import short_kernels

_TRAINING = {"forward", "backward", "optimizer"}
_UPDATING_IN_BACKWARD = {"forward", "backward"}
TOLERANCE = 0.03
"""Largest relative difference between profiled busy time and unprofiled step time that counts as agreement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    phase: str
    """One of PHASES, 'outside', or 'step' for their sum."""
    window_s: float
    busy_s: float
    host_bound_s: float
    """Seconds without a kernel because Python had not launched the next one."""
    idle_s: float
    """Seconds without a kernel although the next one was launched; on a CPU, outside of operators."""
    categories: dict[str, float]
    num_kernels: float
    timed_s: float | None
    """Median without the profiler; None if untimed."""

    def share(self, category: str) -> float | None:
        return self.categories.get(category, 0.0) / self.busy_s if self.busy_s else None


def spans(run: Run, profile: Profile) -> list[Span]:
    apart = [_span(run, profile, phase.phase, [phase]) for phase in profile.phases]
    if len(apart) == 1 and apart[0].phase != OUTSIDE:
        return apart
    return [*(apart if len(apart) > 1 else []), whole(run, profile)]


def whole(run: Run, profile: Profile) -> Span:
    return _span(run, profile, "step", profile.phases)


def _span(run: Run, profile: Profile, name: str, phases: Sequence[PhaseTime]) -> Span:
    steps = profile.num_steps
    waits_s = sum(p.host_bound_s for p in phases) / steps
    idle_s = sum(p.idle_s for p in phases) / steps
    if profile.device == "cpu":  # the host does not wait for itself; it ran code outside of operators
        waits_s, idle_s = 0.0, idle_s + waits_s
    return Span(
        phase=name,
        window_s=sum(p.window_s for p in phases) / steps,
        busy_s=sum(p.busy_s for p in phases) / steps,
        host_bound_s=waits_s,
        idle_s=idle_s,
        categories={c: sum(p.categories.get(c, 0.0) for p in phases) / steps for c in CATEGORIES},
        num_kernels=sum(p.num_kernels for p in phases) / steps,
        timed_s=run.phase_s(name),
    )


def passes(run: Run, profile: Profile) -> list[tuple[str, Span]]:
    """Accumulate marked phases: forward, forward + backward, train.

    'everything' follows if kernels ran outside phases.
    """
    marked = [part for name in PHASES if (part := profile.phase(name))]
    told = []
    trained = _UPDATING_IN_BACKWARD if run.spec is not None and run.spec.updates_in_backward else _TRAINING
    for count in range(1, len(marked) + 1):
        parts = marked[:count]
        names = [part.phase for part in parts]
        name = "train" if trained.issubset(names) else " + ".join(names)
        told.append((name, _span(run, profile, name, parts)))
    outside = profile.phase(OUTSIDE)
    if outside is not None and outside.busy_s > 0:
        told.append(("everything", whole(run, profile)))
    return told


def shown_categories(profile: Profile) -> list[str]:
    return [category for category in CATEGORIES if profile.category_s(category) > 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKernel:
    name: str
    short: str
    category: str
    phase: str
    ranges: tuple[str, ...]
    calls: float
    time_s: float
    share: float
    median_s: float
    """Seconds per call; over several ranges, the median of their medians, weighted by calls."""
    median_is_exact: bool
    """True if all calls are in one range and stream."""


def top_kernels(profile: Profile, phases: tuple[str, ...] | None = None, *, by_phase: bool = True) -> list[TopKernel]:
    """Kernels of these phases (None: all), most time first; with by_phase=False, phases are merged as 'step'."""
    chosen = [k for k in profile.kernels if phases is None or k.phase in phases]
    total_s = sum(k.total_s for k in chosen) or 1.0
    groups = grouped(chosen, lambda kernel: (kernel.name, kernel.category, kernel.phase if by_phase else "step"))
    short = short_kernels(kernel.name for kernel in profile.kernels)
    merged = [_merge(key, short[key[0]], parts, total_s, profile.num_steps) for key, parts in groups.items()]
    return sorted(merged, key=lambda kernel: -kernel.time_s)


def _merge(
    key: tuple[str, str, str], short: str, parts: list[KernelStats], total_s: float, num_steps: int
) -> TopKernel:
    name, category, phase = key
    time_s = sum(part.total_s for part in parts)
    by_range: dict[str, float] = {}
    for part in parts:
        by_range[part.range] = by_range.get(part.range, 0.0) + part.total_s
    return TopKernel(
        name=name,
        short=short,
        category=category,
        phase=phase,
        ranges=tuple(sorted(by_range, key=lambda where: -by_range[where])),
        calls=sum(part.calls for part in parts) / num_steps,
        time_s=time_s / num_steps,
        share=time_s / total_s,
        median_s=_median_of_medians(parts),
        median_is_exact=len(parts) == 1,
    )


def _median_of_medians(parts: list[KernelStats]) -> float:
    of_calls = [median_s for part in parts for median_s in repeat(part.median_s, part.calls)]
    return median(of_calls) if of_calls else 0.0
