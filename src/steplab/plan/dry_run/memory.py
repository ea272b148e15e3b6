"""Who holds how many bytes, at every moment of a dry run.

A tensor's memory is given back when nothing refers to the tensor any more, as torch's is: CPython counts references,
and a storage that loses its last one says so. The dry run is written as the model is, so that local variables,
arguments and what autograd keeps live as long here as there.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab.plan.dry_run.allocator import Block, CachingAllocator
from steplab.plan.dry_run.sizes import Count, Dtype

if TYPE_CHECKING:
    from steplab.plan.dry_run.tape import Slot


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
    block: Block
    """What the allocator set aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment of most bytes."""

    num_bytes: int
    """Allocated, rounding included."""
    phase: str
    """forward, backward or optimizer."""
    piece: Piece
    """The allocation that reached it."""
    pieces: tuple[Piece, ...]
    """All that was allocated then."""


class Ledger:
    """Every allocation of a device."""

    def __init__(self) -> None:
        self.phase = ""
        """What part of the step is under way; see `begin`."""
        self.where = ""
        """What part of the model is under way."""
        self.phase_peaks: dict[str, int] = {}
        """Most bytes allocated within each phase since `watch`."""
        self._allocator = CachingAllocator()
        self._alive: dict[int, Piece] = {}
        self._at_start: list[Piece] = []
        self._log: list[tuple[Piece, bool]] = []
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, ""

    def allocate(self, count: Count, dtype: Dtype, what: str, category: str) -> "Storage":
        """Memory for so many elements."""
        num_bytes = count.value * dtype.num_bytes
        piece = Piece(
            what=what,
            formula=count.formula(dtype),
            num_bytes=num_bytes,
            category=category,
            where=self.where,
            block=self._allocator.allocate(num_bytes),
        )
        self._alive[id(piece)] = piece
        self._log.append((piece, True))
        allocated = self._allocator.allocated_bytes
        self.phase_peaks[self.phase] = max(self.phase_peaks[self.phase], allocated)
        if allocated > self._peak_bytes:
            self._peak_at, self._peak_bytes, self._peak_phase = len(self._log), allocated, self.phase
        return Storage(self, piece)

    def free(self, piece: Piece) -> None:
        """Give a piece back."""
        self._allocator.free(piece.block)
        del self._alive[id(piece)]
        self._log.append((piece, False))

    def begin(self, phase: str) -> None:
        """A phase of the step begins."""
        self.phase = phase
        self.phase_peaks[phase] = self._allocator.allocated_bytes

    def watch(self) -> None:
        """Look for the peak from here on."""
        self._at_start = list(self._alive.values())
        self._log = []
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, self.phase
        self.phase_peaks = {}

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds from the device, handed out or not."""
        return self._allocator.reserved_bytes

    def position(self) -> int:
        """Now, for `made_since`."""
        return len(self._log)

    def made_since(self, position: int) -> list[Piece]:
        """What was allocated since then and is there still."""
        return [piece for piece, made in self._log[position:] if made and id(piece) in self._alive]

    def peak(self) -> Peak:
        """The highest moment since `watch`."""
        alive = {id(piece): piece for piece in self._at_start}
        for piece, made in self._log[: self._peak_at]:
            if made:
                alive[id(piece)] = piece
            else:
                del alive[id(piece)]
        reached = self._log[self._peak_at - 1][0]
        return Peak(num_bytes=self._peak_bytes, phase=self._peak_phase, piece=reached, pieces=tuple(alive.values()))


class Storage:
    """Memory of one or more tensors, theirs until the last is gone."""

    __slots__ = ("_ledger", "piece")

    def __init__(self, ledger: Ledger, piece: Piece) -> None:
        self._ledger, self.piece = ledger, piece

    def __del__(self) -> None:
        self._ledger.free(self.piece)


class Tensor:
    """A size, a number format, and the memory behind them."""

    __slots__ = ("count", "dtype", "heads_together", "is_view", "slot", "storage")

    def __init__(self, count: Count, dtype: Dtype, storage: Storage) -> None:
        self.count, self.dtype, self.storage = count, dtype, storage
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
