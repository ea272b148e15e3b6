"""What progress lines say of a measurement that will take long."""

import time

import pytest

from steplab.cli.progress import ProgressLine
from steplab.measurement.progress import Progress


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, step_s: float, warmup: int) -> str:
    """What stands on standard error during a measurement of ten steps with steps of this length."""
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
