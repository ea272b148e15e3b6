"""Follows the memory of fake tensors: what it holds, and its lifetime, which ends with the last tensor in it."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from steplab.plan.dry_run.events import Allocations, Listener
from steplab.plan.dry_run.sizes import Count
from steplab.plan.dry_run.tensors import Piece

_FORMATS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def format_of(tensor: Tensor) -> str:
    """Number format in steplab's spelling: bf16; others in torch's: int64."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _FORMATS.get(name, name)


def formula_of(tensor: Tensor) -> str:
    """Bytes of a tensor as the product of its sizes: '2 x 4 x 512 x 768'."""
    return " x ".join(str(each) for each in (tensor.element_size(), *tensor.shape))


class Storages(Allocations):
    def __init__(self, listen: Listener, workspace: Count) -> None:
        super().__init__(listen, workspace)
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage())

    def piece_of(self, tensor: Tensor) -> Piece | None:
        number = self.number(tensor)
        return None if number is None else self._alive.get(number)

    def add(self, tensor: Tensor, what: str, where: str) -> None:
        storage = tensor.untyped_storage()
        number = self.make(what, formula_of(tensor), storage.nbytes(), where)
        self._numbers[storage] = number
        weakref.finalize(storage, self.free, number).atexit = False

    def call(self, tensors: Iterable[Tensor], category: str, what: str | None = None) -> None:
        """Put the tensors' memory in a category, under another description unless it is None."""
        for tensor in tensors:
            if piece := self.piece_of(tensor):
                piece.category, piece.what = category, what or piece.what
