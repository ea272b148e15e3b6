"""The allocations and releases of a device's memory as torch's profiler saw them, with what was running around them.

Every allocator of torch reports to the profiler when it allocates, and the size it set aside. A mode over the
dispatcher would see only tensors, and it changes the step: under one, autograd adds gradients out of place.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steplab.measurement.tensors import dtype_name

_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
        *("resize_", "resize_as_", "_resize_output_", "set_"),
    )
)
"""Operators that allocate memory for the operator that called them."""
_OPERATOR = re.compile(r"(?!autograd::|torch::autograd::)\w+::\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator that is running."""

    name: str
    """The operator's name, such as aten::mm."""
    start_ns: int
    """The beginning, on the profiler's clock."""
    end_ns: int
    """The end, on the profiler's clock."""
    first_address: int | None
    """The address of the storage of its first input; None if that is not a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent:
    """An allocation or a release."""

    time_ns: int
    """The time, on the profiler's clock."""
    address: int
    """The address of the block."""
    num_bytes: int
    """The bytes that were set aside; negative for a release."""
    operator: Operator | None
    """The innermost operator running in that thread."""
    ranges: tuple[str, ...]
    """The names of the ranges open in that thread, innermost last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A named range of the program."""

    name: str
    start_ns: int
    """The beginning, on the profiler's clock."""
    end_ns: int
    """The end, on the profiler's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """A tensor seen as the input of an operator."""

    time_ns: int
    """The time at which the operator began."""
    shape: tuple[int, ...]
    """The tensor's shape."""
    dtype: str
    """The tensor's type: float32, bfloat16, ..."""


class AllocationEvents:
    """The events of one device's memory while a profiler ran, in order of time."""

    def __init__(self, roots: Sequence[Any], device: torch.device) -> None:
        """Read `roots`, the profiler's trees of events, one or more for each thread."""
        self._device = device
        self.memory: list[MemoryEvent] = []
        """Allocations and releases."""
        self.ranges: list[Range] = []
        """The ranges, outer before inner."""
        self._sightings: dict[int, list[Sighting]] = {}
        waiting: list[tuple[Any, Operator | None, tuple[str, ...]]] = [(root, None, ()) for root in roots]
        while waiting:
            event, operator, ranges = waiting.pop()
            if event.tag.name == "Allocation":
                self._add_memory(event, operator, ranges)
            elif event.tag.name == "TorchOp":
                operator, ranges = self._add_operator(event, operator, ranges)
            waiting += [(child, operator, ranges) for child in event.children]
        self.memory.sort(key=lambda event: event.time_ns)
        self.ranges.sort(key=lambda marked: (marked.start_ns, -marked.end_ns))
        for seen in self._sightings.values():
            seen.sort(key=lambda sighting: sighting.time_ns)

    def between(self, start_ns: int, end_ns: int) -> list[MemoryEvent]:
        """The allocations and releases within that time."""
        return [event for event in self.memory if start_ns <= event.time_ns < end_ns]

    def first_sighting(self, allocated: MemoryEvent, released_ns: float) -> Sighting | None:
        """The tensor for which a block was allocated, as the first operator saw it that took it as an input.

        A later operator is preferred to one inside the operator that allocated it, which may see it in another shape.
        """
        seen = self._sightings.get(allocated.address, [])
        after = (allocated.operator.end_ns,) if allocated.operator else ()
        for time_ns in (*after, allocated.time_ns):
            index = bisect_left(seen, time_ns, key=lambda sighting: sighting.time_ns)
            if index < len(seen) and seen[index].time_ns < released_ns:
                return seen[index]
        return None

    def _add_memory(self, event: Any, operator: Operator | None, ranges: tuple[str, ...]) -> None:
        fields = event.extra_fields
        if _is(fields.device, self._device) and fields.alloc_size:
            self.memory.append(
                MemoryEvent(
                    time_ns=event.start_time_ns,
                    address=fields.ptr,
                    num_bytes=fields.alloc_size,
                    operator=operator,
                    ranges=ranges,
                )
            )

    def _add_operator(
        self, event: Any, operator: Operator | None, ranges: tuple[str, ...]
    ) -> tuple[Operator | None, tuple[str, ...]]:
        """Record an event that may contain others; returns the operator and the ranges that hold inside it."""
        name, fields = event.name, event.extra_fields
        if fields.scope.name == "USER_SCOPE":
            self.ranges.append(Range(name=name, start_ns=event.start_time_ns, end_ns=event.end_time_ns))
            return None, (*ranges, name)
        if not _OPERATOR.fullmatch(name):  # a node of autograd, or its engine
            return None, ranges
        inputs = list(fields.inputs)
        for tensor in _tensors(inputs):
            if tensor.storage_data_ptr and _is(tensor.device, self._device):
                sighting = Sighting(
                    time_ns=event.start_time_ns,
                    shape=tuple(tensor.sizes),
                    dtype=dtype_name(tensor.dtype),
                )
                self._sightings.setdefault(tensor.storage_data_ptr, []).append(sighting)
        if operator is not None and name in _FACTORIES:
            return operator, ranges
        first = inputs[0] if inputs else None
        address = getattr(first, "storage_data_ptr", None)
        return Operator(
            name=name, start_ns=event.start_time_ns, end_ns=event.end_time_ns, first_address=address
        ), ranges


def _tensors(inputs: Sequence[Any]) -> Iterator[Any]:
    for value in inputs:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif hasattr(value, "storage_data_ptr"):
            yield value


def _is(device: torch.device, asked: torch.device) -> bool:
    """Whether the devices are the same, also if only one of them has an index."""
    return device.type == asked.type and (device.index or 0) == (asked.index or 0)
