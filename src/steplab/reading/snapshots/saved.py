"""Tensors that autograd saved for backward, and bytes saved and output by each block."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from steplab.reading.snapshots.history import NONE, Codes
from steplab.reading.snapshots.replay import Lifetimes
from steplab.reading.snapshots.timeline import Residents
from steplab.records.memory_marks import Marks, Saved
from steplab.records.memory_profile import MEASURED_CATEGORIES, BlockMemory, LeftOut, SavedTensors, tensor_bytes
from steplab.records.module_names import without_numbers

MOST_GROUPS = 100

_MOST_BLOCKS = 10
_TOLD_APART = ("parameters", "autocast_copies", "inputs")


class SavedMemory:
    """Tensors saved for backward with their categories, and the memory not already held by an earlier one."""

    def __init__(self, marks: Marks, lifetimes: Lifetimes, codes: Codes, residents: Residents) -> None:
        self._marks, self._lifetimes = marks, lifetimes
        self._residents = residents
        pieces = residents.find([s.address for s in marks.saved], [s.position for s in marks.saved]).tolist()
        self._rows = list(self._judged(pieces, codes))

    def _judged(self, pieces: Sequence[int], codes: Codes) -> Iterator[tuple[Saved, str, int]]:
        seen = set[tuple[int, int]]()
        for saved, piece in zip(self._marks.saved, pieces, strict=True):
            category = MEASURED_CATEGORIES[codes[piece]] if piece != NONE else ""
            category = category if category in _TOLD_APART else "activations"
            storage = (piece, 0) if piece != NONE else (NONE, saved.address)
            counts = category != "parameters" and storage not in seen
            seen.add(storage)
            yield saved, category, self._asked_bytes(saved, piece) if counts else 0

    def _asked_bytes(self, saved: Saved, piece: int) -> int:
        """Requested bytes of a storage, as categories count it; without a lifetime, the marks' size."""
        return saved.storage_bytes if piece == NONE else int(self._lifetimes.requested_bytes[piece])

    def groups(self) -> tuple[tuple[SavedTensors, ...], LeftOut | None]:
        sums = defaultdict[tuple[str, str, tuple[int, ...], str, str], list[int]](list)
        for saved, category, stored_bytes in self._rows:
            alike = (without_numbers(saved.module), saved.op, tuple(saved.shape), saved.dtype, category)
            sums[alike].append(stored_bytes)
        found = [
            SavedTensors(
                module=module,
                op=op,
                shape=shape,
                dtype=dtype,
                count=len(stored),
                stored_bytes=sum(stored),
                category=category,
            )
            for (module, op, shape, dtype, category), stored in sums.items()
        ]
        found.sort(key=lambda group: -group.stored_bytes)
        beyond = [group.stored_bytes for group in found[MOST_GROUPS:]]
        return tuple(found[:MOST_GROUPS]), _left_out(beyond)

    def blocks(self) -> tuple[tuple[BlockMemory, ...], LeftOut | None]:
        emitted = self._gradient_bytes()
        found = dict[tuple[object, ...], BlockMemory]()
        for module, (shape, dtype) in self._marks.block_inputs.items():
            inside = f"{module}."
            kept = sum(
                stored_bytes
                for saved, category, stored_bytes in self._rows
                if category == "activations" and (saved.module == module or saved.module.startswith(inside))
            )
            block = BlockMemory(
                module=module,
                saved_bytes=kept,
                gradient_bytes=sum(n for name, n in emitted.items() if name.startswith(inside)) if emitted else None,
                input_bytes=tensor_bytes(shape, dtype),
                input_shape=tuple(shape),
                input_dtype=dtype,
            )
            looks = (kept, block.gradient_bytes, block.input_shape, dtype)
            found.setdefault(looks, block)
        kinds = tuple(found.values())
        return kinds[:_MOST_BLOCKS], _left_out([block.saved_bytes for block in kinds[_MOST_BLOCKS:]])

    def _gradient_bytes(self) -> dict[str, int]:
        owned = [owner for owner in self._marks.owned if owner.category == "gradients" and owner.name]
        pieces = self._residents.find([o.address for o in owned], [o.position for o in owned]).tolist()
        return {
            owner.name: int(self._lifetimes.requested_bytes[piece])
            for owner, piece in zip(owned, pieces, strict=True)
            if owner.name and piece != NONE
        }


def _left_out(sizes: Sequence[int]) -> LeftOut | None:
    return LeftOut(count=len(sizes), num_bytes=sum(sizes)) if sizes else None
