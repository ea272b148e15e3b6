"""Predicts what compiling leaves of a step's time, for any model, in a process that may import the user's code."""

from steplab.costs.rates import gpu_named
from steplab.fake_step.step import operators_of_fake
from steplab.measurement.jobs import SharesTask
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.plan.time import compiled_shares
from steplab.records.profile import CompiledShares


def predict_shares(task: SharesTask, observer: Observer, world: World | None) -> CompiledShares:
    """Fractions as of `compiled_shares`. Raises UserError and Unsupported as `operators_of_fake` does."""
    observer.on_stage("dry run", 0)
    return compiled_shares(task.spec, gpu_named(task.gpu), operators_of_fake(task.spec))
