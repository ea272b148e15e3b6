"""Memory that one host's ranks share, with streams and counters to order copies between GPUs.

A *line* is a separate CUDA stream. A *counter* is a growing number in every rank's memory. A line sets another rank's
counter, and waits on the device until one of this rank's has reached a value.

The driver is called directly for copies and stream waits, because torch's copy takes Python several times as long. On
H200s, waits on some streams delayed each kernel of a forward pass by 1.1 to 1.3 microseconds, so `PeerMemory` times
pairs of streams and takes the best.
"""

import ctypes
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import Collectives
from .errors import Unsupported
from .sizes import COUNTER_BYTES


class Piece(NamedTuple):
    own: int
    start_bytes: int
    """Offset in the target and in the other ranks' gradients; a multiple of 16."""
    num_bytes: int


_NUM_LINES = 2
_PAIRS, _TRIALS, _KERNELS = 4, 3, 400
_HELD_CYCLES = 20_000_000


class PeerMemory:
    """Copies and averages between the GPUs of one host, by address, on two lines numbered 0 and 1. `device` must be
    current at every use. Tests on CPUs replace all methods.
    """

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Raises Unsupported, on all ranks, if one cannot reach another's memory."""
        what, instead = "the transport peer_copy", "use transport='collectives'"
        if device.type != "cuda":
            raise Unsupported(f"{what} on {device.type}", "it is for the copy engines of CUDA GPUs", instead)
        places = collectives.host_gather((socket.gethostname(), device.index))
        hosts = {host for host, _ in places}
        if len(hosts) > 1:
            raise Unsupported(f"{what} between {len(hosts)} hosts", "only GPUs of one host reach each other", instead)
        reached = all(i == device.index or torch.cuda.can_device_access_peer(device, i) for _, i in places)
        if not all(collectives.host_gather(reached)):
            raise Unsupported(f"{what} between these GPUs", "one of them cannot address another's memory", instead)
        self.rank, self.size, self.device = collectives.rank, collectives.size, device
        self._group: Any = dist.group.WORLD if group is None else group
        self._driver = CudaDriver(device.index)
        self._streams: list[torch.cuda.Stream] = []
        self._lines: list[int] = []
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(device))  # creates it
        self._operations: dict[Any, MemoryOperations] = {}
        from .peer_copies import Means  # it needs Triton

        self._means = Means(device, self.size - 1)

    def allocate(self, num_bytes: int, num_counters: int) -> tuple[Tensor, list[int]]:
        """Allocate zeroed bytes and counters on every rank. Returns this rank's bytes (uint8) and each rank's address.
        A collective call, made once.
        """
        # The only private module in use: there is no other way to memory that other processes can address.
        import torch.distributed._symmetric_memory as symmetric

        start = max(-(-num_bytes // COUNTER_BYTES), 1) * COUNTER_BYTES
        self._own = symmetric.empty(start + num_counters * COUNTER_BYTES, dtype=torch.uint8, device=self.device)
        self._own.zero_()
        self._handle = symmetric.rendezvous(self._own, self._group)
        self._meet()  # ranks write only after all are zero
        self._bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
        self._counters = [base + start for base in self._bases]
        self._choose_lines()
        self._meet()  # no rank is still testing
        self._own[start:].zero_()
        self._meet()
        return self._own[:num_bytes], self._bases

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        self._handle.barrier()
        torch.cuda.synchronize(self.device)

    def _choose_lines(self) -> None:
        """Choose the pair of streams whose waits slow the current stream least; all ranks test together."""
        pairs = [[torch.cuda.Stream(self.device, priority=-1) for _ in range(_NUM_LINES)] for _ in range(_PAIRS)]
        least_ms = [float("inf")] * _PAIRS
        for trial in range(_TRIALS * _PAIRS):
            place = trial % _PAIRS
            self._lines = [stream.cuda_stream for stream in pairs[place]]
            least_ms[place] = min(least_ms[place], self._tried_ms(trial + 1))
        self._streams = pairs[least_ms.index(min(least_ms))]
        self._lines = [stream.cuda_stream for stream in self._streams]

    def _tried_ms(self, number: int) -> float:
        peers = [rank for rank in range(self.size) if rank != self.rank]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        numbers = torch.zeros(1, device=self.device)
        sleep: Any = torch.cuda._sleep
        sleep(_HELD_CYCLES)
        begin.record()
        for _ in range(_KERNELS):
            numbers.add_(1)
        end.record()
        self.follow_current(0)
        own, others = self._bases[self.rank], [self._bases[peer] for peer in peers]
        self.copy(0, others, [own] * len(peers), [COUNTER_BYTES] * len(peers))  # zeros onto zeros
        self.signal(0, tuple((peer, self.rank) for peer in peers), number)
        self.follow_line(1, 0)
        self.await_signals(1, tuple(peers), number)
        end.synchronize()
        return begin.elapsed_time(end)

    def follow_current(self, line: int) -> None:
        """Let the line's later work wait for all work queued on the current stream."""
        event = self._ready.cuda_event
        self._driver.record(event, self._current())
        self._driver.wait_event(self._lines[line], event)

    def follow_line(self, line: int, other: int) -> None:
        """Let the line's later work wait for all work queued on the line `other`."""
        event = self._ready.cuda_event
        self._driver.record(event, self._lines[other])
        self._driver.wait_event(self._lines[line], event)

    def current_awaits(self, counters: tuple[int, ...], value: int) -> None:
        """Let the current stream's later work wait until these counters of this rank are at least `value`."""
        self._await(self._current(), counters, value)

    def copy(self, line: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        """Copy between addresses of any ranks, in any order; each size is at least one byte."""
        self._driver.copy(self._lines[line], targets, sources, sizes_bytes)

    def mean(
        self, line: int, pieces: Sequence[Piece], target: int, others: int, distance_bytes: int, dtype: torch.dtype
    ) -> None:
        """Write target + start = (own + (others + start)) / size for each piece. Other ranks' gradients begin at
        `others`, `distance_bytes` apart. Sums are in float32 or wider, in this order.
        """
        self._means.start(self._lines[line], pieces, target, others, distance_bytes, dtype)

    def signal(self, line: int, places: tuple[tuple[int, int], ...], value: int) -> None:
        """Set each (rank, counter) to `value` once all earlier work of the line is done and visible."""
        operations = self._operations.get(places)
        if operations is None:
            addresses = [self._counters[rank] + counter * COUNTER_BYTES for rank, counter in places]
            operations = self._operations[places] = self._driver.writes(addresses)
        operations.start(self._lines[line], value)

    def await_signals(self, line: int, counters: tuple[int, ...], value: int) -> None:
        self._await(self._lines[line], counters, value)

    def _await(self, stream: int, counters: tuple[int, ...], value: int) -> None:
        operations = self._operations.get(counters)
        if operations is None:
            addresses = [self._counters[self.rank] + counter * COUNTER_BYTES for counter in counters]
            operations = self._operations[counters] = self._driver.waits(addresses)
        operations.start(stream, value)

    def _current(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))  # a tenth of the time of making a Stream


_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32. Zero flags: a wait compares by int32 difference
(GEQ), so numbers may overflow; a write follows the stream's work.
"""
_FLUSH, _CAN_FLUSH = 1 << 30, 98
"""CU_STREAM_WAIT_VALUE_FLUSH, for devices that may reorder another's writes:
CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES.
"""
_IN_STREAM_ORDER, _BESIDE_COMPUTATION = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class _MemoryOperation(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
    )


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class MemoryOperations:
    def __init__(self, start: Callable[..., None], operation: int, addresses: Sequence[int], flags: int = 0) -> None:
        self._start, self._items = start, (_MemoryOperation * len(addresses))()
        for item, address in zip(self._items, addresses, strict=True):
            item.operation, item.address, item.flags = operation, address, flags

    def start(self, stream: int, value: int) -> None:
        for item in self._items:
            item.value = value & 0xFFFFFFFF
        self._start(stream, len(self._items), self._items, 0)


class CudaDriver:
    def __init__(self, device: int) -> None:
        """Raises Unsupported if the driver lacks a function."""
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._copy = _function(
            "cuMemcpyBatchAsync", pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        self._operate = _function("cuStreamBatchMemOp_v2", pointer, number, pointer, number)
        self.record = _function("cuEventRecord", pointer, pointer)
        """(event, stream)"""
        self._wait = _function("cuStreamWaitEvent", pointer, pointer, number)
        self._attributes = _CopyAttributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTATION)
        from_the_first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._wait_flags = _FLUSH if _attribute(device, _CAN_FLUSH) else 0
        self._how = ctypes.byref(self._attributes), ctypes.byref(from_the_first), 1, ctypes.byref(failed)

    def writes(self, addresses: Sequence[int]) -> MemoryOperations:
        return MemoryOperations(self._operate, _WRITE, addresses)

    def waits(self, addresses: Sequence[int]) -> MemoryOperations:
        """Operations that wait until the number at each address is at least a value."""
        return MemoryOperations(self._operate, _WAIT, addresses, self._wait_flags)

    def copy(self, stream: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        numbers = ctypes.c_uint64 * len(sizes_bytes)
        self._copy(numbers(*targets), numbers(*sources), numbers(*sizes_bytes), len(sizes_bytes), *self._how, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._wait(stream, event, 0)


def _attribute(device: int, number: int) -> int:
    found, handle = ctypes.c_int(0), ctypes.c_int(0)
    _function("cuDeviceGet", ctypes.c_void_p, ctypes.c_int)(ctypes.byref(handle), device)
    _function("cuDeviceGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(
        ctypes.byref(found), number, handle.value
    )
    return found.value


def _function(name: str, *arguments: type) -> Callable[..., None]:
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except AttributeError as error:
        why = f"its CUDA driver is older than 12.8 and has no {name}"
        raise Unsupported("the transport peer_copy on this host", why, "use transport='collectives'") from error
    function.argtypes, function.restype = arguments, ctypes.c_int

    def call(*given: object) -> None:
        status = function(*given)
        if status:
            raise RuntimeError(f"the CUDA driver refused {name} with error {status}")

    return call


_PEER_COPY, _INSTEAD = "the transport peer_copy", "use transport='collectives'"


def open_peer_memory(
    transport: str | PeerMemory,
    collectives: Collectives,
    group: dist.ProcessGroup | Collectives | None,
    parameters: Sequence[nn.Parameter],
) -> PeerMemory:
    """Return the given memory, or open one for these parameters' GPUs; a collective call. Raises Unsupported for
    gradients that cannot be copied, and for GPUs that cannot reach each other.
    """
    _refuse_uncopied(parameters)
    if not isinstance(transport, str):
        return transport
    process_group = group if isinstance(group, dist.ProcessGroup) else None
    if process_group is None and collectives.size != dist.get_world_size():
        what = f"{_PEER_COPY} among {collectives.size} of {dist.get_world_size()} processes"
        raise Unsupported(what, "it needs their group", "give the process group, not its collectives")
    return PeerMemory(collectives, process_group, parameters[0].device)


def _refuse_uncopied(parameters: Sequence[nn.Parameter]) -> None:
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        what, why = f"{_PEER_COPY} of gradients on {' and '.join(devices)}", "a process's gradients are on one device"
        raise Unsupported(what, why, _INSTEAD)
    if any(parameter.is_complex() for parameter in parameters):
        raise Unsupported(f"{_PEER_COPY} of complex gradients", "it makes means of real numbers", _INSTEAD)
