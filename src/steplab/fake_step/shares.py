"""Predicts the ratios of a step's compiled to its eager costs, in a process that may import the user's model."""

from steplab.costs.rates import gpu_named
from steplab.fake_step.step import operators_of_fake
from steplab.measurement.jobs import SharesTask
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.plan.time import compiled_shares
from steplab.records.profile import CompiledShares


def predict_shares(task: SharesTask, observer: Observer, world: World | None) -> CompiledShares:
    """The task's `compiled_shares`, from a trace of its step. Raises the errors that `operators_of_fake` raises."""
    observer.on_stage("dry run", 0)
    return compiled_shares(task.spec, gpu_named(task.gpu), operators_of_fake(task.spec))
