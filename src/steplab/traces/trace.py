"""A trace as columns: what the profilers agree on, whoever wrote the file.

Times are int64 nanoseconds on one clock. Names are kept once, and columns hold their numbers: a real trace names the
same few hundred kernels a million times.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """Shapes and types of an op's arguments, as far as they are tensors."""

    shapes: tuple[tuple[int, ...], ...]
    """An argument each; () for what is no tensor."""
    dtypes: tuple[str, ...]
    """An argument each, by torch's C++ names (float, c10::BFloat16); '' for what is no tensor."""


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


class TraceBuilder:
    """Collects events one by one, compactly, and makes the Trace."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.device_name: str | None = None
        self.notes: list[str] = []
        self._names: dict[str, int] = {}
        self._inputs: dict[Inputs, int] = {}
        self._threads: dict[object, int] = {}
        self._work = tuple(array("q") for _ in range(7))
        self._calls = tuple(array("q") for _ in range(5))
        self._ops = tuple(array("q") for _ in range(6))
        self._ranges = tuple(array("q") for _ in range(4))

    def name(self, text: str) -> int:
        """Number of a name."""
        return self._names.setdefault(text, len(self._names))

    def inputs(self, inputs: Inputs) -> int:
        """Number of a set of op inputs."""
        return self._inputs.setdefault(inputs, len(self._inputs))

    def thread(self, identity: object) -> int:
        """Number of a thread."""
        return self._threads.setdefault(identity, len(self._threads))

    def add_work(
        self, name: int, start_ns: int, duration_ns: int, device: int, stream: int, correlation: int, size_bytes: int
    ) -> None:
        _append(self._work, (name, start_ns, duration_ns, device, stream, correlation, size_bytes))

    def add_call(self, name: int, start_ns: int, duration_ns: int, thread: int, correlation: int) -> None:
        _append(self._calls, (name, start_ns, duration_ns, thread, correlation))

    def add_op(self, name: int, start_ns: int, duration_ns: int, thread: int, sequence: int, inputs: int) -> None:
        _append(self._ops, (name, start_ns, duration_ns, thread, sequence, inputs))

    def add_range(self, name: int, start_ns: int, duration_ns: int, thread: int) -> None:
        _append(self._ranges, (name, start_ns, duration_ns, thread))

    def build(self) -> Trace:
        """The Trace: each table in the order of start, an outer range or op before what it contains."""
        return Trace(
            source=self.source,
            names=tuple(self._names),
            inputs=tuple(self._inputs),
            work=DeviceWork(**_columns(DeviceWork, self._work)),
            calls=HostCalls(**_columns(HostCalls, self._calls)),
            ops=Ops(**_columns(Ops, self._ops)),
            ranges=Ranges(**_columns(Ranges, self._ranges)),
            device_name=self.device_name,
            notes=tuple(self.notes),
        )


_SMALL = {"name", "device", "stream", "thread", "inputs"}


def _append(columns: Sequence[array[int]], values: tuple[int, ...]) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(value)


def _columns(table: type, arrays: Sequence[array[int]]) -> dict[str, Column]:
    fields = table.__dataclass_fields__  # type: ignore[attr-defined]
    columns = {name: np.frombuffer(data, dtype=np.int64) for name, data in zip(fields, arrays, strict=True)}
    order = np.lexsort((-columns["duration_ns"], columns["start_ns"]))
    return {name: data[order].astype(np.int32 if name in _SMALL else np.int64) for name, data in columns.items()}
