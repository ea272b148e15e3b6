"""One use case run by several command lines at once: torchrun starts one for each rank."""

import dataclasses
import time
from collections.abc import Mapping

from steplab.errors import UserError
from steplab.measurement.torchrun import torchrun_around
from steplab.records.failure import Failure
from steplab.specs.layout import SINGLE, Layout, with_processes
from steplab.specs.step import StepSpec

_FIRST_STORES_S = 5.0


def is_first_rank() -> bool:
    """Whether this process is the one that stores and prints: it is, unless torchrun started it as another.

    Raises UserError where torchrun's variables contradict each other.
    """
    around = torchrun_around()
    return around is None or around.is_first


def fields_here(
    fields: Mapping[str, object], gpus: int | None = None, processes: int | None = None
) -> dict[str, object]:
    """The fields of a step with the layout that `--gpus` or `--processes` stand for, or torchrun where it names none.

    Raises UserError where layout, device and number do not go together.
    """
    given, around = with_processes(fields, gpus, processes), torchrun_around()
    return given if around is None or "layout" in given else {**given, "layout": f"dp={around.size}"}


def spread_here(spec: StepSpec) -> StepSpec:
    """The step as it runs here: under torchrun, without a layout of its own, data parallel over what that started.

    Raises UserError where torchrun started another number of processes than the layout takes.
    """
    around = torchrun_around()
    if around is None or spec.layout.world_size == around.size:
        return spec
    if spec.layout == SINGLE:
        return dataclasses.replace(spec, layout=Layout(dp=around.size))
    raise UserError(
        f"torchrun started {around.size} processes and layout {spec.layout} takes {spec.layout.world_size}: give "
        f"torchrun --nproc-per-node and --nnodes for {spec.layout.world_size} in all, or leave --layout out"
    )


def refuse_torchrun(verb: str) -> None:
    """Raise UserError where torchrun started several processes for something that is to be done once."""
    around = torchrun_around()
    if around is not None:
        raise UserError(
            f"torchrun started {around.size} processes, and each would {verb}: run steplab without it; "
            "--gpus, --processes and --layout start processes too"
        )


def is_told_here(failure: Failure) -> bool:
    """Whether this command line is one to say it: the first, or that of the rank that failed."""
    around = torchrun_around()
    return around is None or around.is_first or failure.rank == around.rank


def let_the_first_store() -> None:
    """Wait a little before ending badly: torchrun ends all the others when one does."""
    time.sleep(_FIRST_STORES_S)
