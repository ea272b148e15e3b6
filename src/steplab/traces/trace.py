"""A trace as columns, in the form that all profilers share.

Times are nanoseconds on one clock. Names are stored once, and columns hold their numbers: a real trace uses the same
few hundred kernel names a million times. A trace of 2 GB has millions of events, so all columns but start_ns are as
narrow as their values allow, int16, int32 or int64: widen them before arithmetic other than sums and comparisons.
"""

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.signedinteger[Any]]

LONGEST_NS = 2**50
"""The longest event that is read: 13 days. Sums of millions of them fit 64 bits."""
EARLIEST_NS, LATEST_NS = -(2**53), 2**53 * 1000
"""The first and the last start that are read: 104 days before the zero of the trace's clock to 285 years after it. All
differences of such times fit 64 bits."""

NONE = -1
"""The value in a column for what the trace does not contain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What happened, as parallel columns in the order of start."""

    name: Column
    start_ns: Column

    def __len__(self) -> int:
        return len(self.name)

    def where(self, chosen: NDArray[np.bool_] | slice) -> Self:
        """The rows that a mask or a slice chooses."""
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Events(Rows):
    """Events of one kind, an outer one before what it contains."""

    duration_ns: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWork(Events):
    """The work of the device: kernels, copies and fills."""

    device: Column
    stream: Column
    correlation: Column
    """The number shared with the host call that launched it; one call can launch several pieces (a CUDA graph)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCalls(Events):
    """Calls into the CUDA runtime or driver: launches, copies, synchronisations."""

    thread: Column
    """The number of the thread, counted from 0 in the order of appearance."""
    correlation: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops(Events):
    """Operators on the host, such as aten::mm; they nest."""

    thread: Column
    sequence: Column
    """Autograd's number: a forward operator and its backward operator carry the same."""
    inputs: Column
    """The number of its inputs in Trace.inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges(Events):
    """Named stretches of host time: record_function and NVTX; they nest."""

    thread: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The shapes and types of an operator's arguments, for those that are tensors.

    A list of tensors has an entry for each of its tensors, whose types the profiler does not record.
    """

    shapes: tuple[tuple[int, ...], ...]
    """One shape per argument; () for one that is not a tensor."""
    dtypes: tuple[str, ...]
    """One type per argument, by torch's C++ names (float, c10::BFloat16); TensorList for a tensor out of a list; ''
    for one that is not a tensor."""
    scalars: tuple[str, ...] = ()
    """One text per argument, of a number or flag, '' for a tensor; only for fused attention, whose cost depends on
    one. Empty if the trace does not have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Everything that a reader found in one file."""

    source: str
    """The kind of file: kineto or nsys."""
    names: tuple[str, ...]
    """The text of each name number."""
    inputs: tuple[Inputs, ...]
    """Each different set of operator inputs, once."""
    work: DeviceWork
    calls: HostCalls
    ops: Ops
    ranges: Ranges
    processes: tuple[int, ...]
    """The number of each thread's process."""
    device_name: str | None = None
    """The name of the GPU with the most work, if the file contains it."""
    notes: tuple[str, ...] = field(default=())
    """What the file lacks or what could not be read, in words; () for a complete one."""
    damage: tuple[str, ...] = field(default=())
    """The notes that say that the file ends early or is broken."""
    lists_gpu: bool = False
    """Whether the file lists a GPU of the machine, whether or not anything ran on it."""

    def named(self, column: Column, is_meant: Callable[[str], object]) -> NDArray[np.bool_]:
        """Which entries of a column of names are of a name that is meant."""
        return np.isin(column, [number for number, name in enumerate(self.names) if is_meant(name)])


Key = TypeVar("Key", bound=Hashable)
Values = int | Sequence[int] | NDArray[Any]
"""One event's value, or one for each of many."""


class Numbering(dict[Key, int]):
    """Numbers things from 0 in the order in which they are first looked up."""

    def __missing__(self, key: Key) -> int:
        number = self[key] = len(self)
        return number


class TraceBuilder:
    """Collects events compactly, one or many at a time, and makes the Trace."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.device_names: Mapping[int, str] = {}
        """The names of GPUs by the numbers that work has for its device."""
        self.notes: list[str] = []
        self.damage: list[str] = []
        """The notes that say that the file ends early or is broken."""
        self.lists_gpu = False
        self.names = Numbering[str]()
        self.inputs = Numbering[Inputs]()
        self.threads = Numbering[tuple[Hashable, Hashable]]()
        """The numbers of threads, by process and thread, each as the file names it."""
        kinds: tuple[type[Events], ...] = (DeviceWork, HostCalls, Ops, Ranges)
        self._tables = {kind: _Table(kind) for kind in kinds}

    def add(self, kind: type[Events], *, start_ns: Values, **columns: Values) -> None:
        """Add an event or many of a kind, with all columns of the kind."""
        self._tables[kind].extend({"start_ns": start_ns, **columns})

    def build(self) -> Trace:
        """The Trace, which ends the builder: its tables become the trace's."""
        calls = HostCalls(**self._tables[HostCalls].build())
        if repeated := _num_repeated(calls.correlation):
            self.notes.append(
                f"{repeated} correlation ids belong to more than one host call, so it is uncertain which of them "
                "launched the work"
            )
        processes = Numbering[Hashable]()
        work = DeviceWork(**self._tables[DeviceWork].build())
        devices, counts = np.unique(work.device, return_counts=True)
        most_first = devices[np.argsort(-counts, kind="stable")].tolist()
        return Trace(
            source=self.source,
            names=tuple(self.names),
            inputs=tuple(self.inputs),
            work=work,
            calls=calls,
            ops=Ops(**self._tables[Ops].build()),
            ranges=Ranges(**self._tables[Ranges].build()),
            processes=tuple(processes[process] for process, _ in self.threads),
            device_name=next((self.device_names[n] for n in most_first if n in self.device_names), None),
            notes=tuple(self.notes),
            damage=tuple(self.damage),
            lists_gpu=self.lists_gpu,
        )


_WIDTHS = "hiq"
"""Type codes of array: 2, 4 and 8 bytes."""
_PIECES = 16


class _Table:
    """Growing columns, each as narrow as its values allow.

    An array grows in place where the system can move its pages, so that nothing is stored twice.
    """

    def __init__(self, kind: type[Events]) -> None:
        self._columns = {field.name: array("q" if field.name == "start_ns" else "h") for field in fields(kind)}

    def extend(self, values: Mapping[str, Values]) -> None:
        assert values.keys() == self._columns.keys()
        for name, value in values.items():
            given = value if isinstance(value, list) else np.atleast_1d(np.asarray(value, dtype=np.int64))
            while not _appended(self._columns[name], given):
                column = self._columns[name]
                self._columns[name] = array(_WIDTHS[_WIDTHS.index(column.typecode) + 1], column)

    def build(self) -> dict[str, Column]:
        built: dict[str, Column] = {}
        start_ns, duration_ns = (self._numpy(name) for name in ("start_ns", "duration_ns"))
        order = _order(start_ns, duration_ns)
        del duration_ns
        for name in self._columns:
            if order is None:
                built[name] = self._numpy(name)
            elif name == "start_ns":
                start_ns.sort()
                built[name] = start_ns
            else:
                built[name] = self._numpy(name)[order]
                self._columns[name] = array("h")
        return built

    def _numpy(self, name: str) -> Column:
        column = self._columns[name]
        return np.frombuffer(column, dtype=_dtype(column))


def _dtype(column: "array[int]") -> np.dtype[Any]:
    code = str(column.typecode)  # mypy would try the overloads of dtype for each of the literals, for seconds
    return np.dtype(code)


def _appended(column: "array[int]", values: list[int] | NDArray[np.int64]) -> bool:
    """Append the values, all or none; returns False if the column is too narrow for them."""
    if isinstance(values, list):
        try:
            column.fromlist(values)
        except OverflowError:
            if column.typecode == _WIDTHS[-1]:
                raise
            return False
        return True
    dtype = _dtype(column)
    limits = np.iinfo(dtype)
    if values.size and not limits.min <= values.min() <= values.max() <= limits.max:
        return False
    column.frombytes(values.astype(dtype, copy=False).tobytes())
    return True


def _order(start_ns: Column, duration_ns: Column) -> Column | None:
    """The order by start, the longer first among equals; None if the rows are in it already.

    Sorted one stretch of time after the other, because sorting all at once would take as much memory as the table
    itself.
    """
    later, equal = start_ns[1:] > start_ns[:-1], start_ns[1:] == start_ns[:-1]
    if bool(np.all(later | (equal & (duration_ns[1:] <= duration_ns[:-1])))):
        return None
    order: Column = np.empty(len(start_ns), dtype=np.int32 if len(start_ns) < 2**31 else np.int64)
    sample = np.sort(start_ns[:: max(1, len(start_ns) // 4096)])
    edges = sample[:: max(1, len(sample) // _PIECES)]
    filled = 0
    for number in range(len(edges) + 1):
        inside = start_ns >= edges[number - 1] if number else start_ns < edges[0]
        if 0 < number < len(edges):
            inside &= start_ns < edges[number]
        rows = np.flatnonzero(inside)
        order[filled : filled + len(rows)] = _sorted(rows, start_ns, duration_ns)
        filled += len(rows)
    return order


def _sorted(rows: Column, start_ns: Column, duration_ns: Column) -> Column:
    """The rows in order. They are first sorted by start alone, which is quick if they are nearly sorted; few starts
    are equal."""
    rows = rows[np.argsort(start_ns[rows], kind="stable")]
    equal = np.diff(start_ns[rows]) == 0
    tied = np.append(equal, False) | np.append(False, equal)
    if tied.any():
        unsure = rows[tied]
        rows[tied] = unsure[np.lexsort((-duration_ns[unsure].astype(np.int64), start_ns[unsure]))]
    return rows


def _num_repeated(correlation: Column) -> int:
    """The number of ids above 0 that occur more than once; 0 and below stand for none."""
    ids = np.sort(correlation[correlation > 0])
    return len(np.unique(ids[1:][ids[1:] == ids[:-1]]))
