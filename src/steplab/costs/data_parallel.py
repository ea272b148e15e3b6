"""Formulas of data parallelism: seconds of communication in a step, and memory that sharding saves.

**Time.** Gradients of s bytes travel in n equal buckets, one in each collective call. A call takes o seconds at any
size, and a byte 1/w seconds. A bucket, and all buckets without computation, take

    c(n) = o + s / (n w)            alone(n) = n o + s / w

If gradients appear evenly over a backward pass of b seconds, bucket i of n is ready at i b / n. If the link keeps up
(c <= b / n), only the last bucket remains after the pass. Otherwise the link works without a pause from b / n on:

    exposed(n) = max( c(n),  b / n + n c(n) - b )

A call's o may be exposed, on SMs that the backward pass would use, or in Python, which also launches that pass. Then

    serial(n) = n o + s / (n w),    least at   n* = sqrt(s / (w o)),   serial(n*) = 2 sqrt(s o / w)

with buckets of s / n* = sqrt(s w o) bytes. With o = 0 no size would be best, so a fit with o = 0 is rejected. Neither
formula includes the slowdown of concurrent computation.

**Copies between GPUs** take memory bandwidth, but no SMs. Each of N ranks reads (N - 1)/N s to send, and receives as
many bytes. Averaging reads s and writes s/N. Sending the averages back to all ranks reads and writes (N - 1)/N s again.
So each GPU moves through its memory

    m = (5N - 3)/N s.

**Memory.** P parameters of e bytes take e P, their gradients as much, and an optimizer with k values each (AdamW: 2) k
e P. ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5) divides by the N ranks the optimizer state (stage 1),
the gradients too (2), the parameters too (3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Time of one collective call: o + bytes / w. Raises ValueError unless both constants are positive."""

    bytes_per_s: float
    """w: gradient bytes per second. Each counts once, although an all-reduce moves it twice."""
    call_s: float
    """o: seconds of a call with an empty message."""

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.call_s > 0):
            raise ValueError(f"a link of {self.bytes_per_s} bytes/s and {self.call_s} s a call has no best bucket")

    def bucket_s(self, num_bytes: float, num_buckets: float) -> float:
        return self.call_s + num_bytes / num_buckets / self.bytes_per_s

    def alone_s(self, num_bytes: float, num_buckets: float) -> float:
        return num_buckets * self.bucket_s(num_bytes, num_buckets)

    def exposed_s(self, num_bytes: float, num_buckets: float, backward_s: float) -> float:
        """Seconds of communication left after a backward pass of `backward_s`, if gradients appear evenly and all calls
        overlap.
        """
        bucket_s = self.bucket_s(num_bytes, num_buckets)
        return max(bucket_s, num_buckets * bucket_s - backward_s * (1 - 1 / num_buckets))

    def serial_s(self, num_bytes: float, num_buckets: float) -> float:
        """Seconds that remain after the backward pass if each call's o is exposed and the link keeps up."""
        return num_buckets * self.call_s + num_bytes / num_buckets / self.bytes_per_s

    def best_bucket_bytes(self, num_bytes: float) -> float:
        """Bucket size with the least `serial_s`: sqrt(s w o), at most `num_bytes`."""
        return min(math.sqrt(num_bytes * self.bytes_per_s * self.call_s), num_bytes)

    def least_serial_s(self, num_bytes: float) -> float:
        return self.serial_s(num_bytes, num_bytes / self.best_bucket_bytes(num_bytes))


def fit_link(num_calls: Sequence[int], num_bytes: float, alone_s: Sequence[float]) -> Link | None:
    """Fit a Link to measured times: `alone_s[i]` is the time of `num_bytes` in `num_calls[i]` calls without
    computation.

    It minimizes squares of relative errors, because the times span orders of magnitude. None with fewer than two
    different numbers of calls, or if the best fit has no positive bandwidth and o.
    """
    if len(set(num_calls)) < 2 or num_bytes <= 0:
        return None
    import numpy as np

    # Each row divided by its measurement: (n / t) o + (1 / t) f = 1, with f = s / w.
    rows = np.array([(calls / seconds, 1 / seconds) for calls, seconds in zip(num_calls, alone_s, strict=True)])
    call_s, transfer_s = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
    if call_s <= 0 or transfer_s <= 0:
        return None
    return Link(bytes_per_s=num_bytes / transfer_s, call_s=call_s)


def peer_copy_memory_bytes(num_bytes: float, size: int) -> float:
    """m: the bytes that each of `size` GPUs moves through its memory. Peer copies average `num_bytes` of gradients."""
    return (5 * size - 3) / size * num_bytes


def buckets_of(num_bytes: float, bucket_bytes: float, num_tensors: int) -> float:
    """Number of buckets, from one to the number of gradients: a gradient is never divided."""
    return min(max(num_bytes / bucket_bytes, 1.0), float(num_tensors))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    parameters: float
    gradients: float
    optimizer: float


def state_bytes(num_parameters: int, *, parameter_bytes: int, states: int, size: int, stage: int) -> StateBytes:
    """Bytes that each of `size` ranks holds under a ZeRO stage: 0 (nothing divided), 1, 2 or 3.

    `parameter_bytes` is the size of one value, `states` the optimizer's values for each parameter. Ranks hold equal
    parts.
    """
    whole = num_parameters * parameter_bytes
    state = states * whole
    return StateBytes(
        parameters=whole / (size if stage >= 3 else 1),
        gradients=whole / (size if stage >= 2 else 1),
        optimizer=state / (size if stage >= 1 else 1),
    )
