import ctypes
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from steplab.parallel.errors import Unsupported
from steplab.parallel.peer_memory import CudaDriver

STREAM, EVENT = 0x5000_0000_1000, 0x6000_0000_2000
TARGETS, SOURCES, SIZES = [0x7F00_0000_0100, 0x7F00_0000_0200], [0x7E00_0000_0300, 0x7E00_0000_0400], [48, 1 << 33]
DEVICE, HANDLE = 3, 5
POINTER, NUMBER, SIZE, FUNCTION = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.CFUNCTYPE


class Library:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.status = 0
        self.can_flush = 0
        status = ctypes.c_int
        copy = FUNCTION(status, POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER, POINTER)
        self.cuMemcpyBatchAsync = copy(self._copy)
        self.cuStreamBatchMemOp_v2 = FUNCTION(status, POINTER, NUMBER, POINTER, NUMBER)(self._operate)
        self.cuEventRecord = FUNCTION(status, POINTER, POINTER)(self._told("record"))
        self.cuStreamWaitEvent = FUNCTION(status, POINTER, POINTER, NUMBER)(self._told("wait"))

        self.cuDeviceGet = FUNCTION(status, POINTER, status)(self._device)
        self.cuDeviceGetAttribute = FUNCTION(status, POINTER, status, status)(self._attribute)

    def _device(self, handle: int, number: int) -> int:
        assert number == DEVICE
        ctypes.c_int.from_address(handle).value = HANDLE
        return self.status

    def _attribute(self, value: int, attribute: int, handle: int) -> int:
        assert (attribute, handle) == (98, HANDLE)  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        ctypes.c_int.from_address(value).value = self.can_flush
        return self.status

    def _told(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.asked.append((name, *arguments))
            return self.status

        return function

    def _copy(self, targets: int, sources: int, sizes: int, count: int, how: int, first: int, *rest: Any) -> int:
        order, *places, flags = struct.unpack("=i2i2iI", ctypes.string_at(how, 24))  # CUmemcpyAttributes
        assert places == [0] * 4
        lists = [numbers_at(place, count) for place in (targets, sources, sizes)]
        num_attributes, _, stream = rest
        self.asked.append((*lists, order, flags, numbers_at(first, 1), num_attributes, stream))
        return self.status

    def _operate(self, stream: int, count: int, operations: int, flags: int) -> int:
        layout = struct.Struct("=I4xQI4xI20x")  # CUstreamBatchMemOpParams: operation, address, value, flags
        self.asked.append((stream, list(layout.iter_unpack(ctypes.string_at(operations, 48 * count))), flags))
        return self.status


def numbers_at(place: int, count: int) -> Sequence[int]:
    return list(struct.unpack(f"={count}Q", ctypes.string_at(place, 8 * count)))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def test_copies_go_in_one_call_in_the_order_of_the_stream(library: Library) -> None:
    CudaDriver(DEVICE).copy(STREAM, TARGETS, SOURCES, SIZES)
    in_stream_order, beside_computation, for_all_from = 1, 1, [0]
    assert library.asked == [(TARGETS, SOURCES, SIZES, in_stream_order, beside_computation, for_all_from, 1, STREAM)]


def test_numbers_are_written_and_waited_for_in_one_call_each(library: Library) -> None:
    driver = CudaDriver(DEVICE)
    driver.writes(TARGETS).start(STREAM, 7)
    waits = driver.waits(SOURCES)
    waits.start(STREAM, 8)
    waits.start(STREAM, (1 << 32) + 9)  # counters have 32 bits, and run over
    assert library.asked == [
        (STREAM, [(2, address, 7, 0) for address in TARGETS], 0),
        *[(STREAM, [(1, address, value, 0) for address in SOURCES], 0) for value in (8, 9)],
    ]


def test_waits_flush_what_others_wrote_where_the_device_may_reorder_it(library: Library) -> None:
    library.can_flush = 1
    CudaDriver(DEVICE).waits(SOURCES).start(STREAM, 8)
    assert library.asked == [(STREAM, [(1, address, 8, 1 << 30) for address in SOURCES], 0)]


def test_a_stream_follows_an_event(library: Library) -> None:
    driver = CudaDriver(DEVICE)
    driver.record(EVENT, STREAM)
    driver.wait_event(STREAM, EVENT)
    assert library.asked == [("record", EVENT, STREAM), ("wait", STREAM, EVENT, 0)]


def test_what_the_driver_refuses_or_lacks_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library.status = CudaDriver(DEVICE), 700
    with pytest.raises(RuntimeError, match="refused cuEventRecord with error 700"):
        driver.record(EVENT, STREAM)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(Unsupported, match=r"older than 12\.8 and has no cuMemcpyBatchAsync.*collectives"):
        CudaDriver(DEVICE)
