import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
from tests.documents import chapter_says
from tests.stored_records import stored
from tests.sure import sure

from steplab.plan.memory import predict_memory
from steplab.records.memory_profile import MEMORY_CATEGORIES, MemoryProfile
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.specs.step import StepSpec

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "memory_h200_202611.md"
SIZES = [*(("2.7b", context) for context in (128, 256, 512, 1024)), *((m, 512) for m in ("xl", "large", "small"))]
PASSES = ("train", "forward")
CHECKPOINTED = [("bf16", "full"), ("bf16", "every_2"), ("bf16", "every_4"), ("bf16", "selective"), ("fp32", "full")]
OPTIMIZERS = ("adamw_fused", "adamw_foreach", "adamw_loop", "sgd")
STUDY = {
    *(f"{m}-{c}-{name}-{p}" for (m, c), p, name in itertools.product(SIZES, ("bf16", "fp32"), PASSES)),
    *(f"{m}-{c}-{name}-bf16-default" for (m, c), name in itertools.product(SIZES, PASSES)),
    *(f"xl-512-train-{precision}-{how}" for precision, how in CHECKPOINTED),
    "xl-512-train-bf16-full-default",
    *(f"2.7b-512-train-bf16-sdpa_{kernel}" for kernel in ("flash", "efficient", "cudnn", "math")),
    *(f"small-512-train-fp16-{optimizer}" for optimizer in OPTIMIZERS),
    "small-512-train-bf16_pure-adamw_fused",
}

OTHERWISE_UNWATCHED = {"xl-512-train-bf16-default": 872 * 1024, "xl-512-train-bf16-full-default": 1976 * 1024}
"""Cells whose back-to-back steps reached so much more than the watched one: the free block for a request varies between
steps.
"""


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


def test_the_whole_study_is_there(runs: dict[str, Run]) -> None:
    assert set(runs) >= STUDY
    for name, run in runs.items():
        spec = spec_of(run)
        told = {"attention": "plain", "compile": "off", "checkpointing": "none", "optimizer": "adamw_fused"}
        differing = {getattr(spec, field) for field, usual in told.items() if getattr(spec, field) != usual}
        words = name.removeprefix(f"{spec.model.name}-{spec.context}-{spec.pass_name}-{spec.precision}").split("-")[1:]
        assert set(words) - {"adamw_fused"} == differing


def test_the_categories_sum_to_the_peak_that_the_allocator_counted(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        memory = memory_of(run)
        assert set(memory.at_peak) <= set(MEMORY_CATEGORIES)
        assert sum(memory.at_peak.values()) == memory.peak_bytes == memory.counted_peak_bytes, name


def test_every_phase_peaks_where_the_allocator_counted_it_in_the_timed_steps(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        phases = memory_of(run).phases
        expected = ["forward"] if spec_of(run).pass_name == "forward" else ["forward", "backward", "optimizer"]
        assert [phase.name for phase in phases] == expected, name
        assert run.memory is not None
        for phase in phases:
            counted = sure(run.memory.peak(phase.name))
            assert phase.peak_bytes == counted.peak_allocated_bytes, f"{name}: {phase.name}"


def test_watching_does_not_change_the_peak(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        memory, counted = memory_of(run), run.memory.peak("step") if run.memory else None
        assert counted is not None
        assert memory.unwatched_peak_bytes == counted.peak_allocated_bytes
        assert memory.unwatched_peak_bytes - memory.peak_bytes == OTHERWISE_UNWATCHED.get(name, 0), name


def test_parameters_and_optimizer_state_are_as_large_as_the_model(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        spec, at_peak = spec_of(run), memory_of(run).at_peak
        assert run.model is not None
        weights = (2 if spec.precision == "bf16_pure" else 4) * run.model.num_parameters
        assert at_peak["parameters"] == pytest.approx(weights, rel=2e-3), name  # and the rotary table
        training = spec.pass_name == "train"
        moments = 2 if training and spec.optimizer != "sgd" else 0
        scalars = 8 if spec.precision == "fp16" else 0  # the gradient scaler's factor, and the steps since it grew
        assert at_peak.get("optimizer_state", 0) == pytest.approx(moments * weights + scalars, rel=1e-3), name
        assert (at_peak.get("activations", 0) > 0) == training, name


def kept_by_a_block(spec: StepSpec) -> int:
    """Sums of docs/memory_formulas.md; dropout's seed and offset in fused kernels are apart."""
    shape = sure(spec.model.shape)
    B, T, d, f, h = spec.batch, spec.context, shape.d_model, shape.d_ff, shape.num_heads
    stream, inner, scores, rows = B * T * d, B * T * f, B * h * T * T, B * h * T
    if spec.checkpointing != "none":
        return 4 * stream + (2 * (6 * stream + 2 * inner + scores) if spec.checkpointing == "selective" else 0)
    if spec.precision in ("fp32", "bf16_pure"):
        return (4 if spec.precision == "fp32" else 2) * (8 * stream + 4 * inner + scores) + 8 * B * T + T * T
    attention = {
        "plain": 8 * stream + 6 * scores + T * T,
        "sdpa_flash": 10 * stream + 4 * rows,
        "sdpa_cudnn": 10 * stream + 4 * rows,
        "sdpa_efficient": 8 * stream + 4 * rows,
        "sdpa_math": 4 * (3 * stream + scores) + 2 * stream,
    }
    return 18 * stream + 8 * inner + 8 * B * T + attention[spec.attention]


def test_a_block_keeps_what_the_formulas_say(runs: dict[str, Run]) -> None:
    eager = {name: run for name, run in runs.items() if spec_of(run).compile == "off"}
    for name, run in eager.items():
        spec, (block, *others), left_out = spec_of(run), memory_of(run).blocks, memory_of(run).blocks_left_out
        shape = sure(spec.model.shape)
        assert left_out is None
        if spec.pass_name == "forward":
            assert (block.saved_bytes, block.gradient_bytes, others) == (0, None, []), name
            continue
        expected = [kept_by_a_block(spec)]
        if spec.checkpointing.startswith("every_"):
            expected.append(kept_by_a_block(dataclasses.replace(spec, checkpointing="none")))
        seeds = {"sdpa_flash": 24, "sdpa_cudnn": 16}.get(spec.attention, 0)
        assert [found.saved_bytes - seeds for found in (block, *others)] == expected, name
        width = 2 if spec.precision == "bf16_pure" else 4
        weights = 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff + 2 * shape.d_model
        assert {found.gradient_bytes for found in (block, *others)} == {width * weights}, name
        stream = width * spec.batch * spec.context * shape.d_model
        assert {found.input_bytes for found in (block, *others)} == {stream}, name


def errors(runs: dict[str, Run], predictions: dict[str, MemoryPrediction], *, compiled: bool) -> dict[str, float]:
    return {
        name: abs(predictions[name].peak_bytes / memory_of(run).peak_bytes - 1)
        for name, run in runs.items()
        if (spec_of(run).compile != "off") == compiled
    }


KINDS: dict[str, Callable[[StepSpec], bool]] = {
    "plain attention, no checkpointing, fp32 and bf16": lambda spec: spec.checkpointing == "none",
    "xl with checkpointing, fp32 and bf16": lambda spec: spec.checkpointing != "none",
    "`sdpa_flash`, `sdpa_efficient`, `sdpa_cudnn`, `sdpa_math`": lambda spec: spec.attention != "plain",
    "small in fp16 (each optimizer) and bf16_pure": lambda spec: spec.precision in ("fp16", "bf16_pure"),
}


def rows_by_kind(runs: dict[str, Run], off: dict[str, float]) -> Iterator[str]:
    kind_of = {name: [kind for kind, is_one in KINDS.items() if is_one(spec_of(runs[name]))][-1] for name in off}
    for kind in KINDS:
        of_kind = [error for name, error in off.items() if kind_of[name] == kind]
        yield f"| {kind} | {len(of_kind)} | {100 * median(of_kind):.4f} % | {100 * max(of_kind):.3f} % |"


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
        "memory",
        f"Over {len(eager)} eager steps on an H200 its median is {100 * median(eager):.4f} % and the worst "
        f"{100 * max(eager):.3f} %; over {len(compiled_ones)} compiled ones, which are estimated, "
        f"{' and '.join(short)}.",
    )
    chapter_says(
        "memory_formulas",
        f"Against the {len(eager)} eager cells of",
        f"For the {len(compiled_ones)} compiled cells: median {short[0]}, worst {short[1]}",
        *rows_by_kind(runs, errors(runs, predictions, compiled=False)),
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
