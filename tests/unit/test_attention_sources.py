"""benchmarks/attention_sources.py: which records the tables of attention take their cells from."""

from dataclasses import replace

from benchmarks.attention_sources import needed
from tests.attention_records import make_benchmark

from steplab.records.failure import Failure


def test_an_earlier_record_is_shown_for_what_later_ones_failed_to_measure() -> None:
    earlier = make_benchmark(lists={"sequence": [64], "dim": [64]}, id="a" * 12)
    missing, *others = earlier.cells
    failed = replace(missing, passes=(), failure=Failure(kind="error", message="No module named 'flash_attn'"))
    later = replace(earlier, id="b" * 12, cells=(failed, *others))
    assert [run.id for run in needed([earlier, later], earlier.study.name)] == ["b" * 12, "a" * 12]
    assert [run.id for run in needed([later, earlier], earlier.study.name)] == ["a" * 12]
