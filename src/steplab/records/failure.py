"""Why something has no figures: a result of its own, not the absence of one."""

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["out_of_memory", "crashed", "timeout", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a step, a cell or an audit has no figures."""

    kind: FailureKind
    """out_of_memory; crashed: the process died; timeout; error: the model or torch raised."""
    message: str
    """One line."""
    phase: str | None = None
    """What was under way: build, compile, warmup, measure."""
    requested_bytes: int | None = None
    """Size of the allocation that did not fit, as the allocator asked it of the driver (CUDA: rounded up to 2 MiB)."""
    peak_allocated_bytes: int | None = None
    """Most bytes in live tensors before that."""
    signal: str | None = None
    """Name of the signal that ended the process, SIGKILL."""
    last_lines: tuple[str, ...] = ()
    """End of what the process wrote to standard error."""
    rank: int | None = None
    """Which of several processes failed; None: there was one, or it is not known which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Something that was to be measured: it went well, or it has a failure."""

    failure: Failure | None = None
    """Why there are no figures; None for a success."""

    @property
    def status(self) -> str:
        """ok, or the kind of the failure."""
        return self.failure.kind if self.failure else "ok"
