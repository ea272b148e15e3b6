"""Measure the changes that the findings on a run propose, each in turns with the unchanged step."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from steplab.comparison.turns import step_ratio
from steplab.errors import SteplabError, UserError
from steplab.lab.keeping import open_store
from steplab.lab.turns import STEPS, StoredSession
from steplab.measurement.processes.turns import Session
from steplab.measurement.progress import OnProgress
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.finding import Finding, Findings, Trial, in_order
from steplab.records.run import Run
from steplab.specs.resolve import with_fields
from steplab.specs.step import StepSpec


def try_findings(
    run: Run,
    findings: Findings,
    *,
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_trial: Callable[[str], None] = lambda what: None,
    session: Callable[..., Session] = Session,
) -> Findings:
    """The findings with a trial for each whose change is a field of the spec.

    The step with each change is measured in turns with the unchanged step, and every measurement is stored. `timeout_s`
    limits the time until a step is warm, and that of each turn; `on_trial` is called with the name of each as it
    begins. A change that runs out of memory, fails or is not supported gives a trial with a failure.

    Raises UserError if the run has no step that can be run again, and SteplabError if the unchanged step fails or runs
    on another device.
    """
    if run.spec is None:
        what = (
            "an imported trace"
            if run.profile
            else "an imported snapshot"
            if run.memory_profile
            else "a loop of your own"
        )
        raise UserError(
            f"run {run.id} is {what}, which steplab cannot run again; apply the changes there, and profile it again"
        )
    spec = _on_the_same_kind(dataclasses.replace(run.spec, steps=max(run.spec.steps, STEPS)), run)
    proposed = {_key(finding): finding.fields for finding in findings.findings if finding.fields}
    if not proposed:
        return findings
    tried: dict[_Key, Run | str] = {}
    with (
        open_store(store, write=True) as opened,
        StoredSession(session(timeout_s=timeout_s, on_progress=on_progress), opened, name=f"trying {run.id}") as taking,
    ):
        on_trial("the unchanged step")
        unchanged = taking.enter("unchanged", spec)
        _refuse_another_device(run, unchanged.environment)
        for key, fields in proposed.items():
            if unchanged.failure is None:
                tried[key] = _tried(taking, unchanged, spec, fields, on_trial)
        base = taking.leave(unchanged)
    if base.failure is not None:
        raise SteplabError(f"the step of run {run.id} did not run again: {failure_words(base.failure)}")
    _refuse_another_device(run, base.environment)
    trials = {key: _trial(base, outcome) for key, outcome in tried.items()}
    measured = (dataclasses.replace(finding, trial=trials.get(_key(finding))) for finding in findings.findings)
    return dataclasses.replace(findings, findings=in_order(measured))


_Key = tuple[tuple[str, str], ...]


def _key(finding: Finding) -> _Key:
    """What two findings that propose the same change have in common."""
    return tuple(sorted(finding.fields.items()))


def _tried(
    taking: StoredSession, unchanged: Any, spec: StepSpec, fields: Mapping[str, str], on_trial: Callable[[str], None]
) -> Run | str:
    """The record of the step with a change, or why there is none."""
    words = ", ".join(f"{name} {value}" for name, value in fields.items())
    on_trial(words)
    try:
        changed = taking.enter(words, with_fields(spec, fields))
    except UserError as error:  # the device, or this build of torch, does not do that
        return str(error)
    taking.session.measure([unchanged, changed], spec.steps)
    return taking.leave(changed)


def _trial(base: Run, outcome: Run | str) -> Trial:
    if isinstance(outcome, str):
        return Trial(before_s=base.median_s or 0.0, after_s=None, run_ids=(base.id,), failure=outcome)
    tokens_ratio = outcome.spec.tokens_of_all / base.spec.tokens_of_all if outcome.spec and base.spec else 1.0
    ratio = step_ratio(base, outcome, tokens_ratio=tokens_ratio)
    ids = (base.id, outcome.id)
    if ratio is None:
        return Trial(
            before_s=base.median_s or 0.0,
            after_s=None,
            run_ids=ids,
            tokens_ratio=tokens_ratio,
            failure=failure_words(outcome.failure),
        )
    return Trial(
        before_s=ratio.a,
        after_s=ratio.a * ratio.ratio * tokens_ratio,
        least_saved_s=None if ratio.high is None else ratio.a * (1 - ratio.high),
        most_saved_s=None if ratio.low is None else ratio.a * (1 - ratio.low),
        run_ids=ids,
        tokens_ratio=tokens_ratio,
        alternating=outcome.turns.alternating if outcome.turns else None,
    )


def _on_the_same_kind(spec: StepSpec, run: Run) -> StepSpec:
    """The spec with `auto` replaced by the run's kind of device, so that a machine without that kind refuses it."""
    kind = run.environment.device.kind if run.environment else None
    return dataclasses.replace(spec, device=kind) if spec.device == "auto" and kind else spec


def _refuse_another_device(run: Run, found: Environment | None) -> None:
    was, now = run.environment.device.name if run.environment else None, found.device.name if found else None
    if was is not None and now is not None and was != now:
        raise SteplabError(
            f"run {run.id} was measured on {was}, but this machine has {now}, for which its predictions do not hold; "
            "profile the step here, and explain that"
        )


def failure_words(failure: Failure | None) -> str:
    """Why a run with this failure has no step time, in one line."""
    if failure is None:
        return "it has no step time"
    kind = failure.kind.replace("_", " ")
    return failure.message if failure.message.startswith(kind) else f"{kind}: {failure.message}"
