"""Owners of memory at every moment of a dry run, from its events."""

from dataclasses import dataclass

from steplab.plan.dry_run.allocator import Block, CachingAllocator
from steplab.plan.dry_run.events import Allocated, Began, Event, Freed
from steplab.plan.dry_run.tensors import Piece


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
        self._log: list[tuple[Piece, bool]] = []
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, ""

    def listen(self, event: Event) -> None:
        if isinstance(event, Allocated):
            self._allocate(event.piece)
        elif isinstance(event, Freed):
            _, block = self._alive.pop(id(event.piece))
            self._allocator.free(block)
            self._log.append((event.piece, False))
        elif isinstance(event, Began):
            self._phase = event.phase
            before = self.phase_peaks.get(event.phase, 0)  # a phase may begin several times in a step
            self.phase_peaks[event.phase] = max(before, self._allocator.allocated_bytes)

    def _allocate(self, piece: Piece) -> None:
        self._alive[id(piece)] = piece, self._allocator.allocate(piece.num_bytes)
        self._log.append((piece, True))
        allocated = self._allocator.allocated_bytes
        self.phase_peaks[self._phase] = max(self.phase_peaks[self._phase], allocated)
        if allocated > self._peak_bytes:
            self._peak_at, self._peak_bytes, self._peak_phase = len(self._log), allocated, self._phase

    def watch(self) -> None:
        self._at_start = [piece for piece, _ in self._alive.values()]
        self._log = []
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, self._phase
        self.phase_peaks = {}

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

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
