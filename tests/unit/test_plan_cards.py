from functools import cache, partial
from typing import Any

import pytest
from tests.documents import chapter_says
from tests.stored_records import stored

from steplab.costs.rates import gpu_named
from steplab.errors import Unsupported
from steplab.lab.layout_planning import plan_given_layout, plan_layout
from steplab.lab.planning import plan_memory, plan_time
from steplab.plan.cards import LEAST_USABLE, OUTSIDE_BYTES, RESERVED_MARGIN, fits_of
from steplab.plan.memory import predict_memory
from steplab.records.prediction import PredictionKind
from steplab.records.run import Run
from steplab.specs.hardware import find_hardware, hardware_named
from steplab.specs.resolve import resolve_step
from steplab.units import GIB

H200 = hardware_named("H200 SXM")
HALF: dict[str, Any] = {"model": "small", "precision": "bf16"}


@cache
def recorded() -> tuple[Run, ...]:
    found = (*stored("step_h200", Run), *stored("memory_h200", Run))
    return tuple(run for run in found if run.spec and run.spec.model.shape)


def test_the_margin_is_not_wider_than_the_most_fragmented_step_asks_for() -> None:
    asked = ("2.7b", 256, "forward_backward", "bf16", "default")
    worst = [
        (spec, peak.peak_reserved_bytes)
        for run in recorded()
        if (spec := run.spec) and run.memory and (peak := run.memory.peak("step"))
        and (spec.model.name, spec.context, spec.pass_name, spec.precision, spec.compile) == asked
    ]  # fmt: skip
    found = predict_memory(worst[0][0])
    assert found.reserved_bytes is not None
    over = max(reserved_bytes for _, reserved_bytes in worst) / found.reserved_bytes - 1
    assert RESERVED_MARGIN - 0.02 < over < RESERVED_MARGIN
    chapter_says("memory_formulas", f"reserved {100 * over:.1f} % more than predicted")


def test_what_lies_outside_was_never_more() -> None:
    outside = [run.memory_profile.outside_bytes for run in recorded() if run.memory_profile]
    assert len(outside) >= 40
    assert 0.9 * OUTSIDE_BYTES < max(size for size in outside if size) <= OUTSIDE_BYTES


def test_the_memory_of_the_h200_is_what_its_records_say() -> None:
    devices = {
        (run.environment.device.name, run.environment.device.memory_bytes) for run in recorded() if run.environment
    }
    assert devices == {("NVIDIA H200", H200.usable_bytes)}
    assert find_hardware("NVIDIA H200") is H200
    assert H200.usable_bytes is not None
    assert 141e9 < H200.usable_bytes < 141 * GIB  # neither reading of the data sheet


def test_a_step_that_ran_out_of_memory_does_not_fit() -> None:
    failed = [run.spec for run in recorded() if run.status == "out_of_memory"]
    assert failed
    for spec in failed:
        assert spec is not None
        (h200,) = (card for card in predict_memory(spec).cards if card.gpu == "H200 SXM")
        assert h200.verdict == "does not fit"


@pytest.mark.parametrize(
    ("gpu", "least", "safe", "verdict"),
    [
        ("H200 SXM", 100, H200.usable_bytes, "fits"),
        ("H200 SXM", 100, H200.usable_bytes + 1, "too tight to promise"),  # type: ignore[operator]
        ("H200 SXM", H200.usable_bytes, 10**12, "too tight to promise"),
        ("H200 SXM", H200.usable_bytes + 1, 10**12, "does not fit"),  # type: ignore[operator]
        ("H100 SXM", 100, int(80 * GIB * LEAST_USABLE), "fits"),
        ("H100 SXM", 100, int(80 * GIB * LEAST_USABLE) + 1, "too tight to promise"),
        ("H100 SXM", 80 * GIB, 10**12, "too tight to promise"),
        ("H100 SXM", 80 * GIB + 1, 10**12, "does not fit"),
        ("H100 SXM", 80 * GIB, None, "not known"),
    ],
)
def test_verdicts(gpu: str, least: int, safe: int | None, verdict: str) -> None:
    kind: PredictionKind = "dry_run" if safe is not None else "at_least"
    (card,) = (card for card in fits_of(resolve_step(HALF), kind, least, safe) if card.gpu == gpu)
    assert card.verdict == verdict
    assert card.usable_is_known == (gpu == "H200 SXM")


def test_a_gpu_without_a_kernel_for_the_attention_is_not_among_those_that_a_step_fits() -> None:
    cards = {
        attention: {card.gpu for card in predict_memory(resolve_step(HALF | {"attention": attention})).cards}
        for attention in ("sdpa", "sdpa_cudnn")
    }
    assert cards["sdpa"] - cards["sdpa_cudnn"] == {"MI300X"}


@pytest.mark.parametrize("attention", ["sdpa_cudnn", "flash_triton", "flash_attn_4"])
def test_a_plan_for_a_gpu_without_a_kernel_for_the_attention_is_refused(attention: str) -> None:
    asked = HALF | {"attention": attention}
    for plan in (plan_time, plan_memory, partial(plan_layout, gpus=8, global_batch=64)):
        with pytest.raises(
            Unsupported, match=f"{attention} on an AMD GPU .rocm. .*it is for cuda; use --attention sdpa"
        ):
            plan(gpu="MI300X", **asked)
    assert plan_time(gpu="A100 SXM 80GB", **asked).central_s > 0


@pytest.mark.parametrize("attention", ["plain", "sdpa_flash", "sdpa_efficient", "sdpa_math", "flex", "auto"])
def test_attention_that_torch_has_on_rocm_is_planned_there(attention: str) -> None:
    planned = plan_time(gpu="MI300X", **(HALF | {"attention": attention}))
    assert planned.central_s > 0
    assert attention != "auto" or any("auto: sdpa, nothing was measured on AMD" in note for note in planned.notes)


def test_between_the_two_figures_nothing_is_promised() -> None:
    verdicts = []
    for batch in (2, 7, 10):
        found = predict_memory(resolve_step({"model": "2.7b", "context": 1024, "batch": batch}))
        assert found.least_device_bytes is not None
        assert found.safe_device_bytes is not None
        assert found.peak_bytes < found.least_device_bytes < found.safe_device_bytes
        verdicts.append(next(card.verdict for card in found.cards if card.gpu == "H200 SXM"))
    assert verdicts == ["fits", "too tight to promise", "does not fit"]


def test_a_given_memory_decides_on_the_fit_in_every_plan_and_the_time_stays() -> None:
    small, large = (gpu_named("H100 SXM", memory_bytes=size * GIB) for size in (40, 96))
    step: dict[str, Any] = {"context": 512, "precision": "bf16"}
    for gpu, fits in ((small, "does not fit"), (large, "fits")):
        memory, time = plan_memory("2.7b", gpu=gpu, **step), plan_time("2.7b", gpu=gpu, **step)
        assert time.fit is not None
        assert {card.verdict for card in memory.cards} == {time.fit.verdict} == {fits}
        assert time.central_s == plan_time("2.7b", gpu="H100 SXM", **step).central_s
        on_two = plan_given_layout(resolve_step({"model": "2.7b", "layout": "dp=2", **step}), gpu).candidates[0]
        assert on_two.verdict == fits
        assert on_two.time is not None
