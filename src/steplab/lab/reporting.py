"""Which runs and audits a report is about."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.records.codec import Record, kind_of
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.store.database import Store

_MOST_SINGLE_RUNS = 60
_TITLES = {
    "run": "Measured steps",
    "numerics": "Precision",
    "attention": "Attention",
    "comm": "Collectives",
    "ddp": "Data parallelism",
    "ceilings": "Ceilings",
}
"""What a report of records of one kind is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Records, and what they have in common."""

    records: tuple[Record, ...]
    """Of any kinds, each kind in the order of measurement; at least one."""
    title: str
    """The study's name, or what the selection is."""
    description: str
    """The study's description, if it has one."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs among them."""
        return tuple(record for record in self.records if isinstance(record, Run))


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
            return _selected(opened.records(ids), "none of these records can be reported")
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
    rows = [row for kind in _TITLES if kind != "ceilings" for row in opened.rows(kind=kind)]
    for row in sorted(rows, key=lambda row: str(row["created_utc"]), reverse=True):
        if record := opened.find(str(row["id"])):
            return record
    raise UserError(f"no run in {opened.path} yet; `steplab run` makes one")


def _of_study(opened: Store, study_id: str) -> Selection:
    row = next((row for row in opened.studies() if row["id"] == study_id), {})
    found = [record for kind in ("run", "numerics") for record in opened.iterate(kind=kind, study=study_id)]
    return Selection(
        records=tuple(found), title=str(row.get("name") or "Study"), description=str(row.get("description") or "")
    )


def _selected(records: Iterable[Record], nothing: str, title: str | None = None) -> Selection:
    """These records, called by the title, or by what the first kind of them is. Raises UserError, saying `nothing`, for
    none."""
    every = sorted(records, key=lambda record: list(_TITLES).index(kind_of(record)))
    if not every:
        raise UserError(nothing)
    return Selection(records=tuple(every), title=title or _TITLES[kind_of(every[0])], description="")
