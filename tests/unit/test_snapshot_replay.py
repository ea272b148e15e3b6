import dataclasses
import lzma
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.allocator_model import KIB, MIB, CachingAllocator
from tests.unit.test_snapshot_reading import assert_same

from steplab.errors import UserError
from steplab.measurement.memory import recorder as memory_recorder
from steplab.reading.snapshots.building import build_history
from steplab.reading.snapshots.digest import check_same_history, digest
from steplab.reading.snapshots.history import AllocatorSettings, History
from steplab.reading.snapshots.reading import read_snapshot
from steplab.reading.snapshots.replay import Lifetimes, replay, reserved_peak_bytes, rounded_sizes
from steplab.records.memory_marks import Marks

SIZES = (1, 512, 513, 700 * KIB, MIB, MIB + 1, 2 * MIB + 3, 5 * MIB, 9 * MIB + 512, 10 * MIB, 19 * MIB, 33 * MIB + 7)
MOVES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10_000)), max_size=80)


def run(moves: list[tuple[int, int]], **options: Any) -> CachingAllocator:
    allocator = CachingAllocator(**options)
    live = deque[Any]()
    for kind, number in moves:
        if kind < 5 or not live:
            size = SIZES[number % len(SIZES)] if kind % 2 else 1 + number * 4001 % (12 * MIB)
            live.append(allocator.malloc(size, stream=int(kind == 4)))
        elif kind < 9:
            live.rotate(number)
            allocator.free(live.popleft(), other_stream=kind == 8)
        elif number % 3 == 0:
            allocator.empty_cache()
    return allocator


def history_of(snapshot: Any) -> History:
    return build_history(snapshot)


def replayed(snapshot: Any) -> Lifetimes:
    history = history_of(snapshot)
    if not history.devices:
        pytest.skip("nothing ever happened")
    return replay(history.devices[0], history.settings)


def after(allocator: CachingAllocator, lost: int) -> Lifetimes:
    return replayed(allocator.snapshot() | {"device_traces": [allocator.events[lost:]]})


def alive_bytes(lifetimes: Lifetimes) -> list[int]:
    change = np.zeros(lifetimes.num_events + 2, dtype=np.int64)
    np.add.at(change, lifetimes.start + 1, lifetimes.block_bytes)
    np.add.at(change, lifetimes.end + 1, -lifetimes.block_bytes)
    sums: list[int] = np.cumsum(change)[:-1].tolist()
    return sums


@given(MOVES, st.sampled_from([None, 5 * MIB, 19 * MIB]), st.sampled_from([0, 2 * MIB]))
def test_what_is_alive_is_what_the_allocator_counted(
    moves: list[tuple[int, int]], max_split_bytes: int | None, gap: int
) -> None:
    allocator = run([(0, 0), *moves], max_split_bytes=max_split_bytes, gap_between_segments=gap)
    lifetimes = replayed(allocator.snapshot())
    assert alive_bytes(lifetimes) == [0, *allocator.allocated_bytes]
    assert lifetimes.notes == ()


@given(MOVES, st.integers(1, 60), st.sampled_from([None, 5 * MIB]))
def test_a_history_that_lost_its_start_is_told_from_its_end(
    moves: list[tuple[int, int]], lost: int, max_split_bytes: int | None
) -> None:
    allocator = run([(0, 0), *moves], max_split_bytes=max_split_bytes)
    allocated = [0, *allocator.allocated_bytes][lost:]
    reserved = [0, *allocator.reserved_bytes][lost:]
    snapshot = allocator.snapshot()
    snapshot["device_traces"] = [allocator.events[lost:]]
    history = history_of(snapshot)
    if not allocated or not history.devices:
        return
    lifetimes = replay(history.devices[0], history.settings)
    assert reserved_peak_bytes(history.devices[0]) == max(reserved)
    alive = alive_bytes(lifetimes)
    if not lifetimes.notes:
        assert alive == allocated
    else:  # assumptions are reported, and at most the allocator's uncut rest
        (note,) = lifetimes.notes
        assert "before the history" in note
        count = int(note.split()[1])
        assert all(0 <= truth - told <= count * MIB for truth, told in zip(allocated, alive, strict=True))


def test_a_gap_too_small_for_a_block_belongs_to_the_piece_before_it() -> None:
    """19 MiB come from 20 MiB, and 1 MiB is not cut off."""
    allocator = CachingAllocator()
    first, second = allocator.malloc(19 * MIB), allocator.malloc(5 * MIB)
    third = allocator.malloc(14 * MIB + 512)
    begin = len(allocator.events)
    for block in (first, second, third):
        allocator.free(block)
    lifetimes = after(allocator, begin)
    assert alive_bytes(lifetimes)[0] == allocator.allocated_bytes[begin - 1]
    assert lifetimes.block_bytes.tolist().count(20 * MIB) == 1


def test_an_oversize_block_is_not_cut_however_much_is_left() -> None:
    allocator = CachingAllocator(max_split_bytes=8 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    block = allocator.malloc(16 * MIB)
    begin = len(allocator.events)
    allocator.free(block)
    assert block.size == 30 * MIB
    assert alive_bytes(after(allocator, begin))[0] == 30 * MIB
    assert alive_bytes(after(allocator, 0))[-3] == 30 * MIB


def test_what_the_history_lost_is_found_by_what_begins_beside_it() -> None:
    """A 6 MiB block for 5.5 MiB, with a free neighbour; a later allocation shows its beginning."""
    allocator = CachingAllocator()
    held = [allocator.malloc(6 * MIB), allocator.malloc(6 * MIB), allocator.malloc(8 * MIB)]
    allocator.free(held[0])
    tight = allocator.malloc(5 * MIB + 512 * KIB)
    allocator.free(held[1])
    begin = len(allocator.events)
    beside = allocator.malloc(4 * MIB)
    allocator.free(tight)
    assert (tight.size, beside.address) == (6 * MIB, tight.address + 6 * MIB)
    lifetimes = after(allocator, begin)
    assert alive_bytes(lifetimes) == allocator.allocated_bytes[begin - 1 :]
    assert lifetimes.notes == ()
    unknown = after(allocator, len(allocator.events) - 2)  # without that allocation
    assert alive_bytes(unknown)[0] == allocator.allocated_bytes[-3]


@pytest.mark.parametrize("lost", [0, 3, 4, 5])
def test_memory_that_awaits_another_stream_is_not_allocated(lost: int) -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(12 * MIB)
    kept = allocator.malloc(100)
    assert len(allocator.events) == 4  # two segments, two allocations
    allocator.free(block, other_stream=True)
    lifetimes = after(allocator, lost)
    assert alive_bytes(lifetimes)[-1] == kept.size == 512
    allocator.process_events()
    later = after(allocator, len(allocator.events) - 1)  # the completion alone
    assert alive_bytes(later) == [512, 512]


def test_segments_that_grow_are_cut_to_size() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(19 * MIB))
    snapshot = allocator.snapshot()
    snapshot["allocator_settings"]["expandable_segments"] = True
    assert max(alive_bytes(replayed(snapshot))) == 19 * MIB
    mapped = [event | {"action": event["action"].replace("alloc", "map")} if "segment" in event["action"] else event
              for event in allocator.events]  # fmt: skip
    assert max(alive_bytes(replayed(allocator.snapshot() | {"device_traces": [mapped]}))) == 19 * MIB


def test_an_allocation_where_no_free_block_is_known_is_told_of() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(19 * MIB))
    allocator.malloc(512)
    allocator.empty_cache()
    events = [event for event in allocator.events if not event["action"].startswith("segment")]
    lifetimes = replayed(allocator.snapshot() | {"device_traces": [events]})
    assert max(alive_bytes(lifetimes)) == 19 * MIB
    assert any("began without a free block in the snapshot" in note for note in lifetimes.notes)


def test_requests_that_were_not_recorded_leave_the_completions() -> None:
    allocator = run([(0, n) for n in range(30)] + [(6, n) for n in range(20)])
    skipped = [event for event in allocator.events if event["action"] != "free_requested"]
    lifetimes = replayed(allocator.snapshot() | {"device_traces": [skipped]})
    assert alive_bytes(lifetimes)[-1] == allocator.allocated_bytes[-1]
    assert max(alive_bytes(lifetimes)) == max(allocator.allocated_bytes)


def divided(size: int, divisions: int) -> int:
    """round_size of CUDACachingAllocator.cpp with roundup_power2_next_division."""
    if size < 512:
        return 512
    if divisions <= 1 or size <= 512 * divisions:
        return -(-size // 512) * 512
    floor = 1 << (size.bit_length() - 1)
    if floor == size:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return size & ~(step - 1) if size & ~(step - 1) == size else (size & ~(step - 1)) + step


@given(st.integers(1, 2**40), st.lists(st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=16, max_size=16))
def test_sizes_are_rounded_as_the_settings_say(size: int, steps: list[int]) -> None:
    interval = min(max(size.bit_length() - 1 - 20, 0), 15)
    settings = AllocatorSettings(roundup_divisions=tuple(steps))
    assert rounded_sizes(np.array([size]), settings).tolist() == [divided(size, steps[interval])]
    assert rounded_sizes(np.array([size]), AllocatorSettings()).tolist() == [divided(size, 0)]


GOLDEN = Path(__file__).parents[1] / "golden" / "memory_small_512_bf16_selective"
D, FF, LAYERS, VOCABULARY, CONTEXT, BATCH = 768, 3072, 12, 10_000, 512, 4
MATRICES = LAYERS * (4 * D * D + 3 * D * FF) + VOCABULARY * D
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
    path = Path("step.marks.json")
    check_same_history(marks, history, path)
    for shift in (64, 512, -(1 << 20)):
        owned = tuple(dataclasses.replace(owner, address=owner.address + shift) for owner in marks.owned)
        with pytest.raises(
            UserError, match=r"step\.marks\.json: it belongs to another snapshot: .* of its 1178 addresses"
        ):
            check_same_history(dataclasses.replace(marks, owned=owned), history, path)
    with pytest.raises(UserError, match="no parameters of the model"):
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
    counted = {"forward": 2_978_129_408, "backward": 2_760_353_792, "optimizer": 2_163_977_728}
    assert {phase.name: phase.peak_bytes for phase in digest(history, marks).phases} == counted
