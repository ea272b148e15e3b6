import os
from pathlib import Path

import pytest

from steplab.measurement.processes.child import keep_compiled_code_private, remove_what_was_cut_off


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, "/home/me/.cache/steplab/torchinductor"),
        ({"XDG_CACHE_HOME": "/scratch/me"}, "/scratch/me/steplab/torchinductor"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/steplab/torchinductor"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/mine"}, "/mine"),
    ],
)
def test_compiled_code_is_kept_where_only_the_user_writes(
    given: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert keep_compiled_code_private(given) == Path(folder)
    assert given["TORCHINDUCTOR_CACHE_DIR"] == folder


def test_an_empty_name_of_the_folder_is_not_the_working_folder() -> None:
    assert keep_compiled_code_private({"TORCHINDUCTOR_CACHE_DIR": ""}) is None


def test_every_measuring_process_asks_for_it_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from steplab.measurement.processes import child

    class Asked(Exception):
        pass

    def ask() -> None:
        raise Asked

    monkeypatch.setattr(child, "keep_compiled_code_private", ask)
    with pytest.raises(Asked):
        child.main()


def test_empty_libraries_of_a_compiler_that_was_killed_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "ab"
    folder.mkdir()
    whole, cut_off, under_way, source = (folder / name for name in ("a.so", "b.so", "c.so", "d.cpp"))
    whole.write_bytes(b"\x7fELF")
    for empty in (cut_off, under_way, source):
        empty.touch()
    for old in (whole, cut_off, source):
        os.utime(old, (1e9, 1e9))
    remove_what_was_cut_off(tmp_path)
    remove_what_was_cut_off(tmp_path / "missing")
    remove_what_was_cut_off(None)
    assert sorted(folder.iterdir()) == [whole, under_way, source]
