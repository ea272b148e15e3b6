"""FLOPs and bytes of one operator call, from the shapes and types of its inputs, and traffic of an optimizer step.

A multiply-add counts as two FLOPs; elementwise operators count the formula's operations. Each input is read once and
each output written once. An unlisted operator's cost is None, not zero.

Fused attention has 4 B H S K D FLOPs forward for S queries and K keys, half if causal, and 2.5 times as many backward
(Dao 2023, "FlashAttention-2", section 4.1). It moves queries, keys, values, output, and backward their gradients, once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from steplab.ops.attention.implementations import TABLE
from steplab.specs.attention import AttentionSpec

FLOATING_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes per element of the floating-point types, widest first."""
_ITEM_BYTES = FLOATING_BYTES | {"int64": 8, "int32": 4, "int16": 2, "bool": 1, "uint8": 1, "int8": 1}
DTYPES_OF_TRACES = {
    "float": "fp32",
    "double": "fp64",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "long int": "int64",
    "int": "int32",
    "short int": "int16",
    "bool": "bool",
    "unsigned char": "uint8",
    "signed char": "int8",
    "c10::Float8_e4m3fn": "fp8_e4m3",
    "c10::Float8_e5m2": "fp8_e5m2",
}
ITEM_BYTES = {name: _ITEM_BYTES[dtype] for name, dtype in DTYPES_OF_TRACES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    flops: float | None
    moved_bytes: float


Rule = Callable[[Sequence[Tensor]], Cost]


def operator_cost(name: str, tensors: Sequence[Tensor]) -> Cost | None:
    """Cost of a call of `name`, such as aten::mm; None without a rule.

    The tensors of an Inductor kernel (triton_*) include its outputs. Its bytes are their sum, and its FLOPs are
    unknown.
    """
    if name.startswith("triton_"):
        return Cost(flops=None, moved_bytes=sum(t.size_bytes for t in tensors)) if tensors else None
    rule = _RULES.get(name.removeprefix("aten::").removesuffix("_"))
    try:
        return rule(tensors) if rule and tensors else None
    except (IndexError, ValueError):  # fewer inputs, or another rank, than the rule expects
        return None


def _product(batch: int, m: int, k: int, n: int, item_bytes: int, bias_bytes: int = 0) -> Cost:
    elements = batch * (m * k + k * n + m * n)
    return Cost(flops=2 * batch * m * k * n, moved_bytes=elements * item_bytes + bias_bytes)


def _matmul(tensors: Sequence[Tensor]) -> Cost:
    a, b = tensors[:2]
    (*batch, m, k), (*same_batch, _, n) = a.shape, b.shape
    if batch != same_batch:
        raise ValueError(f"{a.shape} and {b.shape} have different batches")
    return _product(math.prod(batch), m, k, n, a.item_bytes)


def _added_matmul(tensors: Sequence[Tensor]) -> Cost:
    cost = _matmul(tensors[1:])
    return Cost(flops=cost.flops, moved_bytes=cost.moved_bytes + tensors[0].size_bytes)


def _linear(tensors: Sequence[Tensor]) -> Cost:
    x, weight = tensors[:2]
    n, k = weight.shape
    return _product(1, x.numel // k, k, n, x.item_bytes, bias_bytes=sum(bias.size_bytes for bias in tensors[2:3]))


def _pointwise(flops: int) -> Rule:
    """Rule with `flops` FLOPs per output element. The output has the broadcast shape and the widest of the inputs'
    types.
    """

    def cost(tensors: Sequence[Tensor]) -> Cost:
        sizes = [set(along) - {1} for along in zip_longest(*(t.shape[::-1] for t in tensors), fillvalue=1)]
        if any(len(different) > 1 for different in sizes):
            raise ValueError("the shapes do not broadcast")
        out = math.prod(math.prod(size) for size in sizes)
        widest = max(t.item_bytes for t in tensors)
        return Cost(flops=flops * out, moved_bytes=sum(t.size_bytes for t in tensors) + out * widest)

    return cost


def _like_first(flops: int, inputs: int = 1) -> Rule:
    """Rule with `flops` FLOPs per element of the first input. It reads `inputs` inputs; the output resembles the
    first.
    """

    def cost(tensors: Sequence[Tensor]) -> Cost:
        first = tensors[0]
        read = sum(t.size_bytes for t in tensors[:inputs])
        return Cost(flops=flops * first.numel, moved_bytes=read + first.size_bytes)

    return cost


def _reduction(tensors: Sequence[Tensor]) -> Cost:
    """One addition per element; the few bytes written cannot be derived from the inputs."""
    return Cost(flops=tensors[0].numel, moved_bytes=tensors[0].size_bytes)


def _moves(*tensors: Tensor) -> Cost:
    return Cost(flops=0, moved_bytes=sum(t.size_bytes for t in tensors))


def _embedding(tensors: Sequence[Tensor]) -> Cost:
    """One row is read and written per index."""
    weight, indices = tensors[0], tensors[1]
    rows_bytes = indices.numel * weight.shape[1] * weight.item_bytes
    return Cost(flops=0, moved_bytes=indices.size_bytes + 2 * rows_bytes)


_UNARY = "neg exp log sqrt rsqrt reciprocal abs sigmoid tanh sin cos relu pow triu tril"
_BINARY = "mul add sub rsub div maximum minimum eq ne lt le gt ge where masked_fill clamp"

_FLOPS_AN_ELEMENT = {
    # max, subtract, exp, sum, divide
    "_softmax": 5,
    "_safe_softmax": 5,
    "_log_softmax": 5,
    # multiply, sum, subtract, multiply
    "_softmax_backward_data": 4,
    "_log_softmax_backward_data": 4,
    # max, subtract, exp, sum for the loss; subtract, exp, scale for the gradient
    "cross_entropy_softmax": 7,
    # square, sum, scale, weight
    "_fused_rms_norm": 4,
    # forward's again for the input's gradient, and a product and a sum for the weight's
    "_fused_rms_norm_backward": 10,
    # the same and the sum before it; a multiply and a sum more for the stream's gradient
    "add_rms_norm": 5,
    "add_rms_norm_backward": 11,
    # each pair has four products and two sums, for queries and keys: two thirds of the elements
    "rotary_heads": 2,
    "rotary_heads_backward": 2,
    # of a gate and an up: silu and a product; sigmoid, three for its derivative, and five products
    "swiglu": 3,
    "swiglu_backward": 6,
    # two sums, subtract, scale, weight, bias
    "native_layer_norm": 7,
    "native_layer_norm_backward": 11,
    # sigmoid is negate, exp, add, divide; silu multiplies; its gradient has four more
    "silu": 5,
    "silu_backward": 9,
    "gelu": 8,
    "gelu_backward": 14,
    # weight decay 1, first moment 3, second moment 4, root, divide, add, update 3
    "_fused_adamw_": 14,
    "adamw_kernel": 14,
    "lerp": 3,
    "addcmul": 3,
    "addcdiv": 3,
    **dict.fromkeys((*_UNARY.split(), *_BINARY.split()), 1),
}
"""Operations per element of the largest tensor; an exponential or a root counts as one."""


def flops_of_elements(name: str, elements: int) -> int:
    """FLOPs of an operator other than a matmul, from its largest tensor's elements; 0 if unlisted, as for a copy."""
    stem = name.removeprefix("_foreach_")
    return elements * _FLOPS_AN_ELEMENT.get(stem, _FLOPS_AN_ELEMENT.get(stem.removesuffix("_"), 0))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _added_matmul),
    "linear": _linear,
    **{
        name: _like_first(_FLOPS_AN_ELEMENT[name])
        for name in ["_softmax", "_log_softmax", "_fused_rms_norm", "native_layer_norm", "silu", "gelu"]
    },
    # reads a gradient, and a tensor saved in forward
    **{
        f"{name}_backward": _like_first(_FLOPS_AN_ELEMENT[f"{name}_backward"], inputs=2)
        for name in ["_fused_rms_norm", "native_layer_norm", "silu", "gelu"]
    },
    **{
        f"{name}_backward_data": _like_first(_FLOPS_AN_ELEMENT[f"{name}_backward_data"], inputs=2)
        for name in ["_softmax", "_log_softmax"]
    },
    **dict.fromkeys(("sum", "mean", "amax"), _reduction),
    "copy": lambda tensors: _moves(tensors[0], tensors[1]),
    **dict.fromkeys(("fill", "zero"), lambda tensors: _moves(tensors[0])),
    "cat": lambda tensors: _moves(*tensors, *tensors),
    "embedding": _embedding,
    **{name: _pointwise(_FLOPS_AN_ELEMENT[name]) for name in (*_UNARY.split(), *_BINARY.split())},
}


UPDATE_PASSES = {"adamw_fused": 7, "adamw_foreach": 20, "adamw_loop": 20, "sgd": 3}
"""Passes of an optimizer step over a parameter's bytes. Fused AdamW reads parameter, gradient and two moments, and
writes all except the gradient.

Operator by operator, AdamW makes 20 passes: decay 2, first moment 3 (lerp), second moment 2 + 3 (mul, addcmul), root 2,
correction 2, epsilon 2, update 4 (addcdiv). A test counts them as torch runs.
"""


BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward pass as a multiple of its forward pass's."""


_FUSED = {operator.name: operator for row in TABLE for operator in row.operators}
FUSED_ATTENTION = frozenset(_FUSED)
"""Fused attention operators, with a cost that depends on the causal flag too."""
_YES, _NO = ("True", "1", "2"), ("False", "0")
"""The efficient kernel's causal flag is a number: 0 none, 1 and 2 causal, aligned to the first or to the last key."""


def fused_attention_cost(name: str, tensors: Sequence[Tensor], scalars: Sequence[str]) -> Cost | None:
    """Cost of a fused attention call; `scalars` has the text of each argument, '' for a tensor.

    None if the tensors' shapes are not an attention's. FLOPs are None if the causal flag is unknown.
    """
    known = _FUSED[name]
    try:
        q, k = tensors[known.backward : known.backward + 2]
        batch, *middle, width = q.shape
        queries, heads = middle if known.heads_last else reversed(middle)
        keys = k.shape[1 if known.heads_last else 2]
    except (ValueError, IndexError):  # fewer tensors, or of another rank
        return None
    flops = 4.0 * batch * heads * queries * keys * width * (BACKWARD_FLOPS if known.backward else 1)
    flag = scalars[known.causal] if known.causal < len(scalars) else ""
    share = 0.5 if flag in _YES else 1.0 if flag in _NO else None
    written = 3 if known.backward else 1  # as large as queries, keys and values; nothing else of them is known
    moved = sum(tensor.size_bytes for tensor in tensors) + written * q.size_bytes
    return Cost(flops=None if share is None else share * flops, moved_bytes=moved)


def attention_flops(spec: AttentionSpec) -> dict[str, float]:
    """FLOPs of an attention by pass: forward, backward, both. `spec.heads` counts query heads.

    An implementation may execute more (masked scores) or less (no recomputation).
    """
    forward = 4.0 * spec.batch * spec.heads * spec.queries * spec.num_keys * spec.dim
    if spec.causal:
        forward /= 2
    return {"forward": forward, "backward": BACKWARD_FLOPS * forward, "both": (1 + BACKWARD_FLOPS) * forward}
