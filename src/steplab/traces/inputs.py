"""The inputs of operators, as Kineto writes them."""

from collections.abc import Iterable

import msgspec

from steplab.traces.trace import NONE, Inputs, Numbering

_NO_TENSOR = ("", "Scalar", "ScalarList")
_TENSOR_LIST = "TensorList"
_ABSENT = b"[],[]"


class InputNumbers(dict[bytes, int]):
    """Maps the text of an event's `Input Dims`, `Input type` and, for some, `Concrete Inputs`, separated by commas, to
    its number in Trace.inputs.

    A step calls the same operators with the same inputs many times; each text is parsed once.
    """

    def __init__(self, numbering: Numbering[Inputs]) -> None:
        super().__init__()
        self._numbering = numbering
        self[_ABSENT] = NONE

    def __missing__(self, text: bytes) -> int:
        try:
            dims, types, *concrete = msgspec.json.decode(b"[" + text + b"]", type=list[list[object]])
        except (msgspec.DecodeError, ValueError, RecursionError):
            number = NONE
        else:
            number = self._numbering[_inputs(dims, types, concrete[0] if concrete else [])]
        self[text] = number
        return number


def _inputs(dims: list[object], types: list[object], concrete: list[object]) -> Inputs:
    shapes, dtypes = list[tuple[int, ...]](), list[str]()
    for position, dim in enumerate(dims):
        kind = types[position] if position < len(types) else ""
        for shape, dtype in _entries(dim, kind if isinstance(kind, str) else ""):
            shapes.append(shape)
            dtypes.append(dtype)
    return Inputs(shapes=tuple(shapes), dtypes=tuple(dtypes), scalars=tuple(map(_text, concrete)))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _entries(dim: object, kind: str) -> Iterable[tuple[tuple[int, ...], str]]:
    if not isinstance(dim, list):
        return [((), "")]
    if dim and all(isinstance(tensor, list) for tensor in dim):
        return [(_shape(tensor), _TENSOR_LIST) for tensor in dim]
    return [(_shape(dim), "" if kind in _NO_TENSOR else kind)]


def _shape(dim: list[object]) -> tuple[int, ...]:
    return tuple(size for size in dim if isinstance(size, int))
