"""A trace as columns, in the form that all profilers share.

Times are nanoseconds on one clock. Names are stored once, and columns hold their numbers: a real trace uses the same
few hundred kernel names a million times.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from steplab.reading.traces.naming import STEP, is_range

Column = NDArray[np.signedinteger[Any]]

LONGEST_NS = 2**50
"""The longest event that is read: 13 days. Sums of millions of them fit 64 bits."""
EARLIEST_NS, LATEST_NS = -(2**53), 2**53 * 1000
"""The first and the last start that are read: 104 days before the zero of the trace's clock to 285 years after it. All
differences of such times fit 64 bits."""

NONE = -1
"""The value in a column for what the trace does not contain."""
UNTYPED = "tensor"
"""The type of an input of which the shape alone is known."""


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
class Message:
    """What a trace says of one collective."""

    name: str
    """The collective, as the trace calls it; '' if it has none."""
    group: str
    """The ranks of its process group, or the group's name."""
    size_bytes: int
    """The bytes of its input or output, whichever has more; 0 if they are not known."""


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
    steps: re.Pattern[str] = STEP
    """Matches the names of the ranges that are steps."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """The number of timed events of each category that no reader knows."""

    rank: int | None = None
    """The rank of the process, if the file says so."""
    host: str = ""
    """The name of the machine; '' if the file does not say."""
    base_ns: int = 0
    """What its times begin at, in nanoseconds since 1970."""
    messages: Mapping[tuple[int, int], Message] = field(default_factory=dict)
    """The collectives by their start and stream, or on a CPU thread; only where they were asked for."""

    def doubting(self, *doubts: str) -> "Trace":
        """The trace with further notes that make all of it doubtful."""
        return replace(self, notes=(*self.notes, *doubts), damage=(*self.damage, *doubts))

    def with_ranges(self, is_meant: Callable[[str], object]) -> "Trace":
        """The trace with the operators of names that are meant among the ranges, as old torch writes them."""
        moved = self.named(self.ops.name, is_meant)
        if not moved.any():
            return self
        both = {
            column.name: np.concatenate((getattr(self.ranges, column.name), getattr(self.ops, column.name)[moved]))
            for column in fields(Ranges)
        }
        order = np.lexsort((-both["duration_ns"], both["start_ns"]))
        ranges = Ranges(**{name: column[order] for name, column in both.items()})
        return replace(self, ops=self.ops.where(~moved), ranges=ranges)

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
    """Collects events, one or many at a time, and makes the Trace."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.device_names: Mapping[int, str] = {}
        """The names of GPUs by the numbers that work has for its device."""
        self.notes: list[str] = []
        self.damage: list[str] = []
        """The notes that say that the file ends early or is broken."""
        self.lists_gpu = False
        self.unknown: Mapping[str, int] = {}
        """The number of timed events of each category that is not read."""
        self.rank: int | None = None
        self.host = ""
        self.base_ns = 0
        self.messages: dict[tuple[int, int], Message] = {}
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
        """The Trace."""
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
            unknown=self.unknown,
            rank=self.rank,
            host=self.host,
            base_ns=self.base_ns,
            messages=self.messages,
        ).with_ranges(is_range)


class _Table:
    """Growing columns."""

    def __init__(self, kind: type[Events]) -> None:
        self._parts: dict[str, list[Column]] = {field.name: [] for field in fields(kind)}

    def extend(self, values: Mapping[str, Values]) -> None:
        assert values.keys() == self._parts.keys()
        for name, value in values.items():
            self._parts[name].append(np.atleast_1d(np.asarray(value, dtype=np.int64)))

    def build(self) -> dict[str, Column]:
        """The columns in the order of start, the longer first among equals."""
        none = np.zeros(0, dtype=np.int64)
        columns = {name: np.concatenate([none, *parts]) for name, parts in self._parts.items()}
        order = np.lexsort((-columns["duration_ns"], columns["start_ns"]))
        return {name: column[order] for name, column in columns.items()}


def _num_repeated(correlation: Column) -> int:
    """The number of ids above 0 that occur more than once; 0 and below stand for none."""
    ids = np.sort(correlation[correlation > 0])
    return len(np.unique(ids[1:][ids[1:] == ids[:-1]]))
