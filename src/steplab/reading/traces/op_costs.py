"""Shapes, types, FLOPs and bytes of a trace's operators."""

import numpy as np

from steplab.costs import operators
from steplab.costs.operators import DTYPES_OF_TRACES, ITEM_BYTES, Cost, Tensor
from steplab.reading.traces.trace import NONE, UNTYPED, Column, Inputs, Trace


def describe(inputs: Inputs) -> str:
    """Tensor inputs as text, such as 'bf16[2048, 768] bf16[768, 3072]'."""
    return " ".join(
        f"{DTYPES_OF_TRACES.get(dtype, dtype)}[{', '.join(map(str, shape))}]" for shape, dtype in _tensors(inputs)
    )


def computed_in(inputs: Inputs) -> str:
    """Narrowest floating-point type of multi-dimensional inputs, which a mixed product computes in."""
    found = [DTYPES_OF_TRACES.get(dtype) for _, dtype in _tensors(inputs)]
    return next((name for name in reversed(operators.FLOATING_BYTES) if name in found), "")


class OpCosts:
    """FLOPs and bytes of operators in a trace. Operators whose inner operators compute have no cost: aten::linear calls
    aten::mm, which counts.
    """

    def __init__(self, trace: Trace, parent: Column) -> None:
        self._trace = trace
        self._by_kind: dict[tuple[int, int], Cost | None] = {}
        kinds = zip(trace.ops.name.tolist(), trace.ops.inputs.tolist(), strict=True)
        own = [cost.flops or 0.0 if (cost := self._cost(name, inputs)) else NONE for name, inputs in kinds]
        inner = np.full(len(parent), float(NONE))  # FLOPs of inner operators; NONE without any cost
        for op in range(len(parent) - 1, -1, -1):  # children before their parents
            done = max(own[op], inner[op])
            if parent[op] != NONE and done != NONE:
                inner[parent[op]] = max(inner[parent[op]], 0.0) + done
        self._delegates = (inner != NONE) & (inner >= np.array(own, dtype=np.float64))

    def of(self, calls: Column) -> Cost | None:
        """Total cost of calls of one operator with one input shape; None if unknown."""
        working = calls[~self._delegates[calls]]
        cost = self._cost(int(self._trace.ops.name[calls[0]]), int(self._trace.ops.inputs[calls[0]]))
        if cost is None or not len(working):
            return None
        flops = None if cost.flops is None else len(working) * cost.flops
        return Cost(flops=flops, moved_bytes=len(working) * cost.moved_bytes)

    def _cost(self, name: int, inputs: int) -> Cost | None:
        if inputs == NONE:
            return None
        kind = (name, inputs)
        if kind not in self._by_kind:
            tensors = [
                Tensor(shape=shape, item_bytes=ITEM_BYTES.get(dtype, 0))
                for shape, dtype in _tensors(self._trace.inputs[inputs])
            ]
            called = self._trace.names[name]
            self._by_kind[kind] = (
                operators.fused_attention_cost(called, tensors, self._trace.inputs[inputs].scalars)
                if called in operators.FUSED_ATTENTION
                else operators.operator_cost(called, tensors)
            )
        return self._by_kind[kind]


def _tensors(inputs: Inputs) -> list[tuple[tuple[int, ...], str]]:
    """Shape and type of each tensor input, except numbers passed as tensors, which have shape ()."""
    return [
        (shape, dtype)
        for shape, dtype in zip(inputs.shapes, inputs.dtypes, strict=False)
        if (dtype in ITEM_BYTES or dtype == UNTYPED) and shape
    ]
