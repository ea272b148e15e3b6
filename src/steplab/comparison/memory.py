"""What holds different memory at the peaks of two watched steps: category by category, with the tensors."""

import re
from collections import defaultdict
from collections.abc import Iterable

from steplab.records.comparison import MemoryChange, TensorBytes
from steplab.records.memory_profile import Allocation, MemoryProfile

_NOTICEABLE = 0.001
"""Share of the peak from which a difference is told."""
_MOST = 12
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")

_Group = tuple[str, str, tuple[int, ...] | None]


def memory_changes(a: MemoryProfile, b: MemoryProfile, *, cell: str = "") -> tuple[MemoryChange, ...]:
    """The groups of tensors alive at the peak that differ in bytes or number format, the largest change first.

    A group is what one part of the model holds of one category and shape; number formats within it are told apart. The
    records name the largest allocations, so that small ones may be missing.
    """
    before, after = _groups(a.largest), _groups(b.largest)
    least = _NOTICEABLE * max(a.peak_bytes, b.peak_bytes)
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
    """The allocations alive at the peak, by category, module and shape."""
    found: dict[_Group, list[Allocation]] = defaultdict(list)
    for made in allocations:
        if made.at_peak:
            found[made.category, _LAYER.sub("*", made.module or ""), made.shape].append(made)
    return found


def _by_dtype(allocations: Iterable[Allocation]) -> tuple[TensorBytes, ...]:
    held: dict[str | None, int] = defaultdict(int)
    for made in allocations:
        held[made.dtype] += made.block_bytes * made.count
    return tuple(TensorBytes(dtype=dtype, num_bytes=held[dtype]) for dtype in sorted(held, key=str))


def _op(allocations: list[Allocation]) -> str:
    """The operator that made most of them."""
    return max(allocations, key=lambda made: made.block_bytes * made.count).op or ""
