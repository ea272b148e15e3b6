"""The history of a real step on an H200, held to what two others saw: torch's profiler and the allocator's counters.

`small`, context 512, bf16 autocast, eager plain attention, AdamW fused, checkpointing selective (torch 2.11.0+cu130):
torch's snapshot of the step, but for the paths in it, and the marks of its recorder.
"""

import dataclasses
import lzma
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.unit.test_snapshot_reading import assert_same

from steplab.errors import UserError
from steplab.measurement.memory import recorder as memory_recorder
from steplab.reading.snapshots.building import build_history
from steplab.reading.snapshots.digest import digest
from steplab.reading.snapshots.history import History
from steplab.reading.snapshots.marks import check_same_history
from steplab.reading.snapshots.reading import read_snapshot
from steplab.reading.snapshots.replay import replay, reserved_peak_bytes
from steplab.records.memory_marks import Marks

GOLDEN = Path(__file__).parents[1] / "golden" / "memory_small_512_bf16_selective"
D, FF, LAYERS, VOCABULARY, CONTEXT, BATCH = 768, 3072, 12, 10_000, 512, 4
MATRICES = LAYERS * (4 * D * D + 3 * D * FF) + VOCABULARY * D
"""Elements of the weights of linear layers."""
PARAMETERS = MATRICES + VOCABULARY * D + (2 * LAYERS + 1) * D
ROTARY = 2 * CONTEXT * 32


@pytest.fixture(scope="module")
def pickled() -> bytes:
    return lzma.decompress(GOLDEN.with_suffix(".pickle.xz").read_bytes())


@pytest.fixture(scope="module")
def history(pickled: bytes, tmp_path_factory: pytest.TempPathFactory) -> History:
    path = tmp_path_factory.mktemp("golden") / "step.pickle"
    path.write_bytes(pickled)
    return read_snapshot(path)


@pytest.fixture(scope="module")
def marks() -> Marks:
    return msgspec.json.decode(lzma.decompress(GOLDEN.with_suffix(".marks.json.xz").read_bytes()), type=Marks)


def test_it_is_read_as_pickle_reads_it(pickled: bytes, history: History) -> None:
    assert_same(history, build_history(pickle.loads(pickled)))


def test_the_marks_beside_it_are_taken_as_its_own_and_no_others(history: History, marks: Marks) -> None:
    """They were written before marks named their history."""
    path = Path("step.marks.json")
    check_same_history(marks, history, path)
    for shift in (64, 512, -(1 << 20)):
        owned = tuple(dataclasses.replace(owner, address=owner.address + shift) for owner in marks.owned)
        with pytest.raises(
            UserError, match=r"step\.marks\.json: it belongs to another snapshot: .* of the 1178 addresses"
        ):
            check_same_history(dataclasses.replace(marks, owned=owned), history, path)
    with pytest.raises(UserError, match="none of the model's parameters"):
        check_same_history(dataclasses.replace(marks, owned=()), history, path)


def test_the_recorder_and_the_reader_know_a_history_by_the_same_digest(
    pickled: bytes, history: History, marks: Marks
) -> None:
    snapshot = pickle.loads(pickled)
    named = dataclasses.replace(
        marks, history_sha256=memory_recorder._digest(snapshot["device_traces"][marks.device_index])
    )
    check_same_history(named, history, Path("step.marks.json"))


def test_every_block_has_the_size_that_the_profiler_saw(history: History, marks: Marks) -> None:
    lifetimes = replay(history.devices[0], history.settings)
    made = lifetimes.start >= 0
    assert made.sum() == len(marks.block_bytes) == 2049
    np.testing.assert_array_equal(lifetimes.block_bytes[made], marks.block_bytes)
    assert (lifetimes.block_bytes[made] > lifetimes.requested_bytes[made] + 512).any(), "some were not cut to size"
    assert lifetimes.notes == ()


def test_peak_and_reserved_memory_are_those_of_the_counters(history: History, marks: Marks) -> None:
    worked_out = digest(history, dataclasses.replace(marks, block_bytes=()))
    for profile in (worked_out, digest(history, marks), digest(history, None)):
        assert profile.peak_bytes == sum(profile.at_peak.values()) == marks.counted_peak_bytes
    assert reserved_peak_bytes(history.devices[0]) == marks.reserved_bytes


def test_what_is_known_by_arithmetic_is_found(history: History, marks: Marks) -> None:
    profile = digest(history, marks)
    assert profile.at_peak["parameters"] == 4 * (PARAMETERS + ROTARY)
    num_tensors = 9 * LAYERS + 3
    assert profile.at_peak["optimizer_state"] == 2 * 4 * PARAMETERS + 4 * num_tensors  # fused AdamW counts on the GPU
    assert profile.at_peak["autocast_copies"] == 2 * MATRICES
    assert profile.at_peak["inputs"] == 2 * 2 * 8 * BATCH * CONTEXT  # two batches of tokens and targets
    (block, *_) = profile.blocks
    assert (block.module, block.input_bytes) == ("blocks.0", 4 * BATCH * CONTEXT * D)
    logits = next(group for group in profile.largest if group.shape == (BATCH * CONTEXT, VOCABULARY))
    assert logits.requested_bytes % (BATCH * CONTEXT * VOCABULARY) == 0
    assert logits.source is not None
    assert logits.source.startswith("steplab/model/transformer.py:")


@pytest.mark.parametrize("lost", [1, 700, 3000, 6000])
def test_without_its_beginning_it_is_told_within_what_a_note_allows(history: History, lost: int) -> None:
    (device,) = history.devices
    whole = replay(device, history.settings)
    events = device.events
    later = dataclasses.replace(
        events, **{field.name: getattr(events, field.name)[lost:] for field in dataclasses.fields(events)}
    )
    lifetimes = replay(dataclasses.replace(device, events=later), history.settings)
    alive = (whole.start < lost) & (whole.end >= lost)
    missing = int(whole.block_bytes[alive].sum() - lifetimes.block_bytes[lifetimes.start < 0].sum())
    unsure = sum(int(note.split()[1]) for note in lifetimes.notes)
    assert 0 <= missing <= unsure << 20


def test_every_phase_peaks_where_the_allocator_said_it_did(history: History, marks: Marks) -> None:
    """Its high-water marks over the same phases of steps that nobody watched, each reset at the phase's beginning."""
    counted = {"forward": 2_978_129_408, "backward": 2_760_353_792, "optimizer": 2_163_977_728}
    assert {phase.name: phase.peak_bytes for phase in digest(history, marks).phases} == counted
