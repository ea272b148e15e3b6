"""Temporary folders of commands. The next command removes leftovers of a killed one.

A command, and each process that it passes the lock to, holds a lock on its folder. The kernel releases it with the last
of them, however they end, also in containers.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREFIX = ".steplab-tmp-"
_NAME = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    path: Path
    lock: int
    """Descriptor for a process that may outlive this one."""


@contextmanager
def scratch_folder(beside: Path | None = None) -> Iterator[Scratch]:
    """A folder that only this user can open, in `beside` or the one for temporary files, removed on leaving.

    Raises OSError if it cannot be made.
    """
    parent = beside or Path(tempfile.gettempdir())
    remove_left_over(parent)
    scratch = _made(parent)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch.path, ignore_errors=True)
        os.close(scratch.lock)


def remove_left_over(parent: Path) -> None:
    """Remove this user's unlocked temporary folders in `parent`.

    Without locks, as in some network folders, none is removed.
    """
    try:
        with os.scandir(parent) as entries:
            found = [entry.path for entry in entries if _NAME.fullmatch(entry.name) and _is_own_folder(entry)]
    except OSError:  # a folder that may be written to and not be listed
        return
    for path in found:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # another process has removed it
            continue
        try:
            if _lock(descriptor, wait=False):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _made(parent: Path) -> Scratch:
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        _lock(descriptor, wait=True)
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return Scratch(path=Path(path), lock=descriptor)
        except FileNotFoundError:
            pass  # another process took it for left over, before it was locked
        os.close(descriptor)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _lock(descriptor: int, *, wait: bool) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True
