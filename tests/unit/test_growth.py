"""Time and memory of each reader grow linearly: N, 2N and 4N of everything. Quadratic growth would be 16-fold for 4N; 3
times linear is allowed on a noisy machine.
"""

import itertools
import json
import pickle
import sqlite3
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.first import first

from steplab.errors import SteplabError
from steplab.reading.snapshots.digest import digest as digest_snapshot
from steplab.reading.snapshots.reading import read_snapshot
from steplab.reading.traces.digest import digest as digest_trace
from steplab.reading.traces.reading import read_trace

N = 500
SLACK = 3
LEAST_S, LEAST_BYTES = 0.05, 2e6

Event = dict[str, Any]


def event(number: int, cat: str = "cpu_op", **more: object) -> Event:
    return {"ph": "X", "cat": cat, "name": "x", "pid": 1, "tid": 1, "ts": number * 10, "dur": 5} | more


def kernel(number: int, name: str = "k", stream: int = 7, device: int = 0, **more: object) -> Iterator[Event]:
    correlation = {"correlation": number + 1}
    yield event(number, "cuda_runtime", name="cudaLaunchKernel", args=correlation, **more)
    yield event(number, "kernel", name=name, args={"stream": stream, "device": device} | correlation)


def kernels(n: int) -> list[Event]:
    return [each for i in range(n) for each in kernel(i)]


def ranges(n: int, name: str = "range {}", **more: object) -> list[Event]:
    return [event(i, "user_annotation", name=name.format(i), **more) for i in range(n)]


def inside(n: int, cat: str, **more: object) -> list[Event]:
    return [event(i, cat, name=f"x {i}", ts=i, dur=10 * n - i, **more) for i in range(n)]


MM = {"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}
EVENTS: dict[str, Callable[[int], list[Event]]] = {
    "operators within each other": lambda n: inside(n, "cpu_op", args=MM),
    "ranges within each other": lambda n: [*inside(n, "user_annotation"), *kernel(n // 5)],
    "operators": lambda n: [event(i) for i in range(n)],
    "inputs": lambda n: [event(i, name="aten::mm", args=MM | {"Input Dims": [[i, 1], [1, i]]}) for i in range(n)],
    "autograd's nodes": lambda n: [
        event(i, name="autograd::engine::evaluate_function: A", args={"Sequence number": i}) for i in range(n)
    ],
    "ranges that overlap": lambda n: [*ranges(n, dur=20 * n), *kernel(n)],
    "steps": lambda n: [*ranges(n, "ProfilerStep#{}"), *kernels(n)],
    "phases, and one long kernel": lambda n: [
        *(event(i, "user_annotation", name=("forward", "backward")[i % 2]) for i in range(n)),
        *kernels(n),
        event(0, "kernel", dur=10 * n),
    ],
    "names of kernels": lambda n: [each for i in range(n) for each in kernel(i, name=f"k{i}")],
    "streams": lambda n: [each for i in range(n) for each in kernel(i, stream=i)],
    "devices": lambda n: [each for i in range(n) for each in kernel(i, device=i)],
    "processes": lambda n: [each for i in range(n) for each in kernel(i, pid=i)],
    "threads": lambda n: [e | {"tid": e["ts"]} for e in (*kernels(n), *ranges(n), *(event(i) for i in range(n)))],
    "waits": lambda n: [event(i, "cuda_runtime", name=f"cudaStreamSynchronize{i}") for i in range(n)],
    "collectives": lambda n: [each for i in range(n) for each in kernel(i, name="ncclDevKernel_AllReduce")],
    "messages of the host": lambda n: [*ranges(n, "gloo:all_reduce", tid=2, dur=15), *(event(i) for i in range(n))],
}
GOOD, BAD = '{"cat": "cpu_op", "name": "k", "ts": 1, "dur": 1}', '{"cat": "cpu_op", "name": "k"k", "ts": 1, "dur": 1}'
INDENTED = '\n  {\n    "cat": "cpu_op", "name": "x", "ts": 1, "dur": 1\n  },'
TEXTS: dict[str, Callable[[int], str]] = {
    "objects that are none": lambda n: "[" + "{x}," * 10 * n + GOOD + "]",
    "damaged events": lambda n: "[" + f"{GOOD},{BAD}," * n + GOOD + "]",
    "numbers": lambda n: "[" + "1," * 10 * n + GOOD + "]",
    "letters": lambda n: "[" + "x," * 10 * n + GOOD + "]",
    "strings": lambda n: '["' + 'x","' * 10 * n + '"]',
    "damaged events, indented": lambda n: "[" + (INDENTED + INDENTED.replace('"x"', '"x"x"')) * n + GOOD + "]",
    "events to be repaired": lambda n: "[" + (GOOD.replace("}", ', "x": NaN},')) * n + GOOD + "]",
    "lists": lambda n: "[" * 10 * n + "]" * 10 * n,
    "lists without an end": lambda n: "[" * 10 * n,
    "members": lambda n: "{" + '"a":1,' * n + f'"traceEvents":[{GOOD}]}}',
    "lists of events": lambda n: "{" + '"traceEvents":[],' * n + '"a":1}',
    "a long member": lambda n: '{"a":[' + "1," * 50 * n + f'1],"traceEvents":[{GOOD}]}}',
    "commas": lambda n: "[" + "," * 100 * n + "]",
    "backslashes": lambda n: '["' + "\\" * 100 * n + '"]',
    "spaces": lambda n: "[" + " " * 100 * n + GOOD + "]",
}
FRAME = {"filename": "/app/train.py", "line": 1, "name": "f"}


def allocated(number: int, action: str = "alloc", line: int = 1, size: int = 3 << 20) -> Event:
    frames = [FRAME | {"line": line}, FRAME]
    return {"action": action, "addr": (1 << 40) + (number << 24), "size": size, "stream": 0, "frames": frames}


def segment(number: int, device: int = 0, num_blocks: int = 1) -> Event:
    block = {"size": 512, "requested_size": 500, "state": "active_allocated", "frames": [FRAME]}
    address = (1 << 40) + (number << 24)
    blocks = [block | {"address": address + 512 * i} for i in range(num_blocks)]
    return {"device": device, "address": address, "total_size": 512 * num_blocks, "blocks": blocks}


def history(*events: Event, segments: tuple[Event, ...] = ()) -> object:
    return {"segments": list(segments), "device_traces": [list(events)]}


SNAPSHOTS: dict[str, Callable[[int], object]] = {
    "allocations": lambda n: history(*(allocated(i) for i in range(n))),
    "sizes": lambda n: history(*(allocated(i, size=512 * i) for i in range(n))),
    "stacks": lambda n: history(*(allocated(i, line=i) for i in range(n))),
    "allocations that are freed": lambda n: history(
        *(allocated(i // 3, ("alloc", "free_requested", "free_completed")[i % 3]) for i in range(n))
    ),
    "frees of nothing": lambda n: history(allocated(0), *(allocated(i, "free_completed") for i in range(n))),
    "failed allocations": lambda n: history(allocated(0), *(allocated(i, "oom") for i in range(n))),
    "segments that come and go": lambda n: history(
        *(allocated(i // 2, ("segment_alloc", "segment_free")[i % 2]) for i in range(n)), allocated(0)
    ),
    "pieces of one segment": lambda n: history(
        allocated(0, "segment_alloc", size=n << 24), *(allocated(i, size=16 << 20) for i in range(n))
    ),
    "segments": lambda n: history(segments=tuple(segment(i) for i in range(n))),
    "blocks": lambda n: history(segments=(segment(0, num_blocks=n),)),
    "devices": lambda n: history(segments=tuple(segment(i, device=i) for i in range(n // 10))),
    "a long stack": lambda n: history(allocated(0) | {"frames": [FRAME | {"line": i} for i in range(10 * n)]}),
}
TABLES: dict[str, Callable[[int], dict[str, list[tuple[object, ...]]]]] = {
    "names without an index": lambda n: {
        "StringIds": [(i, f"kernel {i}") for i in range(n)],
        "CUPTI_ACTIVITY_KIND_KERNEL": [(i, i + 1, 7, i, i, 1) for i in range(n)],
    },
    "kernels": lambda n: {"CUPTI_ACTIVITY_KIND_KERNEL": [(10 * i, 10 * i + 5, 7, i, 1, 1) for i in range(n)]},
    "ranges within each other": lambda n: {
        "NVTX_EVENTS": [(i, 20 * n - i, 59, f"range {i}", 1) for i in range(n)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [(n + 1, n + 2, 1, 1, 1)],
        "CUPTI_ACTIVITY_KIND_KERNEL": [(n + 1, n + 3, 7, 1, 1, 1)],
    },
    "processes": lambda n: {
        "CUPTI_ACTIVITY_KIND_RUNTIME": [(10 * i, 10 * i + 5, i << 24, i, 1) for i in range(n)],
        "CUPTI_ACTIVITY_KIND_KERNEL": [(10 * i, 10 * i + 5, 7, i, 1, i << 24) for i in range(n)],
    },
}
COLUMNS = {
    "StringIds": "id, value",
    "CUPTI_ACTIVITY_KIND_KERNEL": '"start", "end", streamId, correlationId, shortName, globalPid',
    "CUPTI_ACTIVITY_KIND_RUNTIME": '"start", "end", globalTid, correlationId, nameId',
    "NVTX_EVENTS": '"start", "end", eventType, text, globalTid',
}


def write_tables(path: Path, tables: dict[str, list[tuple[object, ...]]]) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for name, rows in tables.items():
            connection.execute(f"CREATE TABLE {name} ({COLUMNS[name]})")
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.commit()


def assert_in_proportion(write: Callable[[int], object], read: Callable[[], object]) -> None:
    took = list[tuple[float, float]]()
    for n in (N, 2 * N, 4 * N):
        write(n)
        tracemalloc.start()
        began_s = time.process_time()
        with suppress(SteplabError):
            read()
        seconds, peak_bytes = time.process_time() - began_s, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        took.append((max(seconds, LEAST_S), max(peak_bytes, LEAST_BYTES)))
    for (before_s, before_bytes), (after_s, after_bytes) in itertools.combinations(took, 2):
        growth = 4 if (before_s, after_s) == (took[0][0], took[-1][0]) else 2
        assert after_s <= SLACK * growth * before_s, f"seconds and bytes: {took}"
        assert after_bytes <= SLACK / 2 * growth * before_bytes, f"seconds and bytes: {took}"


@pytest.mark.parametrize("what", [*first(2, EVENTS), *first(2, TEXTS)])
def test_a_trace(what: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def write(n: int) -> None:
        path.write_text(TEXTS[what](n) if what in TEXTS else json.dumps({"traceEvents": EVENTS[what](n)}))

    assert_in_proportion(write, lambda: digest_trace(read_trace(path)))


@pytest.mark.parametrize("what", first(1, TABLES))
def test_an_export_of_nsys(what: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    assert_in_proportion(lambda n: write_tables(path, TABLES[what](n)), lambda: digest_trace(read_trace(path)))


@pytest.mark.parametrize("what", first(2, SNAPSHOTS))
def test_a_snapshot(what: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    assert_in_proportion(
        lambda n: path.write_bytes(pickle.dumps(SNAPSHOTS[what](n))), lambda: digest_snapshot(read_snapshot(path), None)
    )
