"""Where two profiles of a step spend different time: part by part of the model, with the kernels of each."""

from collections import defaultdict

from steplab.records.comparison import KernelChange, KernelCount
from steplab.records.profile import Profile

_NOTICEABLE = 0.005
"""Share of a step's busy time from which a difference of one part is told."""
_MOST = 12


def kernel_changes(a: Profile, b: Profile, *, cell: str = "") -> tuple[KernelChange, ...]:
    """The parts of the model whose kernels take different time in a step of B, the largest difference first.

    A part is a phase and a range; if one of the profiles has no ranges, it is a phase and a category of kernels.
    """
    by_range = all(any(kernel.range for kernel in profile.kernels) for profile in (a, b))
    before, after = _parts(a, by_range=by_range), _parts(b, by_range=by_range)
    least_s = _NOTICEABLE * a.busy_s / a.num_steps
    found = [
        KernelChange(cell=cell, phase=part[0], range=part[1], a=before.get(part, ()), b=after.get(part, ()))
        for part in dict.fromkeys((*before, *after))
    ]
    changed = [change for change in found if abs(change.b_s - change.a_s) >= least_s]
    return tuple(sorted(changed, key=lambda change: -abs(change.b_s - change.a_s))[:_MOST])


def _parts(profile: Profile, *, by_range: bool) -> dict[tuple[str, str], tuple[KernelCount, ...]]:
    """The kernels of each part, per step."""
    calls: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for kernel in profile.kernels:
        counted = calls[kernel.phase, kernel.range if by_range else kernel.category][kernel.name]
        counted[0] += kernel.calls / profile.num_steps
        counted[1] += kernel.total_s / profile.num_steps
    return {
        part: tuple(
            KernelCount(name=name, calls=number, time_s=time_s)
            for name, (number, time_s) in sorted(kernels.items(), key=lambda item: -item[1][1])
        )
        for part, kernels in calls.items()
    }
