"""Objects in a database of anyone's that would compute, hang or swallow when its tables are used.

A view, a virtual table or a generated column computes what is read, without end if it likes; a trigger does anything
with what is written. No exporter and no store has one.
"""

import sqlite3

_OBJECTS = """
    SELECT name FROM sqlite_master
    WHERE NOT (type = 'table' AND COALESCE(sql, '') LIKE 'CREATE TABLE %')
    AND NOT (type = 'index' AND (sql IS NULL OR sql LIKE 'CREATE INDEX %' OR sql LIKE 'CREATE UNIQUE INDEX %'))
    LIMIT 1
"""
"""By the statement, which SQLite goes by, and not by the type that the row states."""
_COLUMNS = """
    SELECT tables.name || '.' || columns.name FROM sqlite_master AS tables, pragma_table_xinfo(tables.name) AS columns
    WHERE tables.type = 'table' AND columns.hidden > 1 LIMIT 1
"""


def computing_object(connection: sqlite3.Connection) -> str | None:
    """What computes in a database, in words; None if nothing does. Raises sqlite3's errors for a damaged one."""
    if found := connection.execute(_OBJECTS).fetchone():
        return f"the view, trigger or virtual table {_shown(found[0])}"
    if found := connection.execute(_COLUMNS).fetchone():
        return f"the generated column {_shown(found[0])}"
    return None


def _shown(name: object) -> str:
    return ascii(str(name)[:100])
