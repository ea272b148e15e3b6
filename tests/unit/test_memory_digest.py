import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.allocator_model import KIB, MIB, Block, CachingAllocator

from steplab.errors import SteplabError
from steplab.reading.snapshots.building import build_history
from steplab.reading.snapshots.digest import digest
from steplab.reading.snapshots.made import SourceLines
from steplab.reading.snapshots.timeline import MOST_POINTS
from steplab.records.codec import encode
from steplab.records.memory_marks import Made, Marks, Owned, Saved, Stretch
from steplab.records.memory_profile import MEASURED_CATEGORIES, UNNAMED_CATEGORIES, LeftOut, MemoryProfile
from steplab.records.module_names import without_numbers

MODEL = {"filename": "/home/me/project/app/model.py", "line": 81, "name": "forward"}
LINEAR = {"filename": "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
TRAIN = {"filename": "/home/me/project/app/train.py", "line": 7, "name": "<module>"}
STACK = (LINEAR, MODEL, TRAIN)


def told(snapshot: Any, marks: Marks | None = None, **more: Any) -> MemoryProfile:
    return digest(build_history(snapshot), marks, **more)


class Step:
    """A training step of two layers, with a recorder's marks.

    Layer: parameters 10 MiB, activation 4 MiB + 100 B, a temporary of 1000 B. History and marks begin with the forward
    pass; earlier memory is in no event.
    """

    def __init__(self, *, recomputed: bool = False) -> None:
        self.allocator = CachingAllocator()
        self.weights = [self.allocator.malloc(10 * MIB) for _ in range(2)]
        self.state = [self.allocator.malloc(10 * MIB) for _ in range(4)]
        self.batch = self.allocator.malloc(8 * KIB)
        self.library = self.allocator.malloc(8 * MIB + KIB)
        self.begin = len(self.allocator.events)
        self.modules: list[Stretch] = []
        self.made: list[Made] = []
        self.owned = [
            *self.owner("parameters", self.weights, name="layers.{}.weight"),
            *self.owner("optimizer_state", self.state),
            *self.owner("inputs", [self.batch]),
        ]
        self.kept: list[Block] = []
        self.gradients: list[Block] = []
        start = self.position
        for layer in range(2):
            self.forward(layer, keep=not recomputed)
        logits = self.allocator.malloc(2000)
        loss = self.allocator.malloc(4)
        self.allocator.free(logits)  # after the last allocation of the phase, and in it
        self.forward_phase = Stretch(name="forward", start=start, end=self.position)
        self.kept_position = self.position
        self.saved_addresses = [block.address for block in self.kept]
        start = self.position
        seed = self.allocator.malloc(4)
        for layer in (1, 0):
            if recomputed:
                self.forward(layer, keep=True, in_backward=True)
            gradient = self.allocator.malloc(10 * MIB)
            self.gradients.append(gradient)
            self.allocator.free(self.kept.pop())
        self.allocator.free(seed)
        self.allocator.free(loss)
        self.backward_phase = Stretch(name="backward", start=start, end=self.position)
        self.owned += self.owner("gradients", self.gradients[::-1], name="layers.{}.weight")
        start = self.position
        update = self.allocator.malloc(3 * MIB)
        self.allocator.free(update)
        for gradient in self.gradients:
            self.allocator.free(gradient)
        self.optimizer_phase = Stretch(name="optimizer", start=start, end=self.position)

    @property
    def position(self) -> int:
        return sum(event["action"] == "alloc" for event in self.allocator.events[self.begin :])

    def owner(self, category: str, blocks: list[Block], name: str | None = None) -> list[Owned]:
        return [
            Owned(address=b.address, position=self.position, category=category, name=name.format(n) if name else None)
            for n, b in enumerate(blocks)
        ]

    def forward(self, layer: int, *, keep: bool, in_backward: bool = False) -> None:
        start = self.position
        temporary = self.allocator.malloc(1000, frames=STACK)
        activation = self.allocator.malloc(4 * MIB + 100, frames=STACK)
        made = Made(address=activation.address, position=self.position, op="aten::mm", shape=(2, 3), dtype="float32")
        self.made.append(made)
        self.allocator.free(temporary)
        self.modules.append(Stretch(name=f"layers.{layer}", start=start, end=self.position, in_backward=in_backward))
        if keep:
            self.kept.append(activation)
        else:
            self.allocator.free(activation)

    def snapshot(self) -> dict[str, Any]:
        return self.allocator.snapshot() | {"device_traces": [self.allocator.events[self.begin :]]}

    def marks(self, **changes: Any) -> Marks:
        given = {
            "phases": (self.forward_phase, self.backward_phase, self.optimizer_phase),
            "modules": tuple(self.modules),
            "owned": tuple(self.owned),
            "made": tuple(self.made),
        }
        return Marks(**given | changes)


ALWAYS = {"parameters": 20 * MIB, "optimizer_state": 40 * MIB, "inputs": 8 * KIB, "workspaces": 8 * MIB + KIB}


def test_the_peak_of_a_step_by_hand() -> None:
    step = Step()
    profile = told(step.snapshot(), step.marks(counted_peak_bytes=1))
    activation = 4 * MIB + 100
    expected = ALWAYS | {"gradients": 20 * MIB, "activations": activation + 4, "temporaries": 4, "autocast_copies": 0}
    # Blocks: the library's ends on 512 B, as does the batch; an activation is rounded up, and 4 B are 512 B.
    expected["rounding"] = 512 - 100 + 2 * (512 - 4)
    assert profile.at_peak == expected
    assert list(profile.at_peak) == list(MEASURED_CATEGORIES)
    assert profile.peak_bytes == sum(expected.values())
    assert profile.peak_bytes == max(step.allocator.allocated_bytes[step.begin :])
    assert (profile.peak_phase, profile.peak_module) == ("backward", None)
    assert profile.reserved_bytes is None  # it is the recorder's to say
    assert any(note.startswith("peak: the allocator itself counted") and "less" in note for note in profile.notes)


def test_phases_have_their_own_peaks_and_tile_the_time() -> None:
    step = Step()
    profile = told(step.snapshot(), step.marks())
    assert [phase.name for phase in profile.phases] == ["forward", "backward", "optimizer"]
    forward, backward, optimizer = profile.phases
    assert (forward.start_s, forward.end_s, backward.end_s) == (0, backward.start_s, optimizer.start_s)
    assert optimizer.end_s == profile.timeline.time_s[-1]
    assert backward.peak_bytes == profile.peak_bytes
    rounded = sum(ALWAYS.values())
    assert forward.peak_bytes == rounded + 2 * (4 * MIB + 512) + 2048 + 512  # two activations, logits, loss
    assert optimizer.peak_bytes == rounded + 23 * MIB


def test_what_is_recomputed_is_an_activation_too() -> None:
    step = Step(recomputed=True)
    profile = told(step.snapshot(), step.marks())
    # Recomputed just before the gradient that needs it, one layer at a time.
    assert profile.at_peak["activations"] == 4 * MIB + 100 + 4
    assert profile.at_peak["gradients"] == 20 * MIB
    groups = {(g.category, g.phase, g.module, g.at_peak) for g in profile.largest if g.requested_bytes == 4 * MIB + 100}
    assert groups == {
        ("activations", "backward", "layers.0", True),
        ("activations", "backward", "layers.1", False),
        ("temporaries", "forward", "layers.*", False),  # nobody kept them
    }


def test_what_is_released_before_its_phase_is_over_was_kept_for_nobody() -> None:
    step = Step()
    (logits,) = (group for group in told(step.snapshot(), step.marks()).largest if group.requested_bytes == 2000)
    assert (logits.category, logits.phase) == ("temporaries", "forward")


def test_of_two_owners_the_first_one_named_has_it() -> None:
    step = Step()
    twice = Owned(address=step.batch.address, position=3, category="gradients")
    assert told(step.snapshot(), step.marks(owned=(*step.owned, twice))).at_peak["inputs"] == 8 * KIB
    assert told(step.snapshot(), step.marks(owned=(twice, *step.owned))).at_peak["inputs"] == 0


def test_inference_keeps_no_activations() -> None:
    step = Step()
    profile = told(step.snapshot(), step.marks(phases=(step.forward_phase,)))
    assert profile.at_peak["activations"] == 0


def test_the_largest_allocations_are_told_with_their_origin() -> None:
    step = Step()
    profile = told(step.snapshot(), step.marks())
    first = [(g.category, g.requested_bytes, g.count, g.at_peak) for g in profile.largest[:3]]
    assert first == [
        ("optimizer_state", 10 * MIB, 4, True),
        ("parameters", 10 * MIB, 2, True),
        ("gradients", 10 * MIB, 2, True),
    ]
    kept, freed = (g for g in profile.largest if g.category == "activations" and g.requested_bytes > KIB)
    assert (kept.module, kept.at_peak, freed.module, freed.at_peak) == ("layers.0", True, "layers.1", False)
    assert (kept.phase, kept.op, kept.shape, kept.dtype) == ("forward", "aten::mm", (2, 3), "float32")
    assert kept.source == "project/app/model.py:81 in forward"
    assert (kept.block_bytes, kept.count) == (4 * MIB + 512, 1)
    (temporaries,) = (g for g in profile.largest if g.requested_bytes == 1000)
    assert (temporaries.category, temporaries.module, temporaries.count) == ("temporaries", "layers.*", 2)
    assert [g.at_peak for g in profile.largest] == sorted((g.at_peak for g in profile.largest), reverse=True)


def test_the_largest_one_is_told_however_much_many_small_ones_hold_together() -> None:
    allocator = CachingAllocator()
    for kind in range(40):
        for _ in range(4):
            allocator.malloc(2 * MIB + 512 * kind)
    allocator.malloc(5 * MIB)
    profile = told(allocator.snapshot() | {"device_traces": [allocator.events]}, None)
    assert max(group.requested_bytes for group in profile.largest if group.at_peak) == 5 * MIB


def test_sizes_seen_by_the_recorder_are_taken_over_those_worked_out() -> None:
    step = Step()
    made = [event for event in step.allocator.events[step.begin :] if event["action"] == "alloc"]
    blocks = tuple(event["size"] + 7 for event in made)
    profile = told(step.snapshot(), step.marks(block_bytes=blocks))
    alive_of_the_step = 5  # two gradients, an activation, the loss and its gradient
    assert profile.at_peak["rounding"] == 7 * alive_of_the_step


def test_marks_that_count_more_allocations_than_the_history_are_told_of() -> None:
    step = Step()
    late = Stretch(name="optimizer", start=0, end=99)
    profile = told(step.snapshot(), step.marks(phases=(late,)))
    assert any("99 allocations were counted during the step" in note for note in profile.notes)


# --- saved tensors and blocks -------------------------------------------------------------------------------


def saved(step: Step, address: int, module: str, shape: tuple[int, ...] = (2, 3), size: int = 4 * MIB + 100) -> Saved:
    return Saved(
        address=address,
        position=step.kept_position,
        module=module,
        op="MmBackward0",
        shape=shape,
        dtype="float32",
        storage_bytes=size,
    )


def test_saved_memory_counts_once_and_parameters_not_at_all() -> None:
    step = Step()
    first, second = step.saved_addresses
    marks = step.marks(
        saved=(
            saved(step, first, "layers.0"),
            saved(step, second, "layers.1"),
            saved(step, first, "layers.1.norm", (3, 2)),  # the same memory, kept again
            saved(step, step.weights[0].address, "layers.0", (9,), 10 * MIB),
            saved(step, step.batch.address, "", (4,), 8 * KIB),
        )
    )
    groups = {(g.module, g.shape, g.category): (g.count, g.stored_bytes) for g in told(step.snapshot(), marks).saved}
    assert groups == {
        ("layers.*", (2, 3), "activations"): (2, 2 * (4 * MIB + 100)),
        ("layers.*.norm", (3, 2), "activations"): (1, 0),
        ("layers.*", (9,), "parameters"): (1, 0),
        ("", (4,), "inputs"): (1, 8 * KIB),
    }


def test_a_block_is_told_by_what_it_keeps_and_emits() -> None:
    step = Step()
    kept = tuple(saved(step, address, f"layers.{n}.proj") for n, address in enumerate(step.saved_addresses))
    inputs = {"layers.0": ((2, 3), "bfloat16"), "layers.1": ((2, 3), "bfloat16")}
    profile = told(step.snapshot(), step.marks(saved=kept, block_inputs=inputs))
    (block,) = profile.blocks
    assert (block.module, block.saved_bytes, block.gradient_bytes) == ("layers.0", 4 * MIB + 100, 10 * MIB)
    assert (block.input_bytes, block.input_shape, block.input_dtype) == (2 * 3 * 2, (2, 3), "bfloat16")
    different = told(step.snapshot(), step.marks(saved=kept[:1], block_inputs=inputs))
    assert [b.saved_bytes for b in different.blocks] == [4 * MIB + 100, 0]
    assert (different.saved_left_out, different.blocks_left_out) == (None, None)


def test_what_the_lists_are_too_short_for_is_counted() -> None:
    step = Step()
    kept = tuple(saved(step, 64 * n, f"layers.{n // 10}.proj", (n, 1), 1000 + n) for n in range(130))  # at no address
    inputs = {f"layers.{n}": ((2, 3), "bfloat16") for n in range(13)}
    profile = told(step.snapshot(), step.marks(saved=kept, block_inputs=inputs))
    sizes = sorted(1000 + n for n in range(130))
    assert (len(profile.saved), profile.saved_left_out) == (100, LeftOut(count=30, num_bytes=sum(sizes[:30])))
    beyond = sum(1000 + n for n in range(100, 130))  # the blocks from the eleventh on
    assert (len(profile.blocks), profile.blocks_left_out) == (10, LeftOut(count=3, num_bytes=beyond))


# --- without marks ------------------------------------------------------------------------------------------


def test_an_imported_snapshot_is_told_by_what_was_there_before() -> None:
    step = Step()
    profile = told(step.snapshot())
    before = sum(ALWAYS.values())
    assert profile.at_peak["before"] == before
    assert profile.peak_bytes == sum(profile.at_peak.values()) == max(step.allocator.allocated_bytes[step.begin :])
    assert tuple(profile.at_peak) == UNNAMED_CATEGORIES
    assert profile.source == "snapshot"
    assert (profile.phases, profile.saved, profile.device, profile.notes) == ((), (), None, ())
    assert profile.reserved_bytes == max(step.allocator.reserved_bytes[step.begin - 1 :])
    assert profile.num_events == len(step.allocator.events) - step.begin


def test_the_line_of_the_peak_is_that_of_its_allocation() -> None:
    allocator = CachingAllocator()
    allocator.malloc(5 * MIB, frames=STACK)
    assert told(allocator.snapshot()).peak_source == "project/app/model.py:81 in forward"


def test_a_failed_allocation_is_told_of() -> None:
    allocator = CachingAllocator()
    allocator.malloc(5 * MIB)
    allocator.events.append({"action": "oom", "device_free": 1, "size": 80 * 1024 * MIB, "stream": 0})
    (note, *others) = told(allocator.snapshot()).notes
    assert "1 allocation failed, the largest with 80.0 GiB" in " ".join((note, *others))


def test_of_several_devices_the_one_with_the_highest_peak_is_told() -> None:
    small, large = CachingAllocator(), CachingAllocator()
    small.malloc(5 * MIB)
    large.free(large.malloc(50 * MIB))
    segments = [*small.snapshot()["segments"], *({**s, "device": 3} for s in large.snapshot()["segments"])]
    whole = {"segments": segments, "device_traces": [small.events, [], [], large.events]}
    profile = told(whole)
    assert (profile.device, profile.peak_bytes) == ("cuda:3", 50 * MIB)
    assert any("figures show cuda:3" in note and "cuda:0" in note for note in profile.notes)
    assert told(whole, Marks(device_index=0)).peak_bytes == 5 * MIB


def test_a_snapshot_without_history_is_told_as_it_stands() -> None:
    allocator = CachingAllocator()
    allocator.malloc(5 * MIB + 1, frames=STACK)
    profile = told(allocator.snapshot() | {"device_traces": [[]]})
    assert profile.at_peak == {"before": 5 * MIB + 1, "during": 0, "rounding": 511}
    assert profile.timeline.time_s == (0.0,)
    assert profile.largest[0].source == "project/app/model.py:81 in forward"
    assert any(note.startswith("history: missing in the snapshot") for note in profile.notes)


def test_events_without_times_are_counted() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(5 * MIB))
    for event in allocator.events:
        del event["time_us"]
    profile = told(allocator.snapshot())
    assert profile.timeline.by_event
    assert profile.timeline.time_s == (0, 1, 2, 3, 4)
    assert profile.peak_s == 2


def test_a_history_made_elsewhere_has_the_sizes_it_says() -> None:
    held = {"address": 64, "size": 1000, "requested_size": 1000, "state": "active_allocated", "frames": []}
    events = [
        {"action": "alloc", "addr": 4096, "size": 3_000_001, "stream": 0, "time_us": 1},
        {"action": "free_completed", "addr": 8192, "size": 77, "stream": 0, "time_us": 2},
        {"action": "free_completed", "addr": 4096, "size": 3_000_001, "stream": 0, "time_us": 3},
    ]
    profile = told({"segments": [{"address": 64, "total_size": 1000, "blocks": [held]}], "device_traces": [events]})
    assert profile.at_peak == {"before": 1077, "during": 3_000_001, "rounding": 0}
    assert profile.reserved_bytes is None


@pytest.mark.parametrize("empty", [{"segments": []}, {"segments": [], "device_traces": [[], []]}])
def test_a_snapshot_of_nothing_says_so(empty: dict[str, Any]) -> None:
    with pytest.raises(SteplabError, match="contains no allocations"):
        told(empty)


# --- timeline and size --------------------------------------------------------------------------------------


def random_run(seed: int, count: int) -> CachingAllocator:
    chance = random.Random(seed)
    allocator = CachingAllocator()
    live: list[Block] = []
    for _ in range(count):
        if len(live) < 40 and (not live or chance.random() < 0.52):
            frames = ({**MODEL, "line": chance.randrange(300)},)
            live.append(allocator.malloc(chance.randrange(1, 20 * MIB), frames=frames))
        else:
            allocator.free(live.pop(chance.randrange(len(live))))
    return allocator


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([10, 400, 1500]))
def test_a_thinned_timeline_keeps_peaks_and_invents_nothing(seed: int, count: int) -> None:
    allocator = random_run(seed, count)
    num_allocations = sum(event["action"] == "alloc" for event in allocator.events)
    borders = [0, num_allocations // 3, num_allocations]
    phases = tuple(Stretch(name=str(n), start=a, end=b) for n, (a, b) in enumerate(pairwise(borders)))
    profile = told(allocator.snapshot(), Marks(phases=phases))
    assert profile.timeline.time_s == tuple(sorted(profile.timeline.time_s))
    assert len(profile.timeline.time_s) <= MOST_POINTS
    at = dict(
        zip((0.0, *(n / 1e5 for n in range(len(allocator.events)))), [0, *allocator.allocated_bytes], strict=False)
    )
    sums = np.sum(profile.timeline.allocated_bytes, axis=0).tolist()
    truth = [at[round(second, 5)] for second in profile.timeline.time_s[2:]]
    assert sums[2:] == truth
    assert max(sums) == profile.peak_bytes == max(allocator.allocated_bytes)
    assert {phase.peak_bytes for phase in profile.phases} <= set(sums)


def test_a_profile_stays_small_whatever_the_history() -> None:
    allocator = random_run(1, 6000)
    allocs = [event for event in allocator.events if event["action"] == "alloc"]
    owned = tuple(
        Owned(address=event["addr"], position=n + 1, category=MEASURED_CATEGORIES[n % 7])
        for n, event in enumerate(allocs)
    )
    names = tuple(Stretch(name=f"blocks.{n % 50}.part_{n}", start=n, end=n + 1) for n in range(len(allocs)))
    kept = tuple(
        Saved(address=e["addr"], position=n + 1, module=names[n].name, op="X" * 30, shape=(n, 2), dtype="float32",
              storage_bytes=e["size"])
        for n, e in enumerate(allocs)
    )  # fmt: skip
    marks = Marks(phases=(Stretch(name="step", start=0, end=len(allocs)),), owned=owned, modules=names, saved=kept)
    profile = told(allocator.snapshot(), marks)
    assert len(encode(profile)) < 100_000
    assert len(profile.timeline.time_s) > 300
    assert sum(profile.at_peak.values()) == profile.peak_bytes == max(allocator.allocated_bytes)


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        (["/v/lib/python3.12/site-packages/torch/nn/functional.py", "/a/b/c/d.py"], "b/c/d.py:1 in f1"),
        (["/usr/lib/python3.12/contextlib.py", "/opt/conda/lib/python3.11/runpy.py", "train.py"], "train.py:2 in f2"),
        (["/v/lib/python3.12/site-packages/transformers/models/llama.py"], "transformers/models/llama.py:0 in f0"),
        (["/v/site-packages/triton/runtime/jit.py", "/v/dist-packages/torch/_dynamo/eval_frame.py"], None),
        (["/opt/pytorch/torch/_ops.py", "/opt/pytorch/torch/nn/modules/module.py", "/w/m.py"], "w/m.py:2 in f2"),
        (["/src/steplab/measurement/memory/recorder.py", "/src/steplab/cli/app.py"], None),
        (["/s/steplab/model/transformer.py", "/s/steplab/measurement/step.py"], "steplab/model/transformer.py:0 in f0"),
        (["/s/torch/optim/adam.py", "/src/steplab/measurement/step/step.py"], "measurement/step/step.py:1 in f1"),
        (["/s/torch/optim/adam.py", "/src/steplab/measurement/step.py"], "steplab/measurement/step.py:1 in f1"),
        (["/tmp/torchinductor_me/ab/cab.py", "/src/steplab/model/workload.py"], "torchinductor_me/ab/cab.py:0 in f0"),
        (["/tmp/torchinductor_me/ab/cab.py", "/w/model.py"], "w/model.py:1 in f1"),
        (["<eval_with_key>.7", "/v/site-packages/torch/fx/graph_module.py"], "<eval_with_key>.7:0 in f0"),
        (["??", "/build/c10/cuda/CUDACachingAllocator.cpp", "<frozen runpy>", "<string>", "<ipython-input-3>"],
         "<ipython-input-3>:4 in f4"),
        (["/home/me/torch/train.py"], "me/torch/train.py:0 in f0"),
        ([], None),
    ],
)  # fmt: skip
def test_the_line_told_is_the_innermost_that_its_reader_may_have_written(frames: list[str], line: str | None) -> None:
    stack = tuple((file, number, f"f{number}") for number, file in enumerate(frames))
    lines = SourceLines([stack])
    assert lines.of(0) == line
    assert lines.of(-1) is None


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("blocks.3.fc", "blocks.*.fc"), ("0.net.12", "*.net.*"), ("h.12", "h.*"), ("conv2d.x1", "conv2d.x1"), ("", "")],
)
def test_numbers_of_layers_are_left_out_of_a_name(name: str, pattern: str) -> None:
    assert without_numbers(name) == pattern
