"""Simulates torch's caching allocator of CUDA memory, in its default settings and on one stream.

Sizes are rounded up to 512 bytes. Requests up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments
of 20 MiB; a larger one gets its own segment, rounded up to 2 MiB. A request takes the free block that fits best, and
the rest is split off, except up to 1 MiB of a large block, which then counts as allocated.
(c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.)

`Ledger` follows the tensors alive in a dry run.
"""

import bisect
from dataclasses import dataclass

from steplab.plan.dry_run.events import Allocated, Began, Event, Freed, Operator
from steplab.plan.dry_run.sizes import rounded_up
from steplab.plan.dry_run.tensors import Piece
from steplab.units import MIB

_MIN_BLOCK = 512
_SMALL = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB
_SEGMENT_STEP = 2 * MIB


class Block:
    __slots__ = ("address", "after", "before", "in_use", "num_bytes", "small")

    def __init__(self, address: int, num_bytes: int, small: bool) -> None:
        self.address, self.num_bytes, self.small = address, num_bytes, small
        self.in_use = False
        self.before: Block | None = None
        self.after: Block | None = None


class CachingAllocator:
    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        """Size of all segments; none is returned to the GPU."""
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, num_bytes: int) -> Block:
        wanted = max(rounded_up(num_bytes, _MIN_BLOCK), _MIN_BLOCK)
        small = wanted <= _SMALL
        block = self._best_fit(wanted, small) or self._segment(wanted, small)
        rest = block.num_bytes - wanted
        if rest >= _MIN_BLOCK if small else rest > _SMALL:
            self._split(block, wanted)
        block.in_use = True
        self.allocated_bytes += block.num_bytes
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.num_bytes
        block.in_use = False
        if block.before is not None and not block.before.in_use:
            self._remove(block.before)
            block = _joined(block.before, block)
        if block.after is not None and not block.after.in_use:
            self._remove(block.after)
            block = _joined(block, block.after)
        self._add(block)

    def _best_fit(self, wanted: int, small: bool) -> Block | None:
        """Ties go to the lowest address."""
        pool = self._free[small]
        at = bisect.bisect_left(pool, (wanted,))
        return pool.pop(at)[2] if at < len(pool) else None

    def _segment(self, wanted: int, small: bool) -> Block:
        large = _LARGE_SEGMENT if wanted < _OWN_SEGMENT_FROM else rounded_up(wanted, _SEGMENT_STEP)
        size = _SMALL_SEGMENT if small else large
        block = Block(self.reserved_bytes, size, small)  # segments are contiguous
        self.reserved_bytes += size
        return block

    def _split(self, block: Block, wanted: int) -> None:
        rest = Block(block.address + wanted, block.num_bytes - wanted, block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.num_bytes = rest, wanted
        self._add(rest)

    def _add(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.num_bytes, block.address, block))

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect.bisect_left(pool, (block.num_bytes, block.address))]


def _joined(first: Block, second: Block) -> Block:
    first.num_bytes += second.num_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    num_bytes: int
    phase: str
    piece: Piece
    pieces: tuple[Piece, ...]


class Ledger:
    def __init__(self) -> None:
        self.phase_peaks: dict[str, int] = {}
        self._allocator = CachingAllocator()
        self._phase = ""
        self._alive: dict[int, tuple[Piece, Block]] = {}
        self._at_start: list[Piece] = []
        self._log: list[Began | Allocated | Freed] = []
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, ""

    def listen(self, event: Event) -> None:
        if isinstance(event, Operator):
            return
        self._log.append(event)
        if isinstance(event, Freed):
            _, block = self._alive.pop(id(event.piece))
            self._allocator.free(block)
            return
        if isinstance(event, Began):
            self._phase = event.phase
        else:
            self._alive[id(event.piece)] = event.piece, self._allocator.allocate(event.piece.num_bytes)
        allocated = self._allocator.allocated_bytes
        self.phase_peaks[self._phase] = max(self.phase_peaks.get(self._phase, 0), allocated)
        if isinstance(event, Allocated) and allocated > self._peak_bytes:
            self._peak_at, self._peak_bytes, self._peak_phase = len(self._log), allocated, self._phase

    def watch(self) -> None:
        self._at_start = [piece for piece, _ in self._alive.values()]
        self._log = []
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, self._phase
        self.phase_peaks = {}

    def repeat(self) -> bool:
        """Replay the events since `watch`, on the allocator in its present state.

        Return False, without a replay, if other tensors are alive than at `watch`, so the step cannot repeat.
        """
        if {id(piece) for piece in self._at_start} != self._alive.keys():
            return False
        log = self._log
        self.watch()
        for event in log:
            self.listen(event)
        return True

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

    def peak(self) -> Peak:
        """Peak since `watch`, with the tensors alive then."""
        alive = {id(piece): piece for piece in self._at_start}
        for event in self._log[: self._peak_at]:
            if isinstance(event, Allocated):
                alive[id(event.piece)] = reached = event.piece
            elif isinstance(event, Freed):
                del alive[id(event.piece)]
        return Peak(num_bytes=self._peak_bytes, phase=self._peak_phase, piece=reached, pieces=tuple(alive.values()))
