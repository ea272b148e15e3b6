"""The page of the fastest steps is what the committed records say."""

from pathlib import Path
from statistics import median

import pytest
from benchmarks import fast_table

from steplab.records.run import Run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return list(fast_table.read(RESULTS / "fast_h200_202611.jsonl.gz"))


def test_the_committed_tables_are_made_of_the_records(runs: list[Run]) -> None:
    page = (RESULTS / "fast_h200_202611.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(fast_table.BEGIN)
    tables, _, _ = rest.partition(fast_table.END)
    assert tables.strip() == "\n\n".join(fast_table.parts(runs))


def test_each_size_has_its_fastest_step_first(runs: list[Run]) -> None:
    _, first, *_ = fast_table.parts(runs)
    large = [row.split(" | ") for row in first.splitlines() if row.startswith("| large |")]
    times = [median(run.samples_s) for run in runs if run.spec and run.spec.model.name == "large"]
    assert [row[9] for row in large] == [f"{min(times) * 1e3:.2f}"]


def test_the_parts_of_a_profiled_step_are_all_of_it(runs: list[Run]) -> None:
    profiled = [run for run in runs if run.profile]
    assert profiled
    for run, row in zip(profiled, fast_table.shares(profiled).rows, strict=True):
        assert run.profile is not None
        found = sum(float(str(row[str(index)])) for index in (5, 8, 11, 12, 13))
        assert found == pytest.approx(run.profile.window_s / run.profile.num_steps * 1e3, rel=0.01)
