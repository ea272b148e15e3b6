"""Find the reasons for a Run's step time: the entry point of this package.

Each diagnosis uses only the record, and gives no finding if data are missing. Each prediction assumes the present step,
so gains overlap; their sum is limited to the step."""

import dataclasses
from collections.abc import Callable, Iterator

from steplab.explain.batch_too_small import batch_too_small
from steplab.explain.case import Case, case_of
from steplab.explain.casts import weight_casts
from steplab.explain.communication_exposed import communication_exposed
from steplab.explain.compile_in_the_loop import compile_in_the_loop
from steplab.explain.copies_exposed import copies_exposed
from steplab.explain.data_loading import data_loading
from steplab.explain.fp8_casts import fp8_casts
from steplab.explain.fp32_matmul import fp32_matmul
from steplab.explain.fp64_work import fp64_work
from steplab.explain.fusing import fusable_elementwise, tiny_kernels
from steplab.explain.host_copies_and_syncs import host_copies_and_syncs
from steplab.explain.launch_bound import launch_bound
from steplab.explain.optimizer_not_fused import optimizer_not_fused
from steplab.explain.ranks import imbalance, late_message, slow_group, straggler
from steplab.explain.scores_materialised import scores_materialised
from steplab.explain.shapes import head_dimension
from steplab.explain.vocabulary import loss_share, vocabulary_padding
from steplab.records.ceilings import Ceilings
from steplab.records.finding import Finding, in_order
from steplab.records.run import Run
from steplab.specs.resolve import command
from steplab.units import format_time

DIAGNOSES: tuple[Callable[[Case], Finding | None], ...] = (
    launch_bound,
    scores_materialised,
    fp32_matmul,
    fusable_elementwise,
    optimizer_not_fused,
    head_dimension,
    vocabulary_padding,
    loss_share,
    batch_too_small,
    weight_casts,
    fp8_casts,
    compile_in_the_loop,
    host_copies_and_syncs,
    communication_exposed,
    copies_exposed,
    data_loading,
    fp64_work,
    tiny_kernels,
    straggler,
    imbalance,
    late_message,
    slow_group,
)

WITHOUT_PROFILE = (optimizer_not_fused, head_dimension, vocabulary_padding, batch_too_small, compile_in_the_loop)
_LEFT = 1e-3
_NOTABLE = 1.005
"""Ratio of profiled to unprofiled step time from which a finding mentions that its times are scaled."""


def explain(run: Run, ceilings: Ceilings | None = None) -> list[Finding]:
    """Return findings, most useful first (records.finding.in_order). `ceilings` from `steplab doctor` on the same
    device replace missing hardware figures."""
    if run.failure is not None:
        return []
    case = case_of(run, ceilings)
    found = []
    for diagnose in WITHOUT_PROFILE if run.profile is None else DIAGNOSES:
        finding = diagnose(case)
        if finding is not None:
            found.append(_believable(case, finding if diagnose in WITHOUT_PROFILE else _scaled(case, finding)))
    length_s = case.step_s if run.profile is None else case.length_s
    return list(_within(length_s, in_order(found)))


def _within(step_s: float | None, findings: tuple[Finding, ...]) -> Iterator[Finding]:
    left_s, included = step_s, {finding.includes for finding in findings}
    for finding in findings:
        if left_s is not None and finding.saves_s is not None and finding.tokens_ratio == 1:
            if finding.saves_s > left_s:
                left_s = left_s if left_s > _LEFT * (step_s or 0.0) else 0.0
                alone = f" Alone it would save {format_time(finding.saves_s)}." if left_s else ""
                finding = dataclasses.replace(
                    finding,
                    saves_s=left_s or None,
                    limited_from_s=finding.saves_s,
                    at_most=left_s > 0,
                    prediction=finding.prediction + alone,
                )
            # A saving that another one includes is deducted with that one.
            left_s -= 0.0 if finding.kind in included else finding.saves_s or 0.0
        yield finding


def _scaled(case: Case, finding: Finding) -> Finding:
    if case.slowdown < _NOTABLE:
        return finding
    how = f"Times are scaled to the unprofiled step; the profiled one took {case.slowdown:.2f} times as long."
    return dataclasses.replace(finding, saw=f"{finding.saw} {how}")


def _believable(case: Case, finding: Finding) -> Finding:
    """Remove a predicted gain of a whole step or more: the profiled steps did more work than the timed ones."""
    step_s = case.step_s
    if case.run.profile is None or step_s is None or finding.saves_s is None or finding.saves_s < step_s:
        return finding
    return dataclasses.replace(
        finding,
        saves_s=None,
        at_most=False,
        prediction=(
            f"No prediction: the device worked {format_time(case.busy_s)} in a profiled step, and a timed "
            f"step lasts {format_time(step_s)}, so they were not the same step."
        ),
    )


def not_looked_at(run: Run, ceilings: Ceilings | None = None) -> tuple[str, ...]:
    """One line per kind of data that the record lacks, with the command that records it."""
    case, profile, gaps = case_of(run, ceilings), run.profile, list[str]()
    if run.failure is not None:
        return (f"the run failed ({run.status.replace('_', ' ')}): there is no step to explain",)
    if profile is None:
        silent = ", ".join(d.__name__ for d in DIAGNOSES if d not in WITHOUT_PROFILE)
        how = command(run.spec, {}).replace("steplab run", "steplab profile", 1) if run.spec else "import-trace"
        make = f"`{how}` makes one" if run.spec else "`steplab import-trace` takes one from your own profiler"
        gaps.append(f"the record has no profile, which these diagnoses need: {silent}; {make}")
    elif not any(op.inputs for op in profile.ops):
        gaps.append(
            "the trace has no shapes (record_shapes=True), so no FLOPs and bytes: attention, casts, the vocabulary and "
            "fp32 matmuls are only seen where their ranges or kernels are named"
        )
    gaps[:0] = profile.doubts if profile else ()
    if run.timing is None:
        gaps.append("the step was not timed without a profiler: waits for Python include the profiler's overhead")
    if case.gpu is None:
        device = run.device_name or "a device the record does not name"
        known = run.device_name is not None
        remedy = "; `steplab doctor` measures it" if known else ""
        gaps.append(f"peaks and bandwidth of {device} are not known: gains that need them are not predicted{remedy}")
    return tuple(gaps)
