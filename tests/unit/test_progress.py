import threading
import time

import pytest

from steplab.cli import progress
from steplab.cli.progress import ProgressLine, shown
from steplab.lab.sweeping import SweepProgress
from steplab.measurement.progress import Progress


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, step_s: float, warmup: int) -> str:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ProgressLine(num_steps=warmup + 10) as line:
        line.within(Progress(stage="build", done=0, total=0))
        now[0] += 50.0
        for stage, total in (("warmup", warmup), ("measure", 10)):
            line.within(Progress(stage=stage, done=0, total=total))
            for done in range(1, total + 1):
                now[0] += step_s
                line.within(Progress(stage=stage, done=done, total=total))
    return capsys.readouterr().err


@pytest.mark.parametrize(("warmup", "more"), [(5, 14), (0, 9)])
def test_the_first_step_of_a_long_run_foretells_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], warmup: int, more: int
) -> None:
    said = told(monkeypatch, capsys, step_s=20.0, warmup=warmup)
    minutes = {14: "4:40", 9: "3:00"}[more]
    assert said.count("the first step took 20.0 s") == 1
    assert f"{more} more steps take about {minutes}" in said


def test_a_short_run_is_not_foretold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "more steps" not in told(monkeypatch, capsys, step_s=0.5, warmup=5)


def test_a_long_stage_is_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ProgressLine() as line:
        for done in range(30):
            line.within(Progress(stage="predict", done=done, total=30))
            now[0] += 1.0
    assert capsys.readouterr().err.splitlines() == [
        "predicting …",
        "predicting, run 10 of 30  (0:10 elapsed)",
        "predicting, run 20 of 30  (0:20 elapsed)",
    ]


@pytest.mark.parametrize("takes_long", [True, False])
def test_what_has_no_steps_is_told_of_once_it_takes_long_and_not_after_its_end(
    monkeypatch: pytest.MonkeyPatch, takes_long: bool
) -> None:
    began, said = threading.Event(), list[str]()

    def say_slowly(text: str) -> None:
        began.set()
        time.sleep(0.1)  # it is still writing at the end of the stage
        said.append(text)

    monkeypatch.setattr(progress, "say", say_slowly)
    monkeypatch.setattr(progress, "_SHORT_S", 0.0 if takes_long else 600.0)
    with shown("planning"):
        assert not takes_long or began.wait(60)
    assert said == ["planning …"] * takes_long


@pytest.mark.parametrize(
    ("resume", "skipped", "said"),
    [
        (True, 3, "3 measurements already made, 2 to go\n"),
        (True, 0, "nothing to resume: the store has no finished measurement of this study, 2 to go\n"),
        (False, 0, ""),
    ],
)
def test_a_resumed_sweep_says_what_it_goes_on_with(
    capsys: pytest.CaptureFixture[str], resume: bool, skipped: int, said: str
) -> None:
    with ProgressLine(resume=resume) as line:
        for index in range(2):
            line.sweep(SweepProgress(index=index, to_run=2, skipped=skipped, what="tiny", num_steps=5))
    assert capsys.readouterr().err == said
