"""Sentences about an audit of precision: what ran in which type, why, and what was lost."""

from collections.abc import Iterator

from steplab.records.numerics import Audit, Elements, LossScaling, Numerics, OperationAudit
from steplab.report.precision_figures import (
    KINDS,
    SMALLEST_EXPONENT,
    SMALLEST_NORMAL_EXPONENT,
    all_elements,
    matmul_groups,
    not_finite,
    short,
    shorts,
)
from steplab.report.run.words import describe
from steplab.units import format_share

AUTOCAST = {"fp16": "fp16", "bf16": "bf16"}
"""Precision -> the type autocast computes in."""

_RULES = {
    "low_precision": "low precision",
    "fp32": "fp32",
    "promote": "widest input",
    "parts": "part by part",
    "none": "none",
    "cast": "the model's own cast",
    "off": "autocast off",
}
_WHY = {
    "low_precision": "a product of matrices, its sums in fp32 inside",
    "promote": "wants one type: the widest of its inputs",
    "parts": "made of operations with different rules",
    "none": "takes its inputs as they come",
    "cast": "the model asks for this type",
    "off": "takes its inputs as they come",
}
_FP32_BECAUSE = (
    (
        ("softmax", "exp", "logsumexp"),
        "exponentials: above 11 they exceed fp16's range, and a row of them is summed up",
    ),
    (("norm",), "a mean of squares over the width: squares leave fp16's range, sums lose digits"),
    (("loss", "entropy", "kl_div"), "logarithms, and a mean over many terms"),
    (("sum", "prod", "cdist", "dist"), "adds up or multiplies many terms: the error grows with their number"),
    (("pow", "rsqrt", "reciprocal", "sqrt"), "a power: leaves the range of a small type soon"),
    (("log", "acos", "asin", "tan", "sinh", "cosh", "erfinv"), "steep somewhere: a rounded input makes a wrong output"),
)


def heading(numerics: Numerics) -> str:
    """What was audited, and where."""
    spec, environment = numerics.spec, numerics.environment
    said = describe(spec) if spec else "sums alone"
    where = [environment.device.name, f"torch {environment.torch}"] if environment else []
    return " · ".join([said, *where, f"record {numerics.id}"])


def title(numerics: Numerics) -> str:
    """The precision, in words."""
    precision = numerics.spec.precision if numerics.spec else ""
    if precision in AUTOCAST:
        return f"{precision} autocast"
    return {"bf16_pure": "bf16 throughout", "tf32": "tf32 matmuls", "fp32": "fp32"}.get(precision, precision)


def rule_words(operation: OperationAudit) -> str:
    """What autocast does with an operation."""
    return _RULES[operation.rule]


def why(operation: OperationAudit) -> str:
    """Why it does that."""
    through = f"; by way of {' and '.join(operation.parts)}" if operation.parts else ""
    if operation.rule != "fp32":
        return _WHY[operation.rule] + through
    names = " ".join(operation.parts) or operation.op
    reasons = (reason for words, reason in _FP32_BECAUSE if any(word in names for word in words))
    return next(reasons, "on autocast's list of operations for fp32") + through


def told(numerics: Numerics, audit: Audit) -> Iterator[str]:
    """The sentences about one audit."""
    precision = numerics.spec.precision if numerics.spec else ""
    yield from _types(precision, audit)
    yield from _kept(precision, audit, numerics)
    if products := _backward_products(precision, audit):
        yield products
    yield from _losses(audit)
    yield from _range(precision, audit)
    if audit.loss_scaling:
        yield _scaling(audit.loss_scaling)


def _types(precision: str, audit: Audit) -> Iterator[str]:
    parameters = shorts(_each(t for m in audit.modules for t in m.parameters))
    gradients = shorts(_each(t for m in audit.modules for t in m.gradients))
    if precision in AUTOCAST:
        yield f"Parameters are {parameters}: autocast casts a copy of a weight where it is multiplied."
    elif precision == "tf32":
        yield (
            "Every tensor is fp32: TF32 is no type of tensors, but how products of fp32 matrices are computed, their "
            "operands rounded to 11 significant bits, with fp32's range."
        )
    else:
        yield f"Parameters are {parameters}; autocast is off."
    if gradients != "–":
        yield f"Gradients of parameters are {gradients}: autograd gives each the type of its parameter."
    if audit.loss_dtype:
        exact = f"; the fp32 run had {audit.reference_loss:.6g}" if audit.reference_loss is not None else ""
        value = f": {audit.loss:.6g}{exact}" if audit.loss is not None else ", and not finite" + exact
        yield f"The loss is {short(audit.loss_dtype)}{value}."


def _kept(precision: str, audit: Audit, numerics: Numerics) -> Iterator[str]:
    if precision not in AUTOCAST:
        return
    kept = _each(operation.op for operation in audit.operations if operation.rule == "fp32")
    yield f"Kept in fp32 by autocast: {', '.join(kept) or 'nothing in this model'}."
    if audit.kept_on_cuda:
        kind = numerics.environment.device.kind if numerics.environment else "cpu"
        ops = ", ".join(audit.kept_on_cuda)
        yield f"On a CUDA GPU autocast would keep {ops} in fp32 as well; its lists for {kind.upper()} leave this out."


def _backward_products(precision: str, audit: Audit) -> str | None:
    groups = [group for group in matmul_groups(audit) if group[0].phase == "backward"]
    found: dict[str, int] = {}
    for group in groups:
        types = f"{' × '.join(map(short, group[0].inputs))} → {shorts(group[0].outputs)}"
        found[types] = found.get(types, 0) + sum(matmul.calls for matmul in group)
    if not found:
        return None
    listed = ", ".join(f"{calls} in {types}" for types, calls in found.items())
    why = " Backward runs outside of autocast, in the types of forward." if precision in AUTOCAST else ""
    return f"Matrix products of the backward pass: {listed}.{why}"


def _losses(audit: Audit) -> Iterator[str]:
    said = []
    for kind in KINDS:
        elements = all_elements(audit, kind)
        if elements is not None:
            said.append(f"of {elements.num_elements:,} {kind} {lost_words(elements)}")
    if said:
        yield f"Lost on the way: {'; '.join(said)}."


def lost_words(elements: Elements) -> str:
    """'3 overflowed, 20 became zero (5 of them below the type's range), 100 subnormal'."""
    if elements.num_overflowed is None or elements.num_underflowed is None:
        parts = [(not_finite(elements), "are inf or NaN"), (elements.num_zero, "are zero")]
    else:
        zero = f"became zero ({elements.num_below_range or 0:,} of them below the type's range)"
        parts = [(elements.num_overflowed, "overflowed"), (elements.num_underflowed, zero)]
    parts.append((elements.num_subnormal, "are subnormal"))
    return ", ".join(f"{count:,} {words}" for count, words in parts if count) or "none"


def _range(precision: str, audit: Audit) -> Iterator[str]:
    """What share of the exact gradients a type cannot hold."""
    low = {"fp16": "fp16", "bf16": "bf16", "bf16_pure": "bf16"}.get(precision)
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
        f"an eighth of fp16's 65504. Of {scaling.unscaled.num_elements:,} gradients {lost_words(scaling.unscaled)} "
        f"without it; with it, {lost_words(scaling.scaled)}."
    )


def _each(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
