"""Columns of a trace, common to all profilers; times are nanoseconds on one clock. Names are stored as numbers: a trace
repeats a few hundred kernel names a million times.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from steplab.reading.traces.naming import STEP, is_range

Column = NDArray[np.signedinteger[Any]]

LONGEST_NS = 2**50
"""Longest event accepted, 13 days; sums of millions fit 64 bits."""
EARLIEST_NS, LATEST_NS = -(2**53), 2**53 * 1000
"""Range of accepted start times: from 104 days before the clock's zero to 285 years after, so differences fit 64 bits.
"""

NONE = -1
UNTYPED = "tensor"
"""Type of an input if only its shape is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Columns of equal length, sorted by start."""

    name: Column
    start_ns: Column

    def __len__(self) -> int:
        return len(self.name)

    def where(self, chosen: NDArray[np.bool_] | slice) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Events(Rows):
    duration_ns: Column

    @property
    def end_ns(self) -> Column:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWork(Events):
    device: Column
    stream: Column
    correlation: Column
    """Number that links the work to its launching host call; a CUDA graph's call has several pieces of work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges(Events):
    thread: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCalls(Ranges):
    correlation: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops(Ranges):
    sequence: Column
    """Autograd's sequence number, which a forward operator and its backward operator share."""
    inputs: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Shapes and types of an operator's tensor arguments. Each tensor of a list has an entry, without a type, which
    profilers do not record.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shape per argument; () if it is no tensor."""
    dtypes: tuple[str, ...]
    """Type per argument, by torch's C++ names (float, c10::BFloat16); TensorList for list members; '' if no tensor."""
    scalars: tuple[str, ...] = ()
    """Text per argument that is a number or flag, '' for tensors. Only for fused attention; else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    name: str
    group: str
    size_bytes: int
    """Bytes of the larger of input and output; 0: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    source: str
    names: tuple[str, ...]
    inputs: tuple[Inputs, ...]
    work: DeviceWork
    calls: HostCalls
    ops: Ops
    ranges: Ranges
    processes: tuple[int, ...]
    device_name: str | None = None
    """Name of the GPU with the most work; None: not in the file."""
    notes: tuple[str, ...] = field(default=())
    """Missing or unreadable parts of the file, as sentences."""
    damage: tuple[str, ...] = field(default=())
    lists_gpu: bool = False
    """True if the file names a GPU, even one without work."""
    steps: re.Pattern[str] = STEP
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Number of timed events per category that the reader does not know."""

    rank: int | None = None
    host: str = ""
    base_ns: int = 0
    """Nanoseconds since 1970 at time 0."""
    messages: Mapping[tuple[int, int], Message] = field(default_factory=dict)
    """Collectives, sorted by start, with their stream (on a CPU, thread)."""

    def doubting(self, *doubts: str) -> "Trace":
        return replace(self, notes=(*self.notes, *doubts), damage=(*self.damage, *doubts))

    def with_ranges(self, is_meant: Callable[[str], object]) -> "Trace":
        """Trace with matching operators turned into ranges, as old torch records them."""
        moved = self.named(self.ops.name, is_meant)
        if not moved.any():
            return self
        both = {
            column.name: np.concatenate((getattr(self.ranges, column.name), getattr(self.ops, column.name)[moved]))
            for column in fields(Ranges)
        }
        return replace(self, ops=self.ops.where(~moved), ranges=_in_order(Ranges, both))

    def named(self, column: Column, is_meant: Callable[[str], object]) -> NDArray[np.bool_]:
        return np.isin(column, [number for number, name in enumerate(self.names) if is_meant(name)])


_Kind = TypeVar("_Kind", bound=Events)
Key = TypeVar("Key", bound=Hashable)
Values = int | Sequence[int] | NDArray[Any]


class Numbering(dict[Key, int]):
    def __missing__(self, key: Key) -> int:
        number = self[key] = len(self)
        return number


class TraceBuilder:
    def __init__(self, source: str) -> None:
        self.source = source
        self.notes: list[str] = []
        self.damage: list[str] = []
        self.messages: dict[tuple[int, int], Message] = {}
        self.names = Numbering[str]()
        self.inputs = Numbering[Inputs]()
        self.threads = Numbering[tuple[Hashable, Hashable]]()
        kinds: tuple[type[Events], ...] = (DeviceWork, HostCalls, Ops, Ranges)
        none = np.zeros(0, dtype=np.int64)
        self._parts: dict[type[Events], dict[str, list[Column]]] = {
            kind: {field.name: [none] for field in fields(kind)} for kind in kinds
        }

    def add(self, kind: type[Events], **columns: Values) -> None:
        parts = self._parts[kind]
        assert columns.keys() == parts.keys()
        for name, values in columns.items():
            parts[name].append(np.atleast_1d(np.asarray(values, dtype=np.int64)))

    def _table(self, kind: type[_Kind]) -> _Kind:
        return _in_order(kind, {name: np.concatenate(parts) for name, parts in self._parts[kind].items()})

    def build(self, device_names: Mapping[int, str] = MappingProxyType({}), **about: Any) -> Trace:
        """Build the trace; `about` holds its other fields."""
        calls = self._table(HostCalls)
        if repeated := _num_repeated(calls.correlation):
            self.notes.append(
                f"{repeated} correlation ids belong to several host calls, so launches of their work are uncertain"
            )
        processes = Numbering[Hashable]()
        work = self._table(DeviceWork)
        devices, counts = np.unique(work.device, return_counts=True)
        most_first = devices[np.argsort(-counts, kind="stable")].tolist()
        return Trace(
            source=self.source,
            names=tuple(self.names),
            inputs=tuple(self.inputs),
            work=work,
            calls=calls,
            ops=self._table(Ops),
            ranges=self._table(Ranges),
            processes=tuple(processes[process] for process, _ in self.threads),
            device_name=next((device_names[n] for n in most_first if n in device_names), None),
            notes=tuple(self.notes),
            damage=tuple(self.damage),
            messages=self.messages,
            **about,
        ).with_ranges(is_range)


def _in_order(kind: type[_Kind], columns: Mapping[str, Column]) -> _Kind:
    """Rows sorted by start, the longer first among equals."""
    order = np.lexsort((-columns["duration_ns"], columns["start_ns"]))
    return kind(**{name: column[order] for name, column in columns.items()})


def _num_repeated(correlation: Column) -> int:
    ids = np.sort(correlation[correlation > 0])
    return len(np.unique(ids[1:][ids[1:] == ids[:-1]]))
