"""Which runs and audits a report is about."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.records.attention import AttentionRun
from steplab.records.codec import Record, kind_of
from steplab.records.comm import CommRun
from steplab.records.ddp import DdpRun
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.store.database import Store

_MOST_SINGLE_RUNS = 60
_KINDS = ("run", "numerics", "attention", "comm", "ddp")
"""Of records that can be reported."""


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
    comm: tuple[CommRun, ...] = ()
    """Benchmarks of collectives."""
    ddp: tuple[DdpRun, ...] = ()
    """Data-parallel studies."""


def runs_to_report(
    ids: Sequence[str] = (), *, study: str | None = None, name: str | None = None, store: Path | str | None = None
) -> Selection:
    """The records with these ids; else those of a name; else the study's; else those of what was measured last.

    That is the study that the newest record belongs to; or if it belongs to none, the benchmark that it is, or all
    runs, or audits, that belong to none.

    Raises UserError where there is nothing to report.
    """
    with open_store(store, write=False) as opened:
        if ids:
            return _selected(
                opened.records(ids), "none of these records is a run; `steplab list` shows the runs there are"
            )
        if name is not None:
            nothing = f"no run is called '{name}'; `steplab list` shows the names there are"
            return _selected(opened.iterate(name=name), nothing, title=name)
        if study is not None:
            return _of_study(opened, opened.study_id(study))
        newest = _newest(opened)
        if isinstance(newest, (Run, Numerics)) and newest.study is not None:
            return _of_study(opened, newest.study)
        if not isinstance(newest, (Run, Numerics)):
            return _selected([newest], "")
        alike = opened.iterate(kind=kind_of(newest))
        single = [record for record in alike if isinstance(record, type(newest)) and record.study is None]
        return _selected(single[-_MOST_SINGLE_RUNS:], "")


def _newest(opened: Store) -> Record:
    """The newest record that can be read and reported. Raises UserError where there is none."""
    rows = [row for kind in _KINDS for row in opened.rows(kind=kind)]
    for row in sorted(rows, key=lambda row: str(row["created_utc"]), reverse=True):
        if record := opened.find(str(row["id"])):
            return record
    raise UserError(f"no run in {opened.path} yet; `steplab run` makes one")


def _of_study(opened: Store, study_id: str) -> Selection:
    row = next((row for row in opened.studies() if row["id"] == study_id), {})
    return Selection(
        runs=_runs(opened.iterate(kind="run", study=study_id)),
        title=str(row.get("name") or "Study"),
        description=str(row.get("description") or ""),
        numerics=tuple(
            record for record in opened.iterate(kind="numerics", study=study_id) if isinstance(record, Numerics)
        ),
    )


def _selected(records: Iterable[Record], nothing: str, title: str | None = None) -> Selection:
    """These records, called by the title, or by what they are. Raises UserError, saying `nothing`, for none."""
    every = list(records)
    kinds = {
        "Measured steps": (runs := _runs(every)),
        "Precision": (numerics := tuple(record for record in every if isinstance(record, Numerics))),
        "Attention": (attention := tuple(record for record in every if isinstance(record, AttentionRun))),
        "Collectives": (comm := tuple(record for record in every if isinstance(record, CommRun))),
        "Data parallelism": (ddp := tuple(record for record in every if isinstance(record, DdpRun))),
    }
    found = [kind for kind, members in kinds.items() if members]
    if not found:
        raise UserError(nothing)
    return Selection(
        runs=runs,
        title=title or found[0],
        description="",
        numerics=numerics,
        attention=attention,
        comm=comm,
        ddp=ddp,
    )


def _runs(records: Iterable[Record]) -> tuple[Run, ...]:
    return tuple(record for record in records if isinstance(record, Run))
