"""The jobs of a measuring process, each with the types of its messages.

A job's function gets its task, an observer and, among several processes, their world. The parent decodes the job's
result, and what the observer sends, by these types. Functions are named by strings, so that this module imports no
torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from steplab.records.attention import AttentionCell
from steplab.records.ceilings import Ceilings
from steplab.records.comm import CommCell, CommFacts
from steplab.records.ddp import DdpCell, DdpFacts
from steplab.records.numerics import Numerics
from steplab.records.profile import CompiledShares
from steplab.records.run import Run
from steplab.records.timing import Turns
from steplab.specs.attention import AttentionStudy
from steplab.specs.comm import CommStudy
from steplab.specs.ddp import DdpStudy
from steplab.specs.step import StepSpec

if TYPE_CHECKING:
    from steplab.measurement.machine.world import World
    from steplab.measurement.observer import Observer

Study = TypeVar("Study")


class StepTask(msgspec.Struct, kw_only=True):
    spec: StepSpec
    profiled_steps: int = 0
    trace: str | None = None
    """Path of the trace, compressed if it ends in .gz; None: no profiled steps."""
    snapshot: str | None = None
    """Path for the allocator history of one further step."""
    marks: str | None = None
    turns: Turns | None = None
    """Turns that the step waits for; None: it is measured at once."""


class AuditTask(msgspec.Struct, kw_only=True):
    spec: StepSpec | None
    device: str


class SharesTask(msgspec.Struct, kw_only=True):
    """Predict what shares of an eager step's costs torch.compile leaves (CompiledShares)."""

    spec: StepSpec
    gpu: str


class CellsTask(msgspec.Struct, Generic[Study], kw_only=True):
    study: Study
    groups: list[list[int]]
    traces: str | None = None
    """Folder for a trace of each cell; None: no traces."""

    @property
    def numbers(self) -> list[int]:
        return [number for group in self.groups for number in group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    work: str
    """Function that does the job, as "module:function"."""
    task: Any
    result: Any = None
    """Type of the result; None if the cells are the result."""
    cell: Any = None
    facts: Any = None
    holds_device: bool = False
    """True if the job holds the device until Python is ahead, which needs longer launch queues (measurement.clock)."""

    def load(self) -> Callable[[Any, "Observer", "World | None"], object]:
        module, _, function = self.work.partition(":")
        loaded: Callable[[Any, Observer, World | None], object] = getattr(import_module(module), function)
        return loaded

    def do(self, task: msgspec.Raw, observer: "Observer", world: "World | None") -> object:
        return self.load()(msgspec.json.decode(task, type=self.task), observer, world)


_HERE = "steplab.measurement."
JOBS = {
    "step": Job(work=_HERE + "step_job:measure_step", task=StepTask, result=Run),
    "audit": Job(work=_HERE + "precision.session:audit_step", task=AuditTask, result=Numerics),
    "ceilings": Job(work=_HERE + "ceilings:measure_ceilings", task=str, result=Ceilings),
    "shares": Job(work="steplab.fake_step.shares:predict_shares", task=SharesTask, result=CompiledShares),
    "attention": Job(
        work=_HERE + "attention.session:measure_attention", task=CellsTask[AttentionStudy], cell=AttentionCell
    ),
    "comm": Job(
        work=_HERE + "comm.session:measure_comm",
        task=CellsTask[CommStudy],
        cell=CommCell,
        facts=CommFacts,
        holds_device=True,
    ),
    "ddp": Job(
        work=_HERE + "ddp.session:measure_ddp",
        task=CellsTask[DdpStudy],
        cell=DdpCell,
        facts=DdpFacts,
        holds_device=True,
    ),
}
