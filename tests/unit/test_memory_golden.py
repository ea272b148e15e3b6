import re
from pathlib import Path
from statistics import median

import pytest
from tests.documents import chapter_says
from tests.stored_records import stored

from steplab.plan.memory import predict_memory
from steplab.records.memory_profile import MEMORY_CATEGORIES, MemoryProfile
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.specs.step import StepSpec

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "memory_h200_202611.md"


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {run.name: run for run in stored("memory_h200", Run)}


@pytest.fixture(scope="module")
def predictions(runs: dict[str, Run]) -> dict[str, MemoryPrediction]:
    return {name: predict_memory(spec_of(run), device=run.device_name) for name, run in runs.items()}


def spec_of(run: Run) -> StepSpec:
    assert run.spec is not None
    return run.spec


def memory_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None, run.notes
    return run.memory_profile


def errors(runs: dict[str, Run], predictions: dict[str, MemoryPrediction], *, compiled: bool) -> dict[str, float]:
    return {
        name: abs(predictions[name].peak_bytes / memory_of(run).peak_bytes - 1)
        for name, run in runs.items()
        if (spec_of(run).compile != "off") == compiled
    }


def test_the_eager_peak_is_predicted(runs: dict[str, Run], predictions: dict[str, MemoryPrediction]) -> None:
    off = errors(runs, predictions, compiled=False)
    assert median(off.values()) <= 0.01
    assert max(off.values()) <= 0.04, max(off, key=lambda name: off[name])


def test_every_eager_category_but_rounding_is_predicted(
    runs: dict[str, Run], predictions: dict[str, MemoryPrediction]
) -> None:
    """To a thousandth of a MiB: a dry run does not know which free block serves a request."""
    for name, run in runs.items():
        if spec_of(run).compile == "off":
            memory, predicted = memory_of(run), predictions[name]
            assert predicted.peak_phase == memory.peak_phase, name
            for category in MEMORY_CATEGORIES[:-1]:
                off = predicted.at_peak.get(category, 0) - memory.at_peak.get(category, 0)
                assert abs(off) <= 1024, f"{name}: {category} {off}"


def test_the_table_tells_the_errors_of_today(runs: dict[str, Run], predictions: dict[str, MemoryPrediction]) -> None:
    text = TABLE.read_text()
    for kind, compiled in (("Eager", False), ("Compiled", True)):
        off = errors(runs, predictions, compiled=compiled).values()
        figures = f"{len(off)} cells, median error {100 * median(off):.4f} %, worst {100 * max(off):.3f} %."
        assert f"{kind}: {figures}" in text
    eager, compiled_ones = (list(errors(runs, predictions, compiled=each).values()) for each in (False, True))
    short = f"{100 * median(compiled_ones):.2f} %", f"{100 * max(compiled_ones):.1f} %"
    chapter_says(
        "memory_formulas",
        f"Over {len(eager)} eager steps on an H200 its median is {100 * median(eager):.4f} % and the worst "
        f"{100 * max(eager):.3f} %; over {len(compiled_ones)} compiled ones, which are estimated, "
        f"{' and '.join(short)}.",
    )
    rows = [line for line in text.splitlines() if re.match(r"\| (2\.7b|xl|large|small) ", line)]
    peaks = sorted(f"{memory_of(run).peak_bytes:,}" for run in runs.values())
    assert sorted(next(cell for cell in row.split(" | ") if cell.count(",") > 1) for row in rows) == peaks


def test_what_is_said_to_be_safe_is_safe(runs: dict[str, Run], predictions: dict[str, MemoryPrediction]) -> None:
    for name, run in runs.items():
        memory, safe_bytes = memory_of(run), predictions[name].safe_device_bytes
        assert safe_bytes is not None
        assert memory.reserved_bytes is not None
        assert memory.outside_bytes is not None
        assert safe_bytes >= memory.reserved_bytes + memory.outside_bytes, name
