"""Sentences about an audit of precision: what ran in which type, why, and what was lost."""

from collections.abc import Iterator, Mapping, Sequence

from steplab.records.numerics import Accumulation, Audit, Elements, LossScaling, Numerics, OperationAudit
from steplab.report.precision.figures import (
    KINDS,
    SMALLEST_EXPONENT,
    SMALLEST_NORMAL_EXPONENT,
    added,
    all_elements,
    elements_of,
    matmul_groups,
    not_finite,
    printed,
    short,
    shorts,
    title_of_sums,
)
from steplab.report.run.one_run import precision_words
from steplab.specs.step import AUTOCAST, describe
from steplab.specs.step_choices import WITH_MASTERS
from steplab.units import format_share

_LOW = ("fp16", "bf16")
COMPUTED_IN = {**AUTOCAST, "bf16_pure": "bf16"}
"""Precision -> the low type in which the step computes; the others compute in fp32."""

RULES = {
    "low_precision": "low precision",
    "fp32": "fp32",
    "promote": "widest input",
    "parts": "part by part",
    "none": "none",
    "cast": "the model's own cast",
    "off": "autocast off",
}
"""What autocast does with an operation, in words."""
_WHY = {
    "low_precision": "a product of matrices, its sums in fp32 inside",
    "promote": "needs inputs of one type: the widest of them",
    "parts": "made of operations with different rules",
    "none": "runs in the type of its inputs",
    "cast": "the model asks for this type",
    "off": "runs in the type of its inputs",
}
_FP32_BECAUSE: tuple[tuple[tuple[str, ...], Mapping[str, str]], ...] = (
    (
        ("softmax", "exp", "logsumexp"),
        {
            "fp16": "exponentials of numbers above 11 exceed fp16's range, and a row of them is summed up",
            "bf16": "exponentials are within bf16's range, but 8 significant bits lose the small ones of a sum",
        },
    ),
    (
        ("norm",),
        {
            "fp16": "means of squares over the width: squares leave fp16's range, and sums lose digits",
            "bf16": "means of squares over the width: within bf16's range, but 8 significant bits are few for sums",
        },
    ),
    (("loss", "entropy", "kl_div"), dict.fromkeys(_LOW, "logarithms, and a mean over many terms")),
    (
        ("sum", "prod", "cdist", "dist"),
        dict.fromkeys(_LOW, "adds up or multiplies many terms: the error grows with their number"),
    ),
    (
        ("pow", "rsqrt", "reciprocal", "sqrt"),
        {
            "fp16": "a power: it soon leaves fp16's range",
            "bf16": "a power: it multiplies the relative error of its input, up to 2^-8 in bf16",
        },
    ),
    (
        ("log", "acos", "asin", "tan", "sinh", "cosh", "erfinv"),
        dict.fromkeys(_LOW, "a steep function, which amplifies the rounding of its input"),
    ),
)
"""Parts of operations' names -> why they are kept in fp32 beside each low type."""


NORMS = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "group_norm": "GroupNorm",
    "batch_norm": "BatchNorm",
    "instance_norm": "InstanceNorm",
}
"""Operations that normalise, and what they are called."""
_FP32 = frozenset({"float32"})
_LARGEST_FP16 = 65504.0
_NORM_BECAUSE = {
    "fp16": "where the square of a value above 255.9 would be infinite in fp16, and each partial sum would be rounded "
    "to 11 significant bits",
    "bf16": "where each partial sum would be rounded to bf16's 8 significant bits; overflow is no reason, for bf16 has "
    "fp32's range",
}


def heading(numerics: Numerics) -> str:
    """What was audited, and where."""
    spec, environment = numerics.spec, numerics.environment
    said = describe(spec) if spec else "sums only"
    where = [environment.device.name, f"torch {environment.torch}"] if environment else []
    return " · ".join([said, *where, f"record {numerics.id}"])


def title(numerics: Numerics) -> str:
    """The precision, in words."""
    return precision_words(numerics.spec.precision) if numerics.spec else ""


def why(operation: OperationAudit, precision: str) -> str:
    """Why autocast does that in an audit of `precision`."""
    through = f"; made of {' and '.join(operation.parts)}" if operation.parts else ""
    if operation.rule != "fp32":
        return _WHY[operation.rule] + through
    names = " ".join(operation.parts) or operation.op
    reasons = (reasons for words, reasons in _FP32_BECAUSE if any(word in names for word in words))
    known = next(reasons, {}).get(AUTOCAST.get(precision, ""))
    return (known or "on autocast's list of operations for fp32") + through


def norm_answers(numerics: Numerics) -> Iterator[str]:
    """Whether to keep normalisation in fp32, as far as this audit can say: a sentence or more for each kind of norm.

    Nothing where the step computes in fp32 in any case, or has no norm.
    """
    low = COMPUTED_IN.get(numerics.spec.precision) if numerics.spec else None
    if low is None or numerics.audit is None:
        return
    for name in dict.fromkeys(use.op for use in numerics.audit.operations if use.op in NORMS):
        uses = [operation for operation in numerics.audit.operations if operation.op == name]
        yield " ".join(_norm_answer(NORMS[name], uses, low, numerics.audit, numerics.accumulations))


def _norm_answer(
    name: str, uses: Sequence[OperationAudit], low: str, audit: Audit, accumulations: Sequence[Accumulation]
) -> Iterator[str]:
    in_fp32 = all(set(use.outputs) <= _FP32 for use in uses)
    yield f"Yes, keep {name} in fp32, because it needs means over many elements, {_NORM_BECAUSE[low]}."
    if not in_fp32:
        yield f"Here it ran in {low}."
    elif any(use.rule == "fp32" for use in uses):
        yield "Here autocast does so by itself."
    elif any(use.rule == "cast" for use in uses):
        yield "Here the model itself asks for it."
    else:
        yield "Here it ran in fp32 because its inputs are fp32; autocast has no rule for it on this device."
    if sums := _sums_seen(low, accumulations):
        yield sums
    outputs = all_elements(audit, "outputs")
    if low == "fp16" and outputs and outputs.largest is not None:
        square = outputs.largest**2
        within = "within" if square <= _LARGEST_FP16 else "above"
        yield f"The largest output of a module in this step is {outputs.largest:.4g}, its square {within} fp16's range."
    norms = added(elements_of(m, "outputs") for m in audit.modules if m.leaf and "norm" in m.kind.lower())
    if norms:
        yield f"Of {norms.num_elements:,} outputs of norms here, {lost_words(norms)}."


def _sums_seen(low: str, accumulations: Sequence[Accumulation]) -> str | None:
    """What the sums of the same record came to in the low type and in fp32; None without them."""
    alike = {short(a.addend): a for a in accumulations if a.addend == a.accumulator and not a.cast}
    if low not in alike or "fp32" not in alike:
        return None
    lossy, exact = alike[low], alike["fp32"]
    return (
        f"On this machine {title_of_sums((lossy,))} gives {printed(lossy.result)} in {low} and "
        f"{printed(exact.result)} in fp32."
    )


def told(numerics: Numerics, audit: Audit) -> Iterator[str]:
    """The sentences about one audit."""
    precision = numerics.spec.precision if numerics.spec else ""
    yield from _types(precision, audit)
    yield from _in_fp32(precision, audit, numerics)
    if products := _backward_products(precision, audit):
        yield products
    yield from _losses(audit)
    yield from _range(precision, audit)
    if audit.loss_scaling:
        yield _scaling(audit.loss_scaling)


def _types(precision: str, audit: Audit) -> Iterator[str]:
    parameters = shorts(dict.fromkeys(t for m in audit.modules for t in m.parameters))
    gradients = shorts(dict.fromkeys(t for m in audit.modules for t in m.gradients))
    if precision in WITH_MASTERS:
        yield (
            f"Parameters are {parameters}: weights of linear layers are kept as autocast would cast them, so it casts "
            "none of these, and the optimizer keeps fp32 masters of them."
        )
    elif precision in AUTOCAST:
        yield f"Parameters are {parameters}: autocast casts a copy of a weight where it is multiplied."
    elif precision == "tf32":
        yield (
            "Every tensor is fp32: TF32 is not a dtype of tensors but a way to multiply fp32 matrices, whose operands "
            "are rounded to 11 significant bits and keep fp32's range."
        )
    else:
        yield f"Parameters are {parameters}; autocast is off."
    if gradients != "–":
        yield f"Gradients of parameters are {gradients}: autograd gives each gradient the type of its parameter."
    if audit.loss_dtype:
        exact = f"; the fp32 run had {audit.reference_loss:.6g}" if audit.reference_loss is not None else ""
        value = f": {audit.loss:.6g}{exact}" if audit.loss is not None else ", and not finite" + exact
        yield f"The loss is {short(audit.loss_dtype)}{value}."


def _in_fp32(precision: str, audit: Audit, numerics: Numerics) -> Iterator[str]:
    if precision not in AUTOCAST:
        return
    names = dict.fromkeys(operation.op for operation in audit.operations if operation.rule == "fp32")
    yield f"Kept in fp32 by autocast: {', '.join(names) or 'nothing in this model'}."
    if audit.kept_on_cuda:
        kind = numerics.environment.device.kind if numerics.environment else "cpu"
        ops = ", ".join(audit.kept_on_cuda)
        yield f"On a CUDA GPU autocast would keep {ops} in fp32 as well; its lists for {kind.upper()} leave them out."


def _backward_products(precision: str, audit: Audit) -> str | None:
    groups = [group for group in matmul_groups(audit) if group[0].phase == "backward"]
    found: dict[str, int] = {}
    for group in groups:
        types = f"{' × '.join(map(short, group[0].inputs))} → {shorts(group[0].outputs)}"
        found[types] = found.get(types, 0) + sum(matmul.calls for matmul in group)
    if not found:
        return None
    listed = ", ".join(f"{calls} in {types}" for types, calls in found.items())
    outside = " Backward runs outside of autocast, in the types of forward." if precision in AUTOCAST else ""
    return f"Matrix products of the backward pass: {listed}.{outside}"


def _losses(audit: Audit) -> Iterator[str]:
    said = []
    for kind in KINDS:
        elements = all_elements(audit, kind)
        if elements is not None:
            said.append(f"of {elements.num_elements:,} {kind} {lost_words(elements)}")
    if said:
        yield f"Lost elements: {'; '.join(said)}."


def lost_words(elements: Elements) -> str:
    """'3 overflowed, 20 became zero (5 of them below the type's range), 100 subnormal'."""
    if elements.num_overflowed is None or elements.num_underflowed is None:
        parts = [(not_finite(elements), "are inf or NaN"), (elements.num_zero, "are zero")]
    else:
        zero = f"became zero ({elements.num_below_range or 0:,} of them below the type's range)"
        parts = [(elements.num_overflowed, "overflowed"), (elements.num_underflowed, zero)]
    parts.append((elements.num_subnormal, "are subnormal"))
    return ", ".join(f"{count:,} {words}" for count, words in parts if count) or "none was lost"


def _range(precision: str, audit: Audit) -> Iterator[str]:
    """What share of the exact gradients a type cannot hold."""
    low = COMPUTED_IN.get(precision)
    total = sum(count for _, count in audit.gradient_exponents)
    if low is None or not total:
        return
    zero, normal = SMALLEST_EXPONENT[low], SMALLEST_NORMAL_EXPONENT[low]
    below = sum(count for exponent, count in audit.gradient_exponents if exponent < zero)
    subnormal = sum(count for exponent, count in audit.gradient_exponents if zero <= exponent < normal)
    lowest, highest = audit.gradient_exponents[0][0], audit.gradient_exponents[-1][0]
    sentence = f"The gradients of the fp32 run lie between 2^{lowest} and 2^{highest + 1}"
    if not below and not subnormal:
        yield f"{sentence}, all within {low}'s normal numbers, which begin at 2^{normal}."
        return
    shares = [
        (below, f"below 2^{zero}, {low}'s smallest number"),
        (subnormal, f"below 2^{normal}, where it loses digits"),
    ]
    yield f"{sentence}: {', '.join(f'{format_share(n / total)} {words}' for n, words in shares if n)}."


def _scaling(scaling: LossScaling) -> str:
    scale = f"{scaling.suggested_scale:g}"
    return (
        f"Loss scaling: multiply the loss by {scale}, torch.amp.GradScaler(init_scale={scale}). The largest gradient, "
        f"{scaling.largest_gradient:.3g}, becomes {scaling.largest_gradient * scaling.suggested_scale:.4g}, at most "
        f"an eighth of fp16's largest number, 65504. Of {scaling.unscaled.num_elements:,} gradients "
        f"{lost_words(scaling.unscaled)} without it; with it, {lost_words(scaling.scaled)}."
    )
