"""Commits of other commands survive any lock order.

A command stops at every statement that takes, waits for or leaves a lock; another one then runs to its end or finds the
store locked. Both share a thread, so each order is tried once.
"""

import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.runs import make_run

from steplab.cli.app import main
from steplab.errors import SteplabError
from steplab.lab.keeping import back_up_store, import_files, load, note, tag
from steplab.records.codec import encode
from steplab.store.database import Store

LOCKING = ("BEGIN", "COMMIT", "PRAGMA journal_mode", "PRAGMA user_version =")
_connect = sqlite3.connect


@contextmanager
def stopping(at: int, do: Callable[[], None]) -> Iterator[list[str]]:
    met: list[str] = []
    inside = False

    def stop(what: str) -> None:
        nonlocal inside
        if inside:
            return
        met.append(what)
        if len(met) == at + 1:
            inside = True
            try:
                do()
            finally:
                inside = False

    class Stopping(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql.lstrip().startswith(LOCKING):
                stop(sql)
            return super().execute(sql, *values)

        def backup(self, *given: Any, **options: Any) -> None:
            stop("backup")
            super().backup(*given, **options)
            stop("after the backup")

        def close(self) -> None:
            super().close()
            stop("close")

    with patch("sqlite3.connect", lambda *given, **options: _connect(*given, factory=Stopping, **options)):
        yield met


def new_store(path: Path) -> None:
    with Store.open(path, write=True) as store:
        for name in ("aa", "bb"):
            store.add(make_run(id=name))


def exported(path: Path, name: str) -> Path:
    file = path.with_name(f"{name}.jsonl")
    file.write_bytes(encode(make_run(id=name)) + b"\n")
    return file


def ids(path: Path) -> set[str]:
    with Store.open(path) as store:
        return {str(row["id"]) for row in store.rows(kind=None, all_attempts=True)}


COMMANDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "rm": (new_store, lambda path: main(["rm", "bb", "--yes", "--store", str(path)])),
    "import": (new_store, lambda path: import_files(exported(path, "cc"), path)),
    "backup": (new_store, lambda path: back_up_store(path.with_name("copy.db"), store=path, force=True)),
    "tag": (new_store, lambda path: tag("aa", ["good"], store=path)),
    "note": (new_store, lambda path: note("aa", "mine", store=path)),
    "make": (lambda path: None, lambda path: Store.open(path, write=True).close()),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_committed_meanwhile_is_kept(name: str, tmp_path: Path) -> None:
    make, command = COMMANDS[name]
    number = num_met = num_committed = 0
    while number <= num_met:
        path = tmp_path / str(number) / "store.db"
        path.parent.mkdir()
        make(path)
        before = ids(path) if path.exists() else set()
        committed: set[str] = set()
        annotated: dict[str, str] = {}

        def other(path: Path = path, committed: set[str] = committed, annotated: dict[str, str] = annotated) -> None:
            try:
                with Store.open(path, write=True, timeout_s=0.01) as store:
                    store.add(make_run(id="ff"))
                    committed.add("ff")
                    if make is new_store:
                        store.annotate("aa", lambda found: {"tags": [*found.tags, "theirs"]})
                        annotated["tag"] = "theirs"
                        if name != "note":
                            store.annotate("aa", lambda found: {"comment": "theirs"})
                            annotated["note"] = "theirs"
            except SteplabError as error:
                if "locked" not in str(error):  # it waits: nothing was committed
                    raise

        with warnings.catch_warnings(), stopping(number, other) as met:
            warnings.simplefilter("ignore")
            command(path)
        left = before - ({"bb"} if name == "rm" else set())
        assert ids(path) >= left | committed, met[number]
        if annotated:
            record: Any = load("aa", store=path)
            assert "theirs" in record.tags, met[number]
            assert record.comment == ("mine" if name == "note" else annotated.get("note", "")), met[number]
        if name == "tag":
            assert "good" in load("aa", store=path).tags
        if name == "backup":
            assert ids(path.with_name("copy.db")) >= before
        num_met, number, num_committed = len(met), number + 1, num_committed + len(committed)
    assert num_met >= 3
    assert num_committed >= 2
