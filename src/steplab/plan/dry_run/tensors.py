"""Tensors of a dry run: a size, a number format, and memory that is given back when the last of them is gone.

A tensor's memory is freed when nothing refers to the tensor any more, as torch's is: CPython counts references, and a
storage that loses its last one says so. The dry run is written as the model is, so that local variables, arguments and
what autograd saves live as long here as there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from steplab.plan.dry_run.sizes import Count, Dtype


@dataclass(kw_only=True, slots=True, eq=False)
class Piece:
    """One allocation."""

    what: str
    """Whose it is, in words."""
    formula: str
    """Its bytes in symbols."""
    num_bytes: int
    """What was asked for."""
    category: str
    """As in MEMORY_CATEGORIES; temporaries until the pass that made it is over and it is still there."""
    where: str
    """What was under way: 'block 3'; '' outside of the blocks."""


class Storage:
    """Memory of one or more tensors, freed when the last is gone."""

    __slots__ = ("_free", "number", "piece")

    def __init__(self, piece: Piece, number: int, free: Callable[[Piece], None]) -> None:
        """number: which allocation of the machine it is."""
        self.piece, self.number, self._free = piece, number, free

    def __del__(self) -> None:
        self._free(self.piece)


class Tensor:
    """A size, a number format, and the memory behind them."""

    __slots__ = ("count", "dtype", "heads_together", "is_view", "num_bytes", "slot", "start", "storage")

    def __init__(self, count: Count, dtype: Dtype, storage: Storage, start: int = 0) -> None:
        """start: bytes of the memory that belong to other parts of it; of interleaved parts, as if one lay after the
        other."""
        self.count, self.dtype, self.storage, self.start = count, dtype, storage, start
        self.num_bytes = count.value * dtype.num_bytes
        """Bytes of its elements."""
        self.slot: Slot | None = None
        """Where its gradient is gathered; None: it has none."""
        self.is_view = False
        """For a gradient: whether torch sees it as a view of another tensor, and so does not add to it in place."""
        self.heads_together = False
        """Whether [B, h, T, d / h] lies in memory as [B, T, d] does."""

    @property
    def what(self) -> str:
        """What it is, in words."""
        return self.storage.piece.what

    def parts(self, *counts: Count) -> "tuple[Tensor, ...]":
        """Views of it that lie beside each other."""
        found, start = [], self.start
        for count in counts:
            found.append(Tensor(count, self.dtype, self.storage, start))
            start += found[-1].num_bytes
        return tuple(found)


class Slot:
    """Where the gradient of a tensor is gathered: of one made by a node, or of a parameter, which keeps it."""

    __slots__ = ("dtype", "gradient", "is_leaf", "num_to_come", "num_uses", "of_pass")

    def __init__(self, dtype: Dtype, is_leaf: bool = False, num_uses: int = 1) -> None:
        self.dtype, self.is_leaf = dtype, is_leaf
        self.gradient: Tensor | None = None
        self.num_uses = self.num_to_come = num_uses
        """How many operators of a forward pass take it, for a parameter: two, where the embedding is the head's weight
        too. And how many of their gradients have still to come in the backward pass under way."""
        self.of_pass = Slot(dtype) if num_uses > 1 else None
        """Where those are added up."""

    def take(self) -> Tensor:
        """The gradient, which the slot no longer holds."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        return gradient
