"""Which runs and audits a report is about."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.records.attention import AttentionRun
from steplab.records.codec import Record
from steplab.records.ddp import DdpRun
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.store.database import Store

_MOST_SINGLE_RUNS = 60
_BENCHMARKS = ("attention", "ddp")
"""Kinds of records that are studies of their own, and stand for themselves where there is no run."""


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
    ddp: tuple[DdpRun, ...] = ()
    """Data-parallel studies."""


def runs_to_report(
    ids: Sequence[str] = (), *, study: str | None = None, name: str | None = None, store: Path | str | None = None
) -> Selection:
    """The runs with these ids; else those of a name; else the study's; else the newest run's study; else the newest
    runs of no study; and where there is no run at all, the newest benchmark of attention or data-parallel study.

    Raises UserError where there is nothing to report.
    """
    with open_store(store, write=False) as opened:
        if ids:
            selection = _selected(opened.records(ids))
            if selection is None:
                raise UserError("none of these records is a run; `steplab list` shows the runs there are")
            return selection
        if name is not None:
            selection = _selected(opened.iterate(name=name), name)
            if selection is None:
                raise UserError(f"no run is called '{name}'; `steplab list` shows the names there are")
            return selection
        newest = next(iter(opened.rows(limit=1)), None)
        if newest is None and study is None and (benchmark := _newest_benchmark(opened)):
            return benchmark
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


def _selected(records: Iterable[Record], title: str | None = None) -> Selection | None:
    """All of these that a page can show, called what most of it is about; None where there is nothing to show."""
    records = list(records)
    runs, numerics, attention = _runs(records), _numerics(records), _attention(records)
    ddp = tuple(record for record in records if isinstance(record, DdpRun))
    if not runs and not numerics and not attention and not ddp:
        return None
    own = "Measured steps" if runs else "Precision" if numerics else "Attention" if attention else "Data parallelism"
    return Selection(runs=runs, title=title or own, description="", numerics=numerics, attention=attention, ddp=ddp)


def _newest_benchmark(opened: Store) -> Selection | None:
    """The newest record that is a study of its own; None where there is none."""
    newest = [row for kind in _BENCHMARKS for row in opened.rows(kind=kind, limit=1)]
    newest.sort(key=lambda row: str(row["created_utc"]))
    return _selected([opened.get(str(newest[-1]["id"]))]) if newest else None


def _runs(records: Iterable[Record]) -> tuple[Run, ...]:
    return tuple(record for record in records if isinstance(record, Run))


def _numerics(records: Iterable[Record]) -> tuple[Numerics, ...]:
    return tuple(record for record in records if isinstance(record, Numerics))


def _attention(records: Iterable[Record]) -> tuple[AttentionRun, ...]:
    return tuple(record for record in records if isinstance(record, AttentionRun))
