"""Reads Kineto's traces (torch.profiler's Chrome JSON) into columns.

It keeps device kernels, copies and fills, runtime and driver calls, operators and annotated ranges. Python frames,
arrows, counters and metadata are skipped.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from msgspec.json import Decoder
from numpy.typing import NDArray

from steplab.costs.operators import FUSED_ATTENTION, ITEM_BYTES
from steplab.reading.traces import trace
from steplab.reading.traces.document import Document, NotATrace
from steplab.reading.traces.events import EVENT, EVENTS, MISSING, NO_DIMS, Event, decoded, nanoseconds, repair_event
from steplab.reading.traces.naming import STEP
from steplab.reading.traces.trace import EARLIEST_NS, LATEST_NS, LONGEST_NS, NONE, Inputs, Message, Trace, TraceBuilder
from steplab.units import format_bytes
from steplab.unpacking import Unpacked

_CATEGORIES = (
    ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"),
    (
        *("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver"),
        "Runtime",
    ),
    ("cpu_op", "Operator"),
    ("user_annotation",),
)
"""Event categories of device work, host calls, operators and ranges, from Kineto's ActivityType.h (AMD's are named cuda
too), also capitalised as before torch 1.12.
"""
_OF_THE_DEVICE = "gpu_user_annotation"
_PASSED_OVER = frozenset(
    (
        *("", "python_function", "ac2g", "fwdbwd", "async_cpu_to_gpu", "async_gpu", "cpu_instant_event", "overhead"),
        *("Trace", "cuda_sync", "cuda_event", "cuda_profiler_range", "external_correlation", "collective_comm"),
        *("mtia_runtime", "glow_runtime", "hpu_runtime", "critical_path", "PythonFunction"),
    )
)
"""Kineto's categories without device work, or that another category duplicates."""


class _Device(msgspec.Struct):
    id: int
    name: str


class _World(msgspec.Struct):
    rank: int | None = None


_DEVICES, _WORLD, _TEXT, _WHOLE = Decoder(list[_Device]), Decoder(_World), Decoder(str), Decoder(int)

Integers = NDArray[np.int64]
Columns = Mapping[str, trace.Values]


def read_kineto(source: Unpacked, *, chunk_bytes: int) -> Trace:
    """Read the trace in a JSON document. Raises NotATrace for other documents, and without events."""
    document = Document(
        source,
        keep=("deviceProperties", "distributedInfo", "baseTimeNanoseconds", "host_name"),
        chunk_bytes=chunk_bytes,
    )
    collector = Collector()
    document.read(collector)
    if not document.has_events:
        raise NotATrace("it has no list traceEvents")
    if not collector.num_events and document.num_unreadable:
        raise NotATrace(f"none of its {document.num_unreadable} list elements is an event")
    builder = collector.builder
    collector.add_steps()
    members = document.members
    listed = {each.id: each.name for each in decoded(_DEVICES, members.get("deviceProperties", b"[]")) or ()}
    world = decoded(_WORLD, members.get("distributedInfo", b"{}"))
    if document.damage:
        cause = f"{source.damage}, and " if source.damage else ""
        read = format_bytes(document.num_bytes)
        builder.damage.append(f"{cause}{document.damage}, after {read} of JSON; the rest is missing")
    elif source.damage:
        builder.damage.append(source.damage)
    builder.notes += builder.damage
    left_out = {"are not valid JSON": document.num_unreadable, **collector.left_out}
    told = [f"events left out because they {why}: {count}" for why, count in left_out.items() if count]
    builder.notes += told
    if collector.has_lost_work:
        builder.damage += told
    if collector.num_repaired:
        builder.notes.append(f"events repaired, with NaN, bad UTF-8 or the like: {collector.num_repaired}")
    if not collector.num_events:
        builder.notes.append("the list of events is empty")
    elif not collector.num_kept:
        builder.notes.append(
            f"none of its {collector.num_events} events is a kernel, a runtime call, an operator or a range"
        )
    return builder.build(
        listed,
        rank=world.rank if world else None,
        host=decoded(_TEXT, members.get("host_name", b'""')) or "",
        base_ns=decoded(_WHOLE, members.get("baseTimeNanoseconds", b"0")) or 0,
        lists_gpu=bool(listed),
        unknown=collector.unknown,
    )


class Collector:
    def __init__(self) -> None:
        self.builder = TraceBuilder("kineto")
        self.num_events = 0
        self.num_kept = 0
        self.left_out = Counter[str]()
        """Number of events without usable times, by reason."""
        self.has_lost_work = False
        self.unknown = Counter[str]()
        self.further_steps = list[Event]()
        """Steps in other categories, such as the GPU's, used if there are none on the host."""
        self.num_repaired = 0
        self._inputs = InputNumbers(self.builder.inputs)

    def take(self, array: memoryview) -> bool:
        events = decoded(EVENTS, array)
        if events is not None:
            self._add(events)
        return events is not None

    def salvage(self, elements: Sequence[memoryview]) -> int:
        events = list[Event]()
        for element in elements:
            text = bytes(element)
            is_object = text.startswith(b"{")  # anything else is not worth a repair
            event = decoded(EVENT, text) if is_object else None
            if is_object and event is None and (event := repair_event(text)):
                self.num_repaired += 1
            if event is not None:
                events.append(event)
        self._add(events)
        return len(elements) - len(events)

    def add_steps(self) -> None:
        if not any(map(STEP.match, self.builder.names)):
            self._add([msgspec.structs.replace(event, cat="user_annotation") for event in self.further_steps])

    def _add(self, events: Sequence[Event]) -> None:
        self.num_events += len(events)
        groups = self._grouped(events)
        kept = [event for group in groups for event in group]
        sizes = [len(group) for group in groups]
        start_ns = nanoseconds([event.ts for event in kept])
        duration_ns = nanoseconds([event.dur for event in kept])
        impossible = (start_ns < EARLIEST_NS) | (start_ns > LATEST_NS) | (duration_ns > LONGEST_NS)  # MISSING is early
        untimed = impossible | (duration_ns == MISSING)
        dropped = untimed | (duration_ns < 0)
        if dropped.any():
            self.left_out["have no start or duration"] += int(untimed.sum())
            self.left_out["have a negative duration"] += int((dropped & ~untimed).sum())
            self.has_lost_work |= bool(dropped[: sizes[0]].any())
            sizes = np.bincount(np.repeat(range(len(groups)), sizes)[~dropped], minlength=len(groups)).tolist()
            kept, start_ns, duration_ns = list(compress(kept, ~dropped)), start_ns[~dropped], duration_ns[~dropped]
        self.num_kept += len(kept)
        numbers = self.builder.names
        names = [numbers[event.name] for event in kept]
        end = 0
        for add, size in zip((self._add_work, self._add_calls, self._add_ops, self._add_ranges), sizes, strict=True):
            begin, end = end, end + size
            if size:
                span = slice(begin, end)
                add(kept[span], {"name": names[span], "start_ns": start_ns[span], "duration_ns": duration_ns[span]})

    def _grouped(self, events: Sequence[Event]) -> tuple[list[Event], ...]:
        groups = tuple(list[Event]() for _ in _CATEGORIES)
        appends = {category: groups[number].append for number, names in enumerate(_CATEGORIES) for category in names}
        for event in events:
            category = event.cat
            if append := appends.get(category):
                append(event)
            elif category not in _PASSED_OVER and bytes(event.dur) != b"null":
                if STEP.match(event.name):
                    self.further_steps.append(event)
                elif category != _OF_THE_DEVICE:
                    self.unknown[category] += 1
        return groups

    def _add_work(self, events: Sequence[Event], common: Columns) -> None:
        args = [event.args for event in events]
        for a, start_ns in zip(args, np.asarray(common["start_ns"]).tolist(), strict=True):
            if a.collective:
                size = max(_integer(a.num_in), _integer(a.num_out)) * _ITEM_BYTES.get(str(a.dtype), 0)
                about = Message(name=str(a.collective), group=str(a.members or a.group), size_bytes=max(size, 0))
                self.builder.messages[start_ns, _integer(a.stream)] = about
        self.builder.add(
            trace.DeviceWork,
            **common,
            device=_integers([a.device for a in args]),
            stream=_integers([a.stream for a in args]),
            correlation=_integers([a.correlation for a in args]),
        )

    def _add_calls(self, events: Sequence[Event], common: Columns) -> None:
        correlation = _integers([event.args.correlation for event in events])
        self.builder.add(trace.HostCalls, **common, thread=self._threads(events), correlation=correlation)

    def _add_ops(self, events: Sequence[Event], common: Columns) -> None:
        args = [event.args for event in events]
        numbers, join = self._inputs, b",".join
        texts = [
            (a.dims, a.types, a.concrete) if event.name in FUSED_ATTENTION else (a.dims, a.types)
            for event, a in zip(events, args, strict=True)
        ]
        self.builder.add(
            trace.Ops,
            **common,
            thread=self._threads(events),
            sequence=_integers([a.sequence for a in args]),
            inputs=[NONE if text[0] is NO_DIMS else numbers[join(text)] for text in texts],
        )

    def _add_ranges(self, events: Sequence[Event], common: Columns) -> None:
        threads = self._threads(events)
        for event, start_ns, thread in zip(events, np.asarray(common["start_ns"]).tolist(), threads, strict=True):
            if event.name.startswith("gloo:"):
                number = self._inputs[b",".join((event.args.dims, event.args.types))]
                given = list(self.builder.inputs)[number] if number != NONE else Inputs(shapes=(), dtypes=())
                sizes = zip(given.shapes, given.dtypes, strict=True)
                size = sum(math.prod(shape) * ITEM_BYTES.get(dtype, 0) for shape, dtype in sizes)
                about = Message(name=event.name.removeprefix("gloo:"), group="", size_bytes=size)
                self.builder.messages[start_ns, thread] = about
        self.builder.add(trace.Ranges, **common, thread=threads)

    def _threads(self, events: Sequence[Event]) -> list[int]:
        numbers = self.builder.threads
        return [numbers[event.pid, event.tid] for event in events]


def _integers(values: list[Any]) -> Integers:
    try:
        return np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_integer(value) for value in values], dtype=np.int64)


def _integer(value: Any) -> int:
    try:
        number = int(value) if value is not None else NONE
    except (TypeError, ValueError, OverflowError):
        return NONE
    return number if abs(number) < 2**63 else NONE


_ITEM_BYTES = {
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
"""Bytes per element, by the names that messages give types."""


_NO_TENSOR = ("", "Scalar", "ScalarList")
_TENSOR_LIST = "TensorList"
_ABSENT = b"[],[]"


class InputNumbers(dict[bytes, int]):
    """Index in Trace.inputs of an event's `Input Dims`, `Input type` and maybe `Concrete Inputs`. Steps repeat
    operators with equal inputs, so each text is parsed once.
    """

    def __init__(self, numbering: trace.Numbering[Inputs]) -> None:
        super().__init__()
        self._numbering = numbering
        self[_ABSENT] = NONE

    def __missing__(self, text: bytes) -> int:
        try:
            dims, types, *concrete = msgspec.json.decode(b"[" + text + b"]", type=list[list[object]])
        except (msgspec.DecodeError, ValueError, RecursionError):
            number = NONE
        else:
            number = self._numbering[_inputs(dims, types, concrete[0] if concrete else [])]
        self[text] = number
        return number


def _inputs(dims: list[object], types: list[object], concrete: list[object]) -> Inputs:
    shapes, dtypes = list[tuple[int, ...]](), list[str]()
    for position, dim in enumerate(dims):
        kind = types[position] if position < len(types) else ""
        for shape, dtype in _entries(dim, kind if isinstance(kind, str) else ""):
            shapes.append(shape)
            dtypes.append(dtype)
    scalars = tuple(value if isinstance(value, str) else "" for value in concrete)
    return Inputs(shapes=tuple(shapes), dtypes=tuple(dtypes), scalars=scalars)


def _entries(dim: object, kind: str) -> Iterable[tuple[tuple[int, ...], str]]:
    if not isinstance(dim, list):
        return [((), "")]
    if dim and all(isinstance(tensor, list) for tensor in dim):
        return [(_shape(tensor), _TENSOR_LIST) for tensor in dim]
    return [(_shape(dim), "" if kind in _NO_TENSOR else kind)]


def _shape(dim: list[object]) -> tuple[int, ...]:
    return tuple(size for size in dim if isinstance(size, int))
