"""What a measuring process can be asked for: each job declared once, with the types that travel for it.

A parent sends a job's name and task (messages.Request); the process imports the job's work and calls it with the task,
an observer and, where several processes do the job together, their world. What the observer is told, and last what the
work gives, travels back and is decoded by the types here. This module imports no torch: the work is named by a string.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from steplab.records.attention import AttentionCell
from steplab.records.attention_tuning import AttentionTuning
from steplab.records.ceilings import Ceilings
from steplab.records.comm import CommCell, CommFacts
from steplab.records.ddp import DdpCell, DdpFacts
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.specs.attention_study import AttentionStudy
from steplab.specs.attention_tuning import TuningStudy
from steplab.specs.comm import CommStudy
from steplab.specs.ddp import DdpStudy
from steplab.specs.step import StepSpec

if TYPE_CHECKING:
    from steplab.measurement.machine.world import World
    from steplab.measurement.observer import Observer

Study = TypeVar("Study")


class StepTask(msgspec.Struct, kw_only=True):
    """Time a step, and then, if asked to, watch some steps more."""

    spec: StepSpec
    """The step."""
    profiled_steps: int = 0
    """How many more steps are profiled once the step is timed; 0: none."""
    trace: str | None = None
    """File for their trace; None: nsys records them, from outside."""
    snapshot: str | None = None
    """File for the allocator's history of one more step; None: it is not watched."""
    marks: str | None = None
    """File for what that history does not know."""


class AuditTask(msgspec.Struct, kw_only=True):
    """See what a precision does to a step; without a step, make sums on a device."""

    spec: StepSpec | None
    """The step to audit."""
    device: str
    """The device of the sums where there is no step."""


class CellsTask(msgspec.Struct, Generic[Study], kw_only=True):
    """Measure some cells of a benchmark."""

    study: Study
    """All of it."""
    groups: list[list[int]]
    """The cells that are wanted, by their numbers; those of a group are timed in turns."""
    traces: str | None = None
    """Folder for a trace of each cell; None: none is wanted."""

    @property
    def numbers(self) -> list[int]:
        """The cells of all groups."""
        return [number for group in self.groups for number in group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One kind of measurement."""

    work: str
    """module:function; called with the task, the observer and the world (None: a process by itself)."""
    task: Any
    """Type of the task."""
    result: Any = None
    """Type of what the work gives; None: the cells are the result."""
    cell: Any = None
    """Type of a benchmark's cells."""
    facts: Any = None
    """Type of what holds for all cells of a benchmark."""
    holds_device: bool = False
    """Whether the device is held until Python is ahead of it, which needs longer launch queues
    (measurement.machine.head_start)."""

    def do(self, task: msgspec.Raw, observer: "Observer", world: "World | None") -> object:
        """Import the work and call it. Raises SteplabError for a task that cannot be served."""
        module, _, function = self.work.partition(":")
        return getattr(import_module(module), function)(msgspec.json.decode(task, type=self.task), observer, world)


_HERE = "steplab.measurement."
JOBS = {
    "step": Job(work=_HERE + "step_job:measure_step", task=StepTask, result=Run),
    "audit": Job(work=_HERE + "precision.session:audit_step", task=AuditTask, result=Numerics),
    "ceilings": Job(work=_HERE + "machine.ceilings:measure_ceilings", task=str, result=Ceilings),
    "tuning": Job(work=_HERE + "attention.tuning:tune_attention", task=TuningStudy, result=AttentionTuning),
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
