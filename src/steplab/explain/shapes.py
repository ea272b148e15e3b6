"""Parse tensor shapes as in records: 'bf16[2048, 768] bf16[768, 3072]'.

One diagnosis: head dimensions that kernels must pad."""

import math
import re
from dataclasses import dataclass

from steplab.costs.kernel_time import FIRST_FACTOR, Product, head_columns
from steplab.costs.operators import FLOATING_BYTES
from steplab.explain.case import Case
from steplab.ops.attention.implementations import implementation
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import OpStats, Profile
from steplab.units import format_percent, format_time

_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    dtype: str
    """Number format in specs' names (fp32, bf16, fp16)."""
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int | None:
        return self.numel * FLOATING_BYTES[self.dtype] if self.dtype in FLOATING_BYTES else None


def shapes_of(op: OpStats) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype=dtype, sizes=tuple(int(size) for size in sizes.split(",")))
        for dtype, sizes in _TENSOR.findall(op.inputs)
        if sizes.strip()
    )


def product_of(op: OpStats) -> Product | None:
    """Sizes of a matrix product from its factors [..., m, k] and [..., k, n]; None for other operators or missing
    sizes. Compiled code puts the output last."""
    first = FIRST_FACTOR.get(op.name.removeprefix("aten::"))
    factors = [] if first is None else [shape.sizes for shape in shapes_of(op)][first : first + 2]
    if len(factors) < 2 or min(map(len, factors)) < 2:
        return None
    (*batch, m, k), (*_, rows, n) = factors
    return Product(m=m, n=n, k=k, batch=math.prod(batch)) if rows == k else None


def softmax_inputs(profile: Profile) -> list[Shape]:
    return [shape for op in profile.ops if op.category == "softmax" for shape in shapes_of(op)]


ALIGNED = 8
"""Number of bf16 elements in 16 bytes, which the fastest tensor-core kernels load at once (NVIDIA, "Matrix
Multiplication Background User's Guide")."""


def head_dimension(case: Case) -> Finding | None:
    """Finding for head dimensions that fused attention pads. Without fused attention: for widths not divisible by 8,
    which tensor-core kernels cannot load whole."""
    spec, width = case.spec, _from_spec(case)
    fused = spec is not None and not implementation(spec.attention).materialises_scores
    if width is None:
        width, fused = _from_ops(case.profile), True
    if width is None:
        return None
    padded = head_columns(width)
    if width % ALIGNED == 0 and (padded == width or not fused):
        return None
    evidence = [Evidence(what="head dimension", value=width, unit="")]
    saves_s, prediction = None, "A profile of the step would show the share of attention."
    saw = f"Each attention head is {width} wide"
    if fused and padded != width:
        evidence.append(Evidence(what="computed as", value=padded, unit=""))
        saw += f", computed as {padded}: {format_percent(1 - width / padded)} of the work is on zeros."
        attention_s = case.per_step(case.profile.category_s("attention"))
        if attention_s:
            saves_s = attention_s * (1 - width / padded)
            evidence.append(Evidence(what="fused attention", value=attention_s, unit="s"))
            saw += f" Fused attention takes {format_time(attention_s)} per step."
            prediction = (
                f"The same time per FLOP without the padding: {width} of {padded}. Left out: fewer heads also need "
                "fewer exponentials. Kernels that do not pad this width gain nothing."
            )
    else:
        saw += f", no multiple of {ALIGNED}."
        prediction = "No prediction: the slowdown of kernels for such widths is not known."
    fields = _whole_heads(case, width)
    return Finding(
        kind="head_dimension",
        title=f"A head dimension of {width} does not suit the kernels",
        saw=saw,
        why=(
            "Attention kernels are compiled for a few widths, and tensor cores multiply blocks of fixed size. A head "
            "of another width is padded with zeros, which take as long to multiply as other numbers."
        ),
        change=case.change(
            fields, f"choose the number of heads so that each is {' or '.join(map(str, _good(width)))} wide"
        ),
        note="this changes the model: the number of parameters stays, the number and width of the heads do not",
        evidence=tuple(evidence),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _good(width: int) -> tuple[int, ...]:
    return tuple(sorted((64, 128), key=lambda good: abs(good - width)))


def _whole_heads(case: Case, width: int) -> dict[str, str]:
    shape = case.spec.model.shape if case.spec else None
    if shape is None:
        return {}
    for good in _good(width):
        if shape.d_model % good == 0 and shape.d_model // good % (shape.num_kv_heads or 1) == 0:
            return {"model.num_heads": str(shape.d_model // good)}
    return {}


def _from_spec(case: Case) -> int | None:
    model = case.spec.model if case.spec else None
    if model and model.shape:
        return model.shape.head_dim if model.shape.num_heads else None
    if model is None:
        return None
    hidden, heads = model.configured("hidden_size"), model.configured("num_attention_heads")
    return model.configured("head_dim") or (hidden // heads if hidden and heads and heads > 0 else None)


def _from_ops(profile: Profile) -> int | None:
    """Last size of the queries in fused attention, [batch, heads, tokens, width] or with heads and tokens exchanged."""
    for op in profile.ops:
        shapes = shapes_of(op)
        if op.category == "attention" and op.name.startswith("aten::") and shapes and len(shapes[0].sizes) == 4:
            return shapes[0].sizes[-1]
    return None
