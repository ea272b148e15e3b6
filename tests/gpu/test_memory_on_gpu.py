import gc
import pickle
import threading
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from steplab.lab.memory import memory
from steplab.measurement.memory.recorder import MemoryRecorder
from steplab.measurement.observer import Observer
from steplab.measurement.step_job import measure_here
from steplab.records.memory_marks import Marks
from steplab.records.memory_profile import MEMORY_CATEGORIES, MemoryProfile
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step

SMALL: dict[str, object] = {"model": "small", "context": 256}
CELLS: list[dict[str, object]] = [
    {"model": "tiny"},
    SMALL,
    SMALL | {"precision": "bf16"},
    SMALL | {"precision": "bf16", "pass_name": "forward"},
    SMALL | {"precision": "fp16", "attention": "sdpa"},
    SMALL | {"precision": "bf16_pure", "optimizer": "adamw_foreach"},
    SMALL | {"precision": "bf16_master", "optimizer": "adamw_triton"},
    SMALL | {"precision": "bf16", "checkpointing": "full"},
    SMALL | {"precision": "bf16", "checkpointing": "selective", "pass_name": "forward_backward"},
    {"model": "tiny", "precision": "bf16", "attention": "sdpa", "compile": "default"},
]
WEIGHT_BYTES = {"bf16_pure": 2}


Measured = Callable[..., tuple[Run, MemoryProfile]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    seen: dict[str, Run] = {}
    store = tmp_path_factory.mktemp("memory") / "store.db"

    def measured(**fields: object) -> tuple[Run, MemoryProfile]:
        key = str(sorted(fields.items()))
        if key not in seen:
            seen[key] = memory(**{"warmup": 2, "steps": 3, **fields}, store=store)  # type: ignore[arg-type]
        run = seen[key]
        assert run.failure is None, run.failure
        assert run.memory_profile is not None, run.notes
        return run, run.memory_profile

    return measured


@pytest.mark.parametrize("fields", CELLS, ids=str)
def test_the_categories_sum_to_the_peak_that_the_allocator_counted_with_and_without_watching(
    measured: Measured, fields: dict[str, object]
) -> None:
    _, profile = measured(**fields)
    assert set(profile.at_peak) <= set(MEMORY_CATEGORIES)
    assert sum(profile.at_peak.values()) == profile.peak_bytes == profile.counted_peak_bytes
    assert profile.unwatched_peak_bytes == profile.counted_peak_bytes
    assert profile.reserved_bytes is not None
    assert profile.reserved_bytes >= profile.peak_bytes
    assert profile.outside_bytes is not None
    assert profile.outside_bytes > 100_000_000, "a CUDA context alone takes that much"
    assert not any(note.startswith("marks: ") for note in profile.notes)


@pytest.mark.parametrize("fields", CELLS, ids=str)
def test_parameters_and_gradients_are_as_large_as_the_model(measured: Measured, fields: dict[str, object]) -> None:
    run, profile = measured(**fields)
    assert run.spec is not None
    assert run.model is not None
    assert run.spec.model.shape is not None
    num_bytes = WEIGHT_BYTES.get(run.spec.precision, 4) * run.model.num_parameters
    if run.spec.precision == "bf16_master":
        shape = run.spec.model.shape
        in_fp32 = shape.d_model * (shape.vocab_size + 2 * shape.num_layers + 1)
        num_bytes -= 2 * (run.model.num_parameters - in_fp32)
    rotary_bytes = 4 * run.spec.context * run.spec.model.shape.head_dim
    assert profile.at_peak["parameters"] == num_bytes + rotary_bytes
    assert profile.at_peak.get("gradients", 0) <= num_bytes
    if run.spec.pass_name == "train":
        assert profile.at_peak["optimizer_state"] >= 2 * num_bytes
    if run.spec.pass_name == "forward":
        assert not profile.at_peak.get("gradients")
        assert not profile.at_peak.get("optimizer_state")


@pytest.mark.parametrize("fields", CELLS, ids=str)
def test_the_history_and_the_profiler_saw_the_same_blocks(tmp_path: Path, fields: dict[str, object]) -> None:
    watch = partial(MemoryRecorder, snapshot=tmp_path / "step.pickle", marks=tmp_path / "marks.json")
    given = {("pass" if name == "pass_name" else name): value for name, value in fields.items()}
    gc.collect()  # what earlier cases left in cycles would otherwise be freed during the recorded step
    run = measure_here(resolve_step({"warmup": 2, "steps": 2} | given), Observer(), watch)
    assert run.failure is None, run.failure
    marks = msgspec.json.decode((tmp_path / "marks.json").read_bytes(), type=Marks)
    snapshot: dict[str, Any] = pickle.loads((tmp_path / "step.pickle").read_bytes())
    trace = snapshot["device_traces"][marks.device_index]
    allocations = [event for event in trace if event["action"] == "alloc"]
    assert len(marks.block_bytes) == len(allocations) > 100
    assert all(block >= event["size"] for block, event in zip(marks.block_bytes, allocations, strict=True))
    sizes, at, changes = iter(marks.block_bytes), {}, []
    for event in trace:
        if event["action"] == "alloc":
            at[event["addr"]] = next(sizes)
            changes.append(at[event["addr"]])
        elif event["action"] == "free_requested":
            # Of blocks from before the step, AdamW's table of addresses goes when the allocator moved a gradient.
            changes.append(-at.pop(event["addr"], ceil(event["size"] / 512) * 512))
    end = sum(segment["allocated_size"] for segment in snapshot["segments"] if segment["device"] == marks.device_index)
    total = highest = end - sum(changes)
    for change in changes:
        total += change
        highest = max(highest, total)
    assert highest == marks.counted_peak_bytes


def test_an_allocation_has_its_line_operator_and_module(measured: Measured) -> None:
    _, profile = measured(model="small", context=512)
    scores = [a for a in profile.largest if a.op == "aten::_softmax" and a.phase == "forward"]
    assert scores
    assert scores[0].shape == (4, 12, 512, 512)
    assert scores[0].source is not None
    assert "plain.py:" in scores[0].source
    assert scores[0].module is not None
    assert scores[0].module.endswith(".attention")
    assert profile.blocks[0].input_shape == (4, 512, 768)
    assert profile.blocks[0].gradient_bytes == 4 * (4 * 768 * 768 + 3 * 768 * 3072 + 2 * 768)


class FromAThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        aside = threading.Thread(target=lambda: torch.ones(10_000, device=x.device).sum())
        aside.start()
        aside.join()
        return self.layer(x).sum()


def from_a_thread(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    return FromAThread(), lambda: torch.ones(8, 64, device=device)


def test_where_the_two_accounts_differ_nobody_is_named(tmp_path: Path) -> None:
    watch = partial(MemoryRecorder, snapshot=tmp_path / "step.pickle", marks=tmp_path / "marks.json")
    measure_here(resolve_step({"model": f"{__name__}:from_a_thread", "warmup": 1, "steps": 2}), Observer(), watch)
    marks = msgspec.json.decode((tmp_path / "marks.json").read_bytes(), type=Marks)
    assert (marks.owned, marks.phases, marks.block_bytes) == ((), (), ())
    assert any(note.startswith("marks: ") for note in marks.notes)
    assert marks.counted_peak_bytes


def test_a_step_of_cuda_graphs_is_recorded_and_the_record_says_what_is_not_seen(measured: Measured) -> None:
    _, profile = measured(model="tiny", compile="reduce-overhead", precision="bf16", attention="sdpa", warmup=5)
    assert sum(profile.at_peak.values()) == profile.peak_bytes
    assert any("CUDA graphs" in note for note in profile.notes)


def test_a_replayed_step_has_the_memory_of_the_launched_one(measured: Measured) -> None:
    fields = {"model": "tiny", "compile": "block", "precision": "bf16", "attention": "sdpa", "warmup": 2}
    _, launched = measured(**fields)
    _, replayed = measured(**fields, cuda_graph="step")
    assert replayed.at_peak["activations"] == launched.at_peak["activations"]
    assert any(note.startswith("CUDA graphs: ") for note in replayed.notes)
