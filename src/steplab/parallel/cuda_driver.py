"""The calls of the CUDA driver that peer copies use; addresses, streams and events are numbers.

They are made in the middle of a backward pass, where the host has to keep ahead of the GPU. So they are made directly,
because torch's own copy takes several times as long, and each does as much as it can at once.
"""

import ctypes
from collections.abc import Callable, Sequence

from steplab.errors import SteplabError, Unsupported

_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32. Flags of zero are GEQ for a wait: it lasts until
the number, minus the value, is not negative as an int32, so that numbers may run over. For a write they are: when all
that the stream has done can be seen."""
_FLUSH, _CAN_FLUSH = 1 << 30, 98
"""CU_STREAM_WAIT_VALUE_FLUSH: what another device wrote before the number can be seen after the wait, also where the
device may reorder such writes. A device that may can do so: CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES."""
_IN_STREAM_ORDER, _BESIDE_COMPUTATION = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of a wait or a write: both have the same fields."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
    )


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the places are hints for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class MemoryOperations:
    """Writes to numbers of 32 bits, or waits for them, that a stream is given in one call."""

    def __init__(self, start: Callable[..., None], operation: int, addresses: Sequence[int], flags: int = 0) -> None:
        self._start, self._items = start, (_MemoryOperation * len(addresses))()
        for item, address in zip(self._items, addresses, strict=True):
            item.operation, item.address, item.flags = operation, address, flags

    def start(self, stream: int, value: int) -> None:
        """Add them to a stream."""
        for item in self._items:
            item.value = value & 0xFFFFFFFF
        self._start(stream, len(self._items), self._items, 0)


class CudaDriver:
    """The driver's functions, looked up once. They act on the current device."""

    def __init__(self, device: int) -> None:
        """Look the functions up for the device of that number. Raises Unsupported if the driver is older than one of
        them."""
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._copy = _function(
            "cuMemcpyBatchAsync", pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        self._operate = _function("cuStreamBatchMemOp_v2", pointer, number, pointer, number)
        self._record = _function("cuEventRecord", pointer, pointer)
        self._wait = _function("cuStreamWaitEvent", pointer, pointer, number)
        self._attributes = _CopyAttributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTATION)
        from_the_first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._wait_flags = _FLUSH if _attribute(device, _CAN_FLUSH) else 0
        self._how = ctypes.byref(self._attributes), ctypes.byref(from_the_first), 1, ctypes.byref(failed)

    def writes(self, addresses: Sequence[int]) -> MemoryOperations:
        """Writes of a value to each address, when the stream has done all work before."""
        return MemoryOperations(self._operate, _WRITE, addresses)

    def waits(self, addresses: Sequence[int]) -> MemoryOperations:
        """Waits until the number at each address is at least a value; the stream then sees what was written before."""
        return MemoryOperations(self._operate, _WAIT, addresses, self._wait_flags)

    def copy(self, stream: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        """Copy between addresses of any GPUs that reach each other, in any order, as one piece of the stream's work."""
        numbers = ctypes.c_uint64 * len(sizes_bytes)
        self._copy(numbers(*targets), numbers(*sources), numbers(*sizes_bytes), len(sizes_bytes), *self._how, stream)

    def record(self, event: int, stream: int) -> None:
        """Record the work that the stream was given so far."""
        self._record(event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Have the stream's next work wait for the event."""
        self._wait(stream, event, 0)


def _attribute(device: int, number: int) -> int:
    """A device attribute of the driver, by its number."""
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
            raise SteplabError(f"the CUDA driver refused {name} with error {status}")

    return call
