"""The parent's side of a job: it receives the calls of the child's observer."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from steplab.errors import SteplabError, UserError
from steplab.measurement.jobs import Job
from steplab.measurement.processes.messages import STAGE, decoded, read
from steplab.measurement.progress import OnProgress, Progress
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.run import Run


class Listener:
    """Receives a job's messages and keeps the latest of each kind."""

    def __init__(
        self,
        job: Job,
        on_progress: OnProgress = lambda progress: None,
        *,
        on_environment: Callable[[Environment], None] = lambda environment: None,
        on_facts: Callable[[Any], None] = lambda facts: None,
        on_cell: Callable[[int, Any], None] = lambda number, cell: None,
    ) -> None:
        self.on_progress = on_progress
        self.progress = Progress(stage="starting", done=0, total=0)
        self.environment: Environment | None = None
        self.measured: Run | None = None
        """The record as it was when all timing was done; None before."""
        self.is_ready = False
        """Whether the child waits for its next turn."""
        self.under_way: Sequence[int] = ()
        """The cells that may be the cause if the process dies now."""
        self.result: Any = None
        """The job's result; None until it arrives, or if the cells are the result."""
        self.refusal: SteplabError | None = None
        self.hub: tuple[str, int, str] | None = None
        """Address, port and token of the first command line, as the child of another command line found them."""
        self.failed: Failure | None = None
        """The failure of any rank, as the first command line reported it to this one."""
        self.renew: Callable[[], None] = lambda: None
        """Restarts the child's time limit."""
        self._job, self._on_environment, self._on_facts, self._on_cell = job, on_environment, on_facts, on_cell
        self._ended = False

    def hear(self, kind: str, value: msgspec.Raw) -> None:
        """Receive one message. Raises BadMessage if its value is not what such a message has."""

        def of(message: Any) -> Any:
            return read(value, message)

        if kind == "stage":
            stage, total = of(STAGE)
            self._tell(Progress(stage=stage, done=0, total=total))
        elif kind == "step":
            self._tell(Progress(stage=self.progress.stage, done=of(int), total=self.progress.total))
        elif kind == "environment":
            self.environment = of(Environment)
            self._on_environment(self.environment)
        elif kind == "measured":
            self.measured = of(Run)
        elif kind == "ready":
            self.is_ready = True
        elif kind == "facts":
            self._on_facts(of(self._job.facts))
        elif kind == "at":
            self.under_way = of(tuple[int, ...])
            self.renew()
        elif kind == "cell":
            number, cell = of(tuple[int, msgspec.Raw])
            self._on_cell(number, read(cell, self._job.cell))
        elif kind == "result":
            self.result, self._ended = of(self._job.result), True
        elif kind == "hub":
            self.hub = of(tuple[str, int, str])
        elif kind == "failed":
            self.failed = of(Failure)
        elif kind == "refused":
            exit_code, text = decoded(value, tuple[int, str])
            self.refusal = UserError(text) if exit_code == UserError.exit_code else SteplabError(text)

    @property
    def answered(self) -> bool:
        """Whether the child has sent its last message."""
        return self._ended or self.refusal is not None or self.failed is not None

    def _tell(self, progress: Progress) -> None:
        self.progress = progress
        self.on_progress(progress)
