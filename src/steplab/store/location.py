"""Where the store is by default, and what tells one from other files, known without importing anything of one."""

import contextlib
import os
from pathlib import Path

from steplab.errors import SteplabError

APPLICATION_ID = 0x53_54_50_4C
"""'STPL' in the header of each store, which tells it from other SQLite files."""

SQLITE_MAGIC = b"SQLite format 3\0"
"""The first bytes of every SQLite database."""


def is_store_header(beginning: bytes) -> bool:
    """Whether a file with this beginning is a store; https://sqlite.org/fileformat.html#application_id gives the
    place."""
    return beginning.startswith(SQLITE_MAGIC) and beginning[68:72] == APPLICATION_ID.to_bytes(4, "big")


def default_path() -> Path:
    """$STEPLAB_STORE, else steplab/store.db in $XDG_DATA_HOME, else in ~/.local/share.

    An empty variable counts as unset; so does a relative $XDG_DATA_HOME, as the XDG specification asks.
    Raises SteplabError if there is no home folder to fall back on.
    """
    own = os.environ.get("STEPLAB_STORE")
    if own:
        return Path(os.path.expanduser(own))
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data_home.is_absolute():
        data_home = _home() / ".local" / "share"
    return data_home / "steplab" / "store.db"


def make_data_home() -> None:
    """Make the XDG data folder, which a fresh account lacks, if the store is to lie in it.

    If it cannot be made, opening the store reports that.
    """
    if not os.environ.get("STEPLAB_STORE"):
        with contextlib.suppress(OSError):
            default_path().parent.parent.mkdir(parents=True, exist_ok=True)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:  # a container's user without an entry in /etc/passwd
        raise SteplabError(f"{error}; name the store with --store or STEPLAB_STORE") from error
