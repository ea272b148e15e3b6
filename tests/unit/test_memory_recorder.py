import dataclasses
import gc
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.first import first
from tests.memory_files import WatchedFiles
from tests.sure import sure
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.measurement.machine.device import Device
from steplab.measurement.memory import recorder as under_test
from steplab.measurement.memory.cpu_history import storages_in_sight
from steplab.measurement.memory.marks import StepMarks
from steplab.measurement.memory.recorder import MemoryRecorder
from steplab.measurement.observer import Observer
from steplab.measurement.step.step import ModelStep, make_step
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.records.memory import PeakMemory
from steplab.records.memory_marks import Marks, Saved
from steplab.records.run import Run
from steplab.records.timing import curve
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

B, T, C, F, H, V, LAYERS = 2, 5, 16, 24, 2, 31, 2
TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": LAYERS, "model.d_model": C, "model.d_ff": F, "model.num_heads": H,
    "model.vocab_size": V, "batch": B, "context": T, "warmup": 1, "steps": 2, "device": "cpu",
}  # fmt: skip
NUM_PARAMETERS = 2 * V * C + LAYERS * (4 * C * C + 3 * C * F + 2 * C) + C
NUM_MATMUL_WEIGHTS = V * C + LAYERS * (4 * C * C + 3 * C * F)
ROTARY_BYTES = 4 * 2 * T * (C // H // 2)
BATCH_BYTES = 2 * 2 * 8 * B * T
HUGE_BYTES = 2**62 + 3

pytestmark = pytest.mark.usefixtures("torch_settings_put_back")


def spec_of(pass_name: str = "train", **fields: object) -> StepSpec:
    return resolve_step(TINY | {"pass": pass_name} | fields)


def watch(folder: Path, spec: StepSpec, observer: Observer | None = None) -> Run:
    watch = partial(MemoryRecorder, snapshot=folder / "step.pickle", marks=folder / "marks.json")
    return measure_here(spec, observer or Observer(), watch)


Watched = Callable[..., WatchedFiles]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    seen: dict[str, WatchedFiles] = {}

    def watched(pass_name: str = "train", **fields: object) -> WatchedFiles:
        key = f"{pass_name} {sorted(fields.items())}"
        if key not in seen:
            folder = tmp_path_factory.mktemp("watched")
            run = watch(folder, spec_of(pass_name, **fields))
            assert run.failure is None
            assert not [note for note in run.notes if note.startswith("memory: ")]
            seen[key] = WatchedFiles(folder / "step.pickle", folder / "marks.json")
        return seen[key]

    return watched


def of_this_file(
    folder: Path, factory: Callable[[], object], observer: Observer | None = None, pass_name: str = "train"
) -> Run:
    name = f"{factory.__module__}:{factory.__name__}"
    spec = resolve_step({"model": name, "device": "cpu", "warmup": 1, "steps": 2, "pass": pass_name})
    return watch(folder, spec, observer)


def bytes_of(blocks: object) -> int:
    return sum(block.size for block in blocks)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _no_garbage(earlier_tests_left_no_garbage: None) -> Iterator[None]:
    """Garbage of earlier tests would seem alive before the step, and may go at any moment."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny operators wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the step that is watched is the step that runs alone ------------------------------------------------


def allocated_unwatched(spec: StepSpec) -> list[int]:
    step = make_step(build_workload(spec, torch.device("cpu")), spec, torch.device("cpu"))

    def run() -> None:
        for phase in step.phases:
            phase.run()

    for _ in range(3):
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()  # what it leaves behind is released in the next
        begun_ns = time.time_ns()
        run()
    results: Any = profiler.profiler
    waiting, found = list(results.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" and event.start_time_ns > begun_ns:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return released_together([size for _, size in sorted(found)])


def released_together(sizes: list[int]) -> list[int]:
    """Sums releases between two allocations, because autocast drops its copies in any order."""
    sums: list[int] = []
    for size in sizes:
        if size < 0 and sums and sums[-1] < 0:
            sums[-1] += size
        else:
            sums.append(size)
    return sums


@pytest.mark.parametrize(
    "fields",
    first(
        2,
        [
            {"checkpointing": "selective", "precision": "bf16"},
            {"checkpointing": "full", "optimizer": "adamw_foreach"},
            {"precision": "bf16", "attention": "sdpa"},
            {"pass_name": "forward", "precision": "bf16"},
            {"pass_name": "forward_backward", "precision": "fp16"},
            {"accumulation": 2, "checkpointing": "full"},
            {},
        ],
    ),
    ids=str,
)
def test_watching_changes_no_allocation(watched: Watched, fields: dict[str, Any]) -> None:
    expected = allocated_unwatched(spec_of(**fields))
    assert released_together(watched(**fields).sizes()) == expected
    assert len(expected) > 50


# --- whose memory it is -----------------------------------------------------------------------------------


def test_parameters_gradients_and_optimizer_state_are_there_to_the_byte(watched: Watched) -> None:
    files = watched()
    num_tensors = 3 + LAYERS * 9  # embedding, norm, head; two norms, four matrices of attention, three of SwiGLU
    assert files.owned() == {
        "parameters": 4 * NUM_PARAMETERS + ROTARY_BYTES,
        "gradients": 4 * NUM_PARAMETERS,
        "optimizer_state": 2 * 4 * NUM_PARAMETERS + 4 * num_tensors,  # AdamW counts the steps of each tensor
        "inputs": BATCH_BYTES,
    }
    backward_ends, optimizer_ends = files.end_of("backward"), files.end_of("optimizer")
    assert bytes_of(files.alive(backward_ends, "gradients")) == 4 * NUM_PARAMETERS
    assert files.alive(optimizer_ends, "gradients") == []
    assert all(block.number == 0 for block in files.blocks if block.category in ("parameters", "optimizer_state"))


def test_a_parameter_and_its_gradient_go_by_its_name(watched: Watched) -> None:
    files = watched()
    named: dict[str, dict[str | None, int]] = {"parameters": {}, "gradients": {}}
    for owner in files.marks.owned:
        if owner.category in named:
            (block,) = [b for b in files.blocks if b.address == owner.address and b.alive(owner.position)][-1:]
            named[owner.category][owner.name] = block.size
    sizes: dict[str | None, int] = {name: 4 * numel for name, numel in parameters().items()}
    assert named == {"parameters": sizes | {"rotary_2TD": ROTARY_BYTES}, "gradients": sizes}


def parameters() -> dict[str, int]:
    module = sure(build_workload(spec_of(), torch.device("cpu")).module)
    return {name: parameter.numel() for name, parameter in module.named_parameters()}


def matrices() -> list[str]:
    return [name for name in parameters() if "norm" not in name and "embedding" not in name]


def test_without_an_optimizer_gradients_go_with_the_backward_pass(watched: Watched) -> None:
    files = watched("forward_backward")
    owned = files.owned()
    assert owned["gradients"] == 4 * NUM_PARAMETERS
    assert "optimizer_state" not in owned
    assert files.alive(files.num_allocations, "gradients") == []


def test_a_forward_pass_alone_leaves_nothing_behind(watched: Watched) -> None:
    files = watched("forward")
    assert files.owned() == {"parameters": 4 * NUM_PARAMETERS + ROTARY_BYTES, "inputs": BATCH_BYTES}
    assert files.marks.saved == ()
    assert [phase.name for phase in files.marks.phases] == ["forward"]
    assert all(block.number == 0 for block in files.alive(files.num_allocations))


@pytest.mark.parametrize("pass_name", ["forward", "forward_backward"])
@pytest.mark.parametrize("precision", first(1, ["bf16", "fp16"]))
def test_autocast_copies_every_weight_of_a_matmul_once(watched: Watched, pass_name: str, precision: str) -> None:
    files = watched(pass_name, precision=precision)
    assert files.owned()["autocast_copies"] == 2 * NUM_MATMUL_WEIGHTS
    assert files.owned()["parameters"] == 4 * NUM_PARAMETERS + ROTARY_BYTES
    copies = [owner for owner in files.marks.owned if owner.category == "autocast_copies"]
    assert len(copies) == 1 + 7 * LAYERS
    assert {owner.name for owner in copies} == set(matrices())


def test_weights_in_bf16_are_half_as_large_and_never_copied(watched: Watched) -> None:
    owned = watched(precision="bf16_pure").owned()
    assert owned["parameters"] == owned["gradients"] + ROTARY_BYTES == 2 * NUM_PARAMETERS + ROTARY_BYTES
    assert "autocast_copies" not in owned


def test_masters_of_weights_in_bf16_are_state_of_the_optimizer(watched: Watched) -> None:
    owned = watched(precision="bf16_master", optimizer="adamw_triton").owned()
    others = NUM_PARAMETERS - NUM_MATMUL_WEIGHTS
    assert owned["parameters"] == 4 * others + 2 * NUM_MATMUL_WEIGHTS + ROTARY_BYTES
    assert owned["gradients"] == 4 * others + 2 * NUM_MATMUL_WEIGHTS
    masters, moments = 4 * NUM_MATMUL_WEIGHTS, 8 * NUM_PARAMETERS
    assert masters + moments <= owned["optimizer_state"] <= masters + moments + 64 * len(matrices()) * 4
    assert "autocast_copies" not in owned


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


def tied() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Tied(), lambda: torch.ones(3, 6)


def test_a_tied_weight_counts_once(tmp_path: Path) -> None:
    of_this_file(tmp_path, tied)
    owned = WatchedFiles(tmp_path / "step.pickle", tmp_path / "marks.json").owned()
    assert owned["parameters"] == owned["gradients"] == 4 * 6 * 6


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 1, bias=False)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.repeat(11, 1)
        return self.layer(x).sum()


def caching() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Caching(), lambda: torch.ones(5, 7)


def test_what_the_step_before_left_behind_is_there_and_is_seen_to_go(tmp_path: Path) -> None:
    of_this_file(tmp_path, caching)
    files = WatchedFiles(tmp_path / "step.pickle", tmp_path / "marks.json")
    kept = [block for block in files.blocks if block.size == 4 * 11 * 5 * 7]
    assert [(block.number, math.isinf(block.released_at)) for block in kept] == [(0, False), (kept[1].number, True)]


# --- what is kept for backward ----------------------------------------------------------------------------


def kept_by_torch(spec: StepSpec) -> Counter[tuple[str, tuple[int, ...], str]]:
    step = make_step(build_workload(spec, torch.device("cpu")), spec, torch.device("cpu"))
    assert isinstance(step, ModelStep)
    packed: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    under_way: list[str] = [""]
    for name, module in step.module.named_modules():
        if name:
            module.register_forward_pre_hook(lambda module, inputs, name=name: under_way.append(name))
            module.register_forward_hook(lambda module, inputs, output: under_way.pop() and None)

    def pack(tensor: Tensor) -> Tensor:
        packed[under_way[-1], tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.forward()
    return packed


@pytest.mark.parametrize("fields", [{}, {"precision": "bf16"}, {"attention": "sdpa"}], ids=str)
def test_the_saved_tensors_are_those_that_autograd_packs(watched: Watched, fields: dict[str, object]) -> None:
    saved = watched(**fields).marks.saved
    found = Counter((tensor.module, tensor.shape, tensor.dtype) for tensor in saved)
    numbers = [key for key in found if key[1:] == ((), "float64")]  # Python's, for which torch calls no hook
    assert Counter({key: found[key] for key in found if key not in numbers}) == kept_by_torch(spec_of(**fields))  # type: ignore[arg-type]
    assert len(found) > 20


def test_the_saved_tensors_and_the_loss_are_all_that_is_left_of_the_forward_pass(watched: Watched) -> None:
    files = watched()
    position = files.end_of("forward")
    alive = {block.address: block for block in files.alive(position)}
    for tensor in files.marks.saved:
        assert tensor.position == position
        assert alive[tensor.address].size == tensor.storage_bytes
    left = {block.address for block in files.alive(position) if block.number > 0 and not block.category}
    loss_bytes = 4
    saved = {tensor.address for tensor in files.marks.saved}
    assert bytes_of(alive[address] for address in left - saved) == loss_bytes


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 10, bias=False), nn.Linear(10, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.softmax(self.inner(x), -1)).sum()


def chain() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Chain(), lambda: torch.ones(3, 6)


def test_a_linear_keeps_its_input_and_a_softmax_its_result(tmp_path: Path) -> None:
    of_this_file(tmp_path, chain)
    files = WatchedFiles(tmp_path / "step.pickle", tmp_path / "marks.json")
    saved = {(s.module, s.op, s.shape): s for s in files.marks.saved}
    assert set(saved) == {
        ("inner", "MmBackward0", (3, 6)),  # the input needs no gradient, so its weight is not kept
        ("", "SoftmaxBackward0", (3, 10)),
        ("outer", "MmBackward0", (3, 10)),
        ("outer", "MmBackward0", (10, 2)),
    }
    result = saved["", "SoftmaxBackward0", (3, 10)]
    assert result.address == saved["outer", "MmBackward0", (3, 10)].address
    assert result.storage_bytes == 4 * 3 * 10
    position = files.end_of("forward")
    activations = [b for b in files.alive(position) if b.number > 0]
    assert bytes_of(activations) == 4 * 3 * 10 + 4  # and the loss


RESIDUAL = 4 * B * T * C


def checkpointed_inputs(saved: tuple[Saved, ...]) -> list[Saved]:
    return [tensor for tensor in saved if not tensor.op]


def test_a_checkpointed_block_keeps_its_input_alone(watched: Watched) -> None:
    files = watched(checkpointing="full")
    inputs = checkpointed_inputs(files.marks.saved)
    assert [(tensor.module, tensor.shape, tensor.storage_bytes) for tensor in inputs] == [
        ("blocks.0", (B, T, C), RESIDUAL),
        ("blocks.1", (B, T, C), RESIDUAL),
    ]
    inside = [tensor for tensor in files.marks.saved if tensor.op and tensor.module.startswith("blocks.")]
    assert all(tensor.storage_bytes <= 8 for tensor in inside), "a scalar at most"


def test_selective_checkpointing_keeps_what_its_matmuls_made(watched: Watched) -> None:
    inputs = checkpointed_inputs(watched(checkpointing="selective").marks.saved)
    matmuls = {"query": C, "key": C, "value": C, "output": C, "gate": F, "up": F, "down": C}
    of_linears = [t for t in inputs if t.module.rpartition(".")[2] in matmuls]
    assert Counter(t.module.rpartition(".")[2] for t in of_linears) == dict.fromkeys(matmuls, LAYERS)
    assert all(t.storage_bytes == 4 * B * T * matmuls[t.module.rpartition(".")[2]] for t in of_linears)


@pytest.mark.parametrize("fields", first(1, [{"checkpointing": "selective"}, {"checkpointing": "full"}, {}]), ids=str)
def test_what_is_saved_is_that_of_one_micro_step(watched: Watched, fields: dict[str, object]) -> None:
    def saved(**more: object) -> Counter[tuple[object, ...]]:
        found = watched(**fields, **more).marks.saved
        return Counter((tensor.module, tensor.op, tensor.shape, tensor.storage_bytes) for tensor in found)

    assert saved(accumulation=3) == saved()
    files = watched(accumulation=3, **fields)
    assert [phase.name for phase in files.marks.phases] == ["forward", "backward"] * 3 + ["optimizer"]
    assert bytes_of(files.alive(files.marks.phases[2].start, "gradients")) == 4 * NUM_PARAMETERS


@pytest.mark.parametrize("checkpointing", first(1, ["selective", "full"]))
def test_every_checkpointed_block_keeps_the_same(watched: Watched, checkpointing: str) -> None:
    wide = {"model.num_layers": 3, "model.d_model": 64, "model.d_ff": 128, "model.num_heads": 4, "context": 32}
    saved = watched(checkpointing=checkpointing, **wide, batch=4).marks.saved
    kept: dict[str, Counter[tuple[object, ...]]] = {}
    for tensor in saved:
        if tensor.module.startswith("blocks."):
            block, _, inside = tensor.module.removeprefix("blocks.").partition(".")
            kept.setdefault(block, Counter())[inside, tensor.op, tensor.shape, tensor.storage_bytes] += 1
    assert set(kept) == {str(layer) for layer in range(3)}
    assert all(kept[block] == kept["0"] for block in kept)


def test_modules_run_again_in_the_backward_pass_are_marked_as_such(watched: Watched) -> None:
    again, once = watched(checkpointing="full").marks, watched().marks
    assert not any(call.in_backward for call in once.modules)
    backward = next(phase for phase in again.phases if phase.name == "backward")
    recomputed = [call for call in again.modules if call.in_backward]
    assert [call.name for call in recomputed if call.name.count(".") == 1] == ["blocks.1", "blocks.0"]
    assert all(backward.start <= call.start <= call.end <= backward.end for call in recomputed)
    assert [c.name for c in again.modules if not c.in_backward] == [c.name for c in once.modules]


# --- where it was allocated -------------------------------------------------------------------------------


def test_the_phases_tile_the_step(watched: Watched) -> None:
    files = watched()
    phases = files.marks.phases
    assert [phase.name for phase in phases] == ["forward", "backward", "optimizer"]
    borders = [position for phase in phases for position in (phase.start, phase.end)]
    assert borders == [0, *[phases[0].end] * 2, *[phases[1].end] * 2, files.num_allocations]


def test_a_tensor_has_the_operator_that_made_it_its_shape_and_its_module(watched: Watched) -> None:
    files = watched()
    marks = files.marks
    scores = [made for made in marks.made if made.op == "aten::_softmax"]
    assert [(made.shape, made.dtype) for made in scores] == [((B, H, T, T), "float32")] * LAYERS
    blocks = {block.number: block for block in files.blocks if block.number}
    for made in scores:
        assert (blocks[made.position].address, blocks[made.position].size) == (made.address, 4 * B * H * T * T)
        around = [call.name for call in marks.modules if call.start < made.position <= call.end]
        assert around[-1] in ("blocks.0.attention", "blocks.1.attention")
    sizes = {"float32": 4, "float64": 8, "int64": 8, "bool": 1}
    for made in marks.made:
        assert math.prod(made.shape) * sizes[made.dtype] == blocks[made.position].size, made
    assert len(marks.made) > 0.95 * files.num_allocations


def test_the_innermost_operator_around_an_allocation_is_the_one_that_made_it(watched: Watched) -> None:
    marks = watched(precision="bf16").marks
    for made in marks.made:
        around = [operator.name for operator in marks.operators if operator.start < made.position <= operator.end]
        assert around[-1] == made.op


def test_the_input_of_each_block_is_a_tensor_of_the_residual_stream(watched: Watched) -> None:
    assert watched(precision="bf16").marks.block_inputs == {
        f"blocks.{layer}": ((B, T, C), "float32") for layer in range(LAYERS)
    }


def test_the_line_that_asked_is_found_and_autograd_has_none(watched: Watched) -> None:
    files = watched()

    def line(number: int) -> str:
        frames = next(block.frames for block in files.blocks if block.number == number)
        own = [frame for frame in frames if "/torch/" not in frame["filename"]]
        return f"{Path(own[0]['filename']).name} {own[0]['name']}" if own else ""

    forward, backward, optimizer = files.marks.phases
    lines = {made.op: line(made.position) for made in files.marks.made if made.position <= forward.end}
    assert lines["aten::_softmax"] == "plain.py plain_attention"
    assert lines["aten::_log_softmax"] == "transformer.py forward"
    assert all(line(number) for number in range(1, forward.end + 1))
    assert {line(number) for number in range(backward.start + 2, backward.end + 1)} == {""}
    assert {line(number) for number in range(optimizer.start + 1, optimizer.end + 1)} == {"step.py optimizer_step"}


# --- two witnesses, on a device that keeps a history ------------------------------------------------------


class CountingDevice(Device):
    def peak(self, phase: str) -> Any:
        return PeakMemory(phase=phase, peak_allocated_bytes=1000, peak_reserved_bytes=2000)


def witnessed(folder: Path, monkeypatch: pytest.MonkeyPatch, history: Callable[[list[int]], list[int]]) -> Marks:
    snapshot: dict[str, Any] = {"segments": [], "device_traces": [[]]}

    class Told(StepMarks):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            addresses = history([event.address for event in self.allocations])
            snapshot["device_traces"][0] += [{"action": "alloc", "addr": address, "size": 8} for address in addresses]
            snapshot["device_traces"][0].append({"action": "free_requested", "addr": addresses[0], "size": 8})

    monkeypatch.setattr(under_test, "StepMarks", Told)
    monkeypatch.setattr(compat, "memory_history", nullcontext)
    monkeypatch.setattr(compat, "memory_snapshot", lambda: snapshot)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 50_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2500)
    files = {"snapshot": folder / "step.pickle", "marks": folder / "marks.json"}
    recorder = MemoryRecorder(spec_of(), CountingDevice(torch.device("cpu")), **files)
    monkeypatch.setattr(recorder, "_on_cuda", True)
    step = make_step(build_workload(spec_of(), torch.device("cpu")), spec_of(), torch.device("cpu"))
    recorder.record(step, lambda iteration: None)
    kept = pickle.loads(files["snapshot"].read_bytes())
    assert kept == {"comment": "written by steplab"} | snapshot, "the history is kept as it is"
    return msgspec.json.decode(files["marks"].read_bytes(), type=Marks)


def test_the_allocators_own_figures_are_beside_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = witnessed(tmp_path, monkeypatch, lambda addresses: addresses)
    assert marks.source == "cuda allocator"
    assert (marks.counted_peak_bytes, marks.reserved_bytes, marks.outside_bytes) == (1000, 2000, 40_000 - 2500)
    assert marks.notes == ()
    assert len(marks.block_bytes) == marks.phases[-1].end
    assert {owner.category for owner in marks.owned} > {"parameters", "gradients"}


@pytest.mark.parametrize("history", [lambda seen: seen[1:], lambda seen: [*seen, 1], lambda seen: [1, *seen[1:]]])
def test_where_the_two_differ_nobody_says_whose_anything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: Callable[[list[int]], list[int]]
) -> None:
    marks = witnessed(tmp_path, monkeypatch, history)
    expected = Marks(counted_peak_bytes=1000, reserved_bytes=2000, outside_bytes=37_500, notes=marks.notes)
    assert dataclasses.replace(marks, history_sha256=None) == expected
    assert marks.history_sha256, "even these say of which history they are"
    (note,) = marks.notes
    assert note.startswith("marks: ")


# --- steps that cannot be taken apart ---------------------------------------------------------------------


def test_a_compiled_step_has_phases_and_owners_but_no_modules_and_no_lines(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks and modes would be compiled in, or recompile it. The stand-in compiler runs eagerly."""
    monkeypatch.setattr(torch, "compile", lambda module, mode: module)
    files = watched(compile="default")
    marks = files.marks
    assert (marks.modules, marks.block_inputs) == ((), {})
    assert {tensor.module for tensor in marks.saved} == {""}
    assert files.owned()["gradients"] == 4 * NUM_PARAMETERS
    assert not any(event["frames"] for event in files.trace)
    assert [note.partition(":")[0] for note in marks.notes] == ["modules", "cpu allocator", "lines"]


def own_step() -> Callable[[], object]:
    return lambda: torch.ones(100).sin()


def test_a_whole_step_of_ones_own_has_a_history_and_a_note(tmp_path: Path) -> None:
    of_this_file(tmp_path, own_step)
    files = WatchedFiles(tmp_path / "step.pickle", tmp_path / "marks.json")
    assert files.sizes() == [400, 400, -400, -400]
    assert files.marks.owned == ()
    assert [(phase.name, phase.start, phase.end) for phase in files.marks.phases] == [("step", 0, 2)]
    assert files.marks.notes[0].startswith("categories: ")


def fast_path() -> tuple[nn.Module, Callable[[], Tensor]]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return layer, lambda: torch.ones(2, 3, 8)


def test_a_fused_path_that_minds_being_looked_at_is_left_alone(tmp_path: Path) -> None:
    run = of_this_file(tmp_path, fast_path, pass_name="forward")
    assert run.failure is None
    marks = WatchedFiles(tmp_path / "step.pickle", tmp_path / "marks.json").marks
    assert "aten::_transform_bias_rescale_qkv" in {made.op for made in marks.made}
    assert marks.modules == ()
    assert {note.partition(":")[0] for note in marks.notes} == {"modules", "cpu allocator", "lines"}


# --- the timing is that of steps nobody watched -----------------------------------------------------------


class Sensing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        self.noted: list[tuple[bool, int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules())
        modes = torch._C._len_torch_function_stack()
        self.noted.append((torch.autograd.profiler._is_profiler_enabled, hooks > 0, modes > 0))
        return self.encoder(x).sum()


made: list[Sensing] = []


def sensing() -> tuple[nn.Module, Callable[[], Tensor]]:
    made.append(Sensing())
    return made[-1], lambda: torch.ones(4, 3)


BEFORE_WATCHING = 1 + 2 + 1


@pytest.mark.parametrize("wrap", [torch.func.vmap, torch.func.functionalize])
def test_what_was_wrapped_and_left_is_passed_over(wrap: Callable[..., Any]) -> None:
    wrapped: list[Tensor] = []

    def keep(row: Tensor) -> Tensor:
        wrapped.append(row)
        return row

    rows = torch.ones(3, 4)
    wrap(keep)(rows)
    assert {type(each) for each in wrapped} == {Tensor}
    assert storages_in_sight()[rows.untyped_storage().data_ptr()] == 3 * 4 * 4


def test_nothing_is_attached_to_a_step_that_is_timed_nor_after(tmp_path: Path) -> None:
    stages: list[tuple[str, int]] = []
    told: list[Run] = []
    observer = Observer(on_stage=lambda stage, steps: stages.append((stage, steps)), on_measured=told.append)
    run = of_this_file(tmp_path, sensing, observer)
    module = made[-1]
    profiled_only, watched = (True, False, False), (True, True, True)
    assert module.noted == [(False, False, False)] * BEFORE_WATCHING + [profiled_only, watched]
    assert stages == [("build", 0), ("warmup", 1), ("measure", 2), ("memory", 1), ("snapshot", 0)]
    assert told == [run]
    assert len(curve(sure(run.timing))) == 1 + 2
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()) == 0


# --- failures ---------------------------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self, fail: Callable[[], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.fail = fail

    def forward(self, x: Tensor) -> Tensor:
        if len(self.layer._forward_hooks):
            self.fail()
        return self.layer(x).sum()


def exploding() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(lambda: 1 // 0), lambda: torch.ones(4, 3)


def allocating() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(lambda: torch.empty(HUGE_BYTES, dtype=torch.uint8)), lambda: torch.ones(4, 3)


@pytest.mark.parametrize(("factory", "words"), [(exploding, "ZeroDivisionError"), (allocating, "requested")])
def test_a_failure_while_watched_is_a_note_beside_the_timing(
    tmp_path: Path, factory: Callable[[], object], words: str
) -> None:
    run = of_this_file(tmp_path, factory)
    assert run.failure is None
    assert run.timing is not None
    (note,) = [note for note in run.notes if note.startswith("memory: ")]
    assert words in note
    assert list(tmp_path.iterdir()) == []
    assert not torch.autograd.profiler._is_profiler_enabled
    assert torch._C._len_torch_function_stack() == 0


def test_a_snapshot_that_cannot_be_written_is_a_note_beside_the_timing(tmp_path: Path) -> None:
    run = of_this_file(tmp_path / "missing", chain)
    assert run.timing is not None
    assert any(note.startswith("memory: ") for note in run.notes)


def test_a_device_whose_allocator_tells_nobody_is_refused(tmp_path: Path) -> None:
    device: Any = SimpleNamespace(torch_device=torch.device("mps"))
    with pytest.raises(Unsupported, match=r"mps.*--device cpu"):
        MemoryRecorder(spec_of(), device, snapshot=tmp_path, marks=tmp_path)
