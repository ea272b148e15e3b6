"""The chapter of a walk is what docs/walk/make.py makes of the committed records."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = spec_from_file_location("walk_chapter", DOCS / "walk" / "make.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_chapter_is_that_of_the_committed_records(make: ModuleType) -> None:
    drawn: dict[str, str] = {}
    text = make.chapter(make.read(make.RECORDS), drawn)
    assert (DOCS / "walk.md").read_text(encoding="utf-8") == text, "`python docs/walk/make.py` makes it again"
    assert set(re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)) == set(drawn)
    for path, svg in drawn.items():
        assert re.findall(r"<text[^>]*>([^<]*)<", svg) == re.findall(r"<text[^>]*>([^<]*)<", (DOCS / path).read_text())
    assert "None" not in text


def test_every_change_that_may_be_kept_is_explained(make: ModuleType) -> None:
    """Those that mainly save memory, and further kernels of attention, are told by their figures alone."""
    from steplab.specs.changes import CHANGES

    words = {change.words for change in CHANGES if change.field != "checkpointing"}
    assert set(make.WHY) <= words
