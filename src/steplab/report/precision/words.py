from collections.abc import Iterator

from steplab.records.numerics import Audit, Numerics, OperationAudit
from steplab.report.precision.figures import SMALLEST_EXPONENT, SMALLEST_NORMAL_EXPONENT, short, shorts
from steplab.report.run.one_run import precision_words
from steplab.specs.step import AUTOCAST, describe
from steplab.specs.step_choices import WITH_MASTERS
from steplab.units import format_share

COMPUTED_IN = {**AUTOCAST, "bf16_pure": "bf16"}
"""Low compute dtype by precision; precisions without an entry compute in fp32."""

RULES = {
    "low_precision": "low precision",
    "fp32": "fp32",
    "promote": "widest input",
    "parts": "part by part",
    "none": "none",
    "cast": "the model's own cast",
    "off": "autocast off",
}
_WHY = {
    "fp32": "on autocast's list for fp32: it sums many terms, or leaves fp16's range",
    "low_precision": "a product of matrices, its sums in fp32 inside",
    "promote": "needs inputs of one type: the widest of them",
    "parts": "made of operations with different rules",
    "none": "runs in the type of its inputs",
    "cast": "the model asks for this type",
    "off": "runs in the type of its inputs",
}
NORMS = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "group_norm": "GroupNorm",
    "batch_norm": "BatchNorm",
    "instance_norm": "InstanceNorm",
}


def heading(numerics: Numerics) -> str:
    spec, environment = numerics.spec, numerics.environment
    said = describe(spec) if spec else "sums only"
    where = [environment.device.name, f"torch {environment.torch}"] if environment else []
    return " · ".join([said, *where, f"record {numerics.id}"])


def title(numerics: Numerics) -> str:
    return precision_words(numerics.spec.precision) if numerics.spec else ""


def why(operation: OperationAudit) -> str:
    return _WHY[operation.rule] + (f"; made of {' and '.join(operation.parts)}" if operation.parts else "")


def told(numerics: Numerics, audit: Audit) -> Iterator[str]:
    precision = numerics.spec.precision if numerics.spec else ""
    yield from _types(precision, audit)
    yield from _kept_on_cuda(precision, audit, numerics)
    yield from _range(precision, audit)


def _types(precision: str, audit: Audit) -> Iterator[str]:
    parameters = shorts(dict.fromkeys(t for m in audit.modules for t in m.parameters))
    gradients = shorts(dict.fromkeys(t for m in audit.modules for t in m.gradients))
    if precision in WITH_MASTERS:
        yield (
            f"Parameters are {parameters}: weights of linear layers are kept in the low type, and the optimizer keeps "
            "fp32 masters of them."
        )
    elif precision in AUTOCAST:
        yield f"Parameters are {parameters}; autocast casts copies of them."
    elif precision == "tf32":
        yield "Every tensor is fp32; products round their operands to 11 significant bits."
    else:
        yield f"Parameters are {parameters}; autocast is off."
    if gradients != "–":
        yield f"Gradients of parameters are {gradients}."
    if audit.loss_dtype:
        exact = f"; the fp32 run had {audit.reference_loss:.6g}" if audit.reference_loss is not None else ""
        value = f": {audit.loss:.6g}{exact}" if audit.loss is not None else ", and not finite" + exact
        yield f"The loss is {short(audit.loss_dtype)}{value}."


def _kept_on_cuda(precision: str, audit: Audit, numerics: Numerics) -> Iterator[str]:
    if precision not in AUTOCAST:
        return
    if audit.kept_on_cuda:
        kind = numerics.environment.device.kind if numerics.environment else "cpu"
        ops = ", ".join(audit.kept_on_cuda)
        yield f"On a CUDA GPU autocast would keep {ops} in fp32 as well; its lists for {kind.upper()} leave them out."


def _range(precision: str, audit: Audit) -> Iterator[str]:
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
        (subnormal, f"below 2^{normal}, subnormal if in {low}"),
    ]
    yield f"{sentence}: {', '.join(f'{format_share(n / total)} {words}' for n, words in shares if n)}."
