import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from steplab.measurement.processes.started import remove_left_over, scratch_folder


def left_over(folder: Path, name: str = ".steplab-tmp-0a_9zzzz") -> Path:
    made = folder / name
    made.mkdir()
    (made / "trace.json").write_text("{}")
    return made


def test_the_next_command_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    left = left_over(tmp_path)
    others = [left_over(tmp_path, name) for name in ("steplab-results", ".steplab-tmp-mine", ".steplab-tmp-0a_9zzzzz")]
    target = left_over(tmp_path, "target")
    link = tmp_path / ".steplab-tmp-linklink"
    link.symlink_to(target)
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert not left.exists()
        assert first.path.is_dir()
        assert second.path.stat().st_mode & 0o777 == 0o700
    assert set(tmp_path.iterdir()) == {*others, target, link}
    assert (target / "trace.json").exists()


def test_a_folder_stays_while_a_process_that_it_was_passed_to_lives(tmp_path: Path) -> None:
    left = left_over(tmp_path)
    of_a_rank = os.open(left, os.O_RDONLY)
    fcntl.flock(of_a_rank, fcntl.LOCK_EX)
    remove_left_over(tmp_path)
    assert left.exists()
    os.close(of_a_rank)
    remove_left_over(tmp_path)
    assert not left.exists()


def test_a_folder_that_is_taken_for_left_over_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def removed_at_once(*args: Any, **others: Any) -> str:
        made.append(make(*args, **others))
        if len(made) == 1:
            remove_left_over(tmp_path)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_once)
    with scratch_folder(tmp_path) as scratch:
        assert str(scratch.path) == made[1]
        assert scratch.path.is_dir()


def test_where_there_are_no_locks_nothing_is_removed_but_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = left_over(tmp_path)
    with scratch_folder(tmp_path) as scratch:
        assert left.exists()
    assert not scratch.path.exists()


def test_another_users_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_over(tmp_path)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    remove_left_over(tmp_path)
    assert left.exists()
