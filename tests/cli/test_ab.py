import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.advice_records import ratio
from tests.cli.program import Program, complaint, tiny
from tests.runs import make_run

from steplab.lab.turns import Compared, checked_out
from steplab.records.timing import Turns

STEP = """
import time

def plain():
    return lambda: time.sleep({plain})

def slow():
    return lambda: time.sleep({slow})
"""


def test_a_slower_side_is_found_and_an_equal_one_is_not(steplab: Program) -> None:
    steplab.write("planted.py", STEP.format(plain=0.010, slow=0.015))
    options = ("--device", "cpu", "--warmup", "1", "--format", "json", "--threshold", "20%", "--starts", "1")
    sides = ("--model planted:plain", "--model planted:slow", "--model planted:plain")
    result = steplab("ab", *sides, *options)
    assert result.code == 4, result.stderr
    first, slow, same = result.rows()
    assert slow["decision"] == "higher"
    assert same["decision"] not in ("higher", "lower")
    assert 1.2 < slow["low"] <= slow["ratio"] <= slow["high"]
    assert {row["num_steps"] for row in (first, slow, same)} == {30}
    assert [row["side"] for row in (first, slow, same)] == ["A", "B", "C"]
    assert {row["id"] for row in steplab.rows()} == {row["id"] for row in (first, slow, same)}


@pytest.mark.parametrize(
    ("decisions", "code"),
    [
        (("lower",), 0),
        (("same",), 0),
        (("not higher",), 0),
        (("undecided",), 3),
        ((None,), 3),
        (("higher",), 4),
        (("lower", "undecided"), 3),
        (("undecided", "higher"), 4),
    ],
    ids=str,
)
def test_the_exit_code_is_that_of_compare(
    steplab: Program, decisions: tuple[Any, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = tuple(decision and ratio(0.020, 0.019, decision) for decision in decisions)
    runs = tuple(
        dataclasses.replace(make_run(), id=label * 4, turns=Turns(label=label, session="s"))
        for label in "ABC"[: len(ratios) + 1]
    )
    monkeypatch.setattr("steplab.lab.turns.ab", lambda *sides, **given: Compared(starts=(runs,), each=(ratios,)))
    sides = [f"--seed {number}" for number, _ in enumerate(runs)]
    result = steplab.here("ab", *sides)
    assert result.code == code
    assert ("probably faster" in " ".join(result.stdout.split())) == ("not higher" in decisions)


def test_one_side_may_take_the_recipe(steplab: Program) -> None:
    result = steplab("ab", "--recipe fast", *tiny(), "--starts", "1")
    assert result.code == 3, result.stderr
    assert {row["attention"] for row in steplab.rows()} == {"plain", "sdpa"}


# --- another revision -------------------------------------------------------------------------------------


@pytest.fixture
def repository(steplab: Program) -> Program:
    def git(*words: str) -> None:
        as_someone = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *as_someone, *words], cwd=steplab.cwd, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    steplab.write("mine.py", STEP.format(plain=0.02, slow=0.02))
    git("add", "mine.py")
    git("commit", "-qm", "first")
    steplab.write("mine.py", STEP.format(plain=0.03, slow=0.03))
    return steplab


def worktrees(repository: Program) -> list[str]:
    listed = subprocess.run(["git", "worktree", "list"], cwd=repository.cwd, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def test_each_side_imports_the_model_of_its_own_revision(repository: Program) -> None:
    options = ("--model", "mine:plain", "--device", "cpu", "--warmup", "1", "--threshold", "20%", "--starts", "1")
    result = repository("ab", "--against", "main", *options, "--format", "json")
    assert result.code == 4, result.stderr
    then, now = result.rows()
    assert (then["what"], now["what"], now["decision"]) == ("main", "working tree", "higher")
    assert then["step_time_s"] < 0.029 < now["step_time_s"]
    assert now["git_commit"] == f"{then['git_commit']}+"
    assert len(worktrees(repository)) == 1


def test_a_worktree_is_removed_whatever_happens(repository: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository.cwd)
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{repository.cwd}")
    seen: list[Path] = []

    def interrupted() -> None:
        with checked_out("main") as there:
            assert there.folder is not None
            assert there.environment is not None
            assert there.environment["PYTHONPATH"].split(":")[:2] == ["/elsewhere", str(there.folder)]
            assert "0.02" in (there.folder / "mine.py").read_text()
            assert len(worktrees(repository)) == 2
            seen.append(there.folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(worktrees(repository)) == 1
    assert not seen[0].exists()


# --- what is refused --------------------------------------------------------------------------------------


def test_a_revision_is_one_of_a_repository(steplab: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git repository" in complaint(steplab.here("ab", "--against", "main", *tiny()), 2)


def test_an_unknown_revision_is_named(repository: Program) -> None:
    message = complaint(repository.here("ab", "--against", "nowhere", *tiny()), 2)
    assert "no revision 'nowhere'" in message
