"""CUDA's caching allocator in plain Python, from its source, with its history. One device; addresses come from a
counter; device allocations never fail.
"""

from dataclasses import dataclass
from typing import Any

KIB, MIB = 1024, 1024**2
SMALL_BUFFER, LARGE_BUFFER, LEAST_LARGE, ROUND_LARGE = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    address: int
    size: int
    stream: int
    small: bool
    previous: "Block | None" = None
    next: "Block | None" = None
    requested: int = 0
    allocated: bool = False
    waiting: bool = False
    frames: tuple[Any, ...] = ()


class CachingAllocator:
    def __init__(self, max_split_bytes: int | None = None, *, gap_between_segments: int = 0) -> None:
        self.max_split_bytes, self.gap = max_split_bytes, gap_between_segments
        self.events: list[dict[str, Any]] = []
        self.allocated_bytes: list[int] = []
        self.reserved_bytes: list[int] = []
        self.current_bytes = self.current_reserved_bytes = 0
        self.segments: list[Block] = []
        self.blocks: dict[int, Block] = {}
        self.waiting: list[Block] = []
        self._next_address = 0x7F0000000000

    def record(self, action: str, address: int, size: int, stream: int, frames: Any) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": 1_700_000_000_000_000 + 10 * len(self.events),
                "compile_context": "",
                "user_metadata": "",
                "frames": list(frames),
            }
        )
        self.allocated_bytes.append(self.current_bytes)
        self.reserved_bytes.append(self.current_reserved_bytes)

    def malloc(self, requested: int, stream: int = 0, frames: tuple[Any, ...] = ()) -> Block:
        self.process_events()
        size = max(512, -(-requested // 512) * 512)
        small = size <= MIB
        block = self._find(size, stream, small) or self._more(size, stream, small, frames)
        remaining = block.size - size
        splits = remaining >= 512 if small else remaining > MIB
        if splits and (small or self.max_split_bytes is None or size < self.max_split_bytes):
            rest = Block(block.address + size, remaining, stream, small, block, block.next)
            if block.next:
                block.next.previous = rest
            block.next, block.size = rest, size
        block.allocated, block.requested, block.frames = True, requested, frames
        self.blocks[block.address] = block
        self.current_bytes += block.size
        self.record("alloc", block.address, requested, stream, frames)
        return block

    def free(self, block: Block, *, other_stream: bool = False) -> None:
        """`other_stream`: used there too, so reusable only after process_events."""
        block.allocated = False
        self.current_bytes -= block.size
        self.record("free_requested", block.address, block.requested, block.stream, block.frames)
        block.waiting = other_stream
        if other_stream:
            self.waiting.append(block)
        else:
            self._complete(block)

    def process_events(self, most: int = 1) -> None:
        for block in self.waiting[:most]:
            block.waiting = False
            self._complete(block)
        del self.waiting[:most]

    def empty_cache(self) -> None:
        self.process_events(len(self.waiting))
        for head in list(self.segments):
            if not head.allocated and head.next is None:
                self.segments.remove(head)
                self.current_reserved_bytes -= head.size
                self.record("segment_free", head.address, head.size, head.stream, ())

    def snapshot(self) -> dict[str, Any]:
        settings = {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1 if self.max_split_bytes is None else self.max_split_bytes,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 0, "2": 0},
        }
        segments = [self._told(head) for head in self.segments]
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": settings}

    def _told(self, head: Block) -> dict[str, Any]:
        blocks = list(_chain(head))
        return {
            "device": 0,
            "address": head.address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": sum(block.size for block in blocks if block.allocated),
            "stream": head.stream,
            "segment_type": "small" if head.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "active_allocated"
                    if block.allocated
                    else "active_pending_free"
                    if block.waiting
                    else "inactive",
                    "frames": list(block.frames),
                }
                for block in blocks
            ],
        }

    def _find(self, size: int, stream: int, small: bool) -> Block | None:
        free = [
            block
            for head in self.segments
            for block in _chain(head)
            if not block.allocated and not block.waiting and block.stream == stream and block.small == small
        ]
        fitting = sorted((block.size, block.address) for block in free if block.size >= size)
        if not fitting:
            return None
        found_size, address = fitting[0]
        most = self.max_split_bytes
        if most is not None and (found_size >= most if size < most else found_size >= size + LARGE_BUFFER):
            return None
        return next(block for block in free if block.address == address)

    def _more(self, size: int, stream: int, small: bool, frames: Any) -> Block:
        taken = SMALL_BUFFER if small else LARGE_BUFFER if size < LEAST_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        block = Block(self._next_address, taken, stream, small)
        self._next_address += taken + self.gap
        self.segments.append(block)
        self.current_reserved_bytes += taken
        self.record("segment_alloc", block.address, taken, stream, frames)
        return block

    def _complete(self, block: Block) -> None:
        self.record("free_completed", block.address, block.requested, block.stream, block.frames)
        block.requested = 0
        for other in (block.previous, block.next):
            if other is not None and not other.allocated and not other.waiting:
                self._merge(*((other, block) if other is block.previous else (block, other)))
                block = other if other is block.previous else block

    def _merge(self, left: Block, right: Block) -> None:
        left.size += right.size
        left.next = right.next
        if right.next:
            right.next.previous = left


def _chain(head: Block | None) -> Any:
    while head:
        yield head
        head = head.next
