"""Failures, stored as results."""

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["out_of_memory", "crashed", "timeout", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Reason for missing figures of a step, cell or audit."""

    kind: FailureKind
    """out_of_memory: an allocation was refused, or the state exceeds host memory. crashed: the process died or its GPU
    failed. timeout: too slow. error: the model or torch raised.
    """
    message: str
    phase: str | None = None
    """Stage of the failure, such as build, compile, warmup or measure."""
    requested_bytes: int | None = None
    """Bytes of the failed allocation, as requested from the driver (on CUDA, rounded up to 2 MiB)."""
    peak_allocated_bytes: int | None = None
    """Most bytes in live tensors before the failure."""
    signal: str | None = None
    last_lines: tuple[str, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A measurement's figures, or its failure."""

    failure: Failure | None = None

    @property
    def status(self) -> str:
        return self.failure.kind if self.failure else "ok"
