"""Recorded memory of an H200: categories against the allocator's own count, and what was predicted of it."""

import itertools
import lzma
from pathlib import Path
from statistics import median

import pytest

from steplab.plan.memory import predict_memory
from steplab.records.codec import decode
from steplab.records.memory_profile import MEMORY_CATEGORIES, MemoryProfile
from steplab.records.run import Run

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = [*(("2.7b", context) for context in (128, 256, 512, 1024)), *((m, 512) for m in ("xl", "large", "small"))]
EAGER = [
    (*size, precision, pass_name, "off", "none")
    for size, precision, pass_name in itertools.product(SIZES, ("fp32", "bf16"), ("forward", "train"))
]
COMPILED = [(*size, "bf16", name, "default", "none") for size, name in itertools.product(SIZES, ("forward", "train"))]
CHECKPOINTED = [("xl", 512, "bf16", "train", "off", how) for how in ("full", "every_2", "every_4", "selective")]
Cell = tuple[str, int, str, str, str, str]


@pytest.fixture(scope="module")
def runs() -> dict[Cell, Run]:
    lines = lzma.decompress((GOLDEN / "memory_h200_202611.jsonl.xz").read_bytes()).splitlines()
    found = [record for record in map(decode, lines) if isinstance(record, Run)]
    return {cell_of(run): run for run in found}


def cell_of(run: Run) -> Cell:
    spec = run.spec
    assert spec is not None
    return (spec.model.name, spec.context, spec.precision, spec.pass_name, spec.compile, spec.checkpointing)


def memory_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None, run.notes
    return run.memory_profile


def named(cell: Cell) -> str:
    return "-".join(map(str, cell))


def test_the_whole_study_is_there(runs: dict[Cell, Run]) -> None:
    assert {*EAGER, *COMPILED, *CHECKPOINTED} <= set(runs)


@pytest.mark.parametrize("cell", [*EAGER, *COMPILED, *CHECKPOINTED], ids=named)
def test_the_categories_sum_to_the_peak_that_the_allocator_counted(runs: dict[Cell, Run], cell: Cell) -> None:
    run = runs[cell]
    memory = memory_of(run)
    assert set(memory.at_peak) <= set(MEMORY_CATEGORIES)
    assert sum(memory.at_peak.values()) == memory.peak_bytes == memory.counted_peak_bytes
    counted = run.memory.peak("step") if run.memory else None
    assert counted is not None
    assert memory.unwatched_peak_bytes == counted.peak_allocated_bytes


@pytest.mark.parametrize("cell", [*EAGER, *COMPILED, *CHECKPOINTED], ids=named)
def test_watching_does_not_change_the_peak(runs: dict[Cell, Run], cell: Cell) -> None:
    memory = memory_of(runs[cell])
    assert memory.peak_bytes == memory.unwatched_peak_bytes


@pytest.mark.parametrize("cell", EAGER, ids=named)
def test_parameters_and_optimizer_state_are_as_large_as_the_model(runs: dict[Cell, Run], cell: Cell) -> None:
    run = runs[cell]
    assert run.model is not None
    at_peak, weights = memory_of(run).at_peak, 4 * run.model.num_parameters
    assert at_peak["parameters"] == pytest.approx(weights, rel=1e-3)  # and the rotary table
    training = cell[3] == "train"
    assert at_peak.get("optimizer_state", 0) == pytest.approx(2 * weights if training else 0, rel=1e-3)
    assert (at_peak.get("activations", 0) > 0) == training


def errors(runs: dict[Cell, Run], cells: list[Cell]) -> dict[str, float]:
    found = {}
    for cell in cells:
        spec = runs[cell].spec
        assert spec is not None
        predicted, measured = predict_memory(spec), memory_of(runs[cell])
        found[named(cell)] = predicted.peak_bytes / measured.peak_bytes - 1
        assert predicted.safe_device_bytes is not None
        assert measured.reserved_bytes is not None
        assert measured.outside_bytes is not None
        assert predicted.safe_device_bytes >= measured.reserved_bytes + measured.outside_bytes
    return found


def test_the_peak_is_predicted(runs: dict[Cell, Run]) -> None:
    off = {name: abs(error) for name, error in errors(runs, [*EAGER, *CHECKPOINTED]).items()}
    assert median(off.values()) <= 0.01
    assert max(off.values()) <= 0.04, max(off, key=lambda name: off[name])
