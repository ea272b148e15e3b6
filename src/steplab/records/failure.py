"""Failures of measurements, which are stored as results."""

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["out_of_memory", "crashed", "timeout", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Reason why a step, cell or audit has no figures."""

    kind: FailureKind
    """out_of_memory: an allocation was refused, or the state exceeds host memory. crashed: the process died or its GPU
    failed. timeout: too slow. error: the model or torch raised an exception.
    """
    message: str
    phase: str | None = None
    """Stage of the failure, such as build, compile, warmup or measure."""
    requested_bytes: int | None = None
    """Bytes of the failed request to the driver (on CUDA, a multiple of 2 MiB)."""
    peak_allocated_bytes: int | None = None
    """Most bytes in live tensors before the failure."""
    signal: str | None = None
    last_lines: tuple[str, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Base of results that hold either figures or a failure."""

    failure: Failure | None = None

    @property
    def status(self) -> str:
        return self.failure.kind if self.failure else "ok"
