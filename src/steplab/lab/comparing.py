"""Finds the records that a comparison is about, and compares them."""

import os.path
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.comparison.comparing import compare as compare_records
from steplab.comparison.likeness import whole_key
from steplab.errors import UserError
from steplab.git import git
from steplab.lab.importing import read_records
from steplab.lab.keeping import open_store
from steplab.records.comparison import Comparison, Side
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.rows import Row
from steplab.store.database import Store
from steplab.store.location import is_store_header
from steplab.store.selection import BACK, LAST


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The records that a text stands for."""

    side: Side
    """What they are called in the comparison."""
    records: tuple[Record, ...]
    """The records, at least one, oldest first."""


def compare(
    a: Record | Sequence[Record] | str,
    b: Record | Sequence[Record] | str = "last",
    *,
    threshold: float | None = None,
    allow: Collection[str] = (),
    store: Path | str | None = None,
) -> Comparison:
    """How the records B differ from the records A, as `steplab compare` says it.

        found = steplab.compare(before, after, allow=["torch"])
        found.outcome  # fine, undecided or regression
        steplab.show(found)

    A and B are records, or a text; `find_records` says what that may be. `threshold` is the smallest difference that
    matters, as a share; `allow` names fields that may differ.

    Raises UserError for a text that stands for no record, and errors.Inconclusive for records that are not alike in a
    field that `allow` does not name.
    """
    before, after = (_given(each, store) for each in (a, b))
    return compare_records(
        before.side, after.side, before.records, after.records, threshold=threshold, allow=frozenset(allow)
    )


def _given(given: Record | Sequence[Record] | str, store: Path | str | None) -> Found:
    if isinstance(given, str):
        return find_records(given, store=store)
    records = [given] if isinstance(given, Record) else list(given)
    if not records:
        raise UserError("no records to compare; give at least one on each side")
    return _found(", ".join(record.id for record in records), records)


def find_records(text: str, *, store: Path | str | None = None) -> Found:
    """The records that a text stands for, in this store or in the file that it names.

    The text is tried in this order: `last`, or `last~2` for the record two before it; a record's whole id; the id or
    the name of a study; a name or a tag, for all records that have it; the beginning of the id of a record, or of a
    study; a git revision, for the newest record of each cell that was measured in a clean checkout of it. FILE stands
    for the records in an export (.jsonl), or for the newest of another store (.db); FILE:TEXT for the records in that
    store that TEXT stands for.

    Raises UserError if it stands for none, and SteplabError for a file that cannot be read.
    """
    path, rest = _file_in(text)
    if path is not None and not is_store_header(_beginning(path)):
        records = read_records(path)
        if rest:
            raise UserError(f"'{text}': a text behind the file is for stores; an export is compared as a whole")
        return _found(text, records)
    with open_store(path or store, write=False) as opened:
        return _found(text, _in_store(opened, rest if path is None else rest or LAST))


def records_of(opened: Store, texts: Iterable[str]) -> list[Record]:
    """The records of a store that texts stand for, each once: ids, studies, names, tags and revisions, as in
    `find_records`. Raises UserError for a text that stands for none."""
    return list({record.id: record for text in texts for record in _in_store(opened, text)}.values())


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(100)


def _file_in(text: str) -> tuple[Path | None, str]:
    """The file that a text names, if it does, and the rest."""
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
    rows = list(opened.rows_in_part(("id", "name", "tags", "git_commit")))
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
    """The records of the first of these that has any."""
    return next((records for study in studies if (records := list(opened.iterate(study=study)))), [])


def without_records(study: str, opened: Store) -> UserError:
    """The error for a study of which there is nothing to show, as where its first measurement was interrupted."""
    return UserError(
        f"study '{study}' has no record in {opened.path} that can be read; its command goes on by --resume"
    )


def _of_commit(opened: Store, rows: Sequence[Row], revision: str) -> list[Record]:
    """The newest record of each cell among those measured in a clean checkout of the revision, oldest first."""
    commit = _commit(revision)
    ids = [str(row["id"]) for row in rows if commit and commit.startswith(str(row.get("git_commit") or "?"))]
    newest: dict[object, Record] = {}
    for record in opened.records(ids):
        cells = kind_of(record).cells
        keys = [whole_key(record, cell) for cell in cells(record)] if cells else []
        newest.setdefault(frozenset(item for key in keys for item in key.items()), record)
    return list(newest.values())[::-1]


def _commit(revision: str) -> str | None:
    """The whole digits of a commit: those that git gives for the revision here, or the beginning of a commit."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        return None
