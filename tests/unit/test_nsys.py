import hashlib
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from steplab.errors import UserError
from steplab.reading.traces.reading import read_trace
from steplab.reading.traces.trace import NONE, Trace

WORK = "start, end, deviceId, contextId, greenContextId, streamId, correlationId, globalPid"
SCHEMA = {
    "META_DATA_EXPORT": "name, value",
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_GPU": "vmId, id, name, cuDevice",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{WORK}, demangledName, shortName, mangledName, gridX, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{WORK}, bytes, copyKind, srcKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{WORK}, value, bytes",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{WORK}, graphId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, eventClass, globalTid, correlationId, nameId, returnValue",
    "NVTX_EVENTS": "start, end, eventType, rangeId, text, globalTid, endGlobalTid, textId, domainId",
}
PID = (1 << 48) | (4242 << 24)
OTHER_PID = (1 << 48) | (4343 << 24)
STRINGS = {
    1: "void gemm<float>(float*)",
    2: "gemm",
    3: "cudaLaunchKernel_v7000",
    4: "forward",
    5: "cudaMemcpyAsync_v3020",
    6: "cudaStreamSynchronize_v3020_ptsz",
}
ROWS: dict[str, list[Sequence[Any]]] = {
    "META_DATA_EXPORT": [("EXPORT_SCHEMA_VERSION", "3.16.1")],
    "StringIds": list(STRINGS.items()),
    "TARGET_INFO_GPU": [(1, 0, "NVIDIA T4", 1), (1, 1, "NVIDIA H200", 0)],
    "CUPTI_ACTIVITY_KIND_KERNEL": [
        (300, 350, 0, 1, None, 7, 12, PID, 1, 2, None, 4, None),
        (200, 240, 0, 1, None, 7, 11, PID, None, 2, None, 4, None),
    ],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [
        (400, 410, 0, 1, None, 7, 13, PID, 4096, 1, 0),
        (420, 421, 0, 1, None, 8, 14, PID, 8, 99, 0),
    ],
    "CUPTI_ACTIVITY_KIND_MEMSET": [(100, 101, 0, 1, None, 7, None, PID, 0, 16)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [
        (150, 160, 0, PID | 4242, 11, 3, 0),
        (170, 180, 0, PID | 5000, 12, 3, 0),
        (390, 395, 0, PID | 4242, 13, 5, 0),
        (500, 600, 0, PID | 4242, 15, 6, 0),
    ],
    "NVTX_EVENTS": [
        (140, 200, 59, None, "step", PID | 4242, None, None, 0),
        (140, 190, 59, None, None, PID | 4242, None, 4, 0),
        (165, 185, 60, 3, "loader", PID | 5000, PID | 4242, None, 0),
        (145, None, 34, None, "a mark", PID | 4242, None, None, 0),
        (0, None, 75, None, "NCCL", PID | 4242, None, None, 1),
    ],
}


def export(path: Path, rows: dict[str, list[Sequence[Any]]] = ROWS, renamed: dict[str, str] | None = None) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for table, content in rows.items():
            name = (renamed or {}).get(table, table)
            connection.execute(f"CREATE TABLE {name} ({SCHEMA[table]})")
            for row in content:
                connection.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
        connection.commit()
    return path


def rows_of(trace: Trace, table: str, *columns: str) -> list[tuple[Any, ...]]:
    found = getattr(trace, table)
    names = [trace.names[number] for number in found.name]
    return list(zip(names, *(getattr(found, column).tolist() for column in columns), strict=True))


def test_an_export(tmp_path: Path) -> None:
    trace = read_trace(export(tmp_path / "t.sqlite"))
    columns = ("start_ns", "duration_ns", "device", "stream", "correlation")
    assert rows_of(trace, "work", *columns) == [
        ("Memset", 100, 1, 0, 7, NONE),
        ("gemm", 200, 40, 0, 7, 11),
        ("void gemm<float>(float*)", 300, 50, 0, 7, 12),
        ("Memcpy HtoD", 400, 10, 0, 7, 13),
        ("Memcpy unknown", 420, 1, 0, 8, 14),
    ]
    assert rows_of(trace, "calls", "start_ns", "duration_ns", "thread", "correlation") == [
        ("cudaLaunchKernel", 150, 10, 0, 11),
        ("cudaLaunchKernel", 170, 10, 1, 12),
        ("cudaMemcpyAsync", 390, 5, 0, 13),
        ("cudaStreamSynchronize", 500, 100, 0, 15),
    ]
    assert rows_of(trace, "ranges", "start_ns", "duration_ns", "thread") == [
        ("step", 140, 60, 0),
        ("forward", 140, 50, 0),
        ("loader", 165, 20, 1),
    ]
    assert len(trace.ops.name) == 0
    assert (trace.source, trace.device_name, trace.notes) == ("nsys", "NVIDIA H200", ())
    assert trace.processes == (0, 0)


def test_newer_versions_of_tables(tmp_path: Path) -> None:
    renamed = {table: f"{table}_V2" for table in SCHEMA if table.startswith(("CUPTI", "NVTX"))}
    path = export(tmp_path / "t.sqlite", renamed=renamed)
    export(path, {"CUPTI_ACTIVITY_KIND_MEMSET": []}, {"CUPTI_ACTIVITY_KIND_MEMSET": "CUPTI_ACTIVITY_KIND_MEMSET_V1"})
    expected = read_trace(export(tmp_path / "plain.sqlite"))
    trace = read_trace(path)
    assert trace.notes == ()
    assert rows_of(trace, "work", "start_ns") == rows_of(expected, "work", "start_ns")
    assert rows_of(trace, "ranges", "start_ns") == rows_of(expected, "ranges", "start_ns")


@pytest.mark.parametrize(
    ("absent", "note"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "the export has no kernels: was CUDA traced"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "the export has no CUDA calls"),
        ("NVTX_EVENTS", "the export has no NVTX ranges"),
    ],
)
@pytest.mark.parametrize("empty", [False, True])
def test_what_is_missing_is_told(absent: str, note: str, empty: bool, tmp_path: Path) -> None:
    rows = {table: content for table, content in ROWS.items() if table != absent}
    trace = read_trace(export(tmp_path / "t.sqlite", rows | ({absent: []} if empty else {})))
    assert len(trace.notes) == 1
    assert trace.notes[0].startswith(note)


def test_an_export_without_any_events(tmp_path: Path) -> None:
    trace = read_trace(export(tmp_path / "t.sqlite", {"META_DATA_EXPORT": ROWS["META_DATA_EXPORT"]}))
    assert len(trace.work.name) == len(trace.calls.name) == len(trace.ranges.name) == 0
    assert (len(trace.notes), trace.device_name) == (3, None)


def test_columns_of_an_older_schema(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, streamId, correlationId, shortName);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 20, 7, 1, 1), (30, 40, 7, 2, 99);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 16777217, 1, 2);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT);
            INSERT INTO NVTX_EVENTS VALUES (0, 50, 59, 'step', 16777217);
            CREATE TABLE StringIds (id INT, value TEXT);
            INSERT INTO StringIds VALUES (1, 'k'), (2, 'cuLaunchKernel');
            """
        )
    trace = read_trace(path)
    assert rows_of(trace, "work", "device", "stream", "correlation") == [("k", NONE, 7, 1), ("(unnamed)", NONE, 7, 2)]
    assert rows_of(trace, "calls", "thread", "correlation") == [("cuLaunchKernel", 0, 1)]
    assert trace.notes == ()


def test_every_process_counts_its_own_correlations(tmp_path: Path) -> None:
    rows = dict(ROWS)
    kernel, call = ROWS["CUPTI_ACTIVITY_KIND_KERNEL"][1], ROWS["CUPTI_ACTIVITY_KIND_RUNTIME"][0]
    rows["CUPTI_ACTIVITY_KIND_KERNEL"] = [kernel, (700, 750, *kernel[2:7], OTHER_PID, *kernel[8:])]
    rows["CUPTI_ACTIVITY_KIND_RUNTIME"] = [(650, 660, 0, OTHER_PID | 4343, *call[4:]), call]
    trace = read_trace(export(tmp_path / "t.sqlite", rows))
    launched = dict(zip(trace.calls.correlation.tolist(), trace.calls.start_ns.tolist(), strict=True))
    work = zip(trace.work.correlation.tolist(), trace.work.start_ns.tolist(), strict=True)
    assert [(launched[c], start) for c, start in work if c in launched] == [(150, 200), (650, 700)]
    assert trace.notes == ()
    assert trace.processes == (0, 1, 1)


def test_a_correlation_of_zero_is_none_in_every_process(tmp_path: Path) -> None:
    rows = dict(ROWS)
    kernel, call = ROWS["CUPTI_ACTIVITY_KIND_KERNEL"][1], ROWS["CUPTI_ACTIVITY_KIND_RUNTIME"][0]
    rows["CUPTI_ACTIVITY_KIND_KERNEL"] = [kernel, (700, 750, *kernel[2:6], 0, OTHER_PID, *kernel[8:])]
    rows["CUPTI_ACTIVITY_KIND_RUNTIME"] = [call, (800, 810, 0, OTHER_PID | 4343, 0, *call[5:])]
    trace = read_trace(export(tmp_path / "t.sqlite", rows))
    assert [c for name, c in rows_of(trace, "work", "correlation") if c != NONE and name == "gemm"] == [11]
    assert trace.calls.correlation.tolist() == [11, NONE]


def test_graphs_traced_as_wholes(tmp_path: Path) -> None:
    rows = ROWS | {
        "CUPTI_ACTIVITY_KIND_KERNEL": [],
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [(50, 90, 0, 1, None, 7, 11, PID, 3)],
    }
    trace = read_trace(export(tmp_path / "t.sqlite", rows))
    assert rows_of(trace, "work", "start_ns", "duration_ns", "correlation")[0] == ("CUDA graph", 50, 40, 11)
    assert len(trace.notes) == 1
    assert trace.notes[0].startswith("1 CUDA graphs were traced as wholes")


def test_rows_without_a_proper_end(tmp_path: Path) -> None:
    nvtx = [*ROWS["NVTX_EVENTS"], (10, None, 59, None, "never closed", PID | 4242, None, None, 0)]
    kernels = [*ROWS["CUPTI_ACTIVITY_KIND_KERNEL"], (9, 8, 0, 1, None, 7, 1, PID, 1, 2, None, 4, None)]
    trace = read_trace(
        export(tmp_path / "t.sqlite", ROWS | {"NVTX_EVENTS": nvtx, "CUPTI_ACTIVITY_KIND_KERNEL": kernels})
    )
    assert (len(trace.ranges.name), len(trace.work.name)) == (3, 5)
    assert sorted(note.split()[2] for note in trace.notes) == ["CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"]
    assert all(note.endswith(": 1") for note in trace.notes)


def test_bad_utf8_in_a_name_is_replaced(tmp_path: Path) -> None:
    path = export(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE StringIds SET value = CAST(x'6bff' AS TEXT) WHERE id = 1")
        connection.commit()
    assert "k\N{REPLACEMENT CHARACTER}" in read_trace(path).names


def test_the_file_is_not_touched(tmp_path: Path) -> None:
    path = export(tmp_path / "a name with ? and # and %20.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        # In this mode SQLite keeps files next to an open database, even for reading.
        connection.execute("PRAGMA journal_mode = WAL")
    before = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns
    seen = list[tuple[int, int]]()
    listed = list[list[Path]]()

    def on_progress(done: int, size: int) -> None:
        seen.append((done, size))
        listed.append(list(tmp_path.iterdir()))

    read_trace(path, on_progress)
    assert (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) == before
    assert all(files == [path] for files in [*listed, list(tmp_path.iterdir())])
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE runs (id)")
    with pytest.raises(UserError, match=r"other.db is an SQLite database, but not an export of Nsight Systems"):
        read_trace(path)


def test_a_damaged_export_gives_what_it_can(tmp_path: Path) -> None:
    kernels: list[Sequence[Any]] = [(n, n + 1, 0, 1, None, 7, n, PID, 1, 2, None, 4, None) for n in range(100, 60_100)]
    path = export(tmp_path / "t.sqlite", ROWS | {"CUPTI_ACTIVITY_KIND_KERNEL": kernels})
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 20_000] = bytes(20_000)
    path.write_bytes(whole)
    trace = read_trace(path)
    assert 10_000 < len(trace.work.name) < 50_000
    assert len(trace.calls.name) == 4
    assert len(trace.notes) == 1
    assert trace.notes[0].startswith("table CUPTI_ACTIVITY_KIND_KERNEL is unreadable in part: ")


def test_a_cut_export_is_refused_in_one_line(tmp_path: Path) -> None:
    path = export(tmp_path / "t.sqlite")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UserError, match="is a damaged SQLite database: database disk image is malformed"):
        read_trace(path)


def test_values_of_other_types_are_left_out_and_counted(tmp_path: Path) -> None:
    path = export(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        kernels = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET"
        wrong = "deviceId = 'zero', streamId = ?, correlationId = 1e300"
        connection.execute(f"{kernels} {wrong} WHERE start = 200", (b"7",))
        connection.execute(f"{kernels} end = 0.5 WHERE start = 300")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = ? WHERE start = 150", (float("inf"),))
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = ? WHERE start = 170", (-(2**63),))
        connection.execute("UPDATE StringIds SET value = ? WHERE id = 2", (b"\xff",))
        connection.execute("UPDATE TARGET_INFO_GPU SET name = 7")
        connection.commit()
    trace = read_trace(path)
    [kernel] = [row for row in rows_of(trace, "work", "start_ns", "device", "stream", "correlation") if row[1] == 200]
    assert kernel == ("(unnamed)", 200, NONE, NONE, NONE)
    assert rows_of(trace, "calls", "start_ns", "thread")[0] == ("cudaLaunchKernel", 150, 0)
    assert len(trace.calls.name) == 3
    assert trace.device_name is None
    notes = " ".join(trace.notes)
    assert "rows of CUPTI_ACTIVITY_KIND_KERNEL left out, without an end" in notes
    assert "rows of CUPTI_ACTIVITY_KIND_KERNEL with values of a wrong type, which are left out: 1" in notes
    assert "rows of CUPTI_ACTIVITY_KIND_RUNTIME with values of a wrong type, which are left out: 1" in notes


def test_a_view_that_never_ends_is_not_read(tmp_path: Path) -> None:
    path = export(tmp_path / "t.sqlite")
    expected = read_trace(path).notes
    with closing(sqlite3.connect(path)) as connection:
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i AS start, i AS end FROM n"
        connection.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_MEMSET_V2 AS {endless}")
    assert read_trace(path).notes == expected
