"""Follows the memory of fake tensors: its owner, and its lifetime up to the last tensor in it."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from steplab.plan.dry_run.events import Allocated, Freed, Listener
from steplab.plan.dry_run.tensors import Piece

_FORMATS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def format_of(tensor: Tensor) -> str:
    """Number format in steplab's spelling: bf16; others in torch's: int64."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _FORMATS.get(name, name)


def formula_of(tensor: Tensor) -> str:
    """Bytes of a tensor as the product of its sizes: '2 x 4 x 512 x 768'."""
    return " x ".join(str(each) for each in (tensor.element_size(), *tensor.shape))


class Storages:
    def __init__(self, listen: Listener) -> None:
        self._listen = listen
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._alive: dict[int, Piece] = {}
        self._made = 0

    def number(self, tensor: Tensor) -> int | None:
        found: int | None = self._numbers.get(tensor.untyped_storage())
        return found

    def piece(self, tensor: Tensor) -> Piece | None:
        number = self.number(tensor)
        return None if number is None else self._alive.get(number)

    def add(self, tensor: Tensor, what: str, where: str) -> None:
        storage = tensor.untyped_storage()
        number = self.make(what, formula_of(tensor), storage.nbytes(), where)
        self._numbers[storage] = number
        weakref.finalize(storage, self.free, number).atexit = False

    def make(self, what: str, formula: str, num_bytes: int, where: str, category: str = "temporaries") -> int:
        """Report memory without a tensor, such as a workspace; its number is for `free`."""
        piece = Piece(what=what, formula=formula, num_bytes=num_bytes, category=category, where=where)
        self._made += 1
        self._alive[self._made] = piece
        self._listen(Allocated(piece))
        return self._made

    def free(self, number: int) -> None:
        self._listen(Freed(self._alive.pop(number)))

    def call(self, tensors: Iterable[Tensor], category: str, what: str | None = None) -> None:
        """Put the tensors' memory in a category, under another description unless it is None."""
        for tensor in tensors:
            if piece := self.piece(tensor):
                piece.category, piece.what = category, what or piece.what

    def call_rest(self, category: str) -> None:
        for piece in self._alive.values():
            if piece.category == "temporaries":
                piece.category = category
