"""The store's default path, and the signature of its file."""

import contextlib
import os
from pathlib import Path

from steplab.errors import SteplabError

APPLICATION_ID = 0x53_54_50_4C
"""'STPL' in each store's header, which distinguishes it from other SQLite files."""

SQLITE_MAGIC = b"SQLite format 3\0"


def is_store_header(beginning: bytes) -> bool:
    """True for the first bytes of a store; https://sqlite.org/fileformat.html#application_id gives the position."""
    return beginning.startswith(SQLITE_MAGIC) and beginning[68:72] == APPLICATION_ID.to_bytes(4, "big")


def default_path() -> Path:
    """Default path: $STEPLAB_STORE, else steplab/store.db in $XDG_DATA_HOME, else in ~/.local/share.

    Empty variables count as unset, as does a relative $XDG_DATA_HOME (XDG specification). Raises SteplabError without a
    home folder.
    """
    own = os.environ.get("STEPLAB_STORE")
    if own:
        return Path(os.path.expanduser(own))
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data_home.is_absolute():
        try:
            data_home = Path.home() / ".local" / "share"
        except RuntimeError as error:  # a container's user without an entry in /etc/passwd
            raise SteplabError(f"{error}; set the store by --store or STEPLAB_STORE") from error
    return data_home / "steplab" / "store.db"


def make_data_home() -> None:
    """Make the XDG data folder, which fresh accounts lack, if the store belongs there.

    Failures are reported when the store is opened.
    """
    if not os.environ.get("STEPLAB_STORE"):
        with contextlib.suppress(OSError):
            default_path().parent.parent.mkdir(parents=True, exist_ok=True)
