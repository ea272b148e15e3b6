"""steplab import"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def import_(
    files: Annotated[tuple[Path, ...], Parameter(help="JSONL files written by export (.gz too); - is standard input")],
    /,
    *,
    store: StoreOptions = StoreOptions(),
) -> None:
    """Add exported records to the store; those it has already are left alone."""
    from steplab.cli.output import say
    from steplab.lab.keeping import open_store

    texts = [(str(file), _read(file)) for file in files]
    with open_store(store.store, write=True) as opened:
        for name, text in texts:
            added, already = opened.import_lines(text.splitlines())
            say(f"{name}: {added} records added, {already} were there already")


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
