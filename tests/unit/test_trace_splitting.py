import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steplab.reading.traces.document import Document, NotATrace

HOSTILE = st.text(alphabet=st.sampled_from('},{[]:"\\/\n\t a0é😀\u2028\x7f'), max_size=12) | st.sampled_from(
    ["},{", '"},{"ph":"X"', "\\", '\\"', "]}", "},\n  {", "[{", '"traceEvents": [', "\\\\\\"]
)
KEYS = st.sampled_from(["ph", "cat", "name", "args", "ts"]) | HOSTILE
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
EVENTS = st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=8)
MEMBERS = st.dictionaries(st.sampled_from(["schemaVersion", "deviceProperties", "z"]) | HOSTILE, VALUES, max_size=3)
CHUNK_BYTES = st.integers(1, 40) | st.sampled_from([100, 1000, 100_000])


class Bytes:
    damage: str | None = None

    def __init__(self, data: bytes, seed: int = 0) -> None:
        self._data, self._random = data, random.Random(seed)

    def readinto(self, view: memoryview) -> int:
        count = min(len(view), len(self._data), self._random.randint(1, max(1, len(view))))
        view[:count], self._data = self._data[:count], self._data[count:]
        return count


class Collected:
    def __init__(self) -> None:
        self.events = list[Any]()
        self.num_refused = 0

    def take(self, array: memoryview) -> bool:
        try:
            events = json.loads(bytes(array))
        except (ValueError, RecursionError):
            self.num_refused += 1
            return False
        assert isinstance(events, list)
        self.events += events
        return True

    def salvage(self, elements: Sequence[memoryview]) -> int:
        read = [json.loads(bytes(element)) for element in elements]
        self.events += [event for event in read if isinstance(event, dict)]
        return sum(not isinstance(event, dict) for event in read)


def read(text: str | bytes, chunk_bytes: int, seed: int = 0) -> tuple[Collected, Document]:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    sink, read_document = Collected(), Document(Bytes(data, seed), keep=("deviceProperties",), chunk_bytes=chunk_bytes)
    read_document.read(sink)
    return sink, read_document


class Writer:
    def __init__(self, style: str, seed: int) -> None:
        self.style, self._random = style, random.Random(seed)
        self.text = ""
        self.ends = list[int]()

    def space(self, depth: int) -> str:
        match self.style:
            case "compact":
                return ""
            case "flat":
                return "\n"
            case "indented":
                return "\n" + "  " * depth
            case _:
                return self._random.choice(["", "", " ", "\n", "\t", " \r\n ", "\n  "])

    def scalar(self, value: object) -> str:
        return json.dumps(value, ensure_ascii=self._random.random() < 0.5)

    def value(self, value: object, depth: int = 0, *, events: bool = False) -> None:
        if not isinstance(value, (dict, list)):
            self.text += self.scalar(value)
            return
        self.text += "{" if isinstance(value, dict) else "["
        for number, item in enumerate(value):
            self.text += ("," if number else "") + self.space(depth + 1)
            if isinstance(value, dict):
                self.text += self.scalar(item) + self.space(depth + 1) * (self.style == "random") + ":"
                self.value(value[item], depth + 1, events=depth == 0 and item == "traceEvents")
            else:
                self.value(item, depth + 1)
            if events:
                self.ends.append(len(self.text.encode()))
        self.text += self.space(depth) + ("}" if isinstance(value, dict) else "]")


@st.composite
def traces(draw: st.DrawFn) -> tuple[Writer, list[Any], dict[str, Any] | None]:
    writer = Writer(draw(st.sampled_from(["compact", "flat", "indented", "random"])), draw(st.integers(0, 2**32)))
    events = draw(EVENTS)
    if draw(st.booleans()):
        writer.value(events, events=True)
        return writer, events, None
    before, after = draw(MEMBERS), draw(MEMBERS)
    members = before | {"traceEvents": events} | after
    writer.text = draw(st.sampled_from(["", " ", "\n", "\ufeff"]))
    writer.value(members)
    return writer, events, members


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), CHUNK_BYTES, st.integers(0, 100))
def test_every_event_comes_out_once_and_in_order(
    trace: tuple[Writer, list[Any], dict[str, Any] | None], chunk_bytes: int, seed: int
) -> None:
    writer, events, members = trace
    sink, result = read(writer.text, chunk_bytes, seed)
    assert sink.events == events
    assert (result.damage, result.num_unreadable) == (None, 0)
    assert result.has_events
    if members is not None and "deviceProperties" in members:
        assert json.loads(result.members["deviceProperties"]) == members["deviceProperties"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), CHUNK_BYTES, st.data())
def test_what_a_cut_file_held_whole_comes_out(
    trace: tuple[Writer, list[Any], dict[str, Any] | None], chunk_bytes: int, data: st.DataObject
) -> None:
    writer, events, members = trace
    whole = writer.text.encode("utf-8", "surrogatepass")
    opening = whole.index(b"{" if members is not None else b"[") + 1
    cut = data.draw(st.integers(opening, len(whole) - 1))
    sink, result = read(whole[:cut], chunk_bytes)
    num_whole = sum(end <= cut for end in writer.ends)
    assert sink.events == events[:num_whole]
    assert result.num_unreadable == 0
    if members is not None:
        assert result.damage is not None
    elif num_whole < len(events):
        cut_in_event = whole[writer.ends[num_whole - 1] if num_whole else opening : cut].strip(b" \t\r\n,")
        assert (result.damage is not None) == bool(cut_in_event)


def kineto_text(num_events: int, change: Callable[[int, str], str] = lambda number, text: text) -> str:
    events = (
        change(
            number, f'  {{\n    "ph": "X", "cat": "kernel", "name": "k{number}<{{lambda}}, [2]>", "ts": {number}\n  }}'
        )
        for number in range(num_events)
    )
    return '{\n  "schemaVersion": 1,\n  "traceEvents": [\n' + ",\n".join(events) + '\n  ],\n  "traceName": "t"\n}\n'


@pytest.mark.parametrize("chunk_bytes", [200, 2000, 10**6])
@pytest.mark.parametrize("stray", ['"', '"}', "\\", '"]', '"{'])
def test_damage_costs_one_event_of_an_indented_file(stray: str, chunk_bytes: int) -> None:
    damaged = {7, 30, 31, 98}
    text = kineto_text(100, lambda number, text: text.replace("<", stray) if number in damaged else text)
    sink, result = read(text, chunk_bytes)
    assert [event["ts"] for event in sink.events] == [number for number in range(100) if number not in damaged]
    assert result.num_unreadable == len(damaged)
    assert result.damage is None


def test_damage_all_over_is_passed_event_by_event() -> None:
    text = kineto_text(5_000, lambda number, text: text.replace('"ts":', '"ts"'))
    sink, result = read(text, 1 << 20)
    assert sink.events == []
    assert result.num_unreadable == 5_000


def test_a_long_event_is_read() -> None:
    for style in ("compact", "indented"):
        writer = Writer(style, 0)
        long = {"name": '},\n{"' * 1000, "ts": 2}
        events = [{"ts": 1}, long, {"ts": 3}, {"args": {"name": "x" * 3000}}, {"ts": 5}, long]
        writer.value({"traceEvents": events, "z": 1})
        sink, result = read(writer.text, 64)
        assert sink.events == events
        assert (result.num_unreadable, result.damage) == (0, None)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_what_looks_like_an_event_inside_a_cut_one_is_none(indent: int | None) -> None:
    events = [{"ph": "X", "args": {"stack": [{"ph": number}, {"ph": "inner"}, {"ph": 1}]}} for number in range(20)]
    text = json.dumps(events, indent=indent)
    for chunk_bytes in (100, 10_000):
        sink, result = read(text[: text.rindex("inner") + 10], chunk_bytes)
        assert sink.events == events[:-1]
        assert (result.num_unreadable, result.damage) == (0, "the file ends in the middle of an event")


def test_few_pieces_are_refused() -> None:
    events = [{"ph": "X", "name": "},{", "args": {"stack": [{"f": n}, {"f": n}]}, "ts": n} for n in range(5000)]
    for indent in (None, 0, 2):
        sink, _ = read(json.dumps({"traceEvents": events}, indent=indent), 10_000)
        assert sink.events == events
        assert sink.num_refused <= 5


@pytest.mark.parametrize("text", ["", "  ", "hello", "\x00\x01", '"traceEvents"', "12", "<html>"])
def test_what_is_no_object_or_array_is_refused(text: str) -> None:
    with pytest.raises(NotATrace):
        read(text, 10)


@pytest.mark.parametrize(
    "text", ["{}", "{ }", '{"a": 1}', '{"traceEvents": null}', '{"traceEvents": {"a": [1]}, "b": 2}']
)
def test_an_object_without_events_is_told(text: str) -> None:
    sink, result = read(text, 3)
    assert (sink.events, result.has_events, result.damage) == ([], False, None)


@pytest.mark.parametrize(
    ("text", "num_events"),
    [
        ('{"traceEvents": [], "a": 1}', 0),
        ('[{"a": 1}, {"a": 2}', 2),
        ('[{"a": 1}, {"a": 2},', 2),
        ('[{"a": 1}, {"a": 2},\n]', 2),
        ('{"trace\\u0045vents": [{"a": 1}]}', 1),
        ('{"traceEvents": [{"a": 1}], "traceEvents": [{"a": 2}]}', 2),
        ("[]", 0),
    ],
)
def test_other_forms(text: str, num_events: int) -> None:
    for chunk_bytes in (1, 5, 1000):
        sink, result = read(text, chunk_bytes)
        assert (len(sink.events), result.has_events, result.damage) == (num_events, True, None)


def test_text_that_stops_being_json_is_told() -> None:
    for text in (
        '{"traceEvents": [{"a": 1}] oops',
        '{"traceEvents": [{"a": 1}], oops: 1}',
        '{"traceEvents": [{"a": 1}]',
    ):
        sink, result = read(text, 8)
        assert (len(sink.events), result.damage is not None) == (1, True)


@pytest.mark.parametrize(
    ("end", "damage"),
    [
        ('"z"', "the file ends early"),
        ('"z', "the file ends early"),
        ('"z":', "the file ends early"),
        ('"z" 1}', "the file stops being JSON"),
        ('"z", "y": 1}', "the file stops being JSON"),
        ("1: 2}", "the file stops being JSON"),
    ],
)
def test_a_member_without_a_whole_name_ends_the_reading(end: str, damage: str) -> None:
    for chunk_bytes in (1, 1000):
        sink, result = read(f'{{"traceEvents": [{{"ts": 1}}], {end}', chunk_bytes)
        assert (sink.events, result.damage) == ([{"ts": 1}], damage)


def in_the_way(num_elements: int) -> dict[str, str]:
    event, bad = '\n  {\n    "ph": "X", "ts": 1\n  },', '\n  {\n    "ph": "a"b"\n  },'
    events = 3 * event
    return {
        "numbers": "[" + "1," * num_elements + "1]",
        "numbers in an object": '{"traceEvents": [' + "1," * num_elements + "1]}",
        "letters": "[" + "x," * num_elements + "x]",
        "strings": '["' + 'x","' * num_elements + '"]',
        "objects that are none": "[" + "{x}," * num_elements + "1]",
        "such behind indented events": "[" + events + "{x}," * num_elements + "1]",
        "such before indented events": "[" + events + "{x}," * num_elements + events + "1]",
        "such between indented events": "[" + (events + "{x}," + events) * (num_elements // 20) + "1]",
        "events with stray quotes": "[" + (event + bad) * (num_elements // 10) + "1]",
        "events between numbers": "[" + '{"ph": "X", "ts": 1},1,' * num_elements + "1]",
        "lists": "[" + "[" * num_elements + "]" * num_elements + "]",
        "lists without an end": "[" * num_elements,
        "members": "{" + '"a":1,' * num_elements + '"traceEvents":[]}',
        "lists of events": "{" + '"traceEvents":[],' * num_elements + '"a":1}',
        "commas": "[" + "," * num_elements + "]",
        "backslashes": '["' + "\\" * num_elements + '"]',
        "spaces": "[" + " " * num_elements + "1]",
    }
