"""Events of a dry run, from which memory, FLOPs and bytes are counted.

They are structs, because a large model's step has several hundred thousand, and frozen dataclasses are slower.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from steplab.costs.kernel_time import Product
from steplab.plan.dry_run.sizes import Count
from steplab.plan.dry_run.tensors import Piece

Kind = Literal["matmul", "attention", "streaming"]
READS_A_VALUE = "_local_scalar_dense"
"""Operator of `.item()`: Python reads a value off a tensor, and waits for the GPU."""

MADE_BY_HOST = "made_by_host"
"""Name of an event that is no operator: the model makes a tensor on the CPU, for lack of a device argument.

Its copy to the GPU takes unpredicted time.
"""


CHOSEN_BY_TORCH = "chosen by torch"
"""`Operator.rate` of fused attention whose kernel torch chooses by the GPU."""


class Began(msgspec.Struct, frozen=True, gc=False, tag=True):
    phase: str


class Allocated(msgspec.Struct, frozen=True, gc=False, tag=True):
    piece: Piece


class Freed(msgspec.Struct, frozen=True, gc=False):
    piece: Piece


class Operand(msgspec.Struct, frozen=True, gc=False):
    memory: int
    """Number of the allocation; tensors that share it are views of the same memory."""
    num_bytes: int
    start: int = 0
    """Offset in the allocation, in bytes; distinguishes two parts of one allocation from one tensor read twice."""


class Operator(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag=True):
    name: str
    """The name in a torch trace, without aten::; for fused attention, the implementation's name."""
    kind: Kind
    dtype: str
    """Number format of the computation: fp32, tf32, bf16, fp16."""
    flops: float = 0.0
    """A multiply-add counts as two; fused attention counts only scores that are not masked."""
    read_bytes: int = 0
    written_bytes: int
    reads: tuple[Operand, ...] = ()
    """Inputs that are read whole; an embedding's rows count in `read_bytes` only."""
    writes: tuple[Operand, ...] = ()
    strided: bool = False
    """True if neighbouring elements of one of its tensors are apart in another, as when heads are transposed."""
    product: Product | None = None
    """Sizes of a matmul, or of queries times keys in fused attention, whose other matmuls are alike; None: no matmul.
    """
    phase: str
    where: str
    """Part of the model: 'block 3'."""
    what: str
    """The result: 'gradient of query.weight'. For READS_A_VALUE and MADE_BY_HOST, the source line: 'model.py:12'."""
    recomputed: bool = False
    dropout: bool = False
    """True for fused attention with dropout."""
    rate: str = ""
    """Access pattern, the key of the kernel's measured bandwidth; '': the operator's name."""
    calls: int = 1
    """Number of operators that Python and torch called for it, including preceding views."""

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


Event = Began | Allocated | Freed | Operator
Listener = Callable[[Event], None]


class Allocations:
    """The memory of a dry run: reports what is allocated and freed, and knows what is alive, by number."""

    def __init__(self, listen: Listener, workspace: Count) -> None:
        """workspace: bytes of a cuBLAS handle; each thread that runs matmuls has one."""
        self._listen, self._workspace = listen, workspace
        self._alive: dict[int, Piece] = {}
        self._threads = set[str]()
        self.num_made = 0

    def make(self, what: str, formula: str, num_bytes: int, where: str, category: str = "temporaries") -> int:
        """Report an allocation; its number is for `free`."""
        piece = Piece(what=what, formula=formula, num_bytes=num_bytes, category=category, where=where)
        self.num_made += 1
        self._alive[self.num_made] = piece
        self._listen(Allocated(piece))
        return self.num_made

    def free(self, number: int) -> None:
        self._listen(Freed(self._alive.pop(number)))

    def piece(self, number: int) -> Piece:
        return self._alive[number]

    def made_since(self, number: int) -> list[Piece]:
        """Pieces alive that were made after the one of this number."""
        return [piece for each, piece in self._alive.items() if each > number]

    def call_rest(self, category: str, since: int = 0) -> None:
        for piece in self.made_since(since):
            if piece.category == "temporaries":
                piece.category = category

    def start_products(self, phase: str, where: str) -> None:
        """A thread's first matmul allocates a cuBLAS workspace, which stays; autograd has its own thread."""
        thread = "backward" if phase == "backward" else "forward"
        if thread not in self._threads and self._workspace.value:
            self._threads.add(thread)
            formula, num_bytes = self._workspace.symbols, self._workspace.value
            self.make(f"cuBLAS, {thread} thread", formula, num_bytes, where, "workspaces")


_REPEATED = "block 1"


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Operators of a step with many equal blocks, in order, extrapolated from steps with two and with three.

    Iteration repeats one block's operators, with that block's allocation numbers. Fusion needs the true numbers, so it
    takes `of_two` and `of_three` instead.
    """

    of_two: tuple[Operator, ...]
    of_three: tuple[Operator, ...]
    num_layers: int

    @property
    def times(self) -> int:
        """Number of blocks beyond two: each adds the difference between `of_three` and `of_two`."""
        return self.num_layers - 2

    def __iter__(self) -> Iterator[Operator]:
        block: list[Operator] = []
        updates = iter([op for op in self.of_two if op.phase == "optimizer"])
        for op in self.of_three:
            if block and (op.where != _REPEATED or op.phase != block[0].phase):
                for _ in range(self.times):
                    yield from block
                block = []
            if op.phase == "optimizer":
                yield self._of_all(next(updates, op), op)
            elif op.where == _REPEATED:
                block.append(op)
            else:
                yield op

    def _of_all(self, of_two: Operator, of_three: Operator) -> Operator:
        if of_two.name != of_three.name:
            return of_three
        grown = {
            name: getattr(of_two, name) + self.times * (getattr(of_three, name) - getattr(of_two, name))
            for name in ("read_bytes", "written_bytes", "flops", "calls")
        }
        return msgspec.structs.replace(of_three, **grown)
