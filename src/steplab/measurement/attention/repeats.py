"""One repeat of a pass, with cold caches, and with the device at work until the host has launched all of it.

Before each repeat the cache is overwritten (on a CUDA device), and what backward needs is computed again: if it were
kept, implementations could not use the device's memory one after the other. Overwriting the cache also keeps the device
busy while Python launches the pass, so it is done as often as that takes. If the device reached the pass before all of
it was launched, it may have waited for the host, so the repeat is made again with more work before it.
"""

import math
import time

import torch

from steplab.measurement.attention.variant import AttentionVariant
from steplab.measurement.machine.device import Device
from steplab.specs.attention import AttentionPass
from steplab.units import MIB

_LEAST_FLUSH_BYTES = 256 * MIB
_LEAST_WARMUP_CALLS = 3
_HEAD_START = 1.5
"""How long the device is kept busy before a pass, as a multiple of the time that launching the pass takes."""
MOST_FLUSHES = 40
"""The most flushes before a pass: some milliseconds, in which Python launches any pass but one of hundreds of
kernels."""
_FLUSHES_TIMED = 20


class Repeats:
    """The repeats on one device, with the buffer that its caches are overwritten with."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flush = flush_buffer(device)
        self._flush_s = _seconds_of(self._flush, device)

    def warm_up(self, name: AttentionPass, variant: AttentionVariant, warmup_s: float) -> float:
        """Run a pass until the device is up to speed; returns the seconds of a call at the end, everything included."""
        variant.num_flushes, variant.num_waits = 1, 0
        calls, batch = 0, 1
        self._device.synchronize()
        started = time.perf_counter()
        while True:
            batch_started = time.perf_counter()
            for _ in range(batch):
                self._run(name, variant)
            self._device.synchronize()
            calls += batch
            now = time.perf_counter()
            if calls >= _LEAST_WARMUP_CALLS and now - started >= warmup_s:
                break
            batch *= 2
        variant.num_flushes = self._enough_flushes(name, variant)
        return (now - batch_started) / batch + (variant.num_flushes - 1) * self._flush_s

    def run_ahead(self, name: AttentionPass, variant: AttentionVariant) -> tuple[object, object]:
        """Make one repeat whose kernels were all launched before the device reached them, or count it as one that
        may have waited; returns its marks."""
        while True:
            span = self._run(name, variant)
            if self._flush is None or not self._device.has_passed(span[0]):
                return span
            if variant.num_flushes == MOST_FLUSHES:
                variant.num_waits += 1
                return span
            variant.num_flushes = min(2 * variant.num_flushes, MOST_FLUSHES)

    def _enough_flushes(self, name: AttentionPass, variant: AttentionVariant) -> int:
        """The number of flushes that keep the device busy for longer than Python takes to launch the pass behind
        them."""
        if self._flush is None:
            return 1
        issued_s = []
        for _ in range(_LEAST_WARMUP_CALLS):
            self._device.synchronize()
            started = time.perf_counter()
            self._run(name, variant)
            issued_s.append(time.perf_counter() - started)
        self._device.synchronize()
        return max(1, min(math.ceil(_HEAD_START * min(issued_s) / self._flush_s), MOST_FLUSHES))

    def _run(self, name: AttentionPass, variant: AttentionVariant) -> tuple[object, object]:
        """Make one repeat with cold caches; returns its marks."""
        output = variant.forward_for_backward() if name == "backward" else None
        if self._flush is not None:
            for _ in range(variant.num_flushes):
                self._flush.zero_()
        start = self._device.mark()
        if name == "forward":
            variant.forward()
        else:
            variant.backward(variant.forward_for_backward() if output is None else output)
        return start, self._device.mark()


def flush_buffer(device: Device) -> torch.Tensor | None:
    """The buffer that is written before each repeat so that the data of the last one are in no cache; None if the
    device has no cache to flush."""
    if device.torch_device.type != "cuda":
        return None
    cache_bytes = int(getattr(torch.cuda.get_device_properties(device.torch_device), "L2_cache_size", 0))
    return torch.empty(max(_LEAST_FLUSH_BYTES, 2 * cache_bytes), dtype=torch.uint8, device=device.torch_device)


def _seconds_of(flush: torch.Tensor | None, device: Device) -> float:
    """The seconds that one flush takes; 0 without a buffer."""
    if flush is None:
        return 0.0
    device.synchronize()
    started = time.perf_counter()
    for _ in range(_FLUSHES_TIMED):
        flush.zero_()
    device.synchronize()
    return (time.perf_counter() - started) / _FLUSHES_TIMED
