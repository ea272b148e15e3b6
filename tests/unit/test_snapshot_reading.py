"""Snapshots of every condition: read as pickle reads them where they are what they claim, executed never."""

import gzip
import io
import os
import pickle
import random
import re
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
from steplab.limits import Limits
from steplab.snapshots import machine
from steplab.snapshots.building import build_history
from steplab.snapshots.digest import digest
from steplab.snapshots.event_runs import EventRuns
from steplab.snapshots.history import ACTIONS, ALLOCATED, AWAITING_FREE, INACTIVE, NONE, OTHER, History
from steplab.snapshots.machine import PickleMachine
from steplab.snapshots.reading import read_snapshot
from steplab.snapshots.refusal import Refused
from steplab.snapshots.stacks import Stacks
from steplab.snapshots.window import Window
from steplab.unpacking import Unpacked

PROTOCOLS = (2, 3, 4, 5)
FRAMES = [{"filename": f"/app/train_{i}.py", "line": 10 + i, "name": f"step_{i}"} for i in range(9)]


def event(action: str, address: int, size: int, frames: object = None, **more: object) -> dict[str, Any]:
    """An event with torch 2.11's keys, in its order."""
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
    """What the machine makes of a pickle."""
    window = Window(Unpacked(io.BytesIO(pickled)))
    window.move(0)
    return PickleMachine(window, EventRuns(Stacks())).run()


def written(folder: Path, content: bytes, name: str = "snapshot.pickle") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    """The one line that a file is refused with."""
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
    """Pickles as whatever it is told to."""

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
        ({1, 2}, "make a set"),
        (frozenset([1]), "make a frozenset"),
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
        (b"\x82\x01", "extension registry"),
        (b"\x84\x01\x00\x00\x00", "extension registry"),
        (b"cposix\nsystem\n", "import posix.system"),
        (b"(iposix\nsystem\n", "import posix.system"),
        (b"N)R", "call something"),
        (b"N)\x81", "make an object"),
        (b"N}b", "set an object's state"),
        (b"\x96\x01\x00\x00\x00\x00\x00\x00\x00x", "make a bytearray"),
        (b"\x97", "buffer"),
        (b"\x8c\x05posix\x8c\x07sys\ntem\x93", "import posix.'sys\\ntem'"),
        (b"\x93", "import "),
    ],
)
def test_every_instruction_that_reaches_outside_is_refused(tmp_path: Path, code: bytes, wanted: str) -> None:
    assert wanted in refusal(written(tmp_path, b"\x80\x04" + code + b"."))


# --- what would exhaust something ---------------------------------------------------------------------------


def nested(depth: int, kind: str) -> bytes:
    return {
        "lists": b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".",
        "marks": b"\x80\x04" + b"(" * depth + b"t" * depth + b".",
        "tuples": b"\x80\x04)" + b"\x85" * depth + b".",
        "dicts": b"\x80\x04" + b"}K\x00" * depth + b"}" + b"s" * depth + b".",
        "itself": b"\x80\x04]q\x00h\x00a.",
        "itself in a dict": b"\x80\x04}q\x00K\x01h\x00s.",
    }[kind]


@pytest.mark.parametrize("kind", ["lists", "marks", "tuples", "dicts", "itself", "itself in a dict"])
def test_nesting_without_end_is_refused(tmp_path: Path, kind: str) -> None:
    assert "the pickle nests deeper than" in refusal(written(tmp_path, nested(100_000, kind)))


def test_a_key_whose_hash_would_recurse_is_refused(tmp_path: Path) -> None:
    deep = b"\x80\x04})" + b"\x85" * 100_000 + b"Ns."
    assert "a tuple for a key" in refusal(written(tmp_path, deep))
    assert "a list for a key" in refusal(written(tmp_path, b"\x80\x04}]Ns."))


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (b"\x8d" + (1 << 40).to_bytes(8, "little"), "a text of 1.00 TiB"),
        (b"X" + (1 << 30).to_bytes(4, "little"), "a text of 1.00 GiB"),
        (b"\x8e" + (1 << 62).to_bytes(8, "little"), "a string of bytes of"),
        (b"B" + (1 << 31).to_bytes(4, "little"), "a string of bytes of 2.00 GiB"),
        (b"\x8b" + (1 << 30).to_bytes(4, "little"), "a number of 1.00 GiB"),
    ],
)
def test_a_length_is_not_believed(tmp_path: Path, code: bytes, what: str) -> None:
    assert f"the pickle holds {what}" in refusal(written(tmp_path, b"\x80\x04" + code + b"x" * 100 + b"."))


def test_a_long_text_is_refused_though_it_is_all_there(tmp_path: Path) -> None:
    text = "x" * (machine.LONGEST_TEXT_BYTES + 1)
    assert "the pickle holds a text of" in refusal(written(tmp_path, pickle.dumps(snapshot([], note=text), 4)))
    read_snapshot(written(tmp_path, pickle.dumps(snapshot([], note=text[:-1]), 4)))


def test_a_place_far_out_in_the_memo_takes_no_room(tmp_path: Path) -> None:
    """Python's own reader would make a table of 32 GiB for it."""
    path = written(tmp_path, b"\x80\x04]r\xff\xff\xff\xff.")
    assert not read_snapshot(path).devices


def test_references_to_references_do_not_multiply(tmp_path: Path) -> None:
    """A billion laughs: ten bytes a level, ten times the rows."""
    laughs: object = snapshot([])["segments"]
    for _ in range(9):
        laughs = [laughs] * 10
    assert "not a dict" in refusal(written(tmp_path, pickle.dumps({"segments": laughs}, 4)))
    trace = [event("alloc", 1, 1, FRAMES)]
    twice = snapshot([], device_traces=[trace] * 1000)
    assert "occurs twice" in refusal(written(tmp_path, pickle.dumps(twice, 4)))


@pytest.mark.parametrize("marks_between", [False, True])
def test_objects_that_nothing_takes_are_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks_between: bool
) -> None:
    most = 5000
    monkeypatch.setattr(machine, "MOST_ON_STACK", most)
    waiting = 11 * (b"(" * marks_between + b"]" * 500)  # of each kind more than the most, in stacks far smaller
    why = "the pickle has more than 5000 objects waiting on its stack"
    assert why in refusal(written(tmp_path, b"\x80\x04" + waiting))
    taken = 50 * (b"(" + b"]" * 500 + b"e") + 50 * (b"(" + b"]" * 500 + b"1")
    assert why not in refusal(written(tmp_path, b"\x80\x04]" + taken + b"."))


def test_objects_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Limits(object_bytes=1 << 20, num_allocations=5_000)
    monkeypatch.setattr("steplab.snapshots.reading.Limits", lambda: few)
    for endless in (b"N" * 100_000, b"}" * 100_000, b"]" + b"\x94" * 100_000, b"]" + b"Na" * 100_000):
        path = written(tmp_path, gzip.compress(b"\x80\x04" + endless), "bomb.pickle.gz")
        assert "would take more than 1.00 MiB of memory" in refusal(path)
    many = pickle.dumps(snapshot([event("alloc", i, 1, FRAMES) for i in range(6_000)]), 4)
    assert "more than 5,000 events" in refusal(written(tmp_path, many))


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
        (zipped(), "it is a zip archive, such as torch.save writes"),
        (b'{"traceEvents": []}', "it is no pickle of protocol 2 or later"),
        (pickle.dumps([], 0), "it is no pickle of protocol 2 or later"),
        (b"\x80\x06N.", "it is a pickle of protocol 6"),
        (b"\x80\x01N.", "it is a pickle of protocol 1"),
        (b"\x80\x04.", "it is no whole pickle"),
        (b"\x80\x04a.", "it is no whole pickle"),
        (b"\x80\x04NNa.", "it is no whole pickle"),
        (b"\x80\x04]Ns.", "it is no whole pickle"),
        (b"\x80\x04t.", "it is no whole pickle"),
        (b"\x80\x04h\x05.", "it is no whole pickle"),
        (b"\x80\x04\xffN.", "its byte 0xff is no instruction"),
        (b"\x80\x04\x8c\x02\xff\xfe.", "it is no whole pickle"),
        (pickle.dumps({"weights": [1, 2]}), "it is a pickle, but holds no memory snapshot"),
        (pickle.dumps(5), "it is a pickle, but holds no memory snapshot"),
        (pickle.dumps({"segments": 5}), "segments is not a list"),
        (pickle.dumps({"segments": [], "device_traces": [[5]]}), "an event is not a dict"),
        (pickle.dumps({"segments": [], "device_traces": [[{}]]}), "an event of its history has no action"),
        (pickle.dumps(snapshot([event("alloc", 1 << 70, 1)])), "addr is not a number of 64 bits"),
        (pickle.dumps(snapshot([event("alloc", 1, 1, [{"line": 1}])])), "a frame of its stacks has no filename"),
        (pickle.dumps({"segments": [{"blocks": [{"size": 1}]}]}), "a block of its segments has no state"),
        (gzip.compress(pickle.dumps(snapshot([])), mtime=0)[:-30], "its gzip stream ends early"),
        (b"\x1f\x8b" + b"no gzip at all", "its gzip stream is damaged"),
    ],
)
def test_what_is_no_snapshot_says_so(tmp_path: Path, content: bytes, why: str) -> None:
    message = refusal(written(tmp_path, content))
    assert message.startswith(why) or why in message
    assert "_dump_snapshot" in message


ABSENT = object()


@pytest.mark.parametrize("protocol", [2, 4])  # taken one by one, and in bulk
@pytest.mark.parametrize(
    ("where", "key", "value", "why"),
    [
        ("event", "size", -1, "the size of an event (alloc) is missing or negative"),
        ("event", "size", -(2**40), "the size of an event (alloc) is negative: -1099511627776"),
        ("event", "size", ABSENT, "the size of an event (alloc) is missing or negative"),
        ("event", "size", None, "the size of an event (alloc) is missing or negative"),
        ("event", "size", True, "size is not a number of 64 bits"),
        ("event", "size", 4.0, "size is not a number of 64 bits"),
        ("event", "size", "4", "size is not a number of 64 bits"),
        ("event", "size", 2**63, "size is not a number of 64 bits"),
        ("event", "size", 2**63 - 1, "the end of an event is not a number of 64 bits"),
        ("event", "addr", -5, "the address of an event (alloc) is negative: -5"),
        ("event", "addr", ABSENT, "the address of an event (alloc) is missing or negative"),
        ("event", "addr", False, "addr is not a number of 64 bits"),
        ("event", "addr", 2**64 - 4096, "addr is not a number of 64 bits"),
        ("event", "time_us", 0.5, "time_us is not a number of 64 bits"),
        ("segment", "total_size", ABSENT, "the size of a segment is missing or negative"),
        ("segment", "total_size", -8, "the size of a segment is negative: -8"),
        ("segment", "address", ABSENT, "the address of a segment is missing or negative"),
        ("segment", "address", -8, "the address of a segment is negative: -8"),
        ("segment", "device", -1, "the number of a device is negative: -1"),
        ("block", "size", ABSENT, "the size of a block is missing or negative"),
        ("block", "size", -512, "the size of a block is negative: -512"),
        ("block", "size", 2**63 - 1, "the end of a block is not a number of 64 bits"),
        ("block", "address", -512, "the address of a block is negative: -512"),
        ("block", "requested_size", -512, "the requested size of a block is negative: -512"),
        ("block", "requested_size", True, "requested_size is not a number of 64 bits"),
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
        (why, f"it is a pickle, but no memory snapshot: {why}")
    )


@pytest.mark.parametrize("action", ["free_requested", "free_completed", "segment_alloc", "segment_map", "oom"])
def test_every_event_of_memory_has_a_size(tmp_path: Path, action: str) -> None:
    made = event(action, 4096, 512)
    del made["size"]
    if action == "oom":
        del made["addr"]  # torch tells device_free in its place
    message = refusal(written(tmp_path, pickle.dumps(snapshot([made]))))
    assert message.startswith(f"the size of an event ({action}) is missing or negative")


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
    """Events and segments that contradict one another, by the hundred: an answer, or one line."""
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
    blocks = [{"size": 2**62, "state": "inactive"}, {"size": 2**62, "state": "inactive"}, {"state": "inactive"}]
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
        with pytest.raises(Refused, match="no whole pickle"):
            run(whole[:length])


@given(st.binary(max_size=200), st.integers(0, 3000))
def test_bytes_of_any_kind_end_in_a_history_or_a_refusal(noise: bytes, place: int) -> None:
    events = [event("alloc", i << 30, 100_000 + i, FRAMES[: i % 4]) for i in range(12)]
    whole = pickle.dumps(snapshot(events), 4)
    for damaged in (
        b"\x80\x04" + noise,
        whole[: place % len(whole)] + noise + whole[place % len(whole) + len(noise) :],
    ):
        stacks = Stacks()
        window = Window(Unpacked(io.BytesIO(damaged)))
        window.move(0)
        with suppress(Refused):
            build_history(PickleMachine(window, EventRuns(stacks)).run(), stacks)


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
    """Events of several kinds, as torch writes them, has written them, or might: some share their stacks."""
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
def test_events_taken_in_bulk_are_those_that_pickle_reads(events: list[dict[str, Any]], protocol: int) -> None:
    whole = snapshot(events, external_annotations=[])
    stacks = Stacks()
    pickled = pickle.dumps(whole, protocol)
    window = Window(Unpacked(io.BytesIO(pickled)))
    window.move(0)
    assert_same(
        build_history(PickleMachine(window, EventRuns(stacks)).run(), stacks),
        build_history(pickle.loads(pickled), Stacks()),
    )


def built(pickled: bytes, *, in_bulk: bool) -> History | None:
    """The history in a pickle; None for a refused one."""
    window = Window(Unpacked(io.BytesIO(pickled)))
    window.move(0)
    stacks = Stacks()
    runs = EventRuns(stacks)
    if not in_bulk:
        runs.give_up()
    with suppress(Refused):
        return build_history(PickleMachine(window, runs).run(), stacks)
    return None


def many_events() -> bytes:
    """Events of two shapes, whose new texts and lists come and go."""
    events = []
    for number in range(40):
        made = event("alloc", number << 30, number * 777, FRAMES[: number % 4], pool_id=(0, number))
        made["compile_context"] = "" if number % 3 else f"{number}/0"
        events += [made, made | {"action": "free_requested"}, event("free_completed", number << 30, number)]
    return pickle.dumps(snapshot(events), 4)


MANY = many_events()


@given(st.lists(st.tuples(st.integers(0, len(MANY) - 1), st.integers(0, 255)), min_size=1, max_size=2))
def test_a_damaged_pickle_gives_in_bulk_what_it_gives_event_by_event(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(MANY)
    for place, byte in changes:
        damaged[place] = byte
    in_bulk, one_by_one = (built(bytes(damaged), in_bulk=choice) for choice in (True, False))
    # Taken in bulk, values that nobody reads are not looked at, nor can anything refer to them.
    if in_bulk is not None and one_by_one is not None:
        assert_same(in_bulk, one_by_one)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (rb"(\x8c\x04\d\d/0)\x94", rb"\g<1>0"),  # a text that is dropped again: its key has no value
        (rb"u(\}\x94\(h)", rb"N\1"),  # a dict that is never filled
        (rb"(\]\x94)\((h)", rb"\1N\2"),  # a list that is never filled
    ],
)
def test_what_is_no_whole_event_is_none_in_bulk_either(pattern: bytes, replacement: bytes) -> None:
    events = [event("alloc", n << 30, n, list(FRAMES), compile_context=f"{n}/0") for n in range(10, 40)]
    whole = pickle.dumps(snapshot(events), 4)
    places = list(re.finditer(pattern, whole))
    middle = places[len(places) // 2]
    damaged = whole[: middle.start()] + middle.expand(replacement) + whole[middle.end() :]
    assert built(whole, in_bulk=True) is not None
    assert built(damaged, in_bulk=False) is None
    assert built(damaged, in_bulk=True) is None


def test_a_text_that_is_not_memoized_is_not_taken_for_one_that_is() -> None:
    """By hand, for pickle memoizes every text; what follows has other places in the memo then."""
    events = [event("alloc", n << 30, n, list(FRAMES), compile_context=f"{n}/0") for n in range(10, 40)]
    odd, count = re.subn(rb"(\x8c\x04\d\d/0)\x94", rb"\1", pickle.dumps(snapshot(events), 4))
    assert count == len(events)
    # Without its frame, whose length has changed, and without the settings, whose keys would come from other places.
    whole = odd[:2] + odd[11 : odd.rindex(b"}\x94(h")] + b"eau."
    in_bulk, one_by_one = built(whole, in_bulk=True), built(whole, in_bulk=False)
    assert in_bulk is not None
    assert one_by_one is not None
    assert_same(in_bulk, one_by_one)
    assert_same(one_by_one, build_history(pickle.loads(whole), Stacks()))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_long_history_is_read_through_a_small_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, compressed: bool
) -> None:
    monkeypatch.setattr(machine, "LONGEST_TEXT_BYTES", 1 << 12)
    chance = random.Random(0)
    stacks = [[chance.choice(FRAMES) for _ in range(30)] for _ in range(50)]
    events = list[dict[str, Any]]()
    for number in range(1_000):
        allocated = event("alloc", 1 << 40 | number << 9, number * 7, list(chance.choice(stacks)))
        events += [allocated, *({**allocated, "action": action} for action in ACTIONS[1:3])]
    whole = pickle.dumps(snapshot(events), protocol)
    path = written(tmp_path, gzip.compress(whole, 1) if compressed else whole)
    told = list[tuple[int, int]]()
    history = read_snapshot(path, lambda done, size: told.append((done, size)), window_bytes=3 << 14)
    assert_same(history, build_history(pickle.loads(whole), Stacks()))
    assert len(history.stacks) <= 52
    assert told[-1] == (path.stat().st_size, path.stat().st_size)
    assert len(told) > len(whole) / (3 << 14)


def test_events_are_taken_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3,000 events as torch writes them the machine builds the first of a kind, and those at seams of the pickle."""
    frames = [list(FRAMES) for _ in range(1000)]
    events = [
        event(a, i << 20, i, frames[i]) for i in range(1000) for a in ("alloc", "free_requested", "free_completed")
    ]
    learn, num_built = EventRuns.learn, 0

    def counting(runs: EventRuns, made: Any, memo: Any) -> None:
        nonlocal num_built
        num_built += 1
        learn(runs, made, memo)

    monkeypatch.setattr(EventRuns, "learn", counting)
    run(pickle.dumps(snapshot(events), 4))
    assert num_built < 60


def test_devices_states_actions_and_absences(tmp_path: Path) -> None:
    """Two devices, states by both their names, unknown actions and keys, an event without address or time."""
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
    """As torch 1.12 to 2.0 gave it: blocks follow one another, and their history says what was asked for."""
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
