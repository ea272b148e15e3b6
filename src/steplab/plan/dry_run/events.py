"""What happens in a dry run, in order: the stream that memory, FLOPs and bytes are each read from.

A step of a large model has some hundred thousand events. They are structs, which are made several times as fast as
frozen dataclasses.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from steplab.costs.kernel_time import Product
from steplab.plan.dry_run.tensors import Piece

Kind = Literal["matmul", "attention", "streaming"]
READS_A_VALUE = "_local_scalar_dense"
"""Name of the operator by which the host reads a value off a tensor (`.item()`), and waits until the device has it."""

MADE_BY_HOST = "made_by_host"
"""Name of what is no operator: a tensor that the model makes without naming a device, which a GPU gets by a copy. Its
time is not predicted."""


CHOSEN_BY_TORCH = "chosen by torch"
"""Rate of fused attention whose kernel torch chooses by the GPU."""


class Began(msgspec.Struct, frozen=True, gc=False):
    """A phase of the step begins."""

    phase: str
    """build, forward, backward or optimizer."""


class Allocated(msgspec.Struct, frozen=True, gc=False):
    """Memory was asked for, by the next operator."""

    piece: Piece


class Freed(msgspec.Struct, frozen=True, gc=False):
    """Memory was given back."""

    piece: Piece


class Operand(msgspec.Struct, frozen=True, gc=False):
    """A tensor that an operator reads or writes."""

    memory: int
    """Number of the allocation that it lies in; two tensors in one are views of the same memory."""
    num_bytes: int
    """Bytes of its elements."""
    start: int = 0
    """Where in the allocation they begin, so that two parts of one can be told from one that is read twice."""


class Operator(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A call of an operator: what it computes, what it must move, and where in the step it runs."""

    name: str
    """As a trace of torch has it, without aten::; fused attention by the name of its implementation."""
    kind: Kind
    """matmul, fused attention, or an operator that memory bandwidth bounds."""
    dtype: str
    """Number format it computes in: fp32, tf32, bf16, fp16."""
    flops: float
    """A multiply-add counts as two; of fused attention only what a causal mask leaves."""
    read_bytes: int
    """Each input once."""
    written_bytes: int
    """Each output once."""
    reads: tuple[Operand, ...]
    """Its inputs; of an embedding's table, which is read in part, only `read_bytes` knows."""
    writes: tuple[Operand, ...]
    """Its outputs."""
    strided: bool
    """Whether elements that are neighbours in one of its tensors are apart in another, as when heads are transposed."""
    product: Product | None
    """Sizes of a matmul; of fused attention those of queries times keys, of which it does several; None: no product."""
    phase: str
    """forward, backward or optimizer."""
    where: str
    """Part of the model: 'block 3'."""
    what: str
    """What it makes: 'gradient of query.weight'; of a value that the host reads, and of a tensor that it makes,
    where it does: 'model.py:12'."""
    recomputed: bool
    """Whether activation checkpointing runs it a second time."""
    rate: str = ""
    """Name of the kernel's rate where it is not by the operator's name: how a traced kernel goes over its tensors."""
    calls: int = 1
    """Operators that Python and torch called for it, views before it included."""

    @property
    def moved_bytes(self) -> int:
        """What it reads and writes."""
        return self.read_bytes + self.written_bytes


Event = Began | Allocated | Freed | Operator
Listener = Callable[[Event], None]
