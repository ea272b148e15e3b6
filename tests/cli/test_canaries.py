import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.program import OF_EVERY_COMMAND, SOURCES, Program, tiny
from tests.runs import make_run
from tests.unit.test_growth import event

import steplab.cli.commands
from steplab.records.codec import encode

MISSING = ("triton", "flash_attn", "pynvml", "transformers", "wandb", "mlflow", "sitecustomize", "usercustomize")
DRIVER = """
import io, json, sys
from steplab.cli.app import main
for words in json.loads(sys.argv[1]):
    print(words[0], main(words), file=sys.stderr)
"""
READING: tuple[tuple[str, ...], ...] = (
    ("import", "records.jsonl"),
    ("import-trace", "trace.json"),
    ("import-snapshot", "nothing.pickle"),
    ("list",),
    ("show", "last"),
    ("report", "--output", "report.html"),
    ("export", "--output", "out.jsonl"),
    ("explain", "last"),
    ("compare", "HEAD", "last"),
    ("history",),
    ("tag", "last", "good"),
    ("note", "last", "good"),
    ("completion", "bash"),
    ("plan", "memory", "--model", "tiny"),
    ("store", "check"),
    ("store", "backup", "copy.db"),
    ("rm", "last", "--yes"),
)
MEASURING = ("ab", "advise", "attention", "comm", "ddp", "doctor", "memory", "precision", "profile", "run", "study")


@pytest.fixture
def trap(steplab: Program) -> Path:
    ran = steplab.folder / "ran"
    canary = f"open({str(ran)!r}, 'a').write(__name__ + chr(10))\nraise ImportError('a canary')\n"
    installed = {"steplab", "torch", "numpy", "msgspec", "cyclopts", "rich", "psutil", "matplotlib", "jinja2"}
    for name in {*sys.stdlib_module_names, *MISSING, *installed} - {"__main__"}:
        steplab.write(f"{name}.py", canary)
    program = steplab.folder / "git-canary"
    program.write_text(f'#!/bin/sh\necho "git $0 $1" >> {ran}\ncat 2>/dev/null\n')
    program.chmod(0o755)

    def git(*words: str, folder: Path = steplab.cwd) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    steplab.write("records.jsonl", encode(make_run()).decode())
    steplab.write("trace.json", json.dumps([event(1)]))
    git("add", "records.jsonl", "trace.json")
    git("commit", "-qm", "first")
    (steplab.cwd / ".git" / "info" / "attributes").write_text("* filter=canary\n")
    for key in ("core.fsmonitor", "filter.canary.clean", "filter.canary.smudge", "filter.canary.process"):
        git("config", key, str(program))
    for hook in ("post-index-change", "post-checkout", "reference-transaction"):
        (steplab.cwd / ".git" / "hooks").mkdir(exist_ok=True)
        (steplab.cwd / ".git" / "hooks" / hook).symlink_to(program)
    os.utime(steplab.cwd / "trace.json", (1, 1))  # git looks into it, and so filters it
    return ran


def run(steplab: Program, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=steplab.cwd,
        env={**steplab.environment, **OF_EVERY_COMMAND, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return f"{done.returncode}\n{done.stdout}\n{done.stderr}"


def test_commands_that_read_and_a_measuring_process_run_nothing_of_the_folder(steplab: Program, trap: Path) -> None:
    told = run(steplab, "-P", "-c", DRIVER, json.dumps((*READING, ("run", "--model", "tiny", *tiny()))))
    assert not trap.exists(), trap.read_text()
    assert f"\n{READING[-1][0]} 0" in told, told
    assert "\nrun 0" in told, told


@pytest.mark.release
def test_ranks_run_nothing_of_the_folder(steplab: Program, trap: Path) -> None:
    told = run(steplab, "-P", "-m", "steplab", "comm", "--size", "1KB", "--processes", "2")
    assert not trap.exists(), trap.read_text()
    assert told.startswith("0\n"), told


def test_a_bare_repository_inside_a_clone_runs_nothing(steplab: Program, trap: Path) -> None:
    bare = steplab.cwd / "inside"
    subprocess.run(["cp", "-r", ".git", "inside"], cwd=steplab.cwd, check=True)
    with (bare / "config").open("a") as config:
        config.write("[core]\nbare = false\nworktree = ..\n")
    code = "from contextlib import suppress; from subprocess import SubprocessError; from steplab.git import git\n"
    code += "with suppress(SubprocessError): git('status', '--porcelain')"
    steplab.cwd = bare
    assert run(steplab, "-P", "-c", code).startswith("0\n")
    assert not trap.exists(), trap.read_text()


def test_python_starts_the_program_without_what_lies_in_the_folder(steplab: Program) -> None:
    ran = steplab.folder / "ran"
    steplab.write("profile.py", f"open({str(ran)!r}, 'a')")
    code = "import runpy, sys; sys.argv = ['steplab', 'list']; runpy.run_module('steplab', run_name='__main__')"
    assert "steplab" in run(steplab, "-c", f"{code}; import profile")
    assert not ran.exists()


def test_a_model_of_the_folders_is_found_after_pythons_modules(steplab: Program) -> None:
    ran = steplab.folder / "ran"
    steplab.write("this.py", f"open({str(ran)!r}, 'a')")  # nothing else imports it before the model does
    steplab.write("mine.py", "import this\nthis.s\ndef build():\n    return lambda: sum(range(1000))\n")
    told = steplab("run", "--model", "mine:build", *tiny())
    assert told.code == 0, told.stderr
    assert not ran.exists()


def test_every_command_is_tried() -> None:
    files = {
        file.stem.strip("_").replace("_", "-") for file in Path(steplab.cli.commands.__file__).parent.glob("[!_]*.py")
    }
    assert files - {"sweep"} == {words[0] for words in READING} | set(MEASURING)


def test_one_file_starts_python() -> None:
    starting = [file.relative_to(SOURCES) for file in SOURCES.rglob("*.py") if "sys.executable" in file.read_text()]
    assert starting == [Path("steplab/python.py")]
    asking = [file.name for file in SOURCES.rglob("*.py") if '["git"' in file.read_text()]
    assert asking == ["git.py"]
