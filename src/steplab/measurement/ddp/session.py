"""A data-parallel study on one rank: one variant after the other, each alternating with the baseline.

Every rank runs this, and rank 0 reports. The baseline stays in memory; both take a few steps at a time, so a
disturbance affects both. Without room for two models, the baseline is built and timed before and after. A variant is
freed, and its memory checked, before the next one is built.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from steplab.errors import ERRORS, SteplabError
from steplab.measurement.clock import Samples
from steplab.measurement.ddp.measured import MeasuredVariant
from steplab.measurement.ddp.variant import VariantStep
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.failures import failure_of
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.runner import Runner, refuse_unserved_step
from steplab.records.ddp import DdpCell, DdpFacts, RankPlace
from steplab.records.timing import joined
from steplab.specs.ddp import DdpStudy, Variant
from steplab.units import format_bytes

_ROOM = 0.92
"""Largest share of the device's memory that the baseline and a variant may take together."""
_LET_GO_S = 3.0
_SPARE = 1.2
"""Assumed ratio of a variant's peak to the baseline's, for buckets and gaps between blocks."""


def measure_ddp(task: CellsTask[DdpStudy], observer: Observer, world: World | None) -> None:
    """The job; collective. Rank 0 writes traces, named by the cells' numbers. Raises UserError or Unsupported for an
    impossible step.
    """
    assert world is not None  # the study has at least two processes
    study, device = task.study, world.device.torch_device
    refuse_unserved_step(study.step, device)
    traces = Path(task.traces) if task.traces and study.profiled_steps else None
    session = _Session(study, world, Runner(world.device, observer), traces)
    session.measure_baseline(reported=0 in task.numbers)
    session.runner.run([[number] for number in task.numbers if number != 0], session.measure)


class _Session:
    def __init__(self, study: DdpStudy, world: World, runner: Runner, traces: Path | None) -> None:
        self._study, self._world, self.runner, self._traces = study, world, runner, traces
        self._baseline: VariantStep | None = None
        self._before: Samples = ()
        """Samples of the baseline since the last variant, if it does not stay in memory."""
        runner.idle_bytes = runner.free()

    def measure_baseline(self, *, reported: bool) -> None:
        """Measure the first variant; its model stays if there is room. Its cell is `reported` if requested."""
        self.runner.observer.on_under_way([0])
        measured = self._built(self._study.contenders[0])
        self.runner.observer.on_facts(_facts(measured.step, self._world))
        if reported:
            self.runner.tell(0, measured.cell(None, self._trace_of(0)))
        else:
            measured.timed_by_itself(1)
        self._tell_clocks(measured.step)
        if self._has_room_beside(measured):
            self._baseline = measured.step
        del measured
        self.runner.idle_bytes = self.runner.free()
        if self._baseline is None:
            self._before = self._baseline_by_itself()

    def measure(self, numbers: Sequence[int]) -> None:
        (number,) = numbers
        variant = self._study.contenders[number]
        cell = self._cell_of(number, variant)
        cell = dataclasses.replace(cell, notes=(*cell.notes, *self._left_behind()))
        if self._baseline is None and cell.failure is None:
            cell = self._beside_the_baseline(cell)
        self.runner.tell(number, cell)

    def _cell_of(self, number: int, variant: Variant) -> DdpCell:
        measured, refusal = None, None
        try:
            measured = self._built(variant)
        except ERRORS as error:
            refusal = error
        refused = self._world.collectives.host_gather(refusal is not None)
        if measured is not None and not any(refused):
            return measured.cell(self._baseline, self._trace_of(number))
        if refusal is not None and all(refused):
            return DdpCell(contender=variant, failure=failure_of(refusal, "build"))
        ranks = ", ".join(str(rank) for rank, refuses in enumerate(refused) if refuses)
        raise refusal or SteplabError(f"{variant.label}: rank {ranks} refuses a step that other ranks can run")

    def _left_behind(self) -> tuple[str, ...]:
        """Free a variant's memory; a note if some is not freed and later variants lack it.

        On GPUs buckets of torch's DDP are freed some time after the variant.
        """
        stays = self.runner.stays(patience_s=_LET_GO_S)
        self.runner.settle()
        return (f"memory: {format_bytes(stays)} were not freed after the variant was measured",) if stays else ()

    def _tell_clocks(self, step: VariantStep) -> None:
        step.run()
        step.run()
        self.runner.tell_clocks()

    def _beside_the_baseline(self, cell: DdpCell) -> DdpCell:
        after = self._baseline_by_itself()
        around = self._world.collectives.host_gather(joined([self._before, after]))
        self._before = after
        ranks = [dataclasses.replace(rank, baseline=around[rank.rank]) for rank in cell.ranks]
        return dataclasses.replace(cell, ranks=tuple(ranks), turns="before_and_after")

    def _baseline_by_itself(self) -> Samples:
        measured = self._built(self._study.contenders[0])
        samples = measured.timed_by_itself(max(self._study.step.steps // 2, 1))
        del measured
        self.runner.free()
        return samples

    def _built(self, variant: Variant) -> MeasuredVariant:
        return MeasuredVariant(self._study, variant, self._world, self.runner.idle_bytes, self.runner.observer)

    def _has_room_beside(self, baseline: MeasuredVariant) -> bool:
        fits, device = True, self._world.device.torch_device
        if baseline.peak is not None:
            _, total_bytes = torch.cuda.mem_get_info(device)
            kept = max(memory.known_bytes for memory in baseline.memory)
            fits = kept + _SPARE * baseline.peak.peak_allocated_bytes <= _ROOM * total_bytes
        return all(self._world.collectives.host_gather(fits))

    def _trace_of(self, number: int) -> Path | None:
        return self._traces / self._study.trace_name(number) if self._traces else None


def _facts(step: VariantStep, world: World) -> DdpFacts:
    device = world.device.torch_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    places = world.collectives.host_gather(RankPlace(rank=world.rank, host=world.host, device=name))
    parameters = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
    return DdpFacts(
        backend=world.backend,
        places=tuple(places),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        gradient_bytes=sum(parameter.nbytes for parameter in parameters),
        knows_tokens=step.knows_tokens,
    )
