"""Output files at paths that the user chooses, written completely or not at all.

A store is never replaced; another file only if it is empty, steplab wrote it, or with force. Tables (CSV, JSON, LaTeX)
and plain text bear no mark of steplab. Devices and pipes are appended to.
"""

import contextlib
import gzip
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from steplab.errors import SteplabError, UserError
from steplab.measurement.processes.started import scratch_folder
from steplab.printing import MARK
from steplab.store.location import SQLITE_MAGIC, default_path, is_store_header

if TYPE_CHECKING:
    from steplab.records.run import Run

_READ_BYTES = 16384
_COMPANIONS = ("", "-wal", "-shm", "-journal")
_DEVICES = Path("/dev")
_PACKED = ".gz"


_MARKED = re.compile(rb'[=:] ?"steplab[ "]|"steplab_version":|' + MARK.encode())
"""Pattern near the beginning of a file that shows that steplab wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    path: Path
    store: Path | str | None = None
    force: bool = False
    """Replace other programs' files too, but never a store."""

    @property
    def is_written_to(self) -> bool:
        in_devices = self.path.parent in (_DEVICES, _DEVICES / "fd")
        return in_devices or (self.path.exists() and not self.path.is_file())

    def check(self) -> None:
        """Raises UserError for a file that must not be replaced, SteplabError for an unwritable path."""
        if target := self._checked():
            with self._errors(), scratch_folder(target.parent):
                pass  # on some file systems a folder's permissions do not show if it takes a file

    def write(self, content: bytes) -> None:
        with self.writing() as file:
            file.write(content)

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """Open a file that replaces the target when the context ends without an error; a device is opened directly.
        Raises as `check` does.
        """
        target = self._checked()
        with self._errors():
            if target is None:
                with self.path.open("ab") as device:
                    yield device
                return
            with scratch_folder(target.parent) as scratch:
                written = scratch.path / "written"
                with written.open("wb") as file:
                    yield file
                _put(written, target)

    def take(self, written: Path) -> Path:
        """Move a finished file here; a device gets a copy. Raises as `check` does."""
        target = self._checked()
        with self._errors():
            if target is None:
                with written.open("rb") as source, self.path.open("ab") as device:
                    shutil.copyfileobj(source, device)
                return written
            _put(written, target)
        return self.path

    def _checked(self) -> Path | None:
        """The path to replace, with links resolved before the check; None: a device or pipe."""
        with self._errors():
            if self.path.is_dir():
                raise UserError(f"cannot write to {self.path}: it is a folder; name a file in it")
            self._refuse_the_store()
            if self.is_written_to:
                return None
            target = _real(self.path)
            folder = target.parent
            if not os.access(folder, os.W_OK):
                why = "its folder is not writable" if folder.is_dir() else f"there is no folder {self.path.parent}"
                raise SteplabError(f"cannot write {self.path}: {why}")
            self._refuse_another_store(target)
            self._refuse_a_file_of_others(target)
        return target

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SteplabError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _refuse_the_store(self) -> None:
        try:
            store = Path(self.store) if self.store else default_path()
        except SteplabError:  # there is no place for one
            return
        for end in _COMPANIONS:
            if any(_is_same(self.path, Path(f"{base}{end}")) for base in (store, _real(store))):
                what = f"{end} file of the store" if end else "store"
                raise UserError(f"cannot write to {self.path}: it is the {what} {store}; name another file")

    def _refuse_another_store(self, target: Path) -> None:
        for end in _COMPANIONS:
            other = Path(str(target).removesuffix(end))
            if not str(target).endswith(end) or not other.is_file():
                continue
            beginning = _beginning(other)
            if end and beginning.startswith(SQLITE_MAGIC):
                raise UserError(f"cannot write to {self.path}: it belongs to the database {other}; name another file")
            if is_store_header(beginning):
                raise UserError(f"cannot replace {self.path}: it is a steplab store; name another file")

    def _refuse_a_file_of_others(self, target: Path) -> None:
        beginning = _beginning(target) if target.exists() and not self.force else b""
        if beginning.strip() and not _MARKED.search(beginning):
            raise UserError(
                f"{self.path} exists and does not say that steplab wrote it (tables and plain text never do); "
                "name another file, or add --force to replace this one"
            )


def raw_file(
    path: Path | str | None, store: Path | str | None, force: bool, what: str, suffixes: tuple[str, ...]
) -> Destination | None:
    """Where a trace or snapshot goes; None without a path. Raises as `check` does, and UserError for another suffix."""
    if path is None:
        return None
    target = Destination(path=Path(path), store=store, force=force)
    target.check()
    if not target.is_written_to and not target.path.name.endswith(suffixes):
        ends = " or ".join(suffixes)
        raise UserError(f"cannot write the {what} to {target.path}; use a name ending in {ends}")
    return target


@contextmanager
def folder_for(target: Destination | None) -> Iterator[Path]:
    """Temporary folder on the destination's disk. Raises as `check` does."""
    if target:
        target.check()
    beside = _real(target.path).parent if target and not target.is_written_to else None
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder(beside))
        except OSError as error:
            what = target.path if target else "temporary files"
            raise SteplabError(f"cannot write {what}: {error.strerror or error}") from error
        yield scratch.path


def refuse_the_same(*paths: Path | None) -> None:
    """Raise UserError if two outputs would go to one file."""
    given = [path for path in paths if path is not None]
    for number, path in enumerate(given):
        if any(_is_same(path, other) for other in given[:number]):
            raise UserError(f"two outputs would go to {path}, and the second would replace the first; name two files")


@contextmanager
def rescued(
    written: Path, target: Destination | None, what: str, run: "Run", beside: Callable[[Path], Path] | None = None
) -> Iterator[None]:
    """Move a raw file that cannot be read, with the file `beside` it, out of its temporary folder, and name the new
    path in the error.
    """
    try:
        yield
    except Exception as error:
        kept = target.path if target else None
        if written.exists():
            name = f"steplab-{what}-{run.id}{written.suffix}"
            kept = in_some_folder(name, lambda path: shutil.move(written, path))
            if kept and beside and beside(written).exists():
                shutil.move(beside(written), beside(kept))
        why = str(error) if isinstance(error, SteplabError) else f"{type(error).__name__}: {error}"
        where = f"the {what} is in {kept}" if kept else f"the {what} could not be kept in any folder"
        raise SteplabError(
            f"the {what} could not be read: {why}; {where}, and the timing is in record {run.id}"
        ) from error


def in_some_folder(name: str, put: Callable[[Path], object]) -> Path | None:
    """Try `put` in the working folder, then in the temporary one; return the path, None if both fail."""
    for folder in (Path.cwd, tempfile.gettempdir):
        with contextlib.suppress(OSError):
            path = Path(folder()) / name
            put(path)
            return path
    return None


def write_whole(path: Path, content: bytes) -> None:
    """Write a new file completely, or none. Raises OSError, as for a full disk."""
    try:
        path.write_bytes(content)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _is_same(path: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return _real(path) == _real(other)


def _real(path: Path) -> Path:
    """The path with links resolved; a circle of links is accepted, unlike in Path.resolve."""
    return Path(os.path.realpath(path))


def _put(temporary: Path, target: Path) -> None:
    os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else _new_file_mode())
    os.replace(temporary, target)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(_READ_BYTES)
    if head.startswith(b"\x1f\x8b"):
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(head, _READ_BYTES)
    return head


_FORMATS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".md": "md",
    ".tex": "latex",
    ".html": "html",
    ".htm": "html",
    ".svg": "svg",
    ".txt": "table",
}


def format_of(path: Path) -> str | None:
    return _FORMATS.get(Path(path.name.removesuffix(_PACKED)).suffix.lower())


def packed(file: IO[bytes], path: Path) -> AbstractContextManager[IO[bytes]]:
    if path.suffix != _PACKED:
        return nullcontext(file)
    return cast(IO[bytes], gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0))


def _new_file_mode() -> int:
    """Permissions by the user's umask; mkstemp would allow only the owner to read."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
