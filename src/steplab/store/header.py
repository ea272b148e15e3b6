"""What tells a store from other files, known without reading or importing anything of one."""

APPLICATION_ID = 0x53_54_50_4C
"""'STPL' in the header of each store, which tells it from other SQLite files."""

SQLITE_MAGIC = b"SQLite format 3\0"
"""The first bytes of every SQLite database."""


def is_store_header(beginning: bytes) -> bool:
    """Whether a file with this beginning is a store; https://sqlite.org/fileformat.html#application_id gives the
    place."""
    return beginning.startswith(SQLITE_MAGIC) and beginning[68:72] == APPLICATION_ID.to_bytes(4, "big")
