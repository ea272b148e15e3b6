"""The ordered events of a dry run, the source of memory, FLOPs and bytes. They are structs, because a large model's
step has some hundred thousand and frozen dataclasses are several times slower.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from steplab.costs.kernel_time import Product
from steplab.plan.dry_run.tensors import Piece

Kind = Literal["matmul", "attention", "streaming"]
READS_A_VALUE = "_local_scalar_dense"
"""The operator of `.item()`: Python reads a value off a tensor, and waits until the device has it."""

MADE_BY_HOST = "made_by_host"
"""A tensor that the model makes without naming a device: not an operator. A GPU gets it by a copy of unpredicted
time.
"""


CHOSEN_BY_TORCH = "chosen by torch"
"""Rate of fused attention if torch chooses the kernel by the GPU."""


class Began(msgspec.Struct, frozen=True, gc=False):
    phase: str


class Allocated(msgspec.Struct, frozen=True, gc=False):
    piece: Piece


class Freed(msgspec.Struct, frozen=True, gc=False):
    piece: Piece


class Operand(msgspec.Struct, frozen=True, gc=False):
    memory: int
    """Number of its allocation; two tensors in one allocation are views of the same memory."""
    num_bytes: int
    start: int = 0
    """Offset in the allocation, in bytes; distinguishes two parts of one allocation from one tensor read twice."""


class Operator(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    name: str
    """The name in a torch trace, without aten::; for fused attention, the implementation's name."""
    kind: Kind
    dtype: str
    """Number format of the computation: fp32, tf32, bf16, fp16."""
    flops: float
    """A multiply-add counts as two; fused attention counts only scores that a causal mask leaves."""
    read_bytes: int
    written_bytes: int
    reads: tuple[Operand, ...]
    """Inputs. An embedding reads part of its table, which only `read_bytes` counts."""
    writes: tuple[Operand, ...]
    strided: bool
    """True if neighbouring elements of one of its tensors are apart in another, as when heads are transposed."""
    product: Product | None
    """Sizes of a matmul, or of queries times keys in fused attention, which does several such products; None: no
    product."""
    phase: str
    where: str
    """Part of the model: 'block 3'."""
    what: str
    """The result: 'gradient of query.weight'. For READS_A_VALUE and MADE_BY_HOST, the source line: 'model.py:12'."""
    recomputed: bool
    dropout: bool = False
    """True for fused attention that drops scores."""
    rate: str = ""
    """Name of the kernel's rate, unless it is the operator's name: a traced kernel's access pattern."""
    calls: int = 1
    """Operators that Python and torch called for it, including preceding views."""

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


Event = Began | Allocated | Freed | Operator
Listener = Callable[[Event], None]
