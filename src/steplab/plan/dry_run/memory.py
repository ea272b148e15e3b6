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
        self._began: list[tuple[int, str]] = []
        """Phases, with the length of the log at their beginning."""
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, ""

    def listen(self, event: Event) -> None:
        if isinstance(event, Allocated):
            self._allocate(event.piece)
        elif isinstance(event, Freed):
            self._free(event.piece)
        elif isinstance(event, Began):
            self._begin(event.phase)

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._began.append((len(self._log), phase))
        before = self.phase_peaks.get(phase, 0)  # a phase may begin several times in a step
        self.phase_peaks[phase] = max(before, self._allocator.allocated_bytes)

    def _free(self, piece: Piece) -> None:
        _, block = self._alive.pop(id(piece))
        self._allocator.free(block)
        self._log.append((piece, False))

    def _allocate(self, piece: Piece) -> None:
        self._alive[id(piece)] = piece, self._allocator.allocate(piece.num_bytes)
        self._log.append((piece, True))
        allocated = self._allocator.allocated_bytes
        self.phase_peaks[self._phase] = max(self.phase_peaks[self._phase], allocated)
        if allocated > self._peak_bytes:
            self._peak_at, self._peak_bytes, self._peak_phase = len(self._log), allocated, self._phase

    def watch(self) -> None:
        self._at_start = [piece for piece, _ in self._alive.values()]
        self._log, self._began = [], []
        self._peak_at, self._peak_bytes, self._peak_phase = 0, 0, self._phase
        self.phase_peaks = {}

    def repeat(self) -> bool:
        """Watch the step that was watched once more, on the allocator it left; False if it left other tensors."""
        if {id(piece) for piece in self._at_start} != self._alive.keys():
            return False
        log, began = self._log, self._began
        self.watch()
        for (start, phase), end in zip(began, [*(start for start, _ in began[1:]), len(log)], strict=True):
            self._begin(phase)
            for piece, made in log[start:end]:
                if made:
                    self._allocate(piece)
                else:
                    self._free(piece)
        return True

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
