"""What compiling would leave of a profiled step: predicted when it is profiled, because a record imports no code."""

import dataclasses

from steplab.costs.rates import gpu_named
from steplab.errors import SteplabError
from steplab.lab.planning import DEFAULT_GPU
from steplab.lab.predicting import is_traced
from steplab.measurement.jobs import SharesTask
from steplab.measurement.processes.launch import ask
from steplab.measurement.progress import OnProgress
from steplab.plan.time import compiled_shares
from steplab.records.profile import CompiledShares
from steplab.records.run import Run
from steplab.specs.hardware import find_hardware
from steplab.specs.layout import SINGLE
from steplab.specs.step import StepSpec

LONGEST_S = 60.0
"""Longest time for the dry run of a model: one of 32 layers takes a few seconds, and Python starts before it."""


def with_compiled_shares(run: Run, on_progress: OnProgress = lambda progress: None) -> Run:
    """The run, its profile with what compiling leaves of the step; where that cannot be predicted, a note says why.

    Only of an eager step on CUDA. A model of the user's own is run on tensors without content, in another process.
    """
    spec, profile = run.spec, run.profile
    if spec is None or profile is None or profile.device != "cuda" or spec.compile != "off":
        return run
    known = find_hardware(run.device_name or "")
    alone = dataclasses.replace(spec, device="auto", layout=SINGLE)
    try:
        found = _shares(alone, known.name if known else DEFAULT_GPU, on_progress)
    except SteplabError as error:
        notes = (*profile.notes, f"compiled: what compiling would save is not predicted: {error}")
        return dataclasses.replace(run, profile=dataclasses.replace(profile, notes=notes))
    return dataclasses.replace(run, profile=dataclasses.replace(profile, compiled=found))


def _shares(spec: StepSpec, gpu: str, on_progress: OnProgress) -> CompiledShares:
    if not is_traced(spec):
        return compiled_shares(spec, gpu_named(gpu))
    task = SharesTask(spec=spec, gpu=gpu)
    answer = ask("shares", task, device="cpu", timeout_s=LONGEST_S, on_progress=on_progress)
    shares: CompiledShares = answer.unless_failed("the dry run failed")
    return shares
