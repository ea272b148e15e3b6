"""Traces of every condition: whole ones against a plain reader, damaged ones for what they still tell."""

import gzip
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from steplab.errors import UserError
from steplab.traces import splitting
from steplab.traces.microseconds import MISSING, duration_nanoseconds, float_nanoseconds, text_nanoseconds
from steplab.traces.reading import read_trace
from steplab.traces.trace import NONE, Inputs, Trace, TraceBuilder

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
STEP = [
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
    """Rows of a table, names as text, inputs as they are."""
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
    work = ("name", "start_ns", "duration_ns", "device", "stream", "correlation", "size_bytes")
    assert rows(trace, "work", *work) == [("gemm<float>", 4458676522690655, 3500, 0, 7, 11, NONE)]
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


NAMES = st.text(max_size=8) | st.sampled_from(["},{", '"},\n{"', "aten::mm", "a\\b", "\u2028", "void f<{lambda()#1}>"])
SMALL = st.integers(0, 3)
TIMES_NS = st.integers(0, 10**6) | st.integers(0, 2**43 * 1000) | st.integers(0, 2**53 * 1000 - 1)
DIMS = st.lists(SMALL, max_size=3) | st.lists(st.lists(SMALL, min_size=1, max_size=2), min_size=1, max_size=2)


@st.composite
def kineto_events(draw: st.DrawFn) -> dict[str, Any]:
    dims = draw(st.lists(DIMS, max_size=3))
    kinds = [draw(st.sampled_from(["float", "Scalar", "", "TensorList", "c10::BFloat16"])) for _ in dims]
    args = {
        "device": draw(SMALL),
        "stream": draw(st.integers(-1, 40)),
        "correlation": draw(st.integers(0, 2**33)),
        "bytes": draw(st.integers(0, 2**40)),
        "Sequence number": draw(SMALL),
        "Input Dims": dims,
        "Input type": kinds,
        "nested": draw(st.recursive(SMALL, lambda inner: st.lists(inner, max_size=2) | st.fixed_dictionaries({"}": inner}))),
    }
    event = {
        "ph": "X",
        "cat": draw(st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation", "ac2g", "x"])),
        "name": draw(NAMES),
        "pid": draw(SMALL | st.sampled_from(["Spans", "1"])),
        "tid": draw(SMALL),
        "ts": draw(TIMES_NS),
        "dur": draw(st.integers(-2, 10**9)),
        "args": {key: args[key] for key in draw(st.permutations(list(args)))[: draw(st.integers(0, len(args)))]},
    }
    for key in draw(st.sets(st.sampled_from(["dur", "args", "name", "ts", "tid"]), max_size=1)):
        if draw(st.integers(0, 5)) == 0:
            del event[key]
    return {key: event[key] for key in draw(st.permutations(list(event)))}


def as_text(events: list[dict[str, Any]], seed: int) -> str:
    """JSON of the events, times in ns written as µs in one of the ways exporters have."""
    chance = random.Random(seed)

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


def reference(events: list[dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of each table, sorted, as one would write it down without a thought of speed."""
    tables: dict[str, list[tuple[Any, ...]]] = {"work": [], "calls": [], "ops": [], "ranges": []}
    threads: dict[Any, int] = {}
    for event in events:
        args = event.get("args", {})
        if "ts" not in event or event.get("dur", -1) < 0:
            continue
        common = (event.get("name", ""), event["ts"], event["dur"])
        thread = (event["pid"], event.get("tid"))
        match event["cat"]:
            case "kernel" | "gpu_memcpy":
                ids = (args.get(key, NONE) for key in ("device", "stream", "correlation", "bytes"))
                tables["work"].append((*common, *ids))
            case "cuda_runtime":
                tables["calls"].append((*common, thread, args.get("correlation", NONE)))
            case "cpu_op":
                tables["ops"].append((*common, thread, args.get("Sequence number", NONE), reference_inputs(args)))
            case "user_annotation":
                tables["ranges"].append((*common, thread))
    assert not threads
    return {name: sorted(table, key=repr) for name, table in tables.items()}


def reference_inputs(args: dict[str, Any]) -> tuple[Any, ...] | None:
    dims, kinds = args.get("Input Dims", []), args.get("Input type", [])
    if not dims and not kinds:
        return None
    entries = []
    for position, dim in enumerate(dims):
        kind = kinds[position] if position < len(kinds) else ""
        if dim and isinstance(dim[0], list):
            entries += [(tuple(tensor), "TensorList") for tensor in dim]
        else:
            entries.append((tuple(dim), "" if kind in ("", "Scalar") else kind))
    return tuple(entries)


def found_rows(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    common = ("name", "start_ns", "duration_ns")
    found = {
        "work": rows(trace, "work", *common, "device", "stream", "correlation", "size_bytes"),
        "calls": rows(trace, "calls", *common, "thread", "correlation"),
        "ops": rows(trace, "ops", *common, "thread", "sequence", "inputs"),
        "ranges": rows(trace, "ranges", *common, "thread"),
    }
    for name, table in found.items():
        assert [row[1] for row in table] == sorted(row[1] for row in table), f"{name} in the order of start"
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(kineto_events(), max_size=12), st.integers(0, 2**32), st.integers(1, 60) | st.sampled_from([500, 10**6]))
def test_tables_hold_what_a_plain_reader_finds(
    tmp_path: Path, events: list[dict[str, Any]], seed: int, chunk_bytes: int
) -> None:
    path = tmp_path / "t.json"
    path.write_text(as_text(events, seed))
    trace = read_trace(path, chunk_bytes=chunk_bytes)
    found, expected = found_rows(trace), reference(events)
    # Thread numbers may be any, so long as they tell the same threads apart.
    numbers: dict[int, Any] = {}
    for name, table in found.items():
        if name != "work":
            by_row = {}
            for row in table:
                by_row.setdefault((row[:3], row[4:]), []).append(row[3])
    named = {name: [as_reference(row, name) for row in table] for name, table in found.items()}
    plain = {name: [as_reference(row, name) for row in table] for name, table in expected.items()}
    assert {name: sorted(table, key=repr) for name, table in named.items()} == {
        name: sorted(table, key=repr) for name, table in plain.items()
    }
    assert not numbers
