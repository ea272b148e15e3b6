"""Explain a stored run: its findings, and the runs that its memory is compared with."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.records.codec import now_utc
from steplab.records.finding import Findings
from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.store.database import Store


def explain(run: Run | str | None = None, *, store: Path | str | None = None) -> Findings:
    """Findings on a run: what could be faster, the predicted gain, and the evidence.

    `run` is a record, or the beginning of a stored one's id; without it, the newest run with a profile. Peaks that
    `steplab doctor` measured are used for an unknown GPU. Raises UserError without such a run.
    """
    from steplab import __version__
    from steplab.explain.api import explain as diagnose
    from steplab.explain.api import not_looked_at

    found = run if isinstance(run, Run) else run_to_explain(run, store=store)
    with open_store(store, write=False) as opened:
        ceilings = next(iter(opened.ceilings(found.device_name)), None) if found.device_name else None
    return Findings(
        run_id=found.id,
        created_utc=now_utc(),
        steplab_version=__version__,
        step_s=found.median_s,
        findings=tuple(diagnose(found, ceilings)),
        not_looked_at=not_looked_at(found, ceilings),
    )


def findings_of(runs: Sequence[Run], store: Path | str | None = None) -> dict[str, Findings]:
    return {run.id: explain(run, store=store) for run in runs if run.profile}


def run_to_explain(run_id: str | None = None, *, store: Path | str | None = None) -> Run:
    """The run whose id begins with `run_id`; by default the newest with a profile. Raises UserError without one."""
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


def memory_references(runs: Sequence[Run], store: Path | str | None = None) -> tuple[Run, ...]:
    """Runs to compare memory with: the newest of the same step in fp32, and without checkpointing, on the same device
    and torch.
    """
    watched = [run for run in runs if run.spec is not None and run.memory_profile is not None]
    if not watched:
        return ()
    with open_store(store, write=False) as opened:
        return tuple({other.id: other for run in watched for other in _counterparts(run, opened)}.values())


def _counterparts(run: Run, opened: Store) -> Iterator[Run]:
    assert run.spec is not None  # watched, and no snapshot of unknown origin
    for field, value in (("precision", "fp32"), ("checkpointing", "none")):
        asked = {name: getattr(run.spec, name) for name in ("context", "precision")} | {"model": run.spec.model.label}
        asked |= {field: value} if field in asked else {}
        if getattr(run.spec, field) == value:
            continue
        for row in opened.rows(status="ok"):  # the newest first
            if all(row.get(name) == wanted for name, wanted in asked.items()):
                other = opened.find(str(row["id"]))
                if isinstance(other, Run) and other.memory_profile and _differs_by(run, other, field, value):
                    yield other
                    break


def _differs_by(run: Run, other: Run, field: str, value: str) -> bool:
    assert run.spec is not None
    wanted = _memory_fields(dataclasses.replace(run.spec, **{field: value}))  # type: ignore[arg-type]  # a field of it
    return other.spec is not None and _memory_fields(other.spec) == wanted and _machine(other) == _machine(run)


def _memory_fields(spec: StepSpec) -> StepSpec:
    return dataclasses.replace(spec, warmup=0, steps=1, seed=0, device="auto")


def _machine(run: Run) -> tuple[str | None, str | None]:
    return run.device_name, run.environment.torch if run.environment else None
