"""The jobs of a measuring process that times a step: at once, with further steps that are recorded, or in turns."""

from functools import partial
from pathlib import Path

from steplab.measurement.jobs import StepTask, TurnsTask
from steplab.measurement.machine.world import World
from steplab.measurement.memory.recorder import MemoryRecorder
from steplab.measurement.observer import Observer
from steplab.measurement.profile.profiler import StepProfiler
from steplab.measurement.step.session import measure_here
from steplab.measurement.step.watcher import Watch
from steplab.records.run import Run
from steplab.records.turns import Turns


def measure_step(task: StepTask, observer: Observer, world: World | None) -> Run:
    """The record of the step. Raises UserError or Unsupported for one that cannot be served at all."""
    return measure_here(task.spec, observer, _watch(task, world), world)


def measure_in_turns(task: TurnsTask, observer: Observer, world: World | None) -> Run:
    """The record of a step that waits for each of its turns. Raises as `measure_step` does."""
    return measure_here(task.spec, observer, world=world, turns=Turns(session=task.session, label=task.label))


def _watch(task: StepTask, world: World | None) -> Watch | None:
    def place(path: str) -> Path:
        """The file in which this rank writes. All ranks record, so that all run the same steps; the files of the
        first are kept."""
        if world is None or world.rank == 0:
            return Path(path)
        assert world.folder is not None  # ranks of torchrun are not recorded
        return world.folder / f"{world.rank}.{Path(path).name}"

    if task.snapshot and task.marks:
        return partial(MemoryRecorder, snapshot=place(task.snapshot), marks=place(task.marks))
    if not task.profiled_steps:
        return None
    return partial(StepProfiler, num_steps=task.profiled_steps, trace=place(task.trace) if task.trace else None)
