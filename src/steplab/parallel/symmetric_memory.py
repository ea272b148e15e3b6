"""Peer memory of the GPUs of one host: torch's symmetric memory, copy engines, and waits that take no multiprocessor.

Each bucket takes a handful of calls in the middle of a backward pass, while the host has to keep ahead of the GPU. So
they go to the CUDA driver directly: a copy, a write to a counter and a wait for one take a microsecond or two each,
where torch's own copy takes six and a kernel that signals or waits as long. A wait is the stream's, and runs no kernel.
"""

import ctypes
import socket
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.errors import SteplabError, Unsupported
from steplab.parallel.collectives import Collectives

_COUNTER_BYTES = 64
"""Each has a line of the cache to itself."""
_GEQ = 0
"""CU_STREAM_WAIT_VALUE_GEQ: until the number, minus the value, is not negative as an int32, so it may run over."""
_NUM_LINES = 3
BLOCK = 4096
"""Numbers of a program of the mean."""


class SymmetricMemory:
    """See peer_memory.PeerMemory. `device` is the current device wherever this is built and used."""

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Raises Unsupported, on all ranks, where one cannot reach another's memory."""
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
        self._driver = _Driver()
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(_NUM_LINES)]
        self._lines = [stream.cuda_stream for stream in self._streams]
        self._ready = torch.cuda.Event()
        self._means: dict[Any, Any] = {}

    def allocate(self, num_bytes: int, num_counters: int) -> tuple[Tensor, list[int]]:
        # The one private module that is used: there is no other way to memory that other processes can address.
        import torch.distributed._symmetric_memory as symmetric

        start = -(-num_bytes // _COUNTER_BYTES) * _COUNTER_BYTES
        self._own = symmetric.empty(start + num_counters * _COUNTER_BYTES, dtype=torch.uint8, device=self.device)
        self._own.zero_()
        self._handle = symmetric.rendezvous(self._own, self._group)
        torch.cuda.synchronize(self.device)
        self._handle.barrier()  # nobody writes before all are zero
        torch.cuda.synchronize(self.device)
        bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
        self._counters = [base + start for base in bases]
        return self._own[:num_bytes], bases

    def follow_current(self, *lines: int) -> None:
        self._ready.record(torch.cuda.current_stream(self.device))
        for line in lines:
            self._driver("cuStreamWaitEvent", self._lines[line], self._ready.cuda_event, 0)

    def current_awaits(self, counter: int, value: int) -> None:
        self._await(torch.cuda.current_stream(self.device).cuda_stream, counter, value)

    def copy(self, line: int, target: int, source: int, num_bytes: int) -> None:
        self._driver("cuMemcpyAsync", target, source, num_bytes, self._lines[line])

    def mean(
        self, line: int, target: int, own: int, others: int, distance_bytes: int, count: int, dtype: torch.dtype
    ) -> None:
        distance = distance_bytes // dtype.itemsize
        aligned = not (target | own | others | distance_bytes) % 16
        compiled = self._means.get((dtype, aligned))
        if compiled is None:
            compiled = self._means[dtype, aligned] = self._compiled(dtype, aligned)
        programs = -(-count // BLOCK)
        compiled[(programs, 1, 1)](target, own, others, distance, count, self.size - 1, BLOCK, stream=self._lines[line])

    def signal(self, line: int, rank: int, counter: int, value: int) -> None:
        address = self._counters[rank] + counter * _COUNTER_BYTES
        self._driver("cuStreamWriteValue32_v2", self._lines[line], address, value & 0xFFFFFFFF, 0)

    def await_signal(self, line: int, counter: int, value: int) -> None:
        self._await(self._lines[line], counter, value)

    def _await(self, stream: int, counter: int, value: int) -> None:
        address = self._counters[self.rank] + counter * _COUNTER_BYTES
        self._driver("cuStreamWaitValue32_v2", stream, address, value & 0xFFFFFFFF, _GEQ)

    def _compiled(self, dtype: torch.dtype, aligned: bool) -> Any:
        """The kernel for numbers of a type, which all begin at multiples of 16 bytes or not all do."""
        from steplab.parallel.mean_kernel import mean_kernel

        # A launch on nothing, through Triton's own way, which finds out what to compile for: distances of 64 bits too.
        numbers = torch.zeros(32, dtype=dtype, device=self.device)[0 if aligned else 1 :]
        return mean_kernel[(1,)](numbers, numbers, numbers, 1 << 40, 0, OTHERS=self.size - 1, BLOCK=BLOCK)


class _Driver:
    """The CUDA driver's functions by name; what they are given are numbers."""

    _ARGUMENTS: ClassVar = {
        "cuMemcpyAsync": [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p],
        "cuStreamWaitEvent": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint],
        "cuStreamWriteValue32_v2": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint],
        "cuStreamWaitValue32_v2": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint],
    }

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._functions = {}
        for name, arguments in self._ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function

    def __call__(self, name: str, *arguments: int) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise SteplabError(f"the CUDA driver refused {name} with error {status}")
