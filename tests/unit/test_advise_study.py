"""The study of walks: its cases are steps, and its command line says what is wrong."""

import sys

import pytest
from benchmarks import advise_study

from steplab.specs.resolve import resolve_step


@pytest.mark.parametrize("name", advise_study.CASES)
def test_a_case_is_a_plain_step_of_its_name(name: str) -> None:
    spec = resolve_step(advise_study.CASES[name])
    assert name == f"{spec.model.label}-{spec.context}"
    assert (spec.compile, spec.attention, spec.optimizer, spec.batch) == ("off", "plain", "adamw_fused", 4)


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        (["--help"], 0, "--cases NAME"),
        (["walks", "--cases", "huge"], 2, "invalid choice: 'huge'"),
        (["walks", "--budget", "soon"], 2, "soon"),
    ],
)
def test_the_command_line_measures_nothing_by_accident(
    given: list[str], code: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["advise_study.py", *given])
    with pytest.raises(SystemExit) as ended:
        advise_study.main()
    assert ended.value.code == code
    assert told in "".join(capsys.readouterr())
