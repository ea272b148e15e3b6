"""Shapes, types, FLOPs and bytes of the operators of a trace."""

from steplab.costs.operators import ITEM_BYTES, Cost, Tensor, operator_cost
from steplab.traces.trace import Inputs

_SHORT = {
    "float": "fp32",
    "double": "fp64",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "long int": "int64",
    "int": "int32",
    "bool": "bool",
    "c10::Float8_e4m3fn": "fp8_e4m3",
    "c10::Float8_e5m2": "fp8_e5m2",
}
_FLOATS = ("fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")


def describe(inputs: Inputs) -> str:
    """The tensors among the inputs: 'bf16[2048, 768] bf16[768, 3072]'."""
    return " ".join(
        f"{_SHORT.get(dtype, dtype)}[{', '.join(map(str, shape))}]" for shape, dtype in _tensors(inputs) if shape
    )


def computed_in(inputs: Inputs) -> str:
    """The narrowest floating-point type of more than one dimension's tensors: what a mixed product runs in."""
    found = [_SHORT.get(dtype, dtype) for _, dtype in _tensors(inputs)]
    return next((name for name in reversed(_FLOATS) if name in found), "")


def cost(name: str, inputs: Inputs) -> Cost | None:
    """Cost of one call; None where no rule knows the operator or the trace gave no shapes."""
    return operator_cost(name, [Tensor(shape=shape, item_bytes=ITEM_BYTES[dtype]) for shape, dtype in _tensors(inputs)])


def _tensors(inputs: Inputs) -> list[tuple[tuple[int, ...], str]]:
    """Shape and type of each input that is a tensor. A number that torch passes as one has shape () and stays out."""
    return [
        (shape, dtype)
        for shape, dtype in zip(inputs.shapes, inputs.dtypes, strict=False)
        if dtype in ITEM_BYTES and shape
    ]
