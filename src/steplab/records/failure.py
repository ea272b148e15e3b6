"""Failures of measurements, which are stored as results."""

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["out_of_memory", "crashed", "timeout", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a step, a cell or an audit has no figures."""

    kind: FailureKind
    """Kind of failure. out_of_memory: an allocation was refused, or the state of the step is larger than the
    host's memory. crashed: the process died, or its GPU failed. timeout: it took too long. error: the model or torch
    raised an exception."""
    message: str
    """The failure in one line."""
    phase: str | None = None
    """The stage in which it failed, such as build, compile, warmup or measure."""
    requested_bytes: int | None = None
    """Size in bytes of the allocation that did not fit, as the allocator requested it from the driver (on CUDA, rounded
    up to 2 MiB)."""
    peak_allocated_bytes: int | None = None
    """Most bytes in live tensors before the failure."""
    signal: str | None = None
    """Name of the signal that ended the process, such as SIGKILL."""
    last_lines: tuple[str, ...] = ()
    """Last lines that the process wrote to standard error."""
    rank: int | None = None
    """Rank of the process that failed; None: there was one process, or the rank is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a measurement: its figures, or a failure."""

    failure: Failure | None = None
    """The failure; None for a success."""

    @property
    def status(self) -> str:
        """ok, or the kind of the failure."""
        return self.failure.kind if self.failure else "ok"
