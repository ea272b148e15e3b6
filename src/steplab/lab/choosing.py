"""Choose stored records, for comparisons, `show` and reports."""

import os.path
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.comparison.comparing import whole_key
from steplab.errors import UserError
from steplab.git import git
from steplab.lab.keeping import open_store, read_records
from steplab.records.comparison import Side
from steplab.records.record import Record
from steplab.records.registry import KINDS, KINDS_IN_LISTS, kind_of
from steplab.records.rows import Row
from steplab.store.database import Store
from steplab.store.location import is_store_header
from steplab.store.selection import BACK, LAST

_MOST_TOGETHER = 60
_TELLING = ("id", "name", "tags", "git_commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    side: Side
    records: tuple[Record, ...]


def find_records(given: Record | Sequence[Record] | str, *, store: Path | str | None = None) -> Found:
    """The given records, or those that a text names, in the store or a file.

    The text is tried as, in this order:

    - `last`, or `last~2` for two records before
    - a record's whole id
    - a study's id or name
    - a name or tag, for all its records
    - the beginning of a record's or study's id
    - a git revision: the newest record of each cell measured in a clean checkout of it

    FILE means the records in an export (.jsonl), or the newest of another store (.db); FILE:TEXT names records in that
    store.

    Raises UserError for a text without records, and SteplabError for an unreadable file.
    """
    if not isinstance(given, str):
        held = [given] if isinstance(given, Record) else list(given)
        if not held:
            raise UserError("no records to compare; give at least one on each side")
        return _found(", ".join(record.id for record in held), held)
    path, rest = _file_in(text := given)
    if path is not None and not is_store_header(_beginning(path)):
        records = read_records(path)
        if rest:
            raise UserError(f"'{text}': a text behind the file is for stores; an export is compared as a whole")
        return _found(text, records)
    with open_store(path or store, write=False) as opened:
        return _found(text, _in_store(opened, rest if path is None else rest or LAST))


def records_of(opened: Store, texts: Iterable[str]) -> list[Record]:
    """The records that the texts name, without duplicates. Raises UserError for a text without records."""
    return list({record.id: record for text in texts for record in _in_store(opened, text)}.values())


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(100)


def _file_in(text: str) -> tuple[Path | None, str]:
    if os.path.isfile(text):
        return Path(text), ""
    file, colon, rest = text.rpartition(":")
    if colon and os.path.isfile(file):
        return Path(file), rest
    if (file or text).endswith((".db", ".jsonl", ".jsonl.gz")):
        raise UserError(f"no file {file or text}; give an existing store (.db) or export (.jsonl)")
    return None, text


def _found(text: str, records: Sequence[Record]) -> Found:
    environments = (record.environment for record in records)
    commits = dict.fromkeys(env.git_commit for env in environments if env and env.git_commit)
    names = dict.fromkeys(record.name for record in records if record.name)
    side = Side(told=text, ids=tuple(record.id for record in records), commits=tuple(commits), names=tuple(names))
    return Found(side=side, records=tuple(records))


def _in_store(opened: Store, text: str) -> list[Record]:
    if not text:
        raise UserError("'' stands for no record; give an id, a name, a tag, a study, last or a git revision")
    if text == LAST or text.startswith(BACK):
        return [opened.get(text)]
    rows: list[Row] = [{key: row.get(key) for key in _TELLING} for row in opened.each_row()]
    if any(row["id"] == text for row in rows):
        return [opened.get(text)]
    studies = list(opened.studies())
    called = [str(row["id"]) for row in studies if text in (row["id"], row["name"])]
    if records := _of_studies(opened, called):
        return records
    for having in (
        [row for row in rows if row["name"] == text],
        [row for row in rows if text in str(row.get("tags") or "").split()],
    ):
        if having:
            return opened.records(str(row["id"]) for row in reversed(having))
    if (record_id := opened.id_beginning(text)) is not None:
        return [opened.get(record_id)]
    beginning = [str(row["id"]) for row in studies if str(row["id"]).startswith(text)]
    if records := _of_studies(opened, beginning):
        return records
    if records := _of_commit(opened, rows, text):
        return records
    if called or beginning:
        raise without_records(text, opened)
    raise UserError(
        f"'{text}' is no id, study, name, tag or measured commit in {opened.path}; `steplab list` shows what there is"
    )


def _of_studies(opened: Store, studies: Sequence[str]) -> list[Record]:
    return next((records for study in studies if (records := list(opened.iterate(study=study)))), [])


def without_records(study: str, opened: Store) -> UserError:
    return UserError(
        f"study '{study}' has no record in {opened.path} that can be read; its command goes on by --resume"
    )


def _of_commit(opened: Store, rows: Sequence[Row], revision: str) -> list[Record]:
    commit = _commit(revision)
    ids = [str(row["id"]) for row in rows if commit and commit.startswith(str(row.get("git_commit") or "?"))]
    newest: dict[object, Record] = {}
    for record in opened.records(ids):
        cells = kind_of(record).cells
        keys = [whole_key(record, cell) for cell in cells(record)] if cells else []
        newest.setdefault(frozenset(item for key in keys for item in key.items()), record)
    return list(newest.values())[::-1]


def _commit(revision: str) -> str | None:
    try:
        return git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRecords:
    records: tuple[Record, ...]
    """At least one: those of a study in its order, given ones as given, others in order of measurement."""
    title: str
    """The study's name, or a description of the selection."""
    description: str = ""

    def of(self, kind: str) -> tuple[Any, ...]:
        return tuple(record for record in self.records if kind_of(record).name == kind)


def refuse_several(chosen: Mapping[str, bool]) -> None:
    """Raise UserError if more than one of these is true."""
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
    """The records of a report: `given` ones (or texts as in `find_records`), those of a `study`, or those of a `name`.

    Without any of these three: all records of the newest record's study. If it belongs to none: the newest record alone
    if it is a benchmark, else the newest ones of its kind. Raises UserError without records, and for several of the
    three.
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


_MOST_THAT_ANSWER = 2000


def records_that_answer(
    given: Sequence[Record | str] = (),
    *,
    study: str | None = None,
    name: str | None = None,
    store: Path | str | None = None,
) -> tuple[Record, ...]:
    if given or study is not None or name is not None:
        return records_to_report(given, study=study, name=name, store=store).records
    with open_store(store, write=False) as opened:
        return tuple(opened.iterate(newest=_MOST_THAT_ANSWER)) or (_newest(opened),)


def _newest(opened: Store) -> Record:
    for row in opened.each_row():
        if row["kind"] in KINDS_IN_LISTS and row["kind"] != "doctor" and (record := opened.find(str(row["id"]))):
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
    found = tuple({record.id: record for record in records}.values())  # one may be given twice
    kinds = {kind_of(record).name for record in found}
    return ReportedRecords(
        records=found, title=title or next(kind.title for name, kind in KINDS.items() if name in kinds)
    )
