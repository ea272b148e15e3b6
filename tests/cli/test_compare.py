import dataclasses
import json
import lzma
import shutil
import subprocess

import pytest
from tests.cli.program import REPOSITORY, Program, complaint
from tests.runs import ENVIRONMENT, make_run
from tests.unit.test_comparing import slower

from steplab.records.codec import encode
from steplab.records.run import Run

RUN = make_run({"steps": "30"}, id="aaaa00000000", name="base", created_utc="2026-11-21T08:00:00Z")
SAME = dataclasses.replace(RUN, id="bbbb00000000", name="again", tags=("quick",), created_utc="2026-11-21T09:00:00Z")
SLOW = dataclasses.replace(slower(RUN, 1.1), id="cccc00000000", name="slow", created_utc="2026-11-21T10:00:00Z")
OTHER = make_run({"batch": "8"}, id="dddd00000000", created_utc="2026-11-21T07:00:00Z")


def imported(program: Program, *runs: Run, file: str = "runs.jsonl", options: tuple[str, ...] = ()) -> None:
    (program.cwd / file).write_bytes(b"\n".join(map(encode, runs)) + b"\n")
    assert program("import", file, *options).code == 0


@pytest.fixture
def stored(steplab: Program) -> Program:
    imported(steplab, RUN, SAME, SLOW, OTHER)
    return steplab


@pytest.mark.parametrize("a", ["aaaa", "base", "quick", "last~1"])
def test_a_regression_ends_with_four_however_the_records_are_named(stored: Program, a: str) -> None:
    result = stored("compare", a, "last")
    assert result.code == 4
    assert "B is worse: step time" in result.stdout


def test_an_export_is_a_baseline(stored: Program) -> None:
    stored("export", "aaaa", "--output", "baseline.jsonl")
    assert stored("compare", "baseline.jsonl").code == 4
    assert stored("compare", "baseline.jsonl", "again").code == 0
    assert stored("compare", "baseline.jsonl", "slow", "--threshold", "15%").code == 0


def test_another_store_is_named_by_its_file(stored: Program) -> None:
    shutil.copy(stored.store, stored.cwd / "other.db")
    assert stored("compare", "other.db:base", "again").code == 0
    assert stored("compare", "other.db", "again").code == 0
    assert stored("compare", "again", "other.db").code == 4


def test_unlike_runs_end_with_three_and_name_the_field(stored: Program) -> None:
    result = stored("compare", "aaaa", "dddd")
    assert result.code == 3
    assert "batch: 4 in A, 8 in B; to compare anyway, add --allow batch" in complaint(result, 3)
    assert stored("compare", "aaaa", "dddd", "--allow", "batch").code in (0, 4)


def test_what_stands_for_nothing_is_said_with_what_there_is(stored: Program) -> None:
    assert "'nothing' is no id, study, name, tag or measured commit" in complaint(
        stored("compare", "nothing", "last"), 2
    )
    long = complaint(stored.here("compare", "y" * 1_000), 2)  # longer than a file's name can be
    assert "is no id, study, name, tag or measured commit" in long
    assert "no file missing.db" in complaint(stored.here("compare", "missing.db:last", "last"), 2)
    assert "exceeds the 4 records" in complaint(stored.here("compare", "last~9"), 2)
    assert "is not a share" in complaint(stored.here("compare", "base", "--threshold", "fast"), 2)


def test_a_revision_stands_for_what_was_measured_at_its_commit(steplab: Program) -> None:
    def git(*arguments: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *options, *arguments], cwd=steplab.cwd, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    commits = []
    for number in range(2):
        git("commit", "--quiet", "--allow-empty", "-m", str(number))
        commits.append(git("rev-parse", "--short=12", "HEAD"))
    git("tag", "v1", commits[0])
    runs = [
        dataclasses.replace(run, environment=dataclasses.replace(ENVIRONMENT, git_commit=commit))
        for run, commit in ((RUN, commits[0]), (SLOW, commits[1]), (SAME, commits[1] + "+"))
    ]
    imported(steplab, *runs)
    result = steplab("compare", "v1", "HEAD", "--format", "json")
    assert result.code == 4
    step = next(row for row in json.loads(result.stdout) if row["figure"] == "step time")
    assert step["ratio"] == pytest.approx(1.1)


def test_a_store_of_the_first_format_is_compared(steplab: Program) -> None:
    golden = REPOSITORY / "tests" / "golden" / "store_format_1.db.xz"
    (steplab.cwd / "old.db").write_bytes(lzma.decompress(golden.read_bytes()))
    newest = steplab("list", "--store", "old.db", "--kind", "run", "--format", "json").rows()[0]["id"]
    assert steplab("compare", f"old.db:{newest}", f"old.db:{newest}", "--format", "json").code in (0, 3)
    imported(steplab, RUN)
    refused = steplab("compare", f"old.db:{newest}", "last")
    assert refused.code == 3
    assert "A and B do not match" in complaint(refused, 3)


def test_a_page_has_the_bars_of_the_differences(stored: Program) -> None:
    assert stored("compare", "base", "last", "--output", "page.html").code == 4
    page = (stored.cwd / "page.html").read_text(encoding="utf-8")
    assert "B is worse: step time" in page
    assert "Relative change of the medians from A to B" in page
