"""The page of the fastest steps is what the committed records say."""

from statistics import median

import pytest
from benchmarks import tables_fast
from benchmarks.tables import between_marks, markdown, tables

from steplab.costs.parameters import num_parameters
from steplab.records.advice import Advice
from steplab.records.run import Run
from steplab.specs.model import MODEL_SIZES


@pytest.fixture(scope="module")
def found() -> tuple[list[Run], list[Advice]]:
    parts: tuple[list[Run], list[Advice]] = tables_fast.measured()
    return parts


@pytest.fixture(scope="module")
def runs(found: tuple[list[Run], list[Advice]]) -> list[Run]:
    return found[0]


@pytest.mark.parametrize("name", ["steps", "fast", "eight_b"])
def test_the_committed_tables_are_made_of_the_records(name: str) -> None:
    make, page = tables()[name]
    assert between_marks(page, name) == markdown(make())


def test_each_size_has_its_fastest_step_first(runs: list[Run]) -> None:
    _, _, _, first, *_ = tables_fast.fast()
    assert not isinstance(first, str)
    [large] = [row for row in first.rows if row["0"] == "large"]
    times = [median(run.samples_s) for run in runs if run.spec and run.spec.model.name == "large"]
    assert large[str(len(tables_fast.STEP))] == f"{min(times) * 1e3:.2f}"


def test_the_floor_of_a_step_is_that_of_the_stated_figures(runs: list[Run]) -> None:
    """6 FLOPs for each parameter but the embedding's and token, 6 L d T for each token, 28 bytes a parameter."""
    [run] = [run for run in runs if run.id == "bbcb1adea94b"]  # 2.7b at 2,048 positions
    size, tokens = MODEL_SIZES["2.7b"], 4 * 2048
    num = num_parameters(size)
    floor = 6 * (num - 10_000 * 2560) * tokens / 990e12, 6 * 32 * 2560 * 2048 * tokens / 990e12, 28 * num / 4.8e12
    [row] = tables_fast.floors([run]).rows
    told = [float(str(row[str(place)])) for place in (3, 4, 5, 6)]
    assert told == pytest.approx([1e3 * each for each in (*floor, sum(floor))], rel=0.005)


def test_the_parts_of_a_profiled_step_are_all_of_it(runs: list[Run]) -> None:
    profiled = [run for run in runs if run.profile]
    assert profiled
    signs = {"products": 1, "AdamW": 1, "attention": 1, "other kernels": 1, "at once": -1, "idle": 1}
    table = tables_fast.shares(profiled)
    for run, row in zip(profiled, table.rows, strict=True):
        assert run.profile is not None
        told = {column.heading: float(str(row[column.key])) for column in table.columns if column.heading in signs}
        found = sum(sign * told[title] for title, sign in signs.items())
        assert found == pytest.approx(run.profile.window_s / run.profile.num_steps * 1e3, rel=0.01)
