"""Explain a run: its findings, and runs to compare its memory with."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.records.codec import now_utc
from steplab.records.finding import Findings
from steplab.records.rows import Row, software, step_key
from steplab.records.run import Run
from steplab.specs.resolve import with_fields
from steplab.store.database import Store


def explain(run: Run | str | None = None, *, store: Path | str | None = None) -> Findings:
    """Findings on a run: what could be faster, the predicted gain, and the evidence.

    `run` is a record, or the beginning of a stored one's id; without it, the newest run with a profile. Peaks that
    `steplab doctor` measured are used for an unknown GPU. Raises UserError without such a run.
    """
    from steplab import __version__
    from steplab.explain import api

    found = run if isinstance(run, Run) else run_to_explain(run, store=store)
    with open_store(store, write=False) as opened:
        ceilings = next(iter(opened.ceilings(found.device_name)), None) if found.device_name else None
    return Findings(
        run_id=found.id,
        created_utc=now_utc(),
        steplab_version=__version__,
        step_s=found.median_s,
        findings=tuple(api.explain(found, ceilings)),
        not_looked_at=api.not_looked_at(found, ceilings),
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
        rows = [row for row in opened.rows(status="ok") if row["kind"] == "memory"]
        return tuple({other.id: other for run in watched for other in _counterparts(run, rows, opened)}.values())


def _counterparts(run: Run, rows: Sequence[Row], opened: Store) -> Iterator[Run]:
    assert run.spec is not None  # watched, and no snapshot of unknown origin
    machine = {"device": run.device_name, "torch": software(run)["torch"]}
    for field, value in (("precision", "fp32"), ("checkpointing", "none")):
        if getattr(run.spec, field) == value:
            continue
        wanted = step_key(with_fields(run.spec, {field: value})) | machine
        alike = (row for row in rows if all(row.get(name, known) == known for name, known in wanted.items()))
        others = (opened.find(str(row["id"])) for row in alike)  # the newest first
        same_model = (
            each for each in others if isinstance(each, Run) and each.spec and each.spec.model == run.spec.model
        )
        yield from itertools.islice(same_model, 1)
