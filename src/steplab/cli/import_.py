"""steplab import"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def import_(
    files: Annotated[
        tuple[Path, ...],
        Parameter(help="JSONL files written by export (.gz too); - is standard input", allow_leading_hyphen=True),
    ],
    /,
    *,
    store: StoreOptions = StoreOptions(),
) -> None:
    """Add exported records to the store, all or none; those it has already are left alone."""
    from steplab.cli.output import say
    from steplab.errors import UserError
    from steplab.lab.keeping import open_store
    from steplab.units import counted

    lines = [line for file in files for line in _lines(file)]
    if not any(line.strip() for line in lines):
        raise UserError(f"nothing to import: {', '.join(map(str, files))} holds no record")
    with open_store(store.store, write=True) as opened:
        added, already = opened.import_lines(lines)
    say(f"{counted(added, 'record')} added, {already} {'was' if already == 1 else 'were'} there already")


def _lines(file: Path) -> list[bytes]:
    """The file's lines, every one of them a record this version reads."""
    from steplab.errors import SteplabError
    from steplab.records.codec import decode

    lines = _read(file).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                decode(line)
        except SteplabError as error:
            raise SteplabError(f"{file}, line {number}: {error}; nothing was imported") from error
    return lines


def _read(file: Path) -> bytes:
    import gzip
    import zlib

    from steplab.errors import UserError

    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{file} is a damaged gzip file: {error}") from error
