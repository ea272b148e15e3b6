import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.program import REPOSITORY, Program, Result, digests, keep_result, kept_result, made_once, tiny


@pytest.fixture
def steplab(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.end_all()


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def measure(folder: Path) -> None:
        program = Program(folder)
        run = program("run", *tiny(), "--name", "first", "--format", "json")
        keep_result(run, folder / "run.json")
        sweep = program("sweep", *tiny(context="8,16"), "--format", "json")
        keep_result(sweep, folder / "sweep.json")

    return made_once(tmp_path_factory, "measured", measure)


@pytest.fixture(scope="session")
def profiled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def profile(folder: Path) -> None:
        options = ("--profiled-steps", "2", "--name", "seen", "--trace", "kept.json.gz", "--format", "json")
        keep_result(Program(folder)("profile", *tiny(), *options), folder / "profile.json")

    return made_once(tmp_path_factory, "profiled", profile)


@pytest.fixture(scope="session")
def watched_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def watch(folder: Path) -> None:
        options = ("--name", "seen", "--snapshot", "kept.pickle", "--format", "json", "--predict")
        keep_result(Program(folder)("memory", *tiny(), *options), folder / "memory.json")

    return made_once(tmp_path_factory, "watched", watch)


@pytest.fixture
def first_run(measured: Path) -> Result:
    return kept_result(measured / "run.json")


@pytest.fixture
def filled(steplab: Program, measured: Path) -> Program:
    shutil.copy(measured / "store" / "store.db", steplab.store)
    return steplab


@pytest.fixture
def guarded(filled: Program) -> Iterator[Program]:
    before = digests(filled.store.parent)
    yield filled
    assert digests(filled.store.parent) == before


@pytest.fixture
def reader(steplab: Program) -> Program:
    shutil.copytree(REPOSITORY / "examples", steplab.cwd / "examples")
    (steplab.cwd / "tests").mkdir(exist_ok=True)
    (steplab.cwd / "tests" / "golden").symlink_to(REPOSITORY / "tests" / "golden")
    scripts = steplab.folder / "bin"
    scripts.mkdir()
    for name, meaning in (("steplab", "-m steplab"), ("python", ""), ("python3", "")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {meaning} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    steplab.environment["PATH"] = f"{scripts}:{steplab.environment['PATH']}"
    return steplab
