import lzma
import random
from pathlib import Path

import pytest
from tests.fuzz.attacks import ATTACKS
from tests.fuzz.ending import described, run

CASES = sorted((Path(__file__).parent / "cases").iterdir())
TRIES = {
    "command lines": 20,
    "stores with flipped bits": 20,
    "mutated records": 20,
    "nsys files": 7,
    "snapshots": 7,
    "Kineto traces": 6,
    "configurations": 10,
    "study files": 10,
    "messages of processes": 20,
}


def test_all_attacks_are_tried() -> None:
    assert set(TRIES) | {"bombs"} == set(ATTACKS)


@pytest.mark.parametrize("name", TRIES)
def test_no_try_ends_badly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tries = ATTACKS[name].make(random.Random(20261122), tmp_path)
    for number in range(TRIES[name]):
        tried = next(tries)
        assert not tried.faults, f"try {number}: {described(tried.arguments)}"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_what_once_broke_something_is_read_or_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    name = path.name
    if name.endswith(".xz"):
        content, name = lzma.decompress(content), name.removesuffix(".xz")
    file, store = tmp_path / name, str(tmp_path / "store.db")
    file.write_bytes(content)
    command = name.partition("--")[0]
    words = [*command.split("-"), "--model", f"hf:{file}"] if command.startswith("plan-") else [command, str(file)]
    end = run(*words, "--store", store)
    assert not end.faults
    if end.code == 0 and command.startswith("import"):
        for shown in ("table", "html", "csv"):
            assert not run("show", "last", "--format", shown, "--store", store).faults
