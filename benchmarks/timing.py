"""Alternating timing of calls in one process, by steplab.measurement.clock.

A sample is the time of consecutive calls on tensors outside the L2 cache, behind flushes that last until Python has
launched them. Each round has a random order: at the power limit, a kernel's clock depends on its predecessor.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steplab.measurement.attention.variant import Gauge
from steplab.measurement.clock import ColdCaches, ColdCall
from steplab.measurement.machine.device import Device
from steplab.measurement.runner import attempt

CACHE_BYTES, SAMPLE_S, MOST_CALLS = 150e6, 0.03, 24
"""Bytes of tensors that exceed an H200's 50 MB L2 cache; target seconds of a sample; most calls and tensor sets of a
sample.
"""
Call = Callable[[], object]
Constants = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    build: Callable[[], Call]
    """Builds a set of tensors and returns the call on them."""
    amount: float = 0.0
    """FLOPs or bytes per call; 0: not counted."""
    unit: str = "B"
    """FLOP or B."""
    set_bytes: float = CACHE_BYTES
    check: Callable[[Any], str] | None = None
    """Takes the first call's result; its words are reported."""
    module: Any = None
    """Module with the constants to set before each sample."""
    constants: Constants = field(default_factory=dict)


def given(call: Call) -> Callable[[], Call]:
    """The `build` of a call whose tensors exist."""
    return lambda: call


def in_tiles(cases: Iterable[Case], module: Any, tiles: Sequence[Constants]) -> Iterator[Case]:
    for case in cases:
        yield from (replace(case, module=module, constants=constants) for constants in tiles)


class Timed:
    """A case on a device, and its row of results."""

    def __init__(self, case: Case, caches: ColdCaches, device: Device) -> None:
        self.row: dict[str, Any] = {"name": case.name, "amount": case.amount, "unit": case.unit, **case.constants}
        self._case, self._caches, self._device = case, caches, device
        self._calls, self._python_s = list[Call](), 0.0
        self._cold = ColdCall(prepare=self._set_constants, run=self._run)

    def build(self) -> None:
        case = self._case
        with self._device.torch_device:
            sets = max(1, min(MOST_CALLS, int(-(-CACHE_BYTES // case.set_bytes))))
            self._calls = [case.build() for _ in range(sets)]
        self._set_constants()
        found = self._calls[0]()
        self.row |= {"check": case.check(found)} if case.check else {}
        del found
        self._caches.warm_up(self._cold, 0.0)
        gauge = Gauge(self._device)
        self._calls[0]()
        self.row["beyond_bytes"] = gauge.peak()
        once_s, _ = self._sample()
        self._calls *= max(1, int(min(MOST_CALLS, SAMPLE_S / once_s) / sets))
        self.row |= {"samples_s": list[float](), "python_s": list[float]()}

    def take_turn(self) -> None:
        for name, seconds in zip(("samples_s", "python_s"), self._sample(), strict=True):
            self.row[name].append(seconds)

    def _sample(self) -> tuple[float, float]:
        start, end = self._caches.run_ahead(self._cold)
        self._device.synchronize()
        return self._device.seconds_between(start, end) / len(self._calls), self._python_s / len(self._calls)

    def _run(self, _: None) -> None:
        began_s = time.perf_counter()
        for call in self._calls:
            call()
        self._python_s = time.perf_counter() - began_s

    def _set_constants(self) -> None:
        for name, value in self._case.constants.items():
            setattr(self._case.module, name, value)


def measure(cases: Iterable[Case], device: Device, repeats: int) -> list[dict[str, Any]]:
    """Rows of results; that of a case that fails says why it is left out."""
    caches, ready, rows = ColdCaches(device), list[Timed](), list[dict[str, Any]]()
    for case in cases:
        timed = Timed(case, caches, device)
        rows.append(timed.row)
        _, failure = attempt("build", timed.build, device)
        if failure is None:
            ready.append(timed)
        else:
            timed.row["left_out"] = failure.message[:160]
        print(f"ready: {case.name} {timed.row.get('left_out', '')}", file=sys.stderr)
    shuffled = random.Random(0)
    for _ in range(repeats):
        shuffled.shuffle(ready)
        for timed in ready:
            timed.take_turn()
    return rows
