"""Tensors of a dry run: a size, a number format and an allocation.

CPython counts references, so a storage frees its memory with its last tensor, as in torch. The dry run mirrors the
model's code, so local variables, arguments and saved tensors live as long.
"""

from collections.abc import Callable
from dataclasses import dataclass

from steplab.plan.dry_run.sizes import Count, Dtype


@dataclass(kw_only=True, slots=True, eq=False)
class Piece:
    what: str
    formula: str
    num_bytes: int
    category: str
    """As in MEMORY_CATEGORIES; 'temporaries' until the tensor outlives the pass that made it."""
    where: str
    """Part of the model that ran: 'block 3'; '' outside of the blocks."""


class Storage:
    """Memory of one or more tensors, freed with the last one."""

    __slots__ = ("_free", "number", "piece")

    def __init__(self, piece: Piece, number: int, free: Callable[[int], None]) -> None:
        self.piece, self.number, self._free = piece, number, free

    def __del__(self) -> None:
        self._free(self.number)


class Tensor:
    __slots__ = ("count", "dtype", "heads_together", "is_view", "num_bytes", "slot", "start", "storage")

    def __init__(self, count: Count, dtype: Dtype, storage: Storage, start: int = 0) -> None:
        """start: offset in its memory, in bytes; interleaved parts count as consecutive."""
        self.count, self.dtype, self.storage, self.start = count, dtype, storage, start
        self.num_bytes = count.value * dtype.num_bytes
        self.slot: Slot | None = None
        self.is_view = False
        """For a gradient: True if torch sees it as a view of another tensor, and so does not add to it in place."""
        self.heads_together = False
        """True if [B, h, T, d / h] has the memory layout of [B, T, d]."""

    @property
    def what(self) -> str:
        return self.storage.piece.what

    def parts(self, *counts: Count) -> "tuple[Tensor, ...]":
        found, start = [], self.start
        for count in counts:
            found.append(Tensor(count, self.dtype, self.storage, start))
            start += found[-1].num_bytes
        return tuple(found)


class Slot:
    """Accumulates the gradient of a tensor made by a node, or of a parameter, which keeps it."""

    __slots__ = ("dtype", "gradient", "is_leaf", "num_to_come", "num_uses", "of_pass")

    def __init__(self, dtype: Dtype, is_leaf: bool = False, num_uses: int = 1) -> None:
        self.dtype, self.is_leaf = dtype, is_leaf
        self.gradient: Tensor | None = None
        self.num_uses = self.num_to_come = num_uses
        """For a parameter: number of operators of a forward pass that read it, and of gradients still to come in the
        current backward pass. A head tied to the embedding makes it two."""
        self.of_pass = Slot(dtype) if num_uses > 1 else None

    def take(self) -> Tensor:
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        return gradient
