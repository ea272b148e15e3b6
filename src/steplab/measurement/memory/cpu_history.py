"""A history of a CPU's memory in the format of torch's CUDA snapshots: each block is a segment of the requested size.

https://docs.pytorch.org/docs/stable/torch_cuda_memory.html describes it. A mode over torch's functions sees lines of
Python and leaves autograd unchanged; autograd's own work, and recomputation, have no line.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode

from steplab.measurement.memory.allocation_events import MemoryEvent

_DEEPEST = 20

_WITHOUT_LINES = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

Frame = tuple[str, int, str]


class PythonLines(TorchFunctionMode):
    """Every call of a torch function becomes a profiler range named by its stack."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._numbers: dict[tuple[Frame, ...], int] = {}

    def stack(self, ranges: tuple[str, ...]) -> tuple[Frame, ...]:
        for name in reversed(ranges):
            if name.startswith(self._prefix):
                return list(self._numbers)[int(name.removeprefix(self._prefix))]
        return ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_LINES or func.__name__ == "__get__":  # an attribute allocates nothing
            return func(*args, **kwargs)
        stack = _stack(sys._getframe(1))
        with record_function(f"{self._prefix}{self._numbers.setdefault(stack, len(self._numbers))}"):
            return func(*args, **kwargs)


def _stack(frame: FrameType | None) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < _DEEPEST:
        code = frame.f_code
        if code.co_filename != __file__:
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def storages_in_sight() -> dict[int, int]:
    tensors: list[Tensor] = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    cpu = (found for found in tensors if found.device.type == "cpu" and found.layout is torch.strided)
    return {address: size for address, size in map(_memory_of, cpu) if address}


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return 0, 0


def left_behind(events: Sequence[MemoryEvent]) -> dict[int, int]:
    alive: dict[int, int] = {}
    for event in events:
        if event.num_bytes > 0:
            alive[event.address] = event.num_bytes
        else:
            alive.pop(event.address, None)
    return alive


def cpu_snapshot(
    events: Sequence[MemoryEvent], before: Mapping[int, int], stack_of: Callable[[tuple[str, ...]], tuple[Frame, ...]]
) -> dict[str, Any]:
    """`before`: bytes of older blocks by address. `stack_of`: open ranges -> Python's stack, innermost frame first."""
    alive = dict(before)
    frames_at: dict[int, list[dict[str, Any]]] = {}
    written: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}
    trace = []
    for event in events:
        gone_bytes = alive.pop(event.address, None)
        if event.num_bytes > 0:
            if gone_bytes is not None:  # released without an allocation: the block is older than the profiler
                trace.append(_entry("free_completed", event, gone_bytes, []))
            stack = stack_of(event.ranges)
            # one list for all: a smaller pickle
            frames = written.setdefault(stack, [{"filename": f, "line": line, "name": n} for f, line, n in stack])
            alive[event.address], frames_at[event.address] = event.num_bytes, frames
            trace.append(_entry("alloc", event, event.num_bytes, frames))
        else:
            trace.append(_entry("free_completed", event, -event.num_bytes, []))
    segments = [_segment(address, alive[address], frames_at.get(address, [])) for address in sorted(alive)]
    return {"segments": segments, "device_traces": [trace]}


def _entry(action: str, event: MemoryEvent, num_bytes: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": event.address,
        "size": num_bytes,
        "stream": 0,
        "frames": frames,
        "time_us": event.time_ns // 1000,
    }


def _segment(address: int, num_bytes: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    block = {
        "address": address,
        "size": num_bytes,
        "requested_size": num_bytes,
        "state": "active_allocated",
        "frames": frames,
    }
    return {
        "device": 0,
        "address": address,
        "total_size": num_bytes,
        "allocated_size": num_bytes,
        "active_size": num_bytes,
        "requested_size": num_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }
