"""Alternating timing of GPU calls in one process.

A sample is the time, by CUDA events, of consecutive calls on tensors outside the L2 cache, after Python got ahead of
the GPU. Each round has a random order: at the power limit, a kernel's clock depends on its predecessor.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CACHE_BYTES, SAMPLE_S, MOST_CALLS = 150e6, 0.03, 24
"""Bytes of tensors that exceed an H200's 50 MB L2 cache; target seconds of a sample; most calls and tensor sets of a
sample.
"""
HEAD_START_CLOCKS = 4_000_000
"""About 2 ms, in which Python gets ahead of the GPU."""
Call = Callable[[], object]
Constants = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    make: Callable[[], Call]
    """Builds a set of tensors and returns the call on them."""
    amount: float = 0.0
    """FLOPs or bytes per call; 0: not counted."""
    unit: str = "B"
    """FLOP or B."""
    set_bytes: float = CACHE_BYTES
    module: Any = None
    """Module with the constants to set before each sample."""
    constants: Constants = field(default_factory=dict)


def sample_s(calls: list[Call], flush: Tensor) -> tuple[float, float]:
    """Seconds per call by CUDA events around all, and Python's seconds per call."""
    flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CLOCKS)
    start.record()
    began_s = time.perf_counter()
    for call in calls:
        call()
    python_s = time.perf_counter() - began_s
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / len(calls), python_s / len(calls)


def measure(cases: Iterable[Case], repeats: int) -> list[dict[str, Any]]:
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    ready, rows = list[tuple[Case, list[Call], dict[str, Any]]](), list[dict[str, Any]]()
    for case in cases:
        row: dict[str, Any] = {"name": case.name, "amount": case.amount, "unit": case.unit, **case.constants}
        rows.append(row)
        try:
            calls = [case.make() for _ in range(max(1, min(MOST_CALLS, int(-(-CACHE_BYTES // case.set_bytes)))))]
            put(case)
            for call in [*calls, *calls[:2]]:
                call()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            calls[0]()
            torch.cuda.synchronize()
            row["beyond_bytes"] = torch.cuda.max_memory_allocated() - before
            once_s, _ = sample_s(calls, flush)
            calls *= max(1, int(min(MOST_CALLS, SAMPLE_S / once_s) / len(calls)))
            row |= {"samples_s": list[float](), "python_s": list[float]()}
            ready.append((case, calls, row))
        except Exception as error:
            row["left_out"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        print(f"ready: {case.name} {row.get('left_out', '')}", file=sys.stderr)
    shuffled = random.Random(0)
    for _ in range(repeats):
        shuffled.shuffle(ready)
        for case, calls, row in ready:
            put(case)
            for name, seconds in zip(("samples_s", "python_s"), sample_s(calls, flush), strict=True):
                row[name].append(seconds)
    return rows


def put(case: Case) -> None:
    for name, value in case.constants.items():
        setattr(case.module, name, value)


def in_tiles(cases: list[Case], module: Any, tiles: list[Constants]) -> Iterator[Case]:
    for case in cases:
        for constants in tiles:
            yield Case(**{**vars(case), "module": module, "constants": constants})
