"""torch runs what lies in its cache of compiled code, so that the folder has to be the user's."""

from pathlib import Path

import pytest

from steplab.measurement.entry.child import keep_compiled_code_private


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
    keep_compiled_code_private(given)
    assert given["TORCHINDUCTOR_CACHE_DIR"] == folder


def test_every_measuring_process_asks_for_it_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from steplab.measurement.entry import child

    class Asked(Exception):
        pass

    def ask() -> None:
        raise Asked

    monkeypatch.setattr(child, "keep_compiled_code_private", ask)
    with pytest.raises(Asked):
        child.main()
