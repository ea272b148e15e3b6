"""Data to standard output or to a file, words about it to standard error."""

import gzip
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from steplab.errors import SteplabError, UserError

_ENDINGS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".md": "md",
    ".tex": "latex",
    ".html": "html",
    ".htm": "html",
    ".txt": "table",
}


ROW_FORMATS = ("table", "json", "csv", "md", "latex")
"""What a table of runs can be written as."""


def chosen_format(format: str | None, output: Path | None, allowed: Sequence[str] = ROW_FORMATS) -> str:
    """The format asked for; else the one the file's ending stands for; else the first allowed.

    To be called before the work begins: raises UserError for a format the command does not write, and
    SteplabError for a file that cannot be made.
    """
    ending = _ENDINGS.get(output.suffix.lower()) if output else None
    if output and output.suffix and not ending and not format:
        raise UserError(f"{output.suffix} stands for no format; give one with --format: {', '.join(allowed)}")
    chosen = format or ending or allowed[0]
    if chosen not in allowed:
        page = "; `steplab report` makes pages" if chosen == "html" else ""
        raise UserError(f"this command does not write {chosen}; choose one of {', '.join(allowed)}{page}")
    if output is not None and output.is_dir():
        raise UserError(f"cannot write to the folder {output}; name a file in it")
    if output and not _writes_through(output) and not os.access(output.parent, os.W_OK):
        why = "its folder is not writable" if output.parent.is_dir() else f"there is no folder {output.parent}"
        raise SteplabError(f"cannot write {output}: {why}")
    return chosen


def emit(text: str, output: Path | None) -> None:
    """Print the text, or replace the file with it: whole, or not at all; compressed where its name ends in .gz.

    Raises SteplabError if it cannot.
    """
    if not text.endswith("\n"):
        text += "\n"
    if output is None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise SteplabError(f"cannot write to standard output: {error.strerror}") from error
        return
    try:
        if _writes_through(output):
            with output.open("w", encoding="utf-8") as file:
                file.write(text)
        else:
            content = text.encode()
            _replace(output.resolve(), gzip.compress(content, mtime=0) if output.suffix == ".gz" else content)
    except OSError as error:
        raise SteplabError(f"cannot write {output}: {error.strerror}") from error
    say(f"wrote {output}")


def _writes_through(output: Path) -> bool:
    """Whether it is a device or a pipe, which is written to; a file is replaced."""
    return output.exists() and not output.is_file()


def _replace(output: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, output.stat().st_mode & 0o777 if output.exists() else _new_file_mode())
        os.replace(temporary, output)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _new_file_mode() -> int:
    """What a file made here may be read by: mkstemp's are for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def say(text: str) -> None:
    """A remark for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def stdout_color() -> bool:
    """Whether what goes to standard output may be coloured."""
    from steplab.report.kit.terminal import wants_color

    return wants_color(sys.stdout)
