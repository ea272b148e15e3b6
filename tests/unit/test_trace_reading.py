import gzip
import json
import os
import random
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from steplab.errors import UserError
from steplab.reading.traces.events import MISSING, nanoseconds
from steplab.reading.traces.reading import read_trace
from steplab.reading.traces.trace import NONE, Inputs, Ranges, Trace, TraceBuilder

KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "gemm<float>",
    "pid": 0,
    "tid": 7,
    "ts": 4458676522690.655,
    "dur": 3.5,
    "args": {"device": 0, "stream": 7, "correlation": 11, "grid": [1, 2, 3]},
}
LAUNCH = {
    "ph": "X",
    "cat": "cuda_runtime",
    "name": "cudaLaunchKernel",
    "pid": 9,
    "tid": 9,
    "ts": 4458676522680.001,
    "dur": 2,
    "args": {"correlation": 11},
}
OP = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 9,
    "tid": 9,
    "ts": 4458676522670.5,
    "dur": 30.25,
    "args": {"Sequence number": 5, "Input Dims": [[2, 3], [3, 4], []], "Input type": ["float", "float", "Scalar"]},
}
RANGE = {"ph": "X", "cat": "user_annotation", "name": "forward", "pid": 9, "tid": 9, "ts": 4458676522660, "dur": 100}
STEP: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "ts": 0, "args": {"name": "python"}},
    RANGE,
    OP,
    {**OP, "cat": "python_function", "name": "f"},
    LAUNCH,
    {"ph": "s", "id": 11, "pid": 9, "tid": 9, "ts": 4458676522680.001, "cat": "ac2g", "name": "ac2g"},
    KERNEL,
]


def write(path: Path, events: object, *, indent: int | None = 2, **members: object) -> Path:
    path.write_text(json.dumps({**members, "traceEvents": events}, indent=indent))
    return path


def rows(trace: Trace, table: str, *columns: str) -> list[tuple[Any, ...]]:
    found = getattr(trace, table)
    texts = {
        "name": lambda number: trace.names[number],
        "inputs": lambda number: trace.inputs[number] if number != NONE else None,
    }
    values = [[texts.get(column, int)(value) for value in getattr(found, column).tolist()] for column in columns]
    return list(zip(*values, strict=True))


def count(trace: Trace) -> tuple[int, int, int, int]:
    return tuple(len(getattr(trace, table).start_ns) for table in ("work", "calls", "ops", "ranges"))  # type: ignore[return-value]


def test_each_kind_goes_into_its_table(tmp_path: Path) -> None:
    properties = [{"id": 1, "name": "other"}, {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 1}]
    trace = read_trace(write(tmp_path / "t.json", STEP, deviceProperties=properties, schemaVersion=1))
    work = ("name", "start_ns", "duration_ns", "device", "stream", "correlation")
    assert rows(trace, "work", *work) == [("gemm<float>", 4458676522690655, 3500, 0, 7, 11)]
    calls = ("name", "start_ns", "duration_ns", "thread", "correlation")
    assert rows(trace, "calls", *calls) == [("cudaLaunchKernel", 4458676522680001, 2000, 0, 11)]
    inputs = Inputs(shapes=((2, 3), (3, 4), ()), dtypes=("float", "float", ""))
    ops = ("name", "start_ns", "duration_ns", "thread", "sequence", "inputs")
    assert rows(trace, "ops", *ops) == [("aten::mm", 4458676522670500, 30250, 0, 5, inputs)]
    assert rows(trace, "ranges", "name", "start_ns", "duration_ns", "thread") == [
        ("forward", 4458676522660000, 100000, 0)
    ]
    assert (trace.source, trace.device_name, trace.notes) == ("kineto", "NVIDIA H200", ())


@pytest.mark.parametrize(
    ("category", "table"),
    [
        *((name, 0) for name in ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")),
        *((name, 1) for name in ("cuda_runtime", "cuda_driver", "xpu_runtime", "privateuse1_driver", "Runtime")),
        *((name, 2) for name in ("cpu_op", "Operator")),
        ("user_annotation", 3),
        *((name, None) for name in ("python_function", "ac2g", "overhead", "gpu_user_annotation", "Trace", "", "new")),
    ],
)
def test_categories(category: str, table: int | None, tmp_path: Path) -> None:
    expected = [0, 0, 0, 0]
    if table is not None:
        expected[table] = 1
    assert count(read_trace(write(tmp_path / "t.json", [{**KERNEL, "cat": category}]))) == tuple(expected)


NAMES = ("", "},{", '"},\n{"', "aten::mm", "a\\b", "\u2028", "é😀", "void f<{lambda()#1}>", '"', "\\", "]}")
CATEGORIES = ("kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "cpu_op", "user_annotation", "ac2g", "x")


def random_event(chance: random.Random, number: int) -> dict[str, Any]:
    dims = [
        [chance.randrange(4) for _ in range(chance.randrange(4))]
        if chance.random() < 0.8
        else [[chance.randrange(4) for _ in range(2)] for _ in range(chance.randint(1, 2))]
        for _ in range(chance.randrange(4))
    ]
    args = {
        "device": chance.randrange(3),
        "stream": chance.randint(-1, 40),
        "correlation": chance.randrange(2 ** chance.choice([3, 20, 33])),
        "Sequence number": chance.randrange(5),
        "Input Dims": dims,
        "Input type": [chance.choice(["float", "Scalar", "", "TensorList", "c10::BFloat16"]) for _ in dims],
        chance.choice(NAMES): [{"ph": {"}": chance.choice(NAMES)}}, {"ph": []}],
    }
    event = {
        "ph": "X",
        "cat": chance.choice(CATEGORIES),
        "name": f"{chance.choice(NAMES)} {number}",
        "pid": chance.choice([0, 1, 2, "Spans", "1"]),
        "tid": chance.randrange(3),
        "ts": chance.randrange(chance.choice([10**6, 2**43 * 1000, 2**53 * 1000])),
        "dur": chance.randint(-1, 10 ** chance.choice([1, 4, 9])),
        "args": {key: args[key] for key in chance.sample(list(args), chance.randint(0, len(args)))},
    }
    if chance.random() < 0.1:
        del event[chance.choice(["dur", "args", "ts", "tid"])]
    return {key: event[key] for key in chance.sample(list(event), len(event))}


def as_text(events: list[dict[str, Any]], chance: random.Random) -> str:
    def microseconds(ns: int) -> str:
        sign, whole, rest = "-" * (ns < 0), *divmod(abs(ns), 1000)
        plain = f"{sign}{whole}.{rest:03}"
        if chance.random() < 0.2:
            return f'"{plain}"'
        return f"{sign}{whole}" if not rest and chance.random() < 0.5 else plain

    texts = []
    for event in events:
        marked = {k: f"<{microseconds(v)}>" if k in ("ts", "dur") else v for k, v in event.items()}
        text = json.dumps(marked, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, None, 2]))
        for key in ("ts", "dur"):
            if key in marked:
                text = text.replace(json.dumps(marked[key]), marked[key][1:-1])
        texts.append(text)
    return '{"traceEvents": [' + chance.choice([",", ", ", " ,\n"]).join(texts) + '], "after": {"},{": 1}}'


def reference(events: list[dict[str, Any]]) -> dict[str, dict[str, tuple[Any, ...]]]:
    tables: dict[str, dict[str, tuple[Any, ...]]] = {"work": {}, "calls": {}, "ops": {}, "ranges": {}}
    for event in events:
        args = event.get("args", {})
        if "ts" not in event or event.get("dur", -1) < 0:
            continue
        times, thread = (event["ts"], event["dur"]), (event["pid"], event.get("tid"))
        match event["cat"]:
            case "kernel" | "gpu_memcpy":
                ids = (args.get(key, NONE) for key in ("device", "stream", "correlation"))
                tables["work"][event["name"]] = (*times, *ids)
            case "cuda_runtime":
                tables["calls"][event["name"]] = (*times, thread, args.get("correlation", NONE))
            case "cpu_op":
                row = (*times, thread, args.get("Sequence number", NONE), reference_inputs(args))
                tables["ops"][event["name"]] = row
            case "user_annotation":
                tables["ranges"][event["name"]] = (*times, thread)
    return tables


def reference_inputs(args: dict[str, Any]) -> Inputs | None:
    dims, kinds = args.get("Input Dims", []), args.get("Input type", [])
    if "Input Dims" not in args or (not dims and not kinds):
        return None
    entries = list[tuple[tuple[int, ...], str]]()
    for position, dim in enumerate(dims):
        kind = kinds[position] if position < len(kinds) else ""
        if dim and isinstance(dim[0], list):
            entries += [(tuple(tensor), "TensorList") for tensor in dim]
        else:
            entries.append((tuple(dim), "" if kind in ("", "Scalar") else kind))
    return Inputs(shapes=tuple(shape for shape, _ in entries), dtypes=tuple(dtype for _, dtype in entries))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**64), st.integers(0, 12), st.integers(1, 60) | st.sampled_from([500, 10**6]))
def test_tables_hold_what_a_plain_reader_finds(tmp_path: Path, seed: int, num_events: int, chunk_bytes: int) -> None:
    chance = random.Random(seed)
    events = [random_event(chance, number) for number in range(num_events)]
    (tmp_path / "t.json").write_text(as_text(events, chance))
    trace = read_trace(tmp_path / "t.json", chunk_bytes=chunk_bytes)
    expected = reference(events)
    common, threads = ("name", "start_ns", "duration_ns"), set()
    for table, columns in {
        "work": ("device", "stream", "correlation"),
        "calls": ("thread", "correlation"),
        "ops": ("thread", "sequence", "inputs"),
        "ranges": ("thread",),
    }.items():
        found = rows(trace, table, *common, *columns)
        assert [row[1] for row in found] == sorted(row[1] for row in found)
        assert len(found) == len(expected[table])
        for name, *row in found:
            wanted = list(expected[table][name])
            if "thread" in columns:
                threads.add((row[2], wanted[2]))
                wanted[2] = row[2]
            assert row == wanted
    # A number for each thread, and a thread for each number.
    assert len(threads) == len({number for number, _ in threads}) == len({thread for _, thread in threads})


def test_times_that_a_product_would_round() -> None:
    texts = [f"4458676522690.{number:03}" for number in range(1000)]
    expected = [4458676522690000 + number for number in range(1000)]
    assert np.rint(np.array(texts, dtype=float) * 1000).astype(int).tolist() != expected, "or the test shows nothing"
    assert nanoseconds([Raw(text.encode()) for text in texts]).tolist() == expected


@given(
    st.lists(
        st.tuples(st.integers(0, 2**53 - 1), st.integers(0, 10**6 - 1), st.integers(0, 6), st.booleans()), max_size=8
    )
)
def test_times_in_text_are_exact(times: list[tuple[int, int, int, bool]]) -> None:
    texts = []
    for whole, millionths, num_decimals, quoted in times:
        text = f"{whole}.{millionths:06}"[: len(str(whole)) + (1 + num_decimals if num_decimals else 0)]
        texts.append(f'"{text}"' if quoted and num_decimals == 3 else text)
    found = nanoseconds([Raw(text.encode()) for text in texts]).tolist()
    for text, ns in zip(texts, found, strict=True):
        exact = Decimal(text.strip('"')) * 1000
        assert ns == exact or (exact % 1 and abs(ns - exact) < 1)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1712195495505582.988", 1712195495505582988),
        ("9007199254740991.999", 9007199254740991999),
        ("9007199254740992.000", MISSING),
        ("9999999999999999.999", MISSING),
        ("99999999999999999999", MISSING),
        ("18446744073709551616", MISSING),
        ("123456789012345.67890", 123456789012345679),
        ("12345678901234.567890", 12345678901234568),
        ("999999999999999.9999", 1000000000000000000),
        ("1e3", 1000000),
        ("1.5E3", 1500000),
        ("-1.5", -1500),
        ("0", 0),
        ("null", MISSING),
        ('"nan"', MISSING),
        ('""', MISSING),
        ("[1,2]", MISSING),
        ("true", MISSING),
        ('"1,5"', MISSING),
        ('"1.5"', 1500),
        ("1e300", MISSING),
        ('"inf"', MISSING),
        ("86400000000.123", 86_400_000_000_123),
    ],
)
def test_times_in_text(text: str, ns: int) -> None:
    for others in ([], [b"7.001"], [b"7"], [b"7.0000001"]):
        found = nanoseconds([Raw(text.encode()), *map(Raw, others)]).tolist()
        assert found == [ns, *(int(Decimal(other.decode()) * 1000) for other in others)]


def test_times_of_1970_keep_their_nanoseconds(tmp_path: Path) -> None:
    texts = [f"{1712195495505582 + number}.{number * 37 % 1000:03}" for number in range(500)]
    events = [f'{{"ph": "X", "cat": "kernel", "ts": {text}, "dur": 1.5}}' for text in ["3.25", *texts]]
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + ", ".join(events) + "]}")
    starts = read_trace(path, chunk_bytes=2000).work.start_ns.tolist()
    assert starts == [3250] + [int(text.replace(".", "")) for text in texts]


def test_lists_of_tensors_take_an_entry_for_each_tensor(tmp_path: Path) -> None:
    args = {"Input Dims": [[[2, 3], []], [4], [], None, [[1], 2]], "Input type": ["TensorList", "bool", "Scalar", ""]}
    trace = read_trace(write(tmp_path / "t.json", [{**OP, "args": args}, {**OP, "args": {"Input Dims": 3}}]))
    assert trace.inputs == (
        Inputs(shapes=((2, 3), (), (4,), (), (), (2,)), dtypes=("TensorList", "TensorList", "bool", "", "", "")),
    )
    assert trace.ops.inputs.tolist() == [0, NONE]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_tables_are_in_the_order_of_start_outer_before_inner(spans: list[tuple[int, int]]) -> None:
    builder = TraceBuilder("kineto")
    for number, (start_ns, duration_ns) in enumerate(spans):
        builder.add(Ranges, name=builder.names[str(number)], start_ns=start_ns, duration_ns=duration_ns, thread=0)
    trace = builder.build()
    found = [spans[int(trace.names[number])] for number in trace.ranges.name]
    assert found == sorted(spans, key=lambda span: (span[0], -span[1]))
    assert list(zip(trace.ranges.start_ns.tolist(), trace.ranges.duration_ns.tolist(), strict=True)) == found


@pytest.mark.parametrize("num_rows", [0, 10, 100_000])
@pytest.mark.parametrize("spread", [1, 50, 10**6])
def test_long_tables_are_sorted(num_rows: int, spread: int) -> None:
    chance = np.random.default_rng(num_rows + spread)
    start_ns, duration_ns = chance.integers(0, spread, num_rows), chance.integers(0, 3, num_rows)
    builder = TraceBuilder("kineto")
    builder.add(Ranges, name=np.arange(num_rows), start_ns=start_ns, duration_ns=duration_ns, thread=np.zeros(num_rows))
    ranges = builder.build().ranges
    expected = np.lexsort((-duration_ns, start_ns))
    assert ranges.name.tolist() == expected.tolist(), "and in the order of the file among equals"
    assert ranges.start_ns.tolist() == start_ns[expected].tolist()
    assert ranges.duration_ns.tolist() == duration_ns[expected].tolist()


def test_numbers_written_as_text_or_not_at_all(tmp_path: Path) -> None:
    args = [
        {"correlation": "7"},
        {"correlation": None},
        {"correlation": 2.0},
        {"correlation": "x"},
        {"correlation": 2**70},
    ]
    trace = read_trace(
        write(tmp_path / "t.json", [{**LAUNCH, "args": each} for each in args] + [{**LAUNCH, "args": None}])
    )
    assert trace.calls.correlation.tolist() == [7, NONE, 2, NONE, NONE, NONE]


def test_compressed_in_any_number_of_members(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.json", STEP * 500).read_bytes()
    for name, data in {
        "one": gzip.compress(plain),
        "two": gzip.compress(plain[:1000]) + gzip.compress(plain[1000:]),
        "padded in between": gzip.compress(plain[:1000]) + b"\0" * 9 + gzip.compress(plain[1000:]),
        "padded": gzip.compress(plain) + b"\0" * 1000,
        "followed by something else": gzip.compress(plain) + b"else",
        "empty first": gzip.compress(b"") + gzip.compress(plain),
    }.items():
        (tmp_path / "t.json.gz").write_bytes(data)
        trace = read_trace(tmp_path / "t.json.gz", chunk_bytes=3000)
        assert (count(trace), trace.notes) == ((500,) * 4, trace.notes), name
        assert not any("gzip" in note for note in trace.notes)


def test_progress_goes_to_the_end(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.json", STEP * 500)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(plain.read_bytes(), 1))
    for path in (plain, tmp_path / "t.json.gz"):
        seen = list[tuple[int, int]]()
        read_trace(path, lambda done, size: seen.append((done, size)), chunk_bytes=5000)  # noqa: B023
        size = path.stat().st_size
        assert len(seen) > 1 or path.suffix == ".gz"
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1] == (size, size)


def args_of(event: dict[str, Any]) -> dict[str, Any]:
    return event.get("args", {})


def no_two_alike(number: int) -> list[dict[str, Any]]:
    return [{**event, "args": {**args_of(event), "correlation": number + 1}} for event in STEP]


MANY = [event for number in range(300) for event in no_two_alike(number)]


def test_cut_in_the_middle(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", MANY)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    trace = read_trace(path)
    assert 140 < len(trace.work.start_ns) < 160
    read = f"{len(whole) // 2 / 1024:.0f} KiB of JSON"
    assert trace.notes == (f"the file ends in the middle of an event, after {read}; the rest is missing",)
    assert trace.damage == trace.notes
    assert read_trace(write(tmp_path / "t.json", MANY)).damage == ()


def test_a_listed_gpu_is_known_though_nothing_ran_on_it(tmp_path: Path) -> None:
    gpus = [{"id": 0, "name": "NVIDIA H200"}]
    for properties, listed in ((gpus, True), ([], False)):
        trace = read_trace(write(tmp_path / "t.json", [OP], deviceProperties=properties))
        assert trace.lists_gpu == listed
        assert trace.device_name is None


def test_truncated_gzip(tmp_path: Path) -> None:
    chance = random.Random(0)
    events = [{**event, "name": str(chance.random())} for event in MANY]
    whole = gzip.compress(write(tmp_path / "t.json", events).read_bytes())
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    trace = read_trace(path)
    assert 130 < len(trace.work.start_ns) < 170
    assert len(trace.notes) == 1
    assert trace.notes[0].startswith("the gzip stream ends early, and the file ends in the middle of an event, after ")
    path.write_bytes(whole[:30])
    with pytest.raises(UserError, match=r"has no trace: the gzip stream ends early"):
        read_trace(path)


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(write(tmp_path / "t.json", MANY * 20).read_bytes()))
    whole[len(whole) * 2 // 3 :] = random.Random(0).randbytes(len(whole) - len(whole) * 2 // 3)
    (tmp_path / "t.json.gz").write_bytes(whole)
    trace = read_trace(tmp_path / "t.json.gz")
    assert len(trace.work.start_ns) > 1000
    assert any("the gzip stream is damaged" in note for note in trace.notes)


def test_durations_that_are_none(tmp_path: Path) -> None:
    without = {key: value for key, value in KERNEL.items() if key != "dur"}
    events = [
        KERNEL,
        {**KERNEL, "dur": -1},
        {**KERNEL, "dur": -0.001},
        without,
        {**KERNEL, "ts": None},
        {**KERNEL, "dur": 0},
    ]
    trace = read_trace(write(tmp_path / "t.json", events))
    assert trace.work.duration_ns.tolist() == [3500, 0]
    assert trace.notes == (
        "events left out because they have no start or duration: 2",
        "events left out because they have a negative duration: 2",
    )


def test_ids_of_several_calls(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "t.json", [LAUNCH, KERNEL, KERNEL])).notes == ()
    trace = read_trace(write(tmp_path / "t.json", [LAUNCH, LAUNCH, LAUNCH, KERNEL]))
    assert count(trace) == (1, 3, 0, 0)
    assert [note.split(",")[0] for note in trace.notes] == ["1 correlation ids belong to several host calls"]
    free = {**LAUNCH, "args": {"correlation": 0}}
    assert (
        read_trace(write(tmp_path / "t.json", [free, free, {**LAUNCH, "args": {}}, {**LAUNCH, "args": {}}])).notes == ()
    )


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        (b'"grid": [', b'"occupancy": NaN, "x": -Infinity, "grid": [', "gemm<float>"),
        (b"gemm", b"ge\xffmm", "ge\N{REPLACEMENT CHARACTER}mm<float>"),
        (b"gemm", b"ge\tmm", "ge\tmm<float>"),
        (b"gemm", b"ge\\ud800mm", "ge?mm<float>"),
    ],
)
def test_what_json_does_not_allow_is_passed(old: bytes, new: bytes, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [*MANY, KERNEL])
    path.write_bytes(path.read_bytes().replace(old, new))
    trace = read_trace(path)
    assert count(trace) == (301, 300, 300, 300)
    assert rows(trace, "work", "name") == [(name,)] * 301
    assert trace.work.start_ns.tolist() == [4458676522690655] * 301
    assert trace.work.stream.tolist() == [7] * 301
    repaired = "events repaired, with NaN, bad UTF-8 or the like: 301"
    assert [note for note in trace.notes if "correlation" not in note] == [repaired]


def test_bad_utf8_where_nobody_looks_is_no_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [{**KERNEL, "args": {"x": "GEMM"}}])
    path.write_bytes(path.read_bytes().replace(b"GEMM", b"\xff"))
    assert read_trace(path).notes == ()


def test_unreadable_events_are_counted(tmp_path: Path) -> None:
    events = [KERNEL, {**KERNEL, "name": 5}, {**KERNEL, "args": "text"}, 5, None, [KERNEL], KERNEL]
    deep = "[" * 100_000 + "]" * 100_000
    path = write(tmp_path / "t.json", [*events, {**KERNEL, "args": {"x": "DEEP"}}, KERNEL], indent=None)
    path.write_text(path.read_text().replace('"DEEP"', deep))
    trace = read_trace(path)
    assert count(trace) == (3, 0, 0, 0)
    assert trace.notes == ("events left out because they are not valid JSON: 6",)


def test_a_gigantic_string_is_read(tmp_path: Path) -> None:
    path, name = tmp_path / "t.json", '},{"' * 500_000
    path.write_text(json.dumps({"traceEvents": [KERNEL, {**KERNEL, "name": name}, KERNEL]}))
    trace = read_trace(path)
    assert count(trace) == (3, 0, 0, 0)
    assert name in trace.names
    assert trace.notes == ()


def test_memory_is_that_of_the_columns(tmp_path: Path) -> None:
    num_events = 40_000
    text = ",".join(json.dumps({**OP, "ts": 10**12 + number * 7919 % num_events}) for number in range(num_events))
    (tmp_path / "t.json").write_text(f'{{"traceEvents": [{text}]}}')
    tracemalloc.start()
    try:
        trace = read_trace(tmp_path / "t.json", chunk_bytes=1 << 17)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.ops.name) == num_events
    assert peak_bytes < num_events * 180


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "has no trace: it is neither JSON nor SQLite"),
        (b"time,name\n1,2\n", "it is neither JSON nor SQLite"),
        (b'{"a": 1}', "it has no list traceEvents"),
        (b'{"traceEvents": null}', "it has no list traceEvents"),
        (b'{"schemaVersion": 1, "deviceProp', "it has no list traceEvents"),
        (b"{'traceEvents': []}", "it has no list traceEvents"),
        (gzip.compress(b"hello", mtime=0), "it is neither JSON nor SQLite"),
        (b"\x1f\x8bhello", "the gzip stream is damaged"),
        (b"SQLite format 3\0 and no more", "is a damaged SQLite database"),
    ],
)
def test_what_is_no_trace_is_one_clear_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_trace(path)
    assert str(error.value).startswith((str(path), f"cannot read {path}"))
    assert "\n" not in str(error.value)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*missing.json: No such file"):
        read_trace(tmp_path / "missing.json")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        read_trace(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", STEP)
    path.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        read_trace(path)


@pytest.mark.parametrize("text", ["[1,1,1]", '{"traceEvents": ["a", [], {x}, null]}', "[[{}]]"])
def test_a_list_without_any_event_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"t\.json has no trace: none of its \d list elements is an event; "):
        read_trace(path)


def test_traces_without_anything(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "t.json", [])).notes == ("the list of events is empty",)
    trace = read_trace(write(tmp_path / "t.json", [{"ph": "X", "cat": "browser", "ts": 1, "dur": 1}] * 3))
    assert count(trace) == (0, 0, 0, 0)
    assert trace.notes == ("none of its 3 events is a kernel, a runtime call, an operator or a range",)


@pytest.mark.parametrize("chunk_bytes", [300, 1000, 10**6])
def test_stretches_without_anything_to_keep_hide_nothing(chunk_bytes: int, tmp_path: Path) -> None:
    frames = [{"ph": "X", "cat": "python_function", "name": "f", "ts": 1, "dur": 1}] * 50
    trace = read_trace(
        write(tmp_path / "t.json", [*frames, KERNEL, *frames, *STEP, *frames, OP]), chunk_bytes=chunk_bytes
    )
    assert count(trace) == (2, 1, 2, 1)


def test_a_profile_of_torch(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    x = torch.randn(8, 16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        with record_function("forward"):
            loss = torch.cat([x @ torch.randn(16, 4), x[:, :4]]).softmax(-1).sum()
        loss.backward()
    path = tmp_path / "t.json"
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path, chunk_bytes=5000)
    assert trace.notes == ()
    recorded = [event for event in profiler.profiler.kineto_results.events() if event.name().startswith("aten::")]
    found = rows(trace, "ops", "name", "start_ns", "duration_ns", "sequence", "inputs")
    read = [row[:3] for row in found if row[0].startswith("aten::")]
    base_ns = recorded[0].start_ns() - next(start_ns for name, start_ns, _ in read if name == recorded[0].name())
    told = [(event.name(), event.start_ns() - base_ns, event.duration_ns()) for event in recorded]
    assert sorted(read) == sorted(told)
    matmul = Inputs(shapes=((8, 16), (16, 4)), dtypes=("float", "float"))
    assert ("aten::mm", matmul) in [(row[0], row[4]) for row in found]
    cat = next(row[4] for row in found if row[0] == "aten::cat")
    assert cat == Inputs(shapes=((8, 4), (8, 4), ()), dtypes=("TensorList", "TensorList", ""))
    assert "forward" in [row[0] for row in rows(trace, "ranges", "name")]
    backward = {row[3] for row in found if row[0] == "MmBackward0"}
    assert backward <= {row[3] for row in found if row[0] == "aten::mm"}
    assert NONE not in backward
