"""A device's allocations and releases from torch's profiler, with operators and ranges around them.

A mode over the dispatcher would see only tensors, and make autograd add gradients out of place.
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
_OPERATOR = re.compile(r"(?!autograd::|torch::autograd::)\w+::\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator(Range):
    first_address: int | None
    """Address of the first input; None if it is no tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent:
    time_ns: int
    address: int
    num_bytes: int
    """Negative for a release."""
    operator: Operator | None
    ranges: tuple[str, ...]
    """Ranges open in the event's thread, innermost last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    time_ns: int
    shape: tuple[int, ...]
    dtype: str


class AllocationEvents:
    def __init__(self, roots: Sequence[Any], device: torch.device) -> None:
        """Read the profiler's event trees, one or more per thread."""
        self._device = device
        self.memory: list[MemoryEvent] = []
        self.ranges: list[Range] = []
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
        return [event for event in self.memory if start_ns <= event.time_ns < end_ns]

    def first_sighting(self, allocated: MemoryEvent, released_ns: float) -> Sighting | None:
        """Shape and dtype of the tensor in this block, as an operator saw it: one after the allocating operator if
        possible, because operators inside that one may see another shape.
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
                    time_ns=event.start_time_ns, shape=tuple(tensor.sizes), dtype=dtype_name(tensor.dtype)
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
    return device.type == asked.type and (device.index or 0) == (asked.index or 0)
