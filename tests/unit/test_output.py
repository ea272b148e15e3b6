import gzip
import os
import pickle
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.profiles import profiled_run
from tests.runs import make_run, out_of_memory

import steplab
from steplab.cli.options import FileOptions
from steplab.cli.output import chosen_format, emit, emit_document
from steplab.errors import SteplabError, UserError
from steplab.lab.files import Destination, folder_for, refuse_the_same
from steplab.lab.keeping import checked_name
from steplab.records.codec import encode
from steplab.records.finding import Findings
from steplab.report.kit.document import Document
from steplab.store.database import Store
from steplab.views.view import View

PROFILED = profiled_run()


def to(output: Path, **others: Any) -> FileOptions:
    return FileOptions(**{"output": output, "store": output.parent / "elsewhere" / "store.db"} | others)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    emit("rows", to(pipe))
    reader.join(timeout=10)
    assert got == ["rows\n"]
    assert pipe.is_fifo()


def test_a_device_is_written_to_and_its_failure_is_told() -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full")
    with pytest.raises(SteplabError, match="cannot write /dev/full: No space left on device"):
        emit("rows", to(Path("/dev/full")))
    assert Path("/dev/full").is_char_device()


def test_a_failing_output_of_a_measurement_says_where_its_record_is() -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full")
    document, out = Document(title="a run", sections=()), to(Path("/dev/full"))
    with pytest.raises(SteplabError, match="No space left on device; the measurement is stored: `steplab show aaaa`"):
        emit_document(document, "md", out, stored="aaaa")
    with pytest.raises(SteplabError, match=r"No space left on device$"):
        emit_document(document, "md", out)


def test_a_file_system_that_takes_no_file_is_known_before_any_work() -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc")
    with pytest.raises(SteplabError, match=r"cannot write /proc/table\.md: "):
        chosen_format(None, to(Path("/proc/table.md")))


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text("# Before\n\n<!-- written by steplab -->\n")
    link.symlink_to(target)
    emit("after", to(link), "md")
    assert link.is_symlink()
    assert target.read_text() == "after\n"


def test_a_file_named_gz_is_compressed_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "step.json.gz", tmp_path / "again.json.gz"
    for path in (first, second):
        emit('{"µ": 1}', to(path))
    assert gzip.decompress(first.read_bytes()).decode() == '{"µ": 1}\n'
    assert first.read_bytes() == second.read_bytes()


def test_a_replaced_file_keeps_its_permissions_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    old, new, usual = tmp_path / "old", tmp_path / "new", tmp_path / "usual"
    old.touch(mode=0o600)
    usual.touch()
    emit("text", to(old))
    emit("text", to(new))
    assert old.stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("page.pdf", r"unknown format \.pdf; set --format to one of table, json"),
        ("rows.gz", r"unknown format \.gz"),
        ("rows.json.xz", r"unknown format \.xz"),
        ("", "it is a folder; name a file in it"),
    ],
)
def test_an_output_that_makes_no_sense_is_refused_before_any_work(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen_format(None, to(Path(path)))


def test_a_compressed_file_has_the_format_of_the_suffix_before(tmp_path: Path) -> None:
    assert chosen_format(None, to(tmp_path / "rows.csv.gz")) == "csv"
    saved = View(lambda chosen, color: f"[] {chosen}").save(tmp_path / "rows.json.gz")
    assert gzip.decompress(saved.read_bytes()) == b"[] json\n"


def test_any_ending_serves_with_a_format(tmp_path: Path) -> None:
    assert chosen_format("csv", to(tmp_path / "rows.data")) == "csv"


@pytest.mark.parametrize("name", ["bell\a", "two\nlines", "\x1b[31mred"])
def test_a_name_that_would_garble_a_listing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="must be one line of printable text"):
        checked_name(name)


def test_a_store_is_not_made_where_its_folder_has_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SteplabError, match=f"there is no folder {tmp_path / 'slip'}"):
        Store.open(tmp_path / "slip" / "data" / "store.db", write=True)
    assert list(tmp_path.iterdir()) == []
    Store.open(tmp_path / "data" / "store.db", write=True).close()


def test_a_store_in_a_folder_that_cannot_be_made_blames_that_folder() -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc")
    with pytest.raises(SteplabError, match="/proc/nope cannot be created; choose another store"):
        Store.open(Path("/proc/nope/store.db"), write=True)


def test_tokens_of_a_loop_are_at_least_one(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"tokens_per_step must be a whole number from 1 to below 1e\+18, not -5"),
        steplab.recorder("loop", tokens_per_step=-5, store=tmp_path / "store.db"),
    ):
        pass


# Files that are never replaced


def _made(path: Path, make: Callable[[Path], object]) -> Path:
    make(path)
    return path


SPELLINGS: dict[str, Callable[[Path], Path]] = {
    "itself": lambda store: store,
    "a link": lambda store: _made(store.with_name("link.csv"), lambda path: path.symlink_to(store)),
    "a hard link": lambda store: _made(store.with_name("hard.csv"), lambda path: path.hardlink_to(store)),
    "up and down again": lambda store: store.parent / "missing" / ".." / store.name,
    "a linked folder": lambda store: (
        _made(store.parent / "again", lambda path: path.symlink_to(store.parent)) / store.name
    ),
    "relative": lambda store: Path(os.path.relpath(store)),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_the_store_is_not_written_to_by_any_name(tmp_path: Path, spell: Callable[[Path], Path], force: bool) -> None:
    store = tmp_path / "store.db"
    Store.open(store, write=True).close()
    before, path = store.read_bytes(), spell(store)
    for write in (
        lambda: chosen_format("csv", to(path, store=store, force=force)),
        lambda: emit("rows", to(path, store=store, force=force), "csv"),
        lambda: Destination(path=path, store=store, force=force).take(tmp_path / "no need of it"),
    ):
        with pytest.raises(UserError, match=f"cannot write to .*: it is the store {store}; name another file"):
            write()
    assert store.read_bytes() == before


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_a_store_that_is_not_made_yet_and_its_companions_are_kept_free(tmp_path: Path, end: str) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    store = tmp_path / "link" / "store.db"
    for folder in ("link", "real"):
        with pytest.raises(UserError, match=r"it is the (store|.* of the store) "):
            chosen_format("csv", to(tmp_path / folder / f"store.db{end}", store=store))


def test_the_store_of_the_environment_is_the_one_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPLAB_STORE", str(tmp_path / "mine"))
    with pytest.raises(UserError, match="it is the store"):
        emit("rows", FileOptions(output=tmp_path / "mine"))


def test_another_store_is_not_replaced_by_force_either(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    Store.open(other, write=True).close()
    before = other.read_bytes()
    with pytest.raises(UserError, match=r"cannot replace .*other\.csv: it is a steplab store; name another file"):
        emit("rows", to(other, force=True), "csv")
    assert other.read_bytes() == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_a_companion_of_another_store_is_not_written_by_force_either(tmp_path: Path, end: str, force: bool) -> None:
    other, companion = tmp_path / "other.db", tmp_path / f"other.db{end}"
    Store.open(other, write=True).close()
    with pytest.raises(
        UserError, match=rf"{companion.name}: it belongs to the database .*other\.db; name another file"
    ):
        emit("rows", to(companion, force=force), "json")
    companion.write_bytes(b"records that are nowhere else")
    with pytest.raises(
        UserError, match=rf"{companion.name}: it belongs to the database .*other\.db; name another file"
    ):
        emit("rows", to(companion, force=force), "json")
    assert companion.read_bytes() == b"records that are nowhere else"


def test_a_link_that_is_changed_after_the_check_does_not_choose_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, harmless, precious = tmp_path / "page.csv", tmp_path / "harmless.csv", tmp_path / "precious"
    precious.write_text("keep me")
    link.symlink_to(harmless)
    make = tempfile.mkdtemp

    def changed(*args: Any, **others: Any) -> str:
        link.unlink()
        link.symlink_to(precious)
        return make(*args, **others)

    monkeypatch.setattr(tempfile, "mkdtemp", changed)
    emit("id,created_utc", to(link), "csv")
    assert precious.read_text() == "keep me"
    assert harmless.read_text() == "id,created_utc\n"


def _database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()


FOREIGN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a program": ("train.py", lambda path: path.write_text("import torch\n")),
    "settings": ("pyproject.toml", lambda path: path.write_text('dependencies = ["torch", "steplab[wandb]"]\n')),
    "a loop": ("loop.py", lambda path: path.write_text('import steplab\nprint("steplab: " + name)\n')),
    "a trace of theirs": ("trace.json", lambda path: path.write_text('{"schemaVersion": 1, "traceEvents": []}')),
    "a table": ("table.csv", lambda path: path.write_text("id,name\n1,mine\n")),
    "a database": ("mine.sqlite", _database),
    "a pickle": ("weights.pickle", lambda path: path.write_bytes(pickle.dumps({"weights": [1.0]}))),
    "a page": ("index.html", lambda path: path.write_text("<!doctype html><title>Mine</title>")),
    "a package": ("package.json", lambda path: path.write_text('{"name": "mine", "version": "1"}')),
    "prose": ("README.md", lambda path: path.write_text("# Mine\n\n| a |\n| --- |\n")),
    "notes": ("notes.txt", lambda path: path.write_text("keep me")),
    "a paper": ("paper.tex", lambda path: path.write_text("\\documentclass{article}\n")),
    "compressed notes": ("notes.json.gz", lambda path: path.write_bytes(gzip.compress(b"keep me"))),
    "events": ("events.json", lambda path: path.write_text('{"traceEvents": [\n  {"ph": "X"}]}\n')),
    "no real gzip": ("broken.gz", lambda path: path.write_bytes(b"\x1f\x8bnot gzip")),
}


@pytest.mark.parametrize(("name", "make"), FOREIGN.values(), ids=FOREIGN.keys())
def test_what_steplab_did_not_write_is_replaced_by_force_alone(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    make(path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=rf"{name} exists.*; name another file, or add --force to replace this one"):
        Destination(path=path, store=tmp_path / "store.db").write(b"new")
    assert path.read_bytes() == before
    Destination(path=path, store=tmp_path / "store.db", force=True).write(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("chosen", ["html", "md"])
def test_a_report_is_known_again(tmp_path: Path, chosen: str) -> None:
    for name in 2 * ("report", "report.gz"):
        steplab.report(make_run()).save(tmp_path / name, chosen)


def test_what_is_emitted_is_known_again(tmp_path: Path) -> None:
    findings = Findings(
        run_id="aaaa", created_utc="2026-11-21T08:00:00Z", steplab_version="0.1.0", step_s=1.0, findings=()
    )
    records = (make_run(), make_benchmark("tiny"), make_comm(), make_ddp_run(), out_of_memory())
    for _ in range(2):
        for number, record in enumerate((findings, make_run())):
            emit(encode(record).decode(), to(tmp_path / f"{number}.json"), "json")
        for number, record in enumerate(records):
            for name in (f"{number}.jsonl", f"{number}.jsonl.gz"):
                emit(encode(record).decode(), to(tmp_path / name), "jsonl")


def test_a_file_that_is_taken_is_whole_has_the_usual_permissions_and_follows_links(tmp_path: Path) -> None:
    written, usual = tmp_path / "written", tmp_path / "usual"
    target, link = tmp_path / "step.json", tmp_path / "link.json"
    usual.touch()
    target.write_text('\n {"schemaVersion": 1, "comment": "written by steplab"}')
    link.symlink_to(target)
    written.write_text("new")
    written.chmod(0o600)
    target.chmod(0o640)
    destination = Destination(path=link, store=tmp_path / "store.db")
    assert destination.take(written) == link
    assert (target.read_text(), target.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)
    assert not written.exists()
    (tmp_path / "other").write_text("fresh")
    fresh = Destination(path=tmp_path / "fresh.json", store=tmp_path / "store.db")
    assert fresh.take(tmp_path / "other").stat().st_mode == usual.stat().st_mode


def test_a_trace_goes_down_a_pipe_which_stays_one(tmp_path: Path) -> None:
    pipe, got = tmp_path / "step.json", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    destination = Destination(path=pipe, store=tmp_path / "store.db")
    with folder_for(destination) as folder:
        (folder / "trace").write_text("steps")
        assert destination.take(folder / "trace").read_text() == "steps"
    reader.join(timeout=10)
    assert got == ["steps"]
    assert pipe.is_fifo()


def test_standard_output_that_is_a_file_is_continued_not_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("before\n")
    code = """
from pathlib import Path
from steplab.cli.options import FileOptions
from steplab.cli.output import emit
emit("after", FileOptions(output=Path("/dev/stdout")))
"""
    with notes.open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert notes.read_text() == "before\nafter\n"


def test_two_outputs_of_one_command_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    refuse_the_same(tmp_path / "a.json", None, tmp_path / "b.json")
    with pytest.raises(UserError, match="two outputs would go to"):
        refuse_the_same(tmp_path / "a.json", None, tmp_path / "link" / "a.json")
