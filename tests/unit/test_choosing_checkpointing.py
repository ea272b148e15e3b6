import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.runs import make_run
from tests.sure import sure
from tests.unit.taking import FakeSession

from steplab.errors import UserError
from steplab.lab import checkpointing, measuring
from steplab.lab.advising import advise
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.machine import VisibleGpu, visible_gpu
from steplab.lab.measuring import measure
from steplab.lab.planning import plan, plan_memory, plan_time
from steplab.lab.predicting import memory_of
from steplab.measurement.jobs import StepTask
from steplab.plan.cards import fit_of
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.specs.hardware import HardwareSpec, hardware_named
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.units import MIB

LAYERS = 3
LADDER = ("none", "selective", "first_1", "first_2", "full")
STEP: dict[str, object] = {"model": "small", "model.num_layers": LAYERS, "context": 512, "checkpointing": "auto"}


def gpu_of(usable_bytes: int) -> HardwareSpec:
    return dataclasses.replace(hardware_named("H200 SXM"), usable_bytes=usable_bytes)


@pytest.fixture(scope="module")
def predictions() -> dict[str, MemoryPrediction]:
    return {choice: predict_memory(resolve_step(STEP | {"checkpointing": choice})) for choice in LADDER}


def verdict(found: MemoryPrediction, usable_bytes: int) -> str:
    return fit_of(gpu_of(usable_bytes), found.kind, sure(found.least_device_bytes), found.safe_device_bytes).verdict


@pytest.mark.parametrize("short_of", [0, 1])
@pytest.mark.parametrize("aimed_at", LADDER)
def test_the_first_choice_that_plan_memory_says_fits_is_taken(
    predictions: dict[str, MemoryPrediction], aimed_at: str, short_of: int
) -> None:
    safe = sure(predictions[aimed_at].safe_device_bytes)
    usable = safe - short_of
    fitting = [choice for choice, found in predictions.items() if verdict(found, usable) == "fits"]
    chosen = choose_checkpointing(resolve_step(STEP), gpu_of(usable))
    least = min(LADDER, key=lambda choice: predictions[choice].safe_device_bytes or 0)
    assert chosen.spec.checkpointing == (fitting[0] if fitting else least)
    assert chosen.spec == resolve_step(STEP | {"checkpointing": chosen.spec.checkpointing})
    assert chosen.notes[0].startswith(f"checkpointing auto: {chosen.spec.checkpointing} (")
    assert ("too tight to promise" in chosen.notes[0]) == (not fitting)


def test_recomputing_more_blocks_takes_less_memory(predictions: dict[str, MemoryPrediction]) -> None:
    peaks = [predictions[choice].safe_device_bytes or 0 for choice in ("none", *LADDER[2:-1])]
    assert peaks == sorted(peaks, reverse=True)


def test_a_step_that_never_fits_is_refused_with_both_figures(predictions: dict[str, MemoryPrediction]) -> None:
    least = min(found.least_device_bytes or 0 for found in predictions.values())
    words = r"does not fit even with full checkpointing: predicted .* of the .* of H200 SXM; take a smaller batch"
    with pytest.raises(UserError, match=words):
        choose_checkpointing(resolve_step(STEP), gpu_of(least - 1))


@pytest.mark.release
def test_of_a_transformers_model_every_layer_is_recomputed_or_none(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 31}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    spec = resolve_step({"model": f"hf:{path}", "checkpointing": "auto", "context": 2048})
    none, full = (
        memory_of(dataclasses.replace(spec, checkpointing=name)).safe_device_bytes for name in ("none", "full")
    )
    assert none is not None
    assert full is not None
    assert choose_checkpointing(spec, gpu_of(none)).spec.checkpointing == "none"
    assert choose_checkpointing(spec, gpu_of(max(full, none - MIB))).spec.checkpointing == "full"


def test_a_choice_by_name_is_left_alone_and_needs_no_gpu() -> None:
    spec = resolve_step(STEP | {"checkpointing": "every_2"})
    assert choose_checkpointing(spec) == checkpointing.Chosen(spec=spec)


@pytest.mark.parametrize("fields", [{"device": "cpu"}, {"pass": "forward"}])
def test_nothing_is_recomputed_where_there_is_no_gpu_or_no_gradient(fields: dict[str, object]) -> None:
    chosen = choose_checkpointing(resolve_step(STEP | fields))
    assert chosen.spec.checkpointing == "none"
    assert len(chosen.notes) == 1


def test_what_cannot_be_predicted_is_left_to_the_user() -> None:
    spec = resolve_step(STEP | {"layout": "dp=2", "optimizer": "adamw_triton"})
    with pytest.raises(
        UserError, match=r"goes by predicted memory: .* is not supported.*or name none, selective or full"
    ):
        choose_checkpointing(spec, gpu_of(2**40))


def test_an_unknown_gpu_at_hand_is_told_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolve_step(STEP | {"device": "cuda:1"})
    asked = list[int]()

    def gpu(number: int) -> VisibleGpu | None:
        asked.append(number)
        return None if len(asked) > 1 else VisibleGpu(name="NVIDIA X1", memory_bytes=2**40)

    monkeypatch.setattr(checkpointing, "visible_gpu", gpu)
    assert "of the 1.00 TiB of NVIDIA X1" in choose_checkpointing(spec).notes[0]
    with pytest.raises(UserError, match="the CUDA driver does not tell"):
        choose_checkpointing(spec)
    assert asked == [1, 1]


class Driver:
    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 100
            if name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA H200"
            if name == "cuDeviceTotalMem_v2":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_size_t))[0] = 150_119_055_360
            return 0

        return call


def test_the_driver_is_asked_for_name_and_memory() -> None:
    assert visible_gpu(0, load=lambda name: Driver()) == VisibleGpu(name="NVIDIA H200", memory_bytes=150_119_055_360)
    for failing in ("cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem_v2"):
        assert visible_gpu(0, load=lambda name, failing=failing: Driver(failing)) is None  # type: ignore[misc]

    def missing(name: str) -> Any:
        raise OSError(name)

    assert visible_gpu(0, load=missing) is None


# --- who asks ---------------------------------------------------------------------------------------------


def test_the_record_has_what_was_chosen_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(task: StepTask, **options: Any) -> Run:
        return dataclasses.replace(make_run(), spec=task.spec)

    monkeypatch.setattr(measuring, "measure_in_child", measured)
    run = measure("tiny", checkpointing="auto", device="cpu", store=tmp_path / "store.db")
    assert sure(run.spec).checkpointing == "none"
    assert run.notes[-1].startswith("checkpointing auto: none")


def test_plans_are_of_what_is_chosen_for_the_gpu_that_is_named() -> None:
    fields: dict[str, Any] = {"context": 2048, "batch": 24, "checkpointing": "auto", "model.num_layers": 4}
    small, large = (plan_memory("small", gpu=gpu, **fields) for gpu in ("A100 SXM 40GB", "H200 SXM"))
    assert large.spec is not None
    assert small.peak_bytes < large.peak_bytes
    assert any(note.startswith(f"checkpointing auto: {large.spec.checkpointing}") for note in large.notes)
    timed = plan_time("small", gpu="A100 SXM 40GB", **fields)
    assert sure(timed.spec).checkpointing == sure(small.spec).checkpointing
    both = plan("small", gpu="H200 SXM", **fields)
    assert sure(both.memory).notes == large.notes
    with pytest.raises(UserError, match="name it, as in --gpu"):
        plan_memory("tiny", checkpointing="auto")


def unprofiled(spec: StepSpec, **options: Any) -> Run:
    raise AssertionError("a step that can be planned is not profiled")


def test_a_walk_recomputes_where_the_step_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, predictions: dict[str, MemoryPrediction]
) -> None:
    def told(spec: StepSpec) -> float | str:
        return 0.1 if spec.checkpointing != "none" else "asked 80 GiB"

    fused = resolve_step({**STEP, "steps": 30, "checkpointing": "none", "attention": "sdpa"})
    usable = sure(predict_memory(dataclasses.replace(fused, checkpointing="selective")).safe_device_bytes)
    monkeypatch.setattr(checkpointing, "visible_gpus", lambda: 1)
    monkeypatch.setattr(checkpointing, "visible_gpu", lambda number: VisibleGpu(name="H200", memory_bytes=usable))
    advice = advise(
        fused, keep_precision=True, store=tmp_path / "store.db", session=FakeSession(told), profile=unprofiled
    )
    assert advice.best is not None
    assert advice.best.checkpointing != "none"
    kept = {tried.field: tried.value for tried in advice.kept}
    assert kept["checkpointing"] == advice.best.checkpointing
