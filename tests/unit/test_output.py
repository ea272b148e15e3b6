"""Where data goes: a file is replaced whole, a device or pipe is written to, and nothing else is harmed."""

import gzip
import os
import threading
from pathlib import Path

import pytest

import steplab
from steplab.cli.output import chosen_format, emit
from steplab.errors import SteplabError, UserError
from steplab.lab.keeping import checked_name
from steplab.store.database import Store


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    emit("rows", pipe)
    reader.join(timeout=10)
    assert got == ["rows\n"]
    assert pipe.is_fifo()


def test_a_device_is_written_to_and_its_failure_is_told() -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full")
    with pytest.raises(SteplabError, match="cannot write /dev/full: No space left on device"):
        emit("rows", Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text("before")
    link.symlink_to(target)
    emit("after", link)
    assert link.is_symlink()
    assert target.read_text() == "after\n"


def test_a_file_named_gz_is_compressed_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "step.json.gz", tmp_path / "again.json.gz"
    for path in (first, second):
        emit('{"µ": 1}', path)
    assert gzip.decompress(first.read_bytes()).decode() == '{"µ": 1}\n'
    assert first.read_bytes() == second.read_bytes()


def test_a_replaced_file_keeps_its_permissions_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    old, new, usual = tmp_path / "old", tmp_path / "new", tmp_path / "usual"
    old.touch(mode=0o600)
    usual.touch()
    emit("text", old)
    emit("text", new)
    assert old.stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("page.pdf", r"\.pdf stands for no format; give one with --format: table, json"),
        ("rows.json.gz", r"\.gz stands for no format"),
        ("", "cannot write to the folder"),
    ],
)
def test_an_output_that_makes_no_sense_is_refused_before_any_work(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen_format(None, Path(path))


def test_any_ending_serves_with_a_format(tmp_path: Path) -> None:
    assert chosen_format("csv", tmp_path / "rows.data") == "csv"


@pytest.mark.parametrize("name", ["bell\a", "two\nlines", "\x1b[31mred"])
def test_a_name_that_would_garble_a_listing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="not one line of printable text"):
        checked_name(name)


def test_a_store_is_not_made_where_its_folder_has_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SteplabError, match=f"there is no folder {tmp_path / 'slip'}"):
        Store.open(tmp_path / "slip" / "data" / "store.db", write=True)
    assert list(tmp_path.iterdir()) == []
    Store.open(tmp_path / "data" / "store.db", write=True).close()


def test_tokens_of_a_loop_are_at_least_one(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="tokens_per_step must be at least 1, not -5"),
        steplab.recorder("loop", tokens_per_step=-5, store=tmp_path / "store.db"),
    ):
        pass
