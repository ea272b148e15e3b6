"""The tables of examples/eight_b.py are what its records say."""

from benchmarks import tables_eight_b
from benchmarks.page_tables import ROOT, between_marks


def test_the_committed_tables_are_made_of_the_records() -> None:
    assert between_marks(ROOT / "docs/layout.md", "eight_b") == tables_eight_b.written()
