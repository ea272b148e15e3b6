"""Use cases under torchrun, which starts one command line for each rank."""

import dataclasses
import time
from collections.abc import Mapping

from steplab.errors import UserError
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.records.failure import Failure
from steplab.specs.layout import SINGLE, Layout, with_processes
from steplab.specs.step import StepSpec

_FIRST_STORES_S = 5.0


def is_first_rank() -> bool:
    """Whether this process stores and prints: it is rank 0 of torchrun, or was not started by torchrun.

    Raises UserError if torchrun's variables contradict each other.
    """
    around = torchrun_around()
    return around is None or around.is_first


def fields_here(
    fields: Mapping[str, object], gpus: int | None = None, processes: int | None = None
) -> dict[str, object]:
    """The fields of a step with the layout that follows from `--gpus` or `--processes`, or from torchrun.

    Raises UserError if layout, device and number of processes contradict each other.
    """
    given, around = with_processes(fields, gpus, processes), torchrun_around()
    return given if around is None or "layout" in given else {**given, "layout": f"dp={around.size}"}


def spread_here(spec: StepSpec) -> StepSpec:
    """The step as it runs here; under torchrun, a step without a layout is data parallel over torchrun's processes.

    Raises UserError if torchrun started another number of processes than the layout takes.
    """
    around = torchrun_around()
    if around is None or spec.layout.world_size == around.size:
        return spec
    if spec.layout == SINGLE:
        return dataclasses.replace(spec, layout=Layout(dp=around.size))
    raise UserError(
        f"torchrun started {around.size} processes, but layout {spec.layout} takes {spec.layout.world_size}; give "
        f"torchrun --nproc-per-node and --nnodes for {spec.layout.world_size} in all, or leave --layout out"
    )


def refuse_torchrun(verb: str) -> None:
    """Raise UserError if torchrun started several processes for a command that runs in one."""
    around = torchrun_around()
    if around is not None:
        raise UserError(
            f"torchrun started {around.size} processes, and each would {verb}; run steplab without torchrun "
            "(--gpus, --processes and --layout start processes too)"
        )


def is_told_here(failure: Failure) -> bool:
    """Whether this command line reports the failure: it is the first, or that of the rank that failed."""
    around = torchrun_around()
    return around is None or around.is_first or failure.rank == around.rank


def let_the_first_store() -> None:
    """Wait briefly before exiting with an error, because torchrun then ends all other processes."""
    time.sleep(_FIRST_STORES_S)
