"""Add words of one's own to stored records: tags to find them by, and a comment."""

from collections.abc import Sequence
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import checked_line, open_store
from steplab.records.record import Record
from steplab.store.database import Store


def tag(
    record_id: str, tags: Sequence[str] = (), *, remove: Sequence[str] = (), store: Path | str | None = None
) -> Record:
    """Add tags to a record and remove others, and give the record as it is then.

    Raises UserError for a tag that is not one printable word, or for a tag to remove that the record does not have.
    """
    for word in tags:
        if not word or not word.isprintable() or any(character.isspace() or character == "," for character in word):
            raise UserError(f"a tag is one printable word without commas, not {word!r}")
    with _existing_store(store) as opened:
        record = opened.get(record_id)
        for word in remove:
            if word not in record.tags:
                has = f"only {', '.join(record.tags)}" if record.tags else "none"
                raise UserError(f"record {record.id} has no tag '{word}'; it has {has}")
        kept = [word for word in dict.fromkeys((*record.tags, *tags)) if word not in remove]
        opened.annotate(record.id, tags=kept, comment=record.comment)
        return opened.get(record.id)


def note(record_id: str, text: str, *, store: Path | str | None = None) -> Record:
    """Give a record this comment in place of an earlier one; an empty text removes it. Gives the record.

    Raises UserError if the text is not one line of printable text.
    """
    with _existing_store(store) as opened:
        record = opened.get(record_id)
        opened.annotate(record.id, tags=record.tags, comment=checked_line("a note", text))
        return opened.get(record.id)


def _existing_store(path: Path | str | None) -> Store:
    """The store, to be written to; raises SteplabError where there is none, and makes none."""
    open_store(path, write=False).close()
    return open_store(path, write=True)
