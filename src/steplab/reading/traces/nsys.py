"""Read SQLite exports of Nsight Systems into columns. `nsys export --type sqlite` writes a table per kind of event.
Tables and columns vary by version and options, so they are looked up first.
"""

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steplab.errors import UserError
from steplab.reading.traces import trace
from steplab.reading.traces.naming import Call, called, without_call
from steplab.reading.traces.trace import EARLIEST_NS, LATEST_NS, LONGEST_NS, NONE, Inputs, Trace, TraceBuilder
from steplab.unpacking import OnProgress

SQLITE_MAGIC = b"SQLite format 3\0"

_KERNELS, _GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_COPIES, _FILLS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_CALLS, _RANGES, _GPUS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "TARGET_INFO_GPU"
_TEXTS = "StringIds"
_MARKS_OF_AN_EXPORT = {"META_DATA_EXPORT", _TEXTS, _KERNELS, _CALLS, _RANGES}

_COPY_KINDS = (
    *("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("Unified HtoD", "Unified DtoH", "Unified DtoD"),
)
"""Copy kinds in the order of ENUM_CUDA_MEMCPY_OPER, in Kineto's words."""
_PUSH_POP, _START_END = 59, 60
_CALL_VERSION = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")
"""Version suffix of a call: cudaLaunchKernel_v7000 becomes cudaLaunchKernel."""
_THREAD_BITS = 24
_CORRELATION_BITS = 32
_ROWS = 20_000
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of a damaged database; the last concerns table and column names."""

Integers = NDArray[np.int64]


def read_nsys(path: Path, on_progress: OnProgress) -> Trace:
    """Read the trace in an export, opened read-only. Raises UserError for other files."""
    size_bytes = path.stat().st_size
    # Immutable, so SQLite writes no files next to it.
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        try:
            export = _Export(connection)
        except _UNREADABLE as error:
            raise UserError(f"{path} is a damaged SQLite database: {error}") from error
        if not export.is_export:
            raise UserError(
                f"{path} is an SQLite database, but not an export of Nsight Systems (nsys export --type sqlite)"
            )
        return export.read(lambda share: on_progress(int(size_bytes * share), size_bytes))


def _name_of_copy(kind: int) -> str:
    return f"Memcpy {_COPY_KINDS[kind] if kind in range(len(_COPY_KINDS)) else 'unknown'}"


class _Export:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._builder = TraceBuilder("nsys")
        self._processes = trace.Numbering[int]()
        self._num_rows = Counter[str]()
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        # The newest of X, X_V2 and X_V3 sorts last.
        self._tables = {re.sub(r"_V\d+$", "", name): name for name in sorted(names)}
        self._texts = dict[int, str]()
        self.is_export = not _MARKS_OF_AN_EXPORT.isdisjoint(self._tables)

    def read(self, on_done: Callable[[float], None]) -> Trace:
        """Read all tables; notes name those that are missing or damaged."""
        readers: dict[str, Callable[[], None]] = {
            _TEXTS: self._read_texts,
            _KERNELS: partial(self._read_work, _KERNELS, ("demangledName", "shortName", "mangledName"), self._text),
            _GRAPHS: partial(self._read_work, _GRAPHS, (), lambda value: "CUDA graph"),
            _COPIES: partial(self._read_work, _COPIES, ("copyKind",), _name_of_copy),
            _FILLS: partial(self._read_work, _FILLS, (), lambda value: "Memset"),
            _CALLS: self._read_calls,
            _RANGES: self._read_ranges,
        }
        for number, (base, read) in enumerate(readers.items(), 1):
            if base in self._tables:
                try:
                    read()
                except _UNREADABLE as error:
                    self._builder.damage.append(f"table {self._tables[base]} is unreadable in part: {error}")
                    self._builder.notes.append(self._builder.damage[-1])
            on_done(number / len(readers))
        self._note_absence()
        return self._builder.build(self._device_names())

    def _note_absence(self) -> None:
        notes, num_rows = self._builder.notes, self._num_rows
        if not num_rows[_KERNELS] and not num_rows[_GRAPHS]:
            notes.append("the export has no kernels: was CUDA traced (nsys profile --trace=cuda,nvtx)?")
        if num_rows[_GRAPHS]:
            notes.append(
                f"{num_rows[_GRAPHS]} CUDA graphs were traced as wholes; nsys profile --cuda-graph-trace=node shows "
                "their kernels"
            )
        if not num_rows[_CALLS]:
            notes.append("the export has no CUDA calls: the launching ranges of kernels are unknown")
        if not num_rows[_RANGES]:
            notes.append("the export has no NVTX ranges: steps and phases are unknown")

    def _read_work(self, base: str, name_columns: Sequence[str], text: Callable[[Any], str]) -> None:
        columns = (name_columns, "deviceId", "streamId", "correlationId", "globalPid")
        for start_ns, duration_ns, name, device, stream, correlation, process in self._rows(base, columns):
            self._builder.add(
                trace.DeviceWork,
                name=[self._builder.names[text(value)] for value in name],
                start_ns=start_ns,
                duration_ns=duration_ns,
                device=device,
                stream=stream,
                correlation=self._correlation(correlation, process),
            )

    def _read_calls(self) -> None:
        for start_ns, duration_ns, name, thread, correlation in self._rows(
            _CALLS, (("nameId",), "globalTid", "correlationId")
        ):
            self._builder.add(
                trace.HostCalls,
                name=[self._builder.names[_CALL_VERSION.sub("", self._text(value))] for value in name],
                start_ns=start_ns,
                duration_ns=duration_ns,
                thread=[self._builder.threads[tid >> _THREAD_BITS, tid] for tid in thread],
                correlation=self._correlation(correlation, thread),
            )

    def _read_ranges(self) -> None:
        kinds = f"eventType IN ({_PUSH_POP}, {_START_END})"
        for *times, name, thread in self._rows(_RANGES, (("text", "textId"), "globalTid"), kinds):
            texts = [self._text(value) for value in name]
            ops = [called(text) for text in texts]
            is_op = [op is not None for op in ops]
            for kind, chosen in ((trace.Ranges, [not op for op in is_op]), (trace.Ops, is_op)):
                start_ns, duration_ns, tids = (list(compress(values, chosen)) for values in (*times, thread))
                own = self._calls_of(list(compress(ops, chosen))) if kind is trace.Ops else {}
                names = [op[0] if op else without_call(text) for op, text in zip(ops, texts, strict=True)]
                self._builder.add(
                    kind,
                    name=[self._builder.names[text] for text in compress(names, chosen)],
                    start_ns=start_ns,
                    duration_ns=duration_ns,
                    thread=[self._builder.threads[tid >> _THREAD_BITS, tid] for tid in tids],
                    **own,
                )

    def _calls_of(self, ops: Sequence[Call | None]) -> dict[str, list[int]]:
        numbers, given = self._builder.inputs, [op for op in ops if op]
        shapes = [tuple(map(tuple, sizes)) for _, _, sizes in given]
        return {
            "sequence": [NONE if number is None else number for _, number, _ in given],
            "inputs": [numbers[Inputs(shapes=of, dtypes=(trace.UNTYPED,) * len(of))] if of else NONE for of in shapes],
        }

    def _rows(
        self, base: str, columns: Sequence[str | Sequence[str]], condition: str = "1"
    ) -> Iterator[Sequence[Sequence[Any]]]:
        """Yield start, duration and the given columns in chunks. If a column has several names, the first with a value
        counts. Missing values and wrong types become NONE; only names may be text, since SQLite stores any type in any
        column.
        """
        table = self._tables[base]
        known = {row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')}
        chosen, unusable = [], []
        for names in columns:
            types = "('integer')" if isinstance(names, str) else "('integer', 'text')"
            present = [f'"{name}"' for name in ((names,) if isinstance(names, str) else names) if name in known]
            usable = [f"CASE WHEN typeof({name}) IN {types} THEN {name} END" for name in present]
            chosen.append(f"COALESCE({', '.join(usable)}, {NONE})" if present else str(NONE))
            unusable += [f"typeof({name}) NOT IN ('null', {types[1:]}" for name in present]
        timed = " AND ".join(
            (
                "typeof(\"start\") = 'integer' AND typeof(\"end\") = 'integer'",
                f'"start" BETWEEN {EARLIEST_NS} AND {LATEST_NS} AND "end" BETWEEN "start" AND "start" + {LONGEST_NS}',
            )
        )
        cursor = self._connection.execute(
            f'SELECT "start", "end" - "start", {", ".join(chosen)} FROM "{table}" WHERE {condition} AND {timed}'
        )
        while rows := cursor.fetchmany(_ROWS):
            self._num_rows[base] += len(rows)
            yield list(zip(*rows, strict=True))
        notes = {
            "left out, without an end or ending before they begin": f"NOT ({timed})",
            "with values of a wrong type, which are left out": " OR ".join(unusable) or "0",
        }
        for what, which in notes.items():
            query = f'SELECT COUNT(*) FROM "{table}" WHERE {condition} AND ({which})'
            if count := self._connection.execute(query).fetchone()[0]:
                self._builder.notes.append(f"rows of {table} {what}: {count}")

    def _correlation(self, correlation: Sequence[int], owner: Sequence[int]) -> Integers:
        ids = np.array(correlation, dtype=np.int64)
        process = [0 if number == NONE else self._processes[number >> _THREAD_BITS] for number in owner]
        return np.where(ids <= 0, NONE, ids + (np.array(process, dtype=np.int64) << _CORRELATION_BITS))

    def _text(self, value: int | str) -> str:
        if isinstance(value, str):
            return value
        return self._texts.get(value, "(unnamed)")

    def _read_texts(self) -> None:
        """Read all texts at once; without an index each look-up would scan half the table."""
        typed = "typeof(id) = 'integer' AND typeof(value) = 'text'"
        rows = self._connection.execute(f'SELECT id, value FROM "{self._tables[_TEXTS]}" WHERE {typed}').fetchall()
        self._texts = dict(reversed(rows))  # the first of an id counts

    def _device_names(self) -> dict[int, str]:
        if _GPUS not in self._tables:
            return {}
        try:
            cursor = self._connection.execute(f'SELECT * FROM "{self._tables[_GPUS]}"')
            rows = [dict(zip((column[0] for column in cursor.description), row, strict=True)) for row in cursor]
        except _UNREADABLE:
            return {}
        names = ((row.get("cuDevice", row.get("id")), row.get("name")) for row in rows)
        return {device: name for device, name in names if isinstance(device, int) and isinstance(name, str) and name}
