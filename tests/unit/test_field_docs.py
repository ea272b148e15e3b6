"""What `help` says of the public dataclasses, and how results that are no records show at a prompt."""

import dataclasses
import inspect
import pydoc

import pytest

import steplab
from steplab.records.comparison import ComparedFigure, Comparison, Ratio, Side
from steplab.records.field_docs import add_to_help
from steplab.specs.model import SIZE_FIELDS


@pytest.mark.parametrize("name", ["Run", "StepSpec", "ModelSpec", "StudySpec"])
def test_help_tells_what_each_field_is(name: str) -> None:
    described = getattr(steplab, name)
    text = pydoc.plain(pydoc.render_doc(described))
    hidden = {field.name for field in dataclasses.fields(described) if field.name.startswith("_")}
    for field in {each.name for each in dataclasses.fields(described)} - hidden:
        assert f"{field}: " in text, field
    length = len(described.__doc__)
    add_to_help(described)
    assert len(described.__doc__) == length


def test_help_of_a_step_has_defaults_and_sizes_and_can_be_read() -> None:
    text = inspect.getdoc(steplab.StepSpec) or ""
    assert "context: Tokens per sequence [default: 128]" in text
    assert all(f"{field.key}: " in text for field in SIZE_FIELDS)
    assert max(map(len, text.splitlines())) <= 110
    assert "lambda" not in str(inspect.signature(steplab.StepSpec))
    assert "help(steplab.StepSpec)" in (inspect.getdoc(steplab.measure) or "")


def test_a_comparison_is_one_line_at_a_prompt() -> None:
    ratio = Ratio(
        a=2.0, b=3.0, num_a=9, num_b=9, ratio=1.5, low=1.4, high=1.6, p=1e-4, threshold=0.05, decision="higher"
    )
    figure = ComparedFigure(cell="", name="step time", group="time", unit="s", decides=True, a=2.0, b=3.0, ratio=ratio)
    found = Comparison(a=Side(told="old", ids=("a",)), b=Side(told="new", ids=("b",)), figures=(figure,))
    assert repr(found) == "<Comparison of new against old: regression, step time 1.500×>"
