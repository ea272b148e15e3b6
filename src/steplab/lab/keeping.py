"""Open the store, keep records, import files, and annotate records."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from steplab import limits
from steplab.errors import SteplabError, UserError
from steplab.lab.files import Destination, folder_for, in_some_folder, write_whole
from steplab.records.codec import encode, new_head
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.records.validation import LONGEST_NAME, check, cleaned
from steplab.store import care
from steplab.store.database import Store
from steplab.store.location import SQLITE_MAGIC, default_path
from steplab.store.record_table import ForeignRecord, read_foreign
from steplab.units import format_bytes
from steplab.unpacking import Unpacked

_BUFFER_BYTES = 1 << 18


RecordType = TypeVar("RecordType", bound=Record)


def open_store(path: Path | str | None = None, *, write: bool) -> Store:
    return Store.open(path, write=write)


def has_store(path: Path | str | None = None) -> bool:
    return (Path(path) if path else default_path()).exists()


def check_store(path: Path | str | None = None) -> care.Condition:
    return care.check(Path(path) if path else default_path())


def back_up_store(target: Path, *, store: Path | str | None = None, force: bool = False) -> None:
    """Copy the store, which may be in use. Raises as Destination does."""
    destination = Destination(path=target, store=store, force=force)
    with folder_for(destination) as folder:
        copy = folder / "store.db"
        care.copy(Path(store) if store else default_path(), copy)
        destination.take(copy)


def load(record_id: str = "last", *, store: Path | str | None = None) -> Record:
    """The stored record with this id, beginning of an id, or unique name; by default the newest.

        run = steplab.load()
        run.median_s, run.interval_s, run.mfu

    Raises UserError for no or several matches, and SteplabError for an unreadable store.
    """
    with open_store(store, write=False) as opened:
        return opened.get(record_id)


def checked_line(what: str, text: str) -> str:
    """Return `text`. Raises UserError about `what` for several lines or unprintable text."""
    if not text.isprintable():
        raise UserError(f"{what} must be one line of printable text, not {text!r}")
    return text


def checked_name(name: str) -> str:
    """Return `name`. Raises UserError for several lines, unprintable or too long text."""
    if not isinstance(name, str):
        raise UserError(f"a name must be text, not {type(name).__name__}")
    if len(name) > LONGEST_NAME:
        raise UserError(f"a name must have at most {LONGEST_NAME} characters, not {len(name):,}")
    return checked_line("a name", name)


def imported_run(path: Path, name: str | None) -> Run:
    """An empty run, named after its file by default (step.json.gz: step). Raises UserError for an invalid name."""
    return Run(
        **new_head(),
        name=Path(path.name.removesuffix(".gz").removesuffix(".xz")).stem if name is None else checked_name(name),
    )


def import_run(path: Path, name: str | None, store: Path | str | None, read: Callable[[Run], Run]) -> Run:
    """Store an empty run with what `read` adds. Raises UserError for an unreadable or invalid file."""
    with open_store(store, write=True) as opened:
        run = imported_run(path, name)
        with named_file(path):
            run = cleaned(read(run))
            check(run)
        return keep(opened, run)


@contextmanager
def named_file(path: Path | str) -> Iterator[None]:
    """Add the file's path to errors of its content, and raise them as UserError."""
    try:
        yield
    except UserError:
        raise
    except SteplabError as error:
        raise UserError(f"{path}: {error}") from error


class NotStored(SteplabError):
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    study_id: str
    cell: str


def keep(store: Store, record: RecordType, place: Place | None = None) -> RecordType:
    """Store a record, at its `place` in a study if given. If that fails, write it to a file, and raise NotStored,
    which names the file.
    """
    record = cleaned(record if place is None else record.within(place.study_id))
    try:
        store.add(record, cell=place.cell if place else None)
    except SteplabError as error:
        line = encode(record) + b"\n"
        rescued = in_some_folder(f"steplab-unsaved-{record.id}.jsonl", lambda path: write_whole(path, line))
        if rescued:
            raise NotStored(f"{error}; the record is in {rescued}: `steplab import` it later") from error
        raise NotStored(
            f"{error}; no folder takes the record of the last measurement either, and it is lost"
        ) from error
    return record


def tag(
    record_id: str, tags: Sequence[str] = (), *, remove: Sequence[str] = (), store: Path | str | None = None
) -> Record:
    """Add and remove a record's tags, and return it. Raises UserError unless a tag is one printable word, and for an
    absent tag to remove.
    """
    for word in tags:
        if not word or not word.isprintable() or any(character.isspace() or character == "," for character in word):
            raise UserError(f"a tag is one printable word without commas, not {word!r}")

    def changed(record: Record) -> dict[str, object]:
        for word in remove:
            if word not in record.tags:
                has = f"only {', '.join(record.tags)}" if record.tags else "none"
                raise UserError(f"record {record.id} has no tag '{word}'; it has {has}")
        return {"tags": [word for word in dict.fromkeys((*record.tags, *tags)) if word not in remove]}

    with _existing_store(store) as opened:
        return opened.annotate(record_id, changed)


def note(record_id: str, text: str, *, store: Path | str | None = None) -> Record:
    """Replace a record's comment; an empty text removes it. Raises UserError unless it is one line of printable
    text.
    """
    with _existing_store(store) as opened:
        return opened.annotate(record_id, lambda record: {"comment": checked_line("a note", text)})


def _existing_store(path: Path | str | None) -> Store:
    open_store(path, write=False).close()
    return open_store(path, write=True)


def import_files(files: Sequence[Path | str] | Path | str, store: Path | str | None = None) -> tuple[int, int]:
    """Store all records of JSON lines files, or none. Files may be compressed by gzip or xz; `-` is standard input.

    Returns the numbers of added and existing records. Raises UserError, with file and line, for a file that is
    unreadable, too large or without records, and for an invalid record; SteplabError for an id that another stored
    record has.
    """
    given = [Path(file) for file in ((files,) if isinstance(files, (str, Path)) else files)]
    try:
        found = [foreign for file in given for foreign in _records(file)]
    except UserError as error:
        raise UserError(f"{error}; nothing was imported") from error
    if not found:
        raise UserError(f"nothing to import: no record in {', '.join(map(str, given))}")
    with open_store(store, write=True) as opened:
        return opened.import_records(found)


def read_records(file: Path) -> list[Record]:
    """The records of an export. Raises as `import_files` does."""
    found = [foreign.record for foreign in _records(file)]
    if not found:
        raise UserError(f"there is no record in {file}")
    return found


def _records(file: Path) -> Iterator[ForeignRecord]:
    try:
        if str(file) == "-":
            yield from _in_lines(file, sys.stdin.buffer)
        else:
            with file.open("rb", buffering=0) as stream:
                yield from _in_lines(file, stream)
    except limits.LimitReached as error:
        raise UserError(f"{file}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def _in_lines(file: Path, stream: IO[bytes]) -> Iterator[ForeignRecord]:
    unpacked = Unpacked(stream, most_bytes=limits.IMPORT_BYTES)
    lines = io.BufferedReader(unpacked, _BUFFER_BYTES)
    for number, line in enumerate(iter(lambda: lines.readline(limits.RECORD_BYTES + 1), b""), start=1):
        if len(line) > limits.RECORD_BYTES:
            raise limits.LimitReached(f"line {number} has more than {format_bytes(limits.RECORD_BYTES)}")
        if unpacked.damage:
            break  # the line may be cut off
        if line.strip():
            try:
                yield read_foreign(f"{file}, line {number}", line)
            except SteplabError as error:
                if number == 1 and line.startswith(SQLITE_MAGIC):
                    how = f"`steplab export --store {file} --output records.jsonl` makes an export of it"
                    raise UserError(f"{file} is a database, and no export; if it is a store, {how}") from error
                raise UserError(str(error)) from error
    if unpacked.damage:
        raise UserError(f"{file} is a damaged compressed file: {unpacked.damage}")
