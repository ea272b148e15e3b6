"""Which runs and audits a report is about."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.records.attention import AttentionRun
from steplab.records.codec import Record
from steplab.records.numerics import Numerics
from steplab.records.run import Run

_MOST_SINGLE_RUNS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Runs, and what they have in common."""

    runs: tuple[Run, ...]
    """In the order they were measured; at least one, unless there are audits or benchmarks."""
    title: str
    """The study's name, or what the selection is."""
    description: str
    """The study's description, if it has one."""
    numerics: tuple[Numerics, ...] = ()
    """Audits of precision that belong to it."""
    attention: tuple[AttentionRun, ...] = ()
    """Benchmarks of attention."""


def runs_to_report(
    ids: Sequence[str] = (), *, study: str | None = None, name: str | None = None, store: Path | str | None = None
) -> Selection:
    """The runs with these ids; else those of a name; else the study's; else the newest run's study; else the newest
    runs of no study; and where there is no run at all, the newest benchmark of attention.

    Raises UserError where there is nothing to report.
    """
    with open_store(store, write=False) as opened:
        if ids:
            records = opened.records(ids)
            runs, numerics, attention = _runs(records), _numerics(records), _attention(records)
            if not runs and not numerics and not attention:
                raise UserError("none of these records is a run; `steplab list` shows the runs there are")
            title = "Measured steps" if runs else "Precision" if numerics else "Attention"
            return Selection(runs=runs, title=title, description="", numerics=numerics, attention=attention)
        if name is not None:
            records = list(opened.iterate(name=name))
            runs, numerics, attention = _runs(records), _numerics(records), _attention(records)
            if not runs and not numerics and not attention:
                raise UserError(f"no run is called '{name}'; `steplab list` shows the names there are")
            return Selection(runs=runs, title=name, description="", numerics=numerics, attention=attention)
        newest = next(iter(opened.rows(limit=1)), None)
        benchmark = next(iter(opened.rows(kind="attention", limit=1)), None)
        if newest is None and study is None and benchmark is not None:
            attention = _attention([opened.get(str(benchmark["id"]))])
            return Selection(runs=(), title="Attention", description="", attention=attention)
        if newest is None:
            raise UserError(f"no run in {opened.path} yet; `steplab run` makes one")
        if study is None:
            first = opened.get(str(newest["id"]))
            study_id = first.study if isinstance(first, Run) else None
        else:
            study_id = opened.study_id(study)
        if study_id is not None:
            row = next((row for row in opened.studies() if row["id"] == study_id), {})
            return Selection(
                runs=_runs(opened.iterate(kind="run", study=study_id)),
                title=str(row.get("name") or "Study"),
                description=str(row.get("description") or ""),
                numerics=_numerics(opened.iterate(kind="numerics", study=study_id)),
            )
        single = [run for run in _runs(opened.iterate(kind="run")) if run.study is None]
        return Selection(runs=tuple(single[-_MOST_SINGLE_RUNS:]), title="Measured steps", description="")


def _runs(records: Iterable[Record]) -> tuple[Run, ...]:
    return tuple(record for record in records if isinstance(record, Run))


def _numerics(records: Iterable[Record]) -> tuple[Numerics, ...]:
    return tuple(record for record in records if isinstance(record, Numerics))


def _attention(records: Iterable[Record]) -> tuple[AttentionRun, ...]:
    return tuple(record for record in records if isinstance(record, AttentionRun))
