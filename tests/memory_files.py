"""The memory recorder's files, read simply and without steplab's reader."""

import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from steplab.records.memory_marks import Marks


@dataclass
class Block:
    number: int
    address: int
    size: int
    frames: list[dict[str, Any]]
    released_at: float = float("inf")
    category: str = ""

    def alive(self, position: int) -> bool:
        return self.number <= position <= self.released_at


class WatchedFiles:
    def __init__(self, snapshot: Path, marks: Path) -> None:
        self.marks = msgspec.json.decode(marks.read_bytes(), type=Marks)
        content = pickle.loads(snapshot.read_bytes())
        (self.trace,) = content["device_traces"]
        ended = {block["address"]: block["size"] for segment in content["segments"] for block in segment["blocks"]}
        old, at = {}, {}
        for event in self.trace:  # blocks that are released, or there at the end, without having been allocated
            if event["action"] == "alloc":
                at[event["addr"]] = event["size"]
            elif at.pop(event["addr"], None) is None:
                old[event["addr"]] = event["size"]
        old |= {address: size for address, size in ended.items() if address not in at}
        self.blocks = [Block(0, address, size, []) for address, size in old.items()]
        self._replay()
        alive = {block.address: block.size for block in self.blocks if block.released_at == float("inf")}
        assert alive == ended, "the segments are what the events leave"
        for owner in self.marks.owned:
            (block,) = [b for b in self.blocks if b.address == owner.address and b.alive(owner.position)][-1:]
            assert block.category in ("", owner.category)
            block.category = owner.category

    def _replay(self) -> None:
        at = {block.address: block for block in self.blocks}
        number = 0
        for event in self.trace:
            if event["action"] == "alloc":
                assert event["addr"] not in at, "two blocks at one address"
                number += 1
                at[event["addr"]] = Block(number, event["addr"], event["size"], event["frames"])
                self.blocks.append(at[event["addr"]])
            else:
                block = at.pop(event["addr"])
                assert (event["action"], event["size"]) == ("free_completed", block.size)
                block.released_at = number

    @property
    def num_allocations(self) -> int:
        return sum(event["action"] == "alloc" for event in self.trace)

    def sizes(self) -> list[int]:
        return [event["size"] * (1 if event["action"] == "alloc" else -1) for event in self.trace]

    def owned(self) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for block in self.blocks:
            sums[block.category] += block.size
        return {name: size for name, size in sums.items() if name}

    def peak(self) -> int:
        total = sum(block.size for block in self.blocks if block.number == 0)
        highest = total
        for size in self.sizes():
            total += size
            highest = max(highest, total)
        return highest

    def end_of(self, phase: str) -> int:
        (found,) = [marked for marked in self.marks.phases if marked.name == phase]
        return found.end

    def alive(self, position: int, category: str | None = None) -> list[Block]:
        found = [block for block in self.blocks if block.number <= position < block.released_at]
        return found if category is None else [block for block in found if block.category == category]
