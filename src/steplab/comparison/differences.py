"""Differences of two steps below their figures: time by part of the model, memory by tensor."""

from collections import defaultdict
from collections.abc import Iterable

from steplab.records.comparison import KernelChange, KernelCount, MemoryChange, TensorBytes
from steplab.records.memory_profile import Allocation, MemoryProfile
from steplab.records.module_names import without_numbers
from steplab.records.profile import Profile

_MOST = 12
_NOTICEABLE_TIME = 0.005
_NOTICEABLE_BYTES = 0.001

_Group = tuple[str, str, tuple[int, ...] | None]
_Part = tuple[str, str, str]
"""Phase, range and category of kernels; range or category is empty."""


def kernel_changes(a: Profile, b: Profile, *, cell: str = "") -> tuple[KernelChange, ...]:
    """Parts of the model with different kernel time in B, largest difference first.

    A part is a phase and a range; without ranges in a profile, a phase and a kernel category.
    """
    by_range = all(any(kernel.range for kernel in profile.kernels) for profile in (a, b))
    before, after = _parts(a, by_range=by_range), _parts(b, by_range=by_range)
    least_s = _NOTICEABLE_TIME * a.busy_s / a.num_steps
    found = [
        KernelChange(
            cell=cell,
            phase=phase,
            range=range_,
            category=category,
            a=before.get((phase, range_, category), ()),
            b=after.get((phase, range_, category), ()),
        )
        for phase, range_, category in dict.fromkeys((*before, *after))
    ]
    changed = [change for change in found if abs(change.b_s - change.a_s) >= least_s]
    return tuple(sorted(changed, key=lambda change: -abs(change.b_s - change.a_s))[:_MOST])


def _parts(profile: Profile, *, by_range: bool) -> dict[_Part, tuple[KernelCount, ...]]:
    calls: dict[_Part, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for kernel in profile.kernels:
        part = (kernel.phase, kernel.range, "") if by_range else (kernel.phase, "", kernel.category)
        counted = calls[part][kernel.name]
        counted[0] += kernel.calls / profile.num_steps
        counted[1] += kernel.total_s / profile.num_steps
    return {
        part: tuple(
            KernelCount(name=name, calls=number, time_s=time_s)
            for name, (number, time_s) in sorted(kernels.items(), key=lambda item: -item[1][1])
        )
        for part, kernels in calls.items()
    }


def memory_changes(a: MemoryProfile, b: MemoryProfile, *, cell: str = "") -> tuple[MemoryChange, ...]:
    """Groups of tensors alive at the peak that differ in bytes or number format, largest change first.

    A group has one part of the model, category and shape, split by number format. Records hold only the largest
    allocations, so small ones may be missing.
    """
    before, after = _groups(a.largest), _groups(b.largest)
    least = _NOTICEABLE_BYTES * max(a.peak_bytes, b.peak_bytes)
    found = []
    for group in dict.fromkeys((*before, *after)):
        category, module, shape = group
        change = MemoryChange(
            cell=cell,
            category=category,
            module=module,
            op=_op(after.get(group) or before[group]),
            shape=shape,
            a=_by_dtype(before.get(group, ())),
            b=_by_dtype(after.get(group, ())),
        )
        if abs(change.change_bytes) >= least:
            found.append(change)
    return tuple(sorted(found, key=lambda change: -abs(change.change_bytes))[:_MOST])


def _groups(allocations: Iterable[Allocation]) -> dict[_Group, list[Allocation]]:
    found: dict[_Group, list[Allocation]] = defaultdict(list)
    for made in allocations:
        if made.at_peak:
            found[made.category, without_numbers(made.module or ""), made.shape].append(made)
    return found


def _by_dtype(allocations: Iterable[Allocation]) -> tuple[TensorBytes, ...]:
    held: dict[str | None, int] = defaultdict(int)
    for made in allocations:
        held[made.dtype] += made.block_bytes * made.count
    return tuple(TensorBytes(dtype=dtype, num_bytes=held[dtype]) for dtype in sorted(held, key=str))


def _op(allocations: list[Allocation]) -> str:
    return max(allocations, key=lambda made: made.block_bytes * made.count).op or ""
