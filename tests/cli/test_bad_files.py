import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.program import Program, complaint

READERS = {
    "import": ("runs.jsonl", ("import", "{}")),
    "import-trace": ("trace.json", ("import-trace", "{}")),
    "import-snapshot": ("snapshot.pickle", ("import-snapshot", "{}")),
    "compare": ("runs.jsonl", ("compare", "{}", "last")),
    "study": ("study.toml", ("study", "{}")),
    "plan": ("config.json", ("plan", "memory", "--model", "hf:{}")),
    "run": ("config.json", ("run", "--model", "hf:{}")),
}


def _folder(path: Path) -> None:
    path.mkdir()


def _holds(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


CONTENTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": _folder,
    "empty": _holds(b""),
    "prose": _holds(b"Dear reader,\nthis is no such file.\n"),
    "bytes": _holds(bytes(range(256)) * 9),
    "a beginning of JSON": _holds(b'{"schema": "steplab.run/1", "id": "a'),
    "JSON of another program": _holds(json.dumps({"traceEvents": [], "schema": "novel.chapter/1"}).encode()),
    "deeply nested": _holds(b"[" * 100_000),
    "a snapshot of nothing": _holds(pickle.dumps({"segments": [], "device_traces": []})),
    "a compressed file cut short": _holds(gzip.compress(b"x" * 10_000)[:20]),
    "the beginning of a database": _holds(b"SQLite format 3\0" + bytes(200)),
}

AS_PROSE = {
    "import-trace": {"bytes", "a snapshot of nothing"},
    "import-snapshot": {
        *("bytes", "a beginning of JSON", "JSON of another program", "deeply nested", "the beginning of a database")
    },
}
"""Contents that a reader refuses as it refuses prose; each costs a bounded process of its own."""


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_not_what_it_should_be_is_named_and_refused_as_usage(steplab: Program, reader: str) -> None:
    name, command = READERS[reader]
    tried = {what: make for what, make in CONTENTS.items() if what not in AS_PROSE.get(reader, ())}
    for number, (what, make) in enumerate(tried.items()):
        file = f"{number}-{name}"
        make(steplab.cwd / file)
        result = steplab.here(*(word.format(file) for word in command))
        assert result.code == 2, (what, result)
        assert file in complaint(result, 2), what
    assert not steplab.store.exists() or not steplab.rows()


def test_a_store_is_no_export_and_the_command_that_makes_one_is_named(filled: Program) -> None:
    other = ("--store", filled.cwd / "other.db")
    said = complaint(filled.here("import", filled.store, *other), 2)
    assert f"steplab export --store {filled.store} --output records.jsonl" in said


def test_a_record_that_is_given_twice_is_reported_and_exported_once(filled: Program) -> None:
    assert filled("export", "last", "last~0").stdout == filled("export", "last").stdout
    assert filled("report", "last", "last", "--format", "json") == filled("report", "last", "--format", "json")


def test_a_trace_in_a_pipe_is_refused_with_the_remedy(steplab: Program) -> None:
    os.mkfifo(steplab.cwd / "pipe")
    assert "pipe is not a regular file; save it to a file" in complaint(steplab.here("import-trace", "pipe"), 2)
