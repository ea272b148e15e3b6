"""Explain a stored run."""

from collections.abc import Sequence
from pathlib import Path

from steplab.errors import UserError
from steplab.explain.api import explain as diagnose
from steplab.explain.api import not_looked_at
from steplab.lab.keeping import open_store
from steplab.records.codec import now_utc
from steplab.records.finding import Findings
from steplab.records.run import Run


def explain(run: Run | str | None = None, *, store: Path | str | None = None) -> Findings:
    """The findings on a run: what could be faster, the predicted gain, and the evidence.

    `run` is a record, or the beginning of a stored one's id; without it, the newest run with a profile. For a device
    outside the catalogue, ceilings that `steplab doctor` measured on it are used. Raises UserError if there is no such
    run.
    """
    from steplab import __version__

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
