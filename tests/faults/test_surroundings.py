import json
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.fuzz.ending import run
from tests.profiles import imported_run
from tests.runs import make_run
from tests.stored_lines import fill

from steplab.cli.app import main
from steplab.cli.progress import ProgressLine
from steplab.measurement.progress import Progress
from steplab.report.kit.text import flowed
from steplab.store.database import Store

ID = "0123456789ab"
READING = (("list",), ("show", "last"), ("report",), ("explain",), ("list", "--sort", "id", "--format", "md"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("surroundings") / "store.db"
    fill(path, *(replace(make_run(), id=ID, name="größer – 漢字"), imported_run(), make_comm(), make_benchmark()))
    return path


def program(
    commands: Sequence[Sequence[str]], variables: Mapping[str, str], ending: str = ""
) -> subprocess.CompletedProcess[bytes]:
    script = "import json, sys; from steplab.cli.app import main; sys.exit(max(map(main, json.loads(sys.argv[1]))))"
    words = ["sh", "-c", f'exec "$@" {ending}', "sh", sys.executable, "-c", script, json.dumps(commands)]
    return subprocess.run(words, env={**os.environ, **variables}, capture_output=True, timeout=120, check=False)


def test_a_locale_without_utf_8_loses_no_file_and_ends_no_command(store: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("page.md", "all.csv", "all.jsonl")]
    writing = [
        [words, ID, "--output", str(file)] for words, file in zip(("report", "report", "export"), files, strict=True)
    ]
    writing[0] += ["--title", "größer – 漢字"]
    given = [[*words, "--store", str(store)] for words in (("list",), ("report",), *writing)]
    given.append(["list", "--where", "name=größer – 漢字", "--store", str(store)])
    ascii_alone = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = program(given, ascii_alone)
    assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), ended.stderr
    assert b"gr\\xf6\\xdfer - \\u6f22\\u5b57" in ended.stdout
    assert b"\n-----" in ended.stdout, "a line of a table is as wide as the table"
    for file in files:
        assert "größer – 漢字" in file.read_text(encoding="utf-8")


def test_a_home_folder_that_the_shell_left_written_is_found(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(store.parent))
    monkeypatch.chdir(tmp_path)
    assert run("show", ID, f"--store=~/{store.name}", "--output=~/shown.json").code == 0
    assert (store.parent / "shown.json").exists()
    monkeypatch.setenv("STEPLAB_STORE", f"~/{store.name}")
    assert run("show", ID).code == 0


@pytest.mark.parametrize("full", [True, False], ids=["a full disk", "a closed pipe"])
def test_remarks_that_cannot_be_written_end_no_work(full: bool, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") if full else open(writing, "w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        with ProgressLine() as line:
            line.within(Progress(stage="measure", done=0, total=3))
            line.done(1, 1, "measured")
        assert main(["tag", ID, "seen", "--store", str(store)]) == 0
        assert main(["nothing"]) == 2
        monkeypatch.undo()


@pytest.mark.parametrize("columns", ["1", "2", "20"])
def test_no_terminal_is_too_narrow(columns: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in (*((*words, "--store", str(store)) for words in READING), ("run", "--help")):
        end = run(*words)
        assert (end.code, end.faults) == (0, ())


@pytest.mark.parametrize("width", [-3, 0, 1, 2])
def test_a_text_is_broken_into_lines_of_at_least_one_column(width: int) -> None:
    assert flowed("ab 漢", width)[:1] == ["a" if width < 2 else "ab"]


def test_standard_output_that_is_closed_is_no_error(store: Path) -> None:
    given = [[*words, "--store", str(store)] for words in (("list",), ("show", ID), ("export",))]
    for ending in ("| head -1", ">&- 2>&- <&-"):
        ended = program(given, {}, ending)
        assert (ended.returncode, ended.stderr) == (0, b""), ending


def test_no_home_is_one_line(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "STEPLAB_STORE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    for words in (("list",), ("run", "--model", "tiny"), ("report",)):
        end = run(*words)
        assert (end.code, end.faults) == (1, ())
        assert "set the store by --store or STEPLAB_STORE" in end.stderr
    assert run("list", "--store", str(store)).code == 0


OUTPUTS = (
    "report --output page.md", "show last --format html --output page.html",
    "list --output list.csv", "export --output all.jsonl",
    "export --format jsonl --output all.jsonl.gz",
)  # fmt: skip


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_on_a_full_disk_is_one_line_and_leaves_nothing(command: str, store: Path, disk: Path) -> None:
    *words, name = command.split()
    target = disk / name
    target.touch()
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(1 << 16)):
            pass
    end = run(*words, str(target), "--store", str(store))
    assert (end.code, end.faults) == (1, ())
    assert f"cannot write {disk}/{name.partition('.')[0]}" in end.stderr
    assert ": No space left on device" in end.stderr
    assert {path.name: path.stat().st_size for path in disk.iterdir() if path.name != "filler"} == {name: 0}


def test_a_store_named_from_another_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open("store.db", write=True) as opened:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        opened.add(make_run())
    assert not list((tmp_path / "elsewhere").iterdir())
    with Store.open(tmp_path / "store.db") as opened:
        assert len(opened.rows()) == 1
