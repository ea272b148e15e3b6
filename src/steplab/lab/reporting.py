"""Select the records of a report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.errors import UserError
from steplab.lab.comparing import records_of, without_records
from steplab.lab.keeping import open_store
from steplab.records.record import Record
from steplab.records.registry import KINDS, kind_of
from steplab.store.database import Store

_MOST_TOGETHER = 60
"""Largest number of records of one kind without a study in one report; older ones are left out."""

_TRIED_FIRST = 10
"""How many of the newest records of each kind are tried, before all are listed because none of these can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRecords:
    """The records of a report, with its title."""

    records: tuple[Record, ...]
    """The records, at least one; those of one kind are in the order they were measured, of a study in its order."""
    title: str
    """Name of the study, or a description of the selection."""
    description: str = ""
    """Description of the study; empty: none."""

    def of(self, kind: str) -> tuple[Any, ...]:
        """The records of one kind, by its name in the registry."""
        return tuple(record for record in self.records if kind_of(record).name == kind)


def refuse_several(chosen: Mapping[str, bool]) -> None:
    """Raise UserError if records are chosen in more ways than one: by each name here that is true."""
    ways = [way for way, is_given in chosen.items() if is_given]
    if len(ways) > 1:
        raise UserError(f"{' and '.join(ways)} were given; choose the records in one way")


def records_to_report(
    given: Sequence[Record | str] = (),
    *,
    study: str | None = None,
    name: str | None = None,
    store: Path | str | None = None,
) -> ReportedRecords:
    """The records that are given, or that given texts stand for (`records_of`); or those of a name, or of a study;
    else those of what was measured last.

    That is the study that the newest record belongs to; or if it belongs to none, the benchmark that it is, or all
    records of its kind that belong to none.

    Raises UserError where there is nothing to report, and for more than one of records, a name and a study.
    """
    refuse_several({"records": bool(given), "a study": study is not None, "a name": name is not None})
    held = [record for record in given if isinstance(record, Record)]
    if held and len(held) == len(given):
        return _selected(held)  # they need not be in a store
    with open_store(store, write=False) as opened:
        if given:
            named = ([each] if isinstance(each, Record) else records_of(opened, [each]) for each in given)
            return _selected(record for those in named for record in those)
        if name is not None:
            found = list(opened.iterate(name=name))
            if not found:
                raise UserError(f"no record is called '{name}'; `steplab list` shows the names")
            return _selected(found, title=name)
        if study is not None:
            found_in = _of_study(opened, opened.study_id(study))
            if not found_in.records:
                raise without_records(study, opened)
            return found_in
        newest = _newest(opened)
        if newest.sweep_id is not None:
            return _of_study(opened, newest.sweep_id)
        if kind_of(newest).stands_alone:
            return _selected([newest])
        alike = opened.iterate(kind=kind_of(newest).name, outside_studies=True, newest=_MOST_TOGETHER)
        return _selected(tuple(alike) or [newest])  # in a damaged store its row may deny its kind


def _newest(opened: Store) -> Record:
    """The newest measurement that can be read. Raises UserError if there is none."""
    kinds = [name for name, kind in KINDS.items() if kind.verb != "doctor"]
    for most in (_TRIED_FIRST, None):
        rows = [row for name in kinds for row in opened.rows(kind=name, limit=most)]
        for row in sorted(rows, key=lambda row: str(row["created_utc"]), reverse=True):
            if record := opened.find(str(row["id"])):
                return record
    raise UserError(f"no run in {opened.path} yet; `steplab run` makes one")


def _of_study(opened: Store, study_id: str) -> ReportedRecords:
    places = opened.cells_in_order(study_id)
    row = next((row for row in opened.studies() if row["id"] == study_id), {})
    return ReportedRecords(
        records=tuple(sorted(opened.iterate(study=study_id), key=lambda record: places[record.id])),
        title=str(row.get("name") or "Study"),
        description=str(row.get("description") or ""),
    )


def _selected(records: Iterable[Record], title: str | None = None) -> ReportedRecords:
    """A selection of these records, with this title or one made from their kind."""
    found = tuple({record.id: record for record in records}.values())  # one may be given twice
    kinds = {kind_of(record).name for record in found}
    return ReportedRecords(
        records=found, title=title or next(kind.title for name, kind in KINDS.items() if name in kinds)
    )
