import dataclasses

import pytest
from tests.cli.program import Program, complaint
from tests.runs import ENVIRONMENT, make_run
from tests.unit.test_comparing import slower

from steplab.records.codec import encode
from steplab.records.run import Run


def of_commit(number: int, factor: float) -> Run:
    environment = dataclasses.replace(ENVIRONMENT, git_commit=f"{number:012x}")
    run = slower(make_run(seed=number), factor)
    created = f"2026-11-{1 + number:02}T08:00:00Z"
    return dataclasses.replace(run, id=f"{number:012x}", environment=environment, created_utc=created)


@pytest.fixture
def stored(steplab: Program) -> Program:
    runs = [of_commit(number, 1.0 if number < 6 else 1.06) for number in range(12)]
    runs.append(make_run({"batch": "8"}, id="f" * 12))
    (steplab.cwd / "runs.jsonl").write_bytes(b"\n".join(map(encode, runs)))
    assert steplab("import", "runs.jsonl").code == 0
    return steplab


def test_the_commit_from_which_the_step_is_slower_is_named(stored: Program) -> None:
    result = stored("history", "--model", "small", "--batch", "4", "--metric", "step_time")
    assert result.code == 0
    assert f"from commit {6:012x} of 2026-11-07 on" in " ".join(result.stdout.split())
    rows = stored("history", "--batch", "4", "--format", "json").rows()
    assert [row["commit"] for row in rows if row["change"]] == [f"{6:012x}"]
    [ratio] = [row["change"] for row in rows if row["change"]]
    assert ratio == pytest.approx(1.06, rel=0.02)


def test_each_step_has_a_history_of_its_own_and_any_figure_one(stored: Program) -> None:
    rows = stored("history", "--metric", "peak-allocated", "--format", "json").rows()
    assert len({row["series"] for row in rows}) == 2
    assert "change" in rows[0]
    assert stored("history", "--output", "page.html").code == 0
    assert "thick lines the median of each level" in (stored.cwd / "page.html").read_text(encoding="utf-8")


def test_what_has_no_history_is_said(stored: Program) -> None:
    assert "no figure 'speed'; choose one of step_time_s" in complaint(stored.here("history", "--metric", "speed"), 2)
    assert "no run in" in complaint(stored.here("history", "--model", "xl"), 2)
