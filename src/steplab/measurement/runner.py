"""The work of every measurement in its process.

Importing torch and compiling take longer than most cells, so one process measures many. It frees and checks a failure's
memory; if some stays, it ends, and another process measures the rest (`processes.launch`).
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from steplab.measurement.machine.device import Device, allocated_bytes, refuse_unserved
from steplab.measurement.machine.environment import read_clocks, read_environment
from steplab.measurement.machine.failures import failure_from
from steplab.measurement.observer import Observer
from steplab.records.failure import Failure
from steplab.specs.attention_kernels import refuse_unserved_kernels
from steplab.specs.step import StepSpec
from steplab.units import MIB

T = TypeVar("T")
TOLERATED_BYTES = 256 * MIB
"""Tolerated bytes, because libraries allocate some memory once and keep it."""


class Broken(Exception):
    """The device no longer answers, or holds memory that nothing refers to."""


class Runner:
    def __init__(self, device: Device, observer: Observer) -> None:
        self.device, self.observer = device, observer
        self.stage = "build"
        self.environment = read_environment(device.torch_device)
        observer.on_environment(self.environment)
        self.idle_bytes = allocated_bytes(device)
        """Bytes allocated before any cell; None if the allocator does not count."""

    def run(self, groups: Sequence[Sequence[int]], measure: Callable[[Sequence[int]], None]) -> bool:
        try:
            for group in groups:
                self.observer.on_under_way(list(group))
                measure(group)
        except Broken:
            return False
        return True

    def read_clocks(self) -> None:
        self.environment = read_clocks(self.environment, self.device.torch_device)

    def tell_clocks(self) -> None:
        self.read_clocks()
        self.observer.on_environment(self.environment)

    def begin(self, stage: str, num_steps: int = 0) -> None:
        self.stage = stage
        self.observer.on_stage(stage, num_steps)

    def settle(self) -> None:
        self.idle_bytes = allocated_bytes(self.device)

    def free(self) -> int | None:
        gc.collect()
        self.device.synchronize()
        self.device.free_unused()
        return allocated_bytes(self.device)

    def stays(self, beyond: int = 0, patience_s: float = 0.0) -> int:
        """Bytes held beyond the idle device's and `beyond`, after at most `patience_s` seconds of waiting for their
        release; 0 if they are so few that libraries may keep them.
        """
        until_s = time.monotonic() + patience_s
        while True:
            held, idle = self.free(), self.idle_bytes
            if held is None or idle is None or held <= idle + beyond + TOLERATED_BYTES:
                return 0
            if time.monotonic() > until_s:
                return held - idle - beyond
            time.sleep(0.1)

    def check(self, beyond: int = 0) -> None:
        """Raises Broken if the device does not answer, or if memory stays."""
        try:
            stays = self.stays(beyond)
        except Exception as error:
            raise Broken from error
        if stays:
            raise Broken


def refuse_unserved_step(spec: StepSpec, device: torch.device) -> None:
    """Raise Unsupported if the device would compute in another precision, or lacks a kernel that the step names."""
    refuse_unserved(spec.precision, device)
    refuse_unserved_kernels(spec, device.type)


def attempt(stage: str, work: Callable[[], T], device: Device) -> tuple[T | None, Failure | None]:
    try:
        return work(), None
    except Exception as error:
        return None, failure_from(error, stage, device)
