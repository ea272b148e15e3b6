from collections.abc import Callable, Iterator, Sequence

from steplab.records.numerics import Accumulation, Audit, Numerics, OperationAudit
from steplab.records.run import Run
from steplab.report.kit.document import Document, Section, Sentences, Verdict
from steplab.report.kit.text import why_failed
from steplab.report.precision import tables, words
from steplab.report.precision.figures import SMALLEST_EXPONENT, all_elements, not_finite, title_of_sums
from steplab.report.precision.words import COMPUTED_IN, NORMS, title
from steplab.report.report import NOTHING, Chapter, Context, JointReport, several_answers
from steplab.specs.step import AUTOCAST
from steplab.units import format_share, listed

_SUMS = ("softmax", "logsumexp", "norm", "loss", "entropy")
_SIGNIFICANT = {
    "fp16": "each partial sum keeps 11 significant bits and overflows above 65504",
    "bf16": "each partial sum keeps 8 significant bits",
}


def precision_verdict(numerics: Numerics) -> Verdict:
    low = COMPUTED_IN.get(numerics.spec.precision) if numerics.spec else None
    audit = numerics.audit
    if audit is None:
        return Verdict()
    if low is None:
        return Verdict(sentences=("Every tensor stays in fp32, so nothing underflows.",))
    sentences = (*_keep(numerics, audit, low), *_scale(audit, low), *_loss(audit))
    return Verdict(sentences=sentences, cautions=tuple(_cautions(audit)))


def _summing(audit: Audit, chosen: Callable[[OperationAudit], bool] = lambda use: True) -> list[str]:
    sums = [use for use in audit.operations if any(part in use.op for part in _SUMS)]
    return list(dict.fromkeys(NORMS.get(use.op, use.op) for use in sums if chosen(use)))


def _keep(numerics: Numerics, audit: Audit, low: str) -> Iterator[str]:
    if names := _summing(audit):
        yield (
            f"{listed(names)} add up many terms. torch's fused kernels add in fp32, whatever their inputs. If you "
            f"compose them of {low} operations, {_SIGNIFICANT[low]}: keep them in fp32{_done(numerics, audit)}."
        )


def _done(numerics: Numerics, audit: Audit) -> str:
    by_autocast = numerics.spec is not None and numerics.spec.precision in AUTOCAST
    ruled = _summing(audit, lambda use: use.rule == "fp32") if by_autocast else []
    return f". Autocast does so for {listed(ruled)}" if ruled else ""


def _scale(audit: Audit, low: str) -> Iterator[str]:
    total = sum(count for _, count in audit.gradient_exponents)
    below = sum(count for exponent, count in audit.gradient_exponents if exponent < SMALLEST_EXPONENT[low])
    smallest = f"{low}'s smallest number, 2^{SMALLEST_EXPONENT[low]}."
    if audit.loss_scaling and total:
        share = format_share(below / total)
        scale = audit.loss_scaling.suggested_scale
        yield f"Scale the loss by {scale:g}: {share} of the fp32 run's gradients lie below {smallest}"
    elif total and not below:
        yield f"The loss needs no scale: the fp32 run has no gradient below {smallest}"


def _loss(audit: Audit) -> Iterator[str]:
    if audit.loss is not None and audit.reference_loss:
        off = format_share(abs(audit.loss / audit.reference_loss - 1))
        yield f"The loss is {audit.loss:.6g}, {off} from the {audit.reference_loss:.6g} of fp32."
    if in_fp8 := [use.fp8 for use in audit.matmuls if use.fp8]:
        error, flushed, clamped = (
            format_share(max(getattr(losses, name) for losses in in_fp8)) for name in ("error", "flushed", "saturated")
        )
        yield (
            f"Products of fp8 operands are off by up to {error} of their norm; at most {flushed} of an operand becomes "
            f"zero and {clamped} is clamped."
        )
        num_steps = max(len(losses.amaxes) for losses in in_fp8)
        if changes := [losses.largest_change for losses in in_fp8 if losses.largest_change]:
            yield (
                f"Over {num_steps} training steps the largest magnitude of an operand changes by up to "
                f"{max(changes):.2f} times from one step to the next."
            )


def _cautions(audit: Audit) -> Iterator[str]:
    infinite = sum(
        not_finite(found) for kind in ("outputs", "parameter gradients") if (found := all_elements(audit, kind))
    )
    if infinite:
        yield f"Warning: {infinite:,} elements are infinite or NaN."
    if audit.loss is None and audit.loss_dtype:
        yield "Warning: the loss is not finite."


def _verdict(records: Sequence[Numerics], context: Context = NOTHING) -> Verdict:
    return several_answers([(title(record), precision_verdict(record)) for record in records])


def precision_document(records: Sequence[Numerics], runs: Sequence[Run] = (), *, with_sums: bool = True) -> Document:
    audits = [record for record in records if record.spec]
    accumulations = _accumulations(records) if with_sums else ()
    further = _sums(accumulations), Section.of("Time and memory of a step", tables.timing_table(runs))
    data = tables.data_tables(audits, accumulations, runs)
    if len(audits) != 1:
        parts = [_part(numerics) for numerics in audits]
        return Document(title="Precision", verdict=_verdict(audits), sections=(*parts, *further), data=data)
    (numerics,) = audits
    return Document(
        title=f"Precision: {words.title(numerics)}",
        subtitle=words.heading(numerics),
        verdict=precision_verdict(numerics),
        sections=(*_sections(numerics), *further),
        data=data,
    )


def _accumulations(records: Sequence[Numerics]) -> tuple[Accumulation, ...]:
    return next((record.accumulations for record in records if record.accumulations), ())


def _part(numerics: Numerics, answered: bool = False) -> Section:
    answer = Verdict() if answered else precision_verdict(numerics)
    return Section.of_record(words.heading(numerics), answer, _sections(numerics), title=words.title(numerics))


def _sections(numerics: Numerics) -> Iterator[Section]:
    if numerics.failure:
        message = why_failed(numerics.failure, most=None)
        yield Section.of("", Sentences.of([message], "warning"))
    if numerics.audit:
        yield from _of_audit(numerics, numerics.audit)
    yield Section.notes(numerics.notes)


def _of_audit(numerics: Numerics, audit: Audit) -> Iterator[Section]:
    yield Section.of("Findings", Sentences.of(words.told(numerics, audit), "finding"))
    yield Section.of("Types by module", tables.type_table(audit))
    yield Section.of("Operations of the forward pass, and autocast's rule for each", tables.operation_table(numerics))
    yield Section.of("Matrix products, after every cast", tables.matmul_table(audit))
    yield Section.of("Overflow and underflow", tables.loss_table(audit))
    if audit.loss_scaling:
        yield Section.of("Loss scaling: all gradients", tables.scaling_table(audit.loss_scaling))


def _sums(accumulations: Sequence[Accumulation]) -> Section:
    return Section.of(title_of_sums(accumulations), tables.sum_table(accumulations))


def _blocks(numerics: Sequence[Numerics], context: Context) -> Iterator[Section]:
    studies = {record.study for record in numerics if record.study}
    timed = [run for run in context.runs if run.study in studies]
    yield Section.of("One step in each precision", tables.timing_table(timed))
    yield from (_part(record, context.answered) for record in numerics if record.spec)
    yield _sums(_accumulations(numerics))


REPORT = JointReport(
    chapters=(Chapter(title="Precision", anchor="precision", blocks=_blocks),),
    verdict=_verdict,
    documents=lambda records, context=NOTHING: [precision_document(records)],
)
