"""Reads tensors in a record's notation: 'bf16[2048, 768] bf16[768, 3072]'."""

import math
import re
from dataclasses import dataclass

from steplab.costs.kernel_time import Product
from steplab.costs.operators import FLOATING_BYTES
from steplab.records.profile import OpStats, Profile

_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    dtype: str
    """Number format in specs' names (fp32, bf16, fp16)."""
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int | None:
        return self.numel * FLOATING_BYTES[self.dtype] if self.dtype in FLOATING_BYTES else None


def shapes_of(op: OpStats) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype=dtype, sizes=tuple(int(size) for size in sizes.split(",")))
        for dtype, sizes in _TENSOR.findall(op.inputs)
        if sizes.strip()
    )


def product_of(op: OpStats) -> Product | None:
    """Sizes of a matrix product by its two factors, [..., m, k] and [..., k, n]; None for other operators, or if the
    record lacks them."""
    first = _FIRST_FACTOR.get(op.name.removeprefix("aten::"))
    factors = [] if first is None else [shape.sizes for shape in shapes_of(op)][first : first + 2]
    if len(factors) < 2 or min(map(len, factors)) < 2:
        return None
    (*batch, m, k), (*_, rows, n) = factors
    return Product(m=m, n=n, k=k, batch=math.prod(batch)) if rows == k else None


_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Place of the first factor among an operator's inputs; compiled code adds its output as the last."""


def softmax_inputs(profile: Profile) -> list[Shape]:
    return [shape for op in profile.ops if op.category == "softmax" for shape in shapes_of(op)]
