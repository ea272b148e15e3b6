"""The jobs of a measuring process: each declared once, with the types of its messages.

A parent sends a job's name and task (messages.Request). The process imports the job's function and calls it with the
task, an observer and, where several processes do the job together, their world. The observer's calls, and last the
function's result, are sent back and decoded by the types declared here. This module imports no torch: the function is
named by a string.
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
from steplab.specs.attention import AttentionStudy
from steplab.specs.comm import CommStudy
from steplab.specs.ddp import DdpStudy
from steplab.specs.step import StepSpec

if TYPE_CHECKING:
    from steplab.measurement.machine.world import World
    from steplab.measurement.observer import Observer

Study = TypeVar("Study")


class StepTask(msgspec.Struct, kw_only=True):
    """Time a step, and then, if requested, record further steps."""

    spec: StepSpec
    """The step to time."""
    profiled_steps: int = 0
    """The number of further steps that are profiled once the step is timed; 0 for none."""
    trace: str | None = None
    """The file for their trace, compressed if it ends in .gz; None if nsys records them."""
    snapshot: str | None = None
    """The file for the allocator's history of one further step; None if its memory is not recorded."""
    marks: str | None = None
    """The file for what that history does not contain (records.memory_marks)."""


class TurnsTask(msgspec.Struct, kw_only=True):
    """Time a step in turns with the steps of other processes."""

    spec: StepSpec
    """The step to time."""
    session: str
    """Identity of the session of all that take turns."""
    label: str
    """Name of the step in the session."""


class AuditTask(msgspec.Struct, kw_only=True):
    """Audit the precision of a step; without a step, run the accumulation study on a device."""

    spec: StepSpec | None
    """The step to audit; None for the accumulation study alone."""
    device: str
    """The device of the accumulation study if there is no step."""


class SharesTask(msgspec.Struct, kw_only=True):
    """Predict what compiling leaves of an eager step."""

    spec: StepSpec
    """The eager step, of one process."""
    gpu: str
    """Name in the catalogue of the GPU whose rates are taken."""


class CellsTask(msgspec.Struct, Generic[Study], kw_only=True):
    """Measure some cells of a benchmark."""

    study: Study
    """The benchmark with all of its cells."""
    groups: list[list[int]]
    """The numbers of the requested cells; the cells of one group are timed in turns."""
    traces: str | None = None
    """The folder for a trace of each cell; None for no traces."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of the cells of all groups."""
        return [number for group in self.groups for number in group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One kind of measurement."""

    work: str
    """"module:function", which is called with the task, the observer and the world (None for a single process)."""
    task: Any
    """The type of the task."""
    result: Any = None
    """The type of the function's result; None if the cells are the result."""
    cell: Any = None
    """The type of a benchmark's cells."""
    facts: Any = None
    """The type of the facts that hold for all cells of a benchmark."""
    holds_device: bool = False
    """Whether the job holds the device until Python is ahead of it, which needs longer launch queues
    (measurement.clock)."""

    def load(self) -> Callable[[Any, "Observer", "World | None"], object]:
        """The function, imported with all that it needs."""
        module, _, function = self.work.partition(":")
        loaded: Callable[[Any, Observer, World | None], object] = getattr(import_module(module), function)
        return loaded

    def do(self, task: msgspec.Raw, observer: "Observer", world: "World | None") -> object:
        """Import the function and call it. Raises SteplabError for a task that cannot be served."""
        return self.load()(msgspec.json.decode(task, type=self.task), observer, world)


_HERE = "steplab.measurement."
JOBS = {
    "step": Job(work=_HERE + "step_job:measure_step", task=StepTask, result=Run),
    "turns": Job(work=_HERE + "step_job:measure_in_turns", task=TurnsTask, result=Run),
    "audit": Job(work=_HERE + "precision.session:audit_step", task=AuditTask, result=Numerics),
    "ceilings": Job(work=_HERE + "machine.ceilings:measure_ceilings", task=str, result=Ceilings),
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
