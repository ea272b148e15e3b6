"""The answer of an audit of precision: what to keep in fp32 and why, and whether the loss needs a scale."""

from collections.abc import Callable, Iterator

from steplab.records.numerics import Audit, Numerics, OperationAudit
from steplab.report.kit.document import Verdict
from steplab.report.precision.figures import SMALLEST_EXPONENT, all_elements, not_finite
from steplab.report.precision.words import COMPUTED_IN, NORMS, title
from steplab.specs.step import AUTOCAST
from steplab.units import format_share, listed

_SUMS = ("softmax", "logsumexp", "norm", "loss", "entropy")
"""Parts of the names of operations that add up many terms."""
_SIGNIFICANT = {
    "fp16": "fp16 keeps 11 significant bits of each partial sum and overflows above 65504",
    "bf16": "bf16 keeps only 8 significant bits of each partial sum; its range is that of fp32",
}


def precision_verdict(numerics: Numerics) -> Verdict:
    """What to keep in fp32 in this step, whether the loss needs a scale, and how far the loss is from that of fp32."""
    low = COMPUTED_IN.get(numerics.spec.precision) if numerics.spec else None
    audit = numerics.audit
    if audit is None:
        return Verdict()
    if low is None:
        return Verdict(sentences=(f"{title(numerics)} keeps every tensor in fp32, so nothing underflows.",))
    sentences = (*_keep(numerics, audit, low), *_scale(audit, low), *_loss(audit))
    return Verdict(sentences=sentences, cautions=tuple(_cautions(numerics, audit, low)))


def _sums(audit: Audit, chosen: Callable[[OperationAudit], bool] = lambda use: True) -> list[str]:
    """The names of the operations that add up many terms, each once; of them those that are chosen."""
    sums = [use for use in audit.operations if any(part in use.op for part in _SUMS)]
    return list(dict.fromkeys(NORMS.get(use.op, use.op) for use in sums if chosen(use)))


def _keep(numerics: Numerics, audit: Audit, low: str) -> Iterator[str]:
    if names := _sums(audit):
        yield f"Keep {listed(names)} in fp32: they add up many terms, and {_SIGNIFICANT[low]}{_done(numerics, audit)}."


def _done(numerics: Numerics, audit: Audit) -> str:
    """What autocast does of that by itself."""
    by_autocast = numerics.spec is not None and numerics.spec.precision in AUTOCAST
    ruled = _sums(audit, lambda use: use.rule == "fp32") if by_autocast else []
    return f". Autocast does so for {listed(ruled)}" if ruled else ""


def _scale(audit: Audit, low: str) -> Iterator[str]:
    """Whether the gradients need a factor on the loss."""
    total = sum(count for _, count in audit.gradient_exponents)
    below = sum(count for exponent, count in audit.gradient_exponents if exponent < SMALLEST_EXPONENT[low])
    if audit.loss_scaling and total:
        yield (
            f"Scale the loss by {audit.loss_scaling.suggested_scale:g}: without a scale {format_share(below / total)} "
            f"of the gradients lie below {low}'s smallest number, 2^{SMALLEST_EXPONENT[low]}."
        )
    elif total and not below:
        yield f"The loss needs no scale: no gradient lies below {low}'s smallest number, 2^{SMALLEST_EXPONENT[low]}."


def _loss(audit: Audit) -> Iterator[str]:
    if audit.loss is not None and audit.reference_loss:
        off = format_share(abs(audit.loss / audit.reference_loss - 1))
        yield f"The loss is {audit.loss:.6g}, {off} from the {audit.reference_loss:.6g} of fp32."


def _cautions(numerics: Numerics, audit: Audit, low: str) -> Iterator[str]:
    if names := _sums(audit, lambda use: not set(use.outputs) <= {"float32"}):
        yield f"Warning: in this step {listed(names)} ran in {low}."
    infinite = sum(
        not_finite(found) for kind in ("outputs", "parameter gradients") if (found := all_elements(audit, kind))
    )
    if infinite:
        yield f"Warning: {infinite:,} elements are infinite or NaN."
    if audit.loss is None and audit.loss_dtype:
        yield "Warning: the loss is not finite."
