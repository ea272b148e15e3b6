"""The accumulation study: one number added to a sum a thousand times, in several pairs of types.

As the sum grows, the numbers of its type lie further apart, and each addition is rounded to the nearest. torch makes
the sums on the device; exact fractions give the rounding of each addition.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from statistics import mode

import torch

from steplab.measurement.tensors import dtype_name
from steplab.records.numerics import Accumulation, Binade

NUMBER = 0.01
NUM_ADDITIONS = 1000

STUDY: tuple[tuple[torch.dtype, torch.dtype, bool], ...] = (
    (torch.float32, torch.float32, False),
    (torch.float16, torch.float16, False),
    (torch.float32, torch.float16, False),
    (torch.float32, torch.float16, True),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, False),
)
"""Type of the sum, type of the addend, and True if the addend is first cast to the sum's type (without effect)."""


def accumulate(device: torch.device) -> tuple[Accumulation, ...]:
    return tuple(_accumulate(device, *types) for types in STUDY)


def _accumulate(device: torch.device, accumulator: torch.dtype, addend: torch.dtype, cast: bool) -> Accumulation:
    total = torch.zeros((), dtype=accumulator, device=device)
    sums = torch.zeros(NUM_ADDITIONS + 1, dtype=accumulator, device=device)
    for index in range(1, NUM_ADDITIONS + 1):
        number = torch.tensor(NUMBER, dtype=addend, device=device)
        total += number.to(accumulator) if cast else number
        sums[index] = total
    seen: list[float] = sums.tolist()
    value: float = torch.tensor(NUMBER, dtype=addend).item()
    return Accumulation(
        accumulator=dtype_name(accumulator),
        addend=dtype_name(addend),
        cast=cast,
        number=NUMBER,
        addend_value=value,
        num_additions=NUM_ADDITIONS,
        num_rounded=sum(Fraction(before) + Fraction(value) != Fraction(after) for before, after in pairwise(seen)),
        result=seen[-1],
        binades=tuple(_binades(seen, torch.finfo(accumulator).eps)),
    )


def _binades(sums: Sequence[float], eps: float) -> list[Binade]:
    """Additions by the power of two below their sum. `eps` is the spacing of numbers between 1 and 2."""
    added: dict[float, list[float]] = {}
    for before, after in pairwise(sums):
        start = 2.0 ** (math.frexp(before)[1] - 1) if before else 0.0
        added.setdefault(start, []).append(after - before)
    return [
        Binade(start=start, spacing=start * eps, num_additions=len(steps), added=mode(steps))
        for start, steps in added.items()
    ]
