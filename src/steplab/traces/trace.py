"""A trace as columns: what the profilers agree on, whoever wrote the file.

Times are int64 nanoseconds on one clock. Names are kept once, and columns hold their numbers: a real trace names the
same few hundred kernels a million times. Every column that is no time is int32 where its values fit, which they nearly
always do: a trace of 2 GB has millions of events. Multiply such columns only after widening them.
"""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.signedinteger[Any]]

NONE = -1
"""In a column: the trace does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWork:
    """What ran on the device: kernels, copies, fills. In the order of their start."""

    name: Column
    start_ns: Column
    duration_ns: Column
    device: Column
    stream: Column
    correlation: Column
    """Pairs it with the host call that launched it; one call can launch several (a CUDA graph)."""
    size_bytes: Column
    """Bytes of a copy or fill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCalls:
    """Calls into the CUDA runtime or driver: launches, copies, synchronisations."""

    name: Column
    start_ns: Column
    duration_ns: Column
    thread: Column
    """Number of the thread, counted from 0 in the order of appearance."""
    correlation: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """Operators on the host, aten::mm and such; they nest."""

    name: Column
    start_ns: Column
    duration_ns: Column
    thread: Column
    sequence: Column
    """Autograd's number: a forward op and the backward op that belongs to it carry the same."""
    inputs: Column
    """Number of its inputs in Trace.inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """Named stretches of host time: record_function and NVTX; they nest."""

    name: Column
    start_ns: Column
    duration_ns: Column
    thread: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Shapes and types of an op's arguments, as far as they are tensors.

    A list of tensors takes an entry for each of its tensors, whose types the profiler does not record.
    """

    shapes: tuple[tuple[int, ...], ...]
    """An argument each; () for what is no tensor."""
    dtypes: tuple[str, ...]
    """An argument each, by torch's C++ names (float, c10::BFloat16); TensorList for a tensor out of a list; '' for what
    is no tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Everything a reader found in one file."""

    source: str
    """kineto or nsys."""
    names: tuple[str, ...]
    """Text of each name number."""
    inputs: tuple[Inputs, ...]
    """Each different set of op inputs, once."""
    work: DeviceWork
    calls: HostCalls
    ops: Ops
    ranges: Ranges
    device_name: str | None = None
    """The GPU's name, where the file says it."""
    notes: tuple[str, ...] = field(default=())
    """What the file lacks or what in it could not be read, in words; () for a whole one."""


Key = TypeVar("Key", bound=Hashable)
Values = int | Sequence[int] | NDArray[Any]
"""One event's value, or one for each of many."""


class Numbering(dict[Key, int]):
    """Numbers things from 0 in the order in which they are first looked up."""

    def __missing__(self, key: Key) -> int:
        number = self[key] = len(self)
        return number


class TraceBuilder:
    """Collects events, one or many at a time, compactly, and makes the Trace."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.device_name: str | None = None
        self.notes: list[str] = []
        self.names = Numbering[str]()
        self.inputs = Numbering[Inputs]()
        self.threads = Numbering[Hashable]()
        """By whatever tells the threads of the file apart."""
        self._work, self._calls, self._ops, self._ranges = (_Table(t) for t in (DeviceWork, HostCalls, Ops, Ranges))

    def add_work(
        self,
        name: Values,
        start_ns: Values,
        duration_ns: Values,
        device: Values,
        stream: Values,
        correlation: Values,
        size_bytes: Values,
    ) -> None:
        self._work.extend(name, start_ns, duration_ns, device, stream, correlation, size_bytes)

    def add_call(
        self, name: Values, start_ns: Values, duration_ns: Values, thread: Values, correlation: Values
    ) -> None:
        self._calls.extend(name, start_ns, duration_ns, thread, correlation)

    def add_op(
        self, name: Values, start_ns: Values, duration_ns: Values, thread: Values, sequence: Values, inputs: Values
    ) -> None:
        self._ops.extend(name, start_ns, duration_ns, thread, sequence, inputs)

    def add_range(self, name: Values, start_ns: Values, duration_ns: Values, thread: Values) -> None:
        self._ranges.extend(name, start_ns, duration_ns, thread)

    def build(self) -> Trace:
        """The Trace: each table in the order of start, an outer range or op before what it contains.

        Ends the builder: its tables become the trace's.
        """
        calls = HostCalls(**self._calls.build())
        if repeated := _num_repeated(calls.correlation):
            self.notes.append(
                f"{repeated} correlation ids belong to more than one host call: which of them launched the work is "
                "not certain"
            )
        return Trace(
            source=self.source,
            names=tuple(self.names),
            inputs=tuple(self.inputs),
            work=DeviceWork(**self._work.build()),
            calls=calls,
            ops=Ops(**self._ops.build()),
            ranges=Ranges(**self._ranges.build()),
            device_name=self.device_name,
            notes=tuple(self.notes),
        )


_TIMES = ("start_ns", "duration_ns")


class _Table:
    """Growing columns. An array grows in place where the system can move its pages, so nothing is held twice."""

    def __init__(self, kind: type) -> None:
        self._names = [field.name for field in fields(kind)]
        self._columns = [array("q" if name in _TIMES else "i") for name in self._names]

    def extend(self, *values: Values) -> None:
        for position, value in enumerate(values):
            if isinstance(value, list):
                try:
                    self._columns[position].fromlist(value)
                except OverflowError:
                    self._widen(position)
                    self._columns[position].fromlist(value)
            else:
                given = np.atleast_1d(np.asarray(value, dtype=np.int64))
                if self._columns[position].typecode == "i" and given.size and not _fits(given):
                    self._widen(position)
                column = self._columns[position]
                column.frombytes(given.astype(np.dtype(column.typecode), copy=False).tobytes())

    def _widen(self, position: int) -> None:
        self._columns[position] = array("q", self._columns[position])

    def build(self) -> dict[str, Column]:
        start_ns, duration_ns = (self._numpy(self._names.index(name)) for name in _TIMES)
        order = _order(start_ns, duration_ns)
        del start_ns, duration_ns
        built = {}
        for position, name in enumerate(self._names):
            built[name] = self._numpy(position) if order is None else self._numpy(position)[order]
            self._columns[position] = array("i")
        return built

    def _numpy(self, position: int) -> Column:
        column = self._columns[position]
        return np.frombuffer(column, dtype=np.dtype(column.typecode))


def _fits(values: NDArray[np.int64]) -> bool:
    limits = np.iinfo(np.int32)
    return bool(limits.min <= values.min() and values.max() <= limits.max)


def _order(start_ns: Column, duration_ns: Column) -> Column | None:
    """The order by start, longer first among equals; None where the rows are in it already.

    Ties are settled after sorting by start alone: sorting by both at once takes twice the memory.
    """
    later, equal = start_ns[1:] > start_ns[:-1], start_ns[1:] == start_ns[:-1]
    if bool(np.all(later | (equal & (duration_ns[1:] <= duration_ns[:-1])))):
        return None
    order: Column = np.argsort(start_ns, kind="stable").astype(np.int32 if len(start_ns) < 2**31 else np.int64)
    equal = np.diff(start_ns[order]) == 0
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] = equal
    tied[:-1] |= equal
    rows = order[tied]
    order[tied] = rows[np.lexsort((-duration_ns[rows], start_ns[rows]))]
    return order


def _num_repeated(correlation: Column) -> int:
    """How many ids above 0 occur more than once; 0 and below stand for none."""
    ids = np.sort(correlation[correlation > 0])
    return len(np.unique(ids[1:][ids[1:] == ids[:-1]]))
