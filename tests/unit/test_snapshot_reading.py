import gzip
import io
import os
import pickle
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.errors import SteplabError, UserError
from steplab.reading.snapshots.building import Refused, build_history
from steplab.reading.snapshots.digest import digest
from steplab.reading.snapshots.history import ACTIONS, ALLOCATED, AWAITING_FREE, INACTIVE, NONE, OTHER, History
from steplab.reading.snapshots.reading import _unpickled, read_snapshot
from steplab.unpacking import Unpacked

PROTOCOLS = (2, 3, 4, 5)
FRAMES = [{"filename": f"/app/train_{i}.py", "line": 10 + i, "name": f"step_{i}"} for i in range(9)]


def event(action: str, address: int, size: int, frames: object = None, **more: object) -> dict[str, Any]:
    stated = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1_763_000_000_000_000}
    told = {} if frames is None else {"frames": frames}
    return stated | {"compile_context": "", "user_metadata": ""} | more | told


def block(address: int, size: int, state: str, frames: object, **more: object) -> dict[str, Any]:
    told = {"address": address, "size": size, "requested_size": size - 12, "state": state, "frames": frames}
    return told | more


def snapshot(events: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    segment = {
        "device": 0,
        "address": 1 << 40,
        "total_size": 20 << 20,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": FRAMES[:1],
        "blocks": [
            block(1 << 40, 3 << 20, "active_allocated", FRAMES),
            block((1 << 40) + (3 << 20), 17 << 20, "inactive", []),
        ],
    }
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {"max_split_size": -1}} | more


def run(pickled: bytes) -> object:
    return _unpickled(Unpacked(io.BytesIO(pickled)))


def written(folder: Path, content: bytes, name: str = "snapshot.pickle") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_snapshot(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(f"{path}: ")


def assert_same(one: History, other: History) -> None:
    assert one.settings == other.settings
    assert len(one.devices) == len(other.devices)
    for mine, its in zip(one.devices, other.devices, strict=True):
        assert mine.index == its.index
        for table in ("events", "segments", "blocks"):
            for name in type(getattr(mine, table)).__slots__:
                here, there = getattr(getattr(mine, table), name), getattr(getattr(its, table), name)
                if name == "stack":  # numbers may differ, the stacks may not
                    told = [[() if n == NONE else h.stacks[n] for n in column.tolist()]
                            for h, column in ((one, here), (other, there))]  # fmt: skip
                    assert told[0] == told[1]
                else:
                    assert here.dtype == there.dtype
                    np.testing.assert_array_equal(here, there)


# --- what is executed: nothing ------------------------------------------------------------------------------


class Reduced:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def touch(path: Path) -> Reduced:
    return Reduced(os.system, (f"touch {path}",))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "place",
    [
        lambda bad: bad,
        lambda bad: snapshot([event("alloc", 1, 1, FRAMES), bad]),
        lambda bad: snapshot([event("alloc", 1, 1, bad)]),
        lambda bad: snapshot([], allocator_settings={"a": bad}),
        lambda bad: {"segments": [{"address": bad, "blocks": []}]},
        lambda bad: [bad],
    ],
)
def test_a_pickle_that_would_run_a_command_is_refused_unrun(
    tmp_path: Path, protocol: int, place: Callable[[object], object]
) -> None:
    sentinel = tmp_path / "executed"
    message = refusal(written(tmp_path, pickle.dumps(place(touch(sentinel)), protocol)))
    assert message.startswith("the pickle wants to import posix.system, which no memory snapshot does: refused")
    assert not sentinel.exists()


def test_the_hostile_pickle_of_these_tests_is_hostile(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(touch(tmp_path / "executed"), 4))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.arange(3), "import numpy"),
        (np.float32(1), "import numpy"),
        (Reduced(eval, ("1",)), "import builtins.eval"),
        (Path("x"), "import pathlib"),
        (1j, "import builtins.complex"),
        (bytearray(b"x"), "import builtins.bytearray"),
    ],
)
def test_objects_that_are_no_containers_or_scalars_are_refused_by_name(
    tmp_path: Path, value: object, wanted: str
) -> None:
    assert f"the pickle wants to {wanted}" in refusal(written(tmp_path, pickle.dumps(value, 4)))


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (b"Pid\n", "persistent id"),
        (b"NQ", "persistent id"),
        (b"\x82\x01", "unregistered extension code"),
        (b"\x84\x01\x00\x00\x00", "unregistered extension code"),
        (b"cposix\nsystem\n", "import posix.system"),
        (b"(iposix\nsystem\n", "import posix.system"),
        (b"N)R", "not callable"),
        (b"N)\x81", "must be a type"),
        (b"N}b", "no attribute '__dict__'"),
        (b"\x97", "no *buffers* argument was given"),
        (b"\x8c\x05posix\x8c\x07sys\ntem\x93", "import posix.'sys\\ntem'"),
        (b"\x93", "the pickle is damaged"),
    ],
)
def test_every_instruction_that_reaches_outside_is_refused(tmp_path: Path, code: bytes, wanted: str) -> None:
    assert wanted in refusal(written(tmp_path, b"\x80\x04" + code + b"."))


# --- what claims more than there is -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        b"\x8d" + (1 << 40).to_bytes(8, "little"),
        b"X" + (1 << 30).to_bytes(4, "little"),
        b"\x8b" + (1 << 30).to_bytes(4, "little"),
    ],
)
def test_a_length_is_not_believed(tmp_path: Path, code: bytes) -> None:
    tracemalloc.start()
    try:
        assert "the pickle is damaged" in refusal(written(tmp_path, b"\x80\x04" + code + b"x" * 100 + b"."))
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_a_snapshot_that_holds_itself_is_refused(tmp_path: Path) -> None:
    for itself in (b"\x80\x04]q\x00h\x00a.", b"\x80\x04}q\x00K\x01h\x00s."):
        assert "memory snapshot" in refusal(written(tmp_path, itself))


# --- what is no snapshot ------------------------------------------------------------------------------------


def zipped() -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", b"")
    return archive.getvalue()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (gzip.compress(b"", mtime=0), "it is empty"),
        (zipped(), "it is a zip archive, such as torch.save's"),
        (b'{"traceEvents": []}', "it is not a pickle of protocol 2 or later"),
        (pickle.dumps([], 0), "it is not a pickle of protocol 2 or later"),
        (b"\x80\x06N.", "unsupported pickle protocol: 6"),
        (b"\x80\x04.", "the pickle is damaged"),
        (b"\x80\x04]Ns.", "the pickle is damaged"),
        (b"\x80\x04h\x05.", "the pickle is damaged"),
        (b"\x80\x04\xffN.", "the pickle is damaged"),
        (b"\x80\x04\x8c\x02\xff\xfe.", "the pickle is damaged"),
        (pickle.dumps({"weights": [1, 2]}), "it is a pickle without a memory snapshot"),
        (pickle.dumps(5), "it is a pickle without a memory snapshot"),
        (pickle.dumps({"segments": 5}), "Expected `array`, got `int` - at `$.segments`"),
        (
            pickle.dumps({"segments": [], "device_traces": [[5]]}),
            "Expected `object`, got `int` - at `$.device_traces[0][0]`",
        ),
        (pickle.dumps({"segments": [], "device_traces": [[{}]]}), "missing required field `action`"),
        (
            pickle.dumps(snapshot([event("alloc", 1 << 70, 1)])),
            "Expected `int` <= 9223372036854775807 - at `$.device_traces[0][0].addr`",
        ),
        (pickle.dumps(snapshot([event("alloc", 1, 1, [{"line": 1}])])), "missing required field `filename`"),
        (pickle.dumps({"segments": [{"blocks": [{"size": 1}]}]}), "missing required field `state`"),
        (gzip.compress(pickle.dumps(snapshot([])), mtime=0)[:-30], "its gzip stream ends early"),
        (b"\x1f\x8b" + b"no gzip at all", "its gzip stream is damaged"),
    ],
)
def test_what_is_no_snapshot_says_so(tmp_path: Path, content: bytes, why: str) -> None:
    message = refusal(written(tmp_path, content))
    assert message.startswith(why) or why in message
    assert "_dump_snapshot" in message


ABSENT = object()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("where", "key", "value", "why"),
    [
        ("event", "size", -1, "an event's size is missing or negative"),
        ("event", "size", -(2**40), "an event's size is missing or negative"),
        ("event", "size", ABSENT, "an event's size is missing or negative"),
        ("event", "size", None, "an event's size is missing or negative"),
        ("event", "size", True, "Expected `int | null`, got `bool`"),
        ("event", "size", "4", "Expected `int | null`, got `str`"),
        ("event", "size", 2**63, "Expected `int` <= 9223372036854775807"),
        ("event", "size", 2**63 - 1, "the end of an event is not a number of 64 bits"),
        ("event", "addr", -5, "an event's address is missing or negative"),
        ("event", "addr", ABSENT, "an event's address is missing or negative"),
        ("event", "addr", 2**64 - 4096, "Expected `int` <= 9223372036854775807"),
        ("event", "time_us", 0.5, "Expected `int | null`, got `float`"),
        ("segment", "total_size", ABSENT, "Object missing required field `total_size`"),
        ("segment", "total_size", -8, "Expected `int` >= 0"),
        ("segment", "address", ABSENT, "Object missing required field `address`"),
        ("segment", "address", -8, "Expected `int` >= 0"),
        ("segment", "device", -1, "Expected `int` >= 0"),
        ("block", "size", ABSENT, "Object missing required field `size`"),
        ("block", "size", -512, "Expected `int` >= 0"),
        ("block", "size", 2**63 - 1, "the end of a block is not a number of 64 bits"),
        ("block", "address", -512, "Expected `int` >= 0"),
        ("block", "requested_size", -512, "Expected `int` >= 0"),
        ("block", "requested_size", True, "Expected `int | null`, got `bool`"),
    ],
)
def test_sizes_and_addresses_that_no_allocator_has_are_refused(
    tmp_path: Path, protocol: int, where: str, key: str, value: object, why: str
) -> None:
    events = [event("alloc", (1 << 41) + (i << 12), 4096 + i, FRAMES) for i in range(20)]
    whole = snapshot(events)
    (segment,) = whole["segments"]
    changed = {"event": events[13], "segment": segment, "block": segment["blocks"][0]}[where]
    read_snapshot(written(tmp_path, pickle.dumps(whole, protocol)))
    if value is ABSENT:
        del changed[key]
    else:
        changed[key] = value
    assert refusal(written(tmp_path, pickle.dumps(whole, protocol))).startswith(
        (why, f"it is a pickle without a memory snapshot: {why}")
    )


@pytest.mark.parametrize("action", ["free_requested", "free_completed", "segment_alloc", "segment_map", "oom"])
def test_every_event_of_memory_has_a_size(tmp_path: Path, action: str) -> None:
    made = event(action, 4096, 512)
    del made["size"]
    if action == "oom":
        del made["addr"]  # torch reports device_free instead
    message = refusal(written(tmp_path, pickle.dumps(snapshot([made]))))
    assert message.startswith("an event's size is missing or negative")


def test_a_snapshots_own_event_needs_neither(tmp_path: Path) -> None:
    path = written(tmp_path, pickle.dumps(snapshot([{"action": "snapshot"}, {"action": "invented", "size": -3}])))
    assert len(read_snapshot(path).devices[0].events) == 2


def test_sizes_whose_sum_is_beyond_64_bits_are_refused(tmp_path: Path) -> None:
    events = [event("alloc", i << 20, 2**61) for i in range(3)]
    read_snapshot(written(tmp_path, pickle.dumps(snapshot(events))))
    events.append(event("alloc", 3 << 20, 2**61))
    message = refusal(written(tmp_path, pickle.dumps(snapshot(events))))
    assert message.startswith("the sum of its sizes exceeds 64 bits")


def test_a_history_that_no_allocator_has_written_is_told_without_negative_memory(tmp_path: Path) -> None:
    for seed in range(150):
        chance = random.Random(seed)
        near = [0, 1, 512, 4096, 1 << 20, chance.randrange(1 << 22), 1 << 40, (1 << 40) + chance.randrange(1 << 25)]
        actions = chance.choices([*ACTIONS, "invented"], k=chance.randrange(40))
        whole = snapshot([event(action, chance.choice(near), chance.choice(near), FRAMES[:2]) for action in actions])
        for segment in whole["segments"] if seed % 2 else ():
            segment["total_size"], segment["address"] = chance.choices(near, k=2)
            for held in segment["blocks"]:
                held["size"], held["address"], held["requested_size"] = chance.choices(near, k=3)
        with suppress(SteplabError):
            profile = digest(read_snapshot(written(tmp_path, pickle.dumps(whole))), None)
            assert sum(profile.at_peak.values()) == profile.peak_bytes
            assert min(profile.at_peak.values()) >= 0


def test_a_block_that_follows_one_without_end_is_refused(tmp_path: Path) -> None:
    blocks = [
        {"size": 2**62, "state": "inactive"},
        {"size": 2**62, "state": "inactive"},
        {"size": 1, "state": "inactive"},
    ]
    segments = [{"device": 0, "address": 4096, "total_size": 2048, "blocks": blocks}]
    assert "the end of a block is not a number of 64 bits" in refusal(written(tmp_path, pickle.dumps(segments)))


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        read_snapshot(tmp_path / "absent.pickle")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        read_snapshot(tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_snapshot_cut_anywhere_is_refused(protocol: int) -> None:
    events = [event("alloc", 1 << 40 | i << 20, 100_000 + i, FRAMES[: i % 4]) for i in range(6)]
    whole = pickle.dumps(snapshot(events), protocol)
    assert run(whole)
    for length in range(2, len(whole)):
        with pytest.raises(Refused, match="the pickle is damaged"):
            run(whole[:length])


@given(st.binary(max_size=200), st.integers(0, 3000))
def test_bytes_of_any_kind_end_in_a_history_or_a_refusal(noise: bytes, place: int) -> None:
    events = [event("alloc", i << 30, 100_000 + i, FRAMES[: i % 4]) for i in range(12)]
    whole = pickle.dumps(snapshot(events), 4)
    for damaged in (
        b"\x80\x04" + noise,
        whole[: place % len(whole)] + noise + whole[place % len(whole) + len(noise) :],
    ):
        with suppress(Refused, MemoryError):  # a place far out in the memo
            build_history(run(damaged))


# --- what is one --------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner)
    return lists | lists.map(tuple) | st.dictionaries(KEYS, inner) | lists.map(lambda items: [items, items, items])


@given(st.recursive(SCALARS | st.binary(), containers, max_leaves=40), st.sampled_from(PROTOCOLS))
def test_containers_and_scalars_are_what_pickle_makes_of_them(value: object, protocol: int) -> None:
    for dumps in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        pickled = dumps(value, protocol)
        if protocol == 2 and (b"_codecs" in pickled or b"__builtin__" in pickled):  # bytes were a call then
            with pytest.raises(Refused, match=r"import (_codecs\.encode|__builtin__\.bytes)"):
                run(pickled)
            continue
        made = run(pickled)
        assert made == value
        assert repr(made) == repr(value)  # 1, 1.0 and True are equal


NUMBERS = st.integers(0, 2**63 - 1) | st.sampled_from(
    [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**47, -1, -(2**40)]
)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    chance = draw(st.randoms(use_true_random=False))
    stacks = [[chance.choice(FRAMES) for _ in range(chance.randrange(4))] for _ in range(6)]
    events = []
    for _ in range(draw(st.integers(0, 60))):
        frames: Any = chance.choice([None, *stacks, list(chance.choice(stacks))])
        made = event(chance.choice([*ACTIONS, "invented"]), draw(NUMBERS), draw(NUMBERS), frames)
        made["stream"], made["time_us"] = draw(NUMBERS), draw(NUMBERS)
        made["compile_context"] = chance.choice(["", "", "0/0", "x" * 300])
        if chance.random() < 0.2:
            made["device_free"] = made.pop("addr")
        if chance.random() < 0.5:
            made = {"action": made.pop("action"), "pool_id": (0, chance.randrange(999))} | made
        events.append(made)
    return events


@settings(max_examples=50)
@given(histories(), st.sampled_from(PROTOCOLS))
def test_columns_are_made_of_any_events(events: list[dict[str, Any]], protocol: int) -> None:
    history = build_history(run(pickle.dumps(snapshot(events, external_annotations=[]), protocol)))
    columns = history.devices[0].events
    keys = {
        "address": ("addr", NONE),
        "size_bytes": ("size", NONE),
        "stream": ("stream", 0),
        "time_us": ("time_us", NONE),
    }
    for name, (key, absent) in keys.items():
        assert getattr(columns, name).tolist() == [event.get(key, absent) for event in events]
    assert [ACTIONS[code] if code < OTHER else "invented" for code in columns.action] == [e["action"] for e in events]
    stacks = [history.stacks[number] if number != NONE else None for number in columns.stack.tolist()]
    assert stacks == [
        tuple((f["filename"], f["line"], f["name"]) for f in event["frames"]) if "frames" in event else None
        for event in events
    ]
    assert len(set(history.stacks)) == len(history.stacks)


def test_a_file_name_that_is_no_text_is_written_out() -> None:
    frame = {"filename": "/app/\ud800.py", "line": 1, "name": "f"}
    assert (
        build_history(run(pickle.dumps(snapshot([event("alloc", 1, 1, [frame])])))).stacks[0][0][0] == "/app/\\ud800.py"
    )


@pytest.mark.parametrize("compressed", [False, True])
def test_progress_is_told_to_the_end(tmp_path: Path, compressed: bool) -> None:
    events = [event("alloc", 1 << 40 | number << 9, number * 7, list(FRAMES)) for number in range(20_000)]
    whole = pickle.dumps(snapshot(events), 4)
    path = written(tmp_path, gzip.compress(whole, 1) if compressed else whole)
    told = list[tuple[int, int]]()
    history = read_snapshot(path, lambda done, size: told.append((done, size)))
    assert len(history.devices[0].events) == len(events)
    assert told == sorted(told)
    assert told[-1] == (path.stat().st_size, path.stat().st_size) or compressed
    assert len(told) > 1


def test_devices_states_actions_and_absences(tmp_path: Path) -> None:
    blocks = [
        block(4096, 512, "active_allocated", FRAMES[:2], new=1),
        block(4608, 512, "active_pending_free", []),
        block(5120, 512, "active_awaiting_free", []),
        {"size": 512, "requested_size": 0, "address": 5632, "state": "inactive"},
    ]  # fmt: skip
    whole = {
        "segments": [{"device": 1, "address": 4096, "total_size": 2048, "blocks": blocks, "is_expandable": True}],
        "device_traces": [[], [event("alloc", 7, 8), {"action": "oom", "device_free": 9, "size": 10}], []],
        "allocator_settings": {
            "max_split_size": 1 << 30,
            "expandable_segments": True,
            "roundup_power2_divisions": {"1": 4, "2": 8},
            "unheard of": [1],
        },
        "external_annotations": [{"name": "x"}],
    }
    whole["device_traces"][1].append(event("defragment", 1, 1))  # type: ignore[index]
    history = read_snapshot(written(tmp_path, pickle.dumps(whole)))
    (device,) = history.devices
    assert device.index == 1
    assert device.blocks.state.tolist() == [ALLOCATED, AWAITING_FREE, AWAITING_FREE, INACTIVE]
    assert [history.stacks[n] if n != NONE else None for n in device.blocks.stack.tolist()] == [
        tuple((f["filename"], f["line"], f["name"]) for f in FRAMES[:2]),
        (),
        (),
        None,
    ]
    assert device.events.action.tolist() == [0, ACTIONS.index("oom"), OTHER]
    assert device.events.address.tolist() == [7, NONE, 1]
    assert device.events.time_us.tolist()[1] == NONE
    assert device.segments.is_expandable.tolist() == [True]
    assert (history.settings.max_split_bytes, history.settings.expandable_segments) == (1 << 30, True)
    assert history.settings.roundup_divisions == (4, 8)


def test_a_bare_list_of_segments_is_an_older_snapshot(tmp_path: Path) -> None:
    old = {
        "history": [{"addr": 4096, "real_size": 900, "frames": FRAMES[:1]}],
        "size": 1024,
        "state": "active_allocated",
    }
    free = {"size": 1024, "state": "inactive"}
    segments = [{"device": 0, "address": 4096, "total_size": 2048, "stream": 0, "blocks": [old, free]}]
    (device,) = read_snapshot(written(tmp_path, pickle.dumps(segments))).devices
    assert not len(device.events)
    assert device.blocks.address.tolist() == [4096, 5120]
    assert device.blocks.requested_bytes.tolist() == [900, 1024]
    assert device.blocks.stack.tolist() == [0, NONE]
