import copy
import pickle
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

CONTROLS = (
    "\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\x9d0;title\x9c", "a\rb", "a\nb", "\x00", "\x7f", "\u202etxt\u202c",
    "\u2066a\u2069", "\u2028", "\u2029", "\u061c", "\u200e", "\x0b\x0c", "\x85",
)  # fmt: skip
TEXTS = (
    *CONTROLS, "", " ", "x" * 5000, "\ud800", "é" * 200, "漢字", "<script>", "&amp;", "|`*_", "\\input{x}", "%", "=1+1",
    "../../etc/passwd", "NaN", "1e999", "null", "-1", "0x10",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 255, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**40,
    -(2**31), -(2**63), -(2**63) - 1, 0.0, -0.0, 0.5, 1e-300, 5e-324, 1e15, 1e18, 1e29, 1e300, 1.7e308, -1e300,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
OTHERS: tuple[object, ...] = (None, True, False, [], {}, [[]], [{}], {"": ""}, [None], [0] * 300, b"")


def mutated_bytes(random_: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random_.choice((1, 1, 1, 2, 3, 8))):
        if not changed:
            break
        random_.choice(_CHANGES_OF_BYTES)(random_, changed)
    return bytes(changed)


def _flip(random_: random.Random, content: bytearray) -> None:
    content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)


def _set(random_: random.Random, content: bytearray) -> None:
    content[random_.randrange(len(content))] = random_.choice((0, 0x7F, 0x80, 0xFF, 0x1B, 0x22, 0x5C, 0x7D, 0x2E, 0x65))


def _cut(random_: random.Random, content: bytearray) -> None:
    del content[random_.randrange(len(content)) :]


def _remove(random_: random.Random, content: bytearray) -> None:
    begin = random_.randrange(len(content))
    del content[begin : begin + random_.choice((1, 2, 4, 16, 256))]


def _repeat(random_: random.Random, content: bytearray) -> None:
    begin = random_.randrange(len(content))
    content[begin:begin] = content[begin : begin + random_.choice((1, 8, 64, 512))]


def _insert(random_: random.Random, content: bytearray) -> None:
    begin = random_.randrange(len(content))
    content[begin:begin] = random_.randbytes(random_.choice((1, 2, 8)))


_CHANGES_OF_BYTES: Sequence[Callable[[random.Random, bytearray], None]] = (
    *(_flip, _flip, _flip, _set, _set, _cut, _remove, _repeat, _insert),
)


def flipped_bits(random_: random.Random, content: bytes, count: int) -> bytes:
    changed = bytearray(content)
    for _ in range(count):
        _flip(random_, changed)
    return bytes(changed)


def edge(random_: random.Random) -> Any:
    return copy.deepcopy(random_.choice(random_.choice((TEXTS, NUMBERS, NUMBERS, OTHERS))))


def mutated_value(random_: random.Random, value: Any, most: int = 3) -> Any:
    changed = pickle.loads(pickle.dumps(value))  # as a deep copy, in a fifth of the time
    for _ in range(random_.randint(1, most)):
        changed = _changed(random_, changed)
    return changed


def _changed(random_: random.Random, root: Any) -> Any:
    holder: Any = None
    key: Any = None
    value = root
    while isinstance(value, (dict, list)) and value and (holder is None or random_.random() < 0.85):
        holder = value
        key = random_.choice(list(value)) if isinstance(value, dict) else random_.randrange(len(value))
        value = value[key]
    if holder is None:
        return edge(random_)
    how = random_.randrange(10)
    if isinstance(value, list) and value and how < 6:
        _change_list(random_, value)
    elif how == 6:
        del holder[key]
    elif how == 7 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(value))
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and how == 8:
        holder[key] = value * random_.choice((-1, 0, 2, 1000, 10**9, 1e300, 0.5))
    elif isinstance(value, str) and how < 5:
        holder[key] = value + random_.choice(CONTROLS) if how < 3 else random_.choice(TEXTS)
    else:
        holder[key] = edge(random_)
    return root


def _change_list(random_: random.Random, values: list[Any]) -> None:
    how = random_.randrange(5)
    if how == 0:
        del values[random_.randrange(len(values)) :]
    elif how == 1:
        values.append(copy.deepcopy(values[-1]))
    elif how == 2:
        random_.shuffle(values)
    elif how == 3:
        values[:] = values * 2
    else:
        values[random_.randrange(len(values))] = edge(random_)


SQL_VALUES: tuple[object, ...] = (
    None, "", "text", "12", "\x1b[31m", "x" * 3000, b"", b"\xff\xfe", b"\x00" * 40, 0, -1, 1, 2**31, 2**62, 2**63 - 1,
    -(2**63), 0.5, 1e300, -1e300, float("inf"), float("-inf"), 5e-324,
)  # fmt: skip


def mutate_database(random_: random.Random, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(random_.randint(1, 6)):
            table = random_.choice(tables)
            columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
            rows = [row[0] for row in connection.execute(f'SELECT rowid FROM "{table}"')]
            if random_.random() < 0.06 and len(columns) > 1:
                _attempt(connection, f'ALTER TABLE "{table}" DROP COLUMN "{random_.choice(columns)}"')
            elif rows:
                value, where = random_.choice(SQL_VALUES), random_.choice(rows)
                every = "" if random_.random() < 0.1 else f" WHERE rowid = {where}"
                _attempt(connection, f'UPDATE "{table}" SET "{random_.choice(columns)}" = ?{every}', value)
        connection.commit()


def _attempt(connection: sqlite3.Connection, sql: str, *values: object) -> None:
    try:
        connection.execute(sql, values)
    except sqlite3.Error:
        connection.rollback()
