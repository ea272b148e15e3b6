"""Where torch.compile keeps its code, and what a compiler that was killed left there."""

import os
import time
from collections.abc import MutableMapping
from pathlib import Path

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_LINKED_WITHIN_S = 10.0
"""A library that is empty for longer is not being written."""


def keep_compiled_code_private(environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """Have torch.compile keep its code in the user's cache folder, unless its variable names another one. Returns that
    folder; None where torch's default stays, because there is no home folder.

    That default is /tmp/torchinductor_USER: anyone on the machine may make that folder first, and torch then runs what
    they put there.
    """
    if _VARIABLE not in environment:
        cache = Path(environment.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():
            try:
                cache = Path.home() / ".cache"
            except RuntimeError:
                return None
        environment[_VARIABLE] = str(cache / "steplab" / "torchinductor")
    folder = environment[_VARIABLE]
    return Path(folder) if folder else None  # an empty name would be the working folder


def remove_what_was_cut_off(folder: Path | None) -> None:
    """Remove empty libraries. A linker that was killed leaves them, as where a budget ends during a compilation, and
    torch would load them in each later step of the same code, and fail."""
    for library in folder.glob("*/*.so") if folder else ():
        try:
            found = library.stat()
            if not found.st_size and time.time() - found.st_mtime > _LINKED_WITHIN_S:
                library.unlink()
        except OSError:
            continue  # another process was quicker, or it is another user's
