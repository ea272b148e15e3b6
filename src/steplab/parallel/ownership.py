"""Which rank owns which parameter: pure arithmetic, the same on every rank because its inputs are.

Parameters stay whole: an optimizer may look at the shape of what it updates (Muon, Adafactor), and its state then has
the form it has without sharding. The price is a balance that is only as good as the largest parameter allows.
"""

from collections.abc import Sequence


def owners_of(elements: Sequence[int], loads: list[int]) -> list[int]:
    """The owner of each parameter by its number of elements: the largest first, each to the rank with the least so far.

    `loads` holds the elements each rank owns already and is brought up to date. Ties go to the earlier parameter and to
    the lower rank, so that all ranks come to the same answer.
    """
    owners = [0] * len(elements)
    for index in sorted(range(len(elements)), key=lambda index: (-elements[index], index)):
        owner = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += elements[index]
    return owners


def owners_in(groups: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The owners of parameters in groups, given by their numbers of elements, so that each group is spread over ranks,
    and all of them evenly."""
    loads = [0] * size
    return [owners_of(elements, loads) for elements in groups]


def largest_share_bound(elements: Sequence[int], size: int) -> float:
    """No rank owns more elements than this: total / size + (1 − 1 / size) · largest (Graham 1966, list scheduling).

    It holds in whatever order parameters come, so for groups added later too: the rank that received the last of its
    parameters had at most the average of all the others by then.
    """
    largest = max(elements, default=0)
    return (sum(elements) + (size - 1) * largest) / size


def runs_of(sizes_bytes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """Runs of neighbours, by index; each ends once it has `bucket_bytes` or more."""
    found: list[list[int]] = []
    filled: float = bucket_bytes
    for index, size_bytes in enumerate(sizes_bytes):
        if filled >= bucket_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size_bytes
    return found
