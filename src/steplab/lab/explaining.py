"""Explain a stored run, and measure the changes that the findings propose."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from steplab.errors import SteplabError, UserError
from steplab.explain.api import explain as diagnose
from steplab.explain.api import not_looked_at
from steplab.lab.keeping import open_store
from steplab.lab.measuring import measure
from steplab.measurement.progress import OnProgress
from steplab.records.codec import now_utc
from steplab.records.finding import Finding, Findings, Trial
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step
from steplab.specs.step import FIELDS, StepSpec


class Measure(Protocol):
    """The signature of steplab.measure, for which a test may pass a substitute."""

    def __call__(
        self, spec: StepSpec, *, name: str, store: Path | str | None, timeout_s: float | None, on_progress: OnProgress
    ) -> Run: ...


def explain(run: Run | str | None = None, *, store: Path | str | None = None) -> Findings:
    """The findings on a run: what could be faster, the predicted gain, and the evidence.

    `run` is a record, or the beginning of a stored one's id; without it, the newest run with a profile. For a device
    outside the catalogue, ceilings that `steplab doctor` measured on it are used. Raises UserError if there is no such
    run.
    """
    from steplab import __version__

    found = run if isinstance(run, Run) else run_to_explain(run, store=store)
    with open_store(store, write=False) as opened:
        ceilings = opened.latest_ceilings(found.environment.device.name) if found.environment else None
    step = found.timing.phase("step") if found.timing else None
    return Findings(
        run_id=found.id,
        created_utc=now_utc(),
        steplab_version=__version__,
        step_s=median(step.best_s) if step and step.best_s else None,
        findings=tuple(diagnose(found, ceilings)),
        not_looked_at=not_looked_at(found, ceilings),
    )


def findings_of(runs: Sequence[Run], store: Path | str | None = None) -> dict[str, Findings]:
    """The findings on each of the runs that has a profile, by their ids."""
    return {run.id: explain(run, store=store) for run in runs if run.profile}


def run_to_explain(run_id: str | None = None, *, store: Path | str | None = None) -> Run:
    """The stored run whose id begins with `run_id`; without it, the newest run with a profile.

    Raises UserError if there is no such run.
    """
    with open_store(store, write=False) as opened:
        if run_id is not None:
            record = opened.get(run_id)
            if isinstance(record, Run):
                return record
            raise UserError(f"record {record.id} is not a run; `steplab list` shows the stored runs")
        for row in opened.rows():
            newest = opened.find(str(row["id"]))
            if isinstance(newest, Run) and newest.profile is not None:
                return newest
        raise UserError(
            f"no run in {opened.path} has a profile; `steplab profile` makes one, `steplab import-trace` imports one, "
            "and `steplab explain ID` explains a run without a profile"
        )


def try_findings(
    run: Run,
    findings: Findings,
    *,
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_trial: Callable[[str], None] = lambda what: None,
    measure: Measure = measure,
) -> Findings:
    """The findings with a trial for each whose change is a field of the spec.

    The unchanged step is measured again, and then the step with each change, each in a process of its own; every
    measurement is stored. `timeout_s` is for one measurement; `on_trial` is called with the name of each as it begins.
    A change that runs out of memory, fails or is not supported gives a trial with a failure. Raises UserError if the
    run has no step that can be run again, and SteplabError if the unchanged step fails or runs on another device.
    """
    if run.spec is None:
        what = "an imported trace" if run.profile else "a loop of your own"
        raise UserError(
            f"run {run.id} is {what}, which steplab cannot run again; apply the changes there, and profile it again"
        )
    spec = _on_the_same_kind(run.spec, run)

    def measured(spec: StepSpec, kind: str) -> Run:
        on_trial(kind)
        return measure(spec, name=f"trying {run.id}", store=store, timeout_s=timeout_s, on_progress=on_progress)

    proposed = [finding for finding in findings.findings if finding.fields]
    if not proposed:
        return findings
    base = measured(spec, "the unchanged step")
    before_s = _step_s(base)
    if before_s is None:
        raise SteplabError(f"the step of run {run.id} did not run again: {_why(base)}")
    _refuse_another_device(run, base)
    trials: dict[tuple[tuple[str, str], ...], Trial] = {}
    for finding in proposed:
        key = tuple(sorted(finding.fields.items()))
        if key not in trials:
            trials[key] = _trial(finding, spec, base, before_s, measured)
    return dataclasses.replace(
        findings,
        findings=tuple(
            dataclasses.replace(f, trial=trials[tuple(sorted(f.fields.items()))]) if f.fields else f
            for f in findings.findings
        ),
    )


def with_fields(spec: StepSpec, fields: Mapping[str, str]) -> StepSpec:
    """The spec with some fields changed, by their names in study files. Raises UserError for an invalid value."""
    sizes: dict[str, Any] = {
        FIELDS[name].attribute: FIELDS[name].parsed(value)
        for name, value in fields.items()
        if name.startswith("model.")
    }
    others = {name: value for name, value in fields.items() if not name.startswith("model.")}
    valid = resolve_step(others)
    changes: dict[str, object] = {FIELDS[name].attribute: FIELDS[name].read(valid) for name in others}
    if sizes and spec.model.shape is not None:
        shape = dataclasses.replace(spec.model.shape, **sizes)
        changes["model"] = dataclasses.replace(spec.model, shape=shape)
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def _trial(
    finding: Finding, spec: StepSpec, base: Run, before_s: float, measured: Callable[[StepSpec, str], Run]
) -> Trial:
    try:
        changed = with_fields(spec, finding.fields)
        after = measured(changed, ", ".join(f"{name} {value}" for name, value in finding.fields.items()))
    except UserError as error:  # the device, or this build of torch, does not do that
        return Trial(before_s=before_s, after_s=None, run_ids=(base.id,), failure=str(error))
    after_s = _step_s(after)
    return Trial(
        before_s=before_s,
        after_s=after_s,
        run_ids=(base.id, after.id),
        tokens_ratio=changed.tokens_of_all / spec.tokens_of_all,
        failure=None if after_s is not None else _why(after),
    )


def _on_the_same_kind(spec: StepSpec, run: Run) -> StepSpec:
    """The spec with `auto` replaced by the run's kind of device, so that a machine without that kind refuses it."""
    kind = run.environment.device.kind if run.environment else None
    return dataclasses.replace(spec, device=kind) if spec.device == "auto" and kind else spec


def _refuse_another_device(run: Run, base: Run) -> None:
    was = run.environment.device.name if run.environment else None
    now = base.environment.device.name if base.environment else None
    if was is not None and was != now:
        raise SteplabError(
            f"run {run.id} was measured on {was}, but this machine has {now}, for which its predictions do not hold; "
            f"explain run {base.id} instead, once it has a profile"
        )


def _step_s(run: Run) -> float | None:
    step = run.timing.phase("step") if run.timing and not run.failure else None
    return median(step.best_s) if step and step.best_s else None


def _why(run: Run) -> str:
    if run.failure is None:
        return "it has no step time"
    kind = run.status.replace("_", " ")
    return run.failure.message if run.failure.message.startswith(kind) else f"{kind}: {run.failure.message}"
