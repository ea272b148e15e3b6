"""Cells of a benchmark of collectives, measured in this process, which is one rank of several.

Every rank walks through the same cells in the same order; where a cell has fewer ranks, it is those of the lowest
numbers, and the others wait for its end. A cell's result is checked before it is timed. What can fail on one rank
alone, such as finding the memory, all hear of before they wait for each other in a collective.

Every rank puts a cell's record together from what all of them found, so that each can tell who started it.
"""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from steplab.errors import Unsupported
from steplab.measurement.comm.back_to_back import Together
from steplab.measurement.comm.calls import MakeCall, make_call
from steplab.measurement.comm.data import Buffers
from steplab.measurement.comm.timing import time_calls
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import Device, HostClockDevice
from steplab.measurement.machine.environment import read_clocks, read_environment
from steplab.measurement.machine.failures import failure_of, refused_memory
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.parallel.collectives import GroupCollectives
from steplab.records.comm import CommCell, CommCheck, CommFacts, CommRank, RankTimes
from steplab.records.failure import Failure
from steplab.specs.comm import CommSpec, CommStudy


@dataclass(kw_only=True, slots=True)
class _Found:
    """What one rank found of a cell."""

    times: RankTimes | None = None
    compared: tuple[int, int, str] = (0, 0, "")
    failure: Failure | None = None


def measure_comm(task: CellsTask[CommStudy], observer: Observer, world: World | None) -> None:
    """The job: measure the task's cells on this rank; every rank does it."""
    assert world is not None  # the study has at least two processes
    measure_comm_here(task.study, task.numbers, world, observer)


def measure_comm_here(
    study: CommStudy, indices: Sequence[int], world: World, observer: Observer, make: MakeCall = make_call
) -> None:
    """Measure these of the study's cells; every rank of the world has to call this, and its observer hears of all.

    Raises Unsupported for a request that this machine cannot serve at all.
    """
    for index in indices:
        _refuse(study.cells[index], world)
    observer.on_stage("build", 0)
    environment = read_environment(world.device.torch_device)
    mine = CommRank(rank=world.rank, host=world.host, device=f"{world.device.torch_device} {environment.device.name}")
    ranks = tuple(world.collectives.host_gather(mine))
    observer.on_environment(environment)
    observer.on_facts(CommFacts(ranks=ranks, libraries=_libraries(study)))
    session = _Session(study, world, observer, make)
    for index in indices:
        session.measure(index)
    observer.on_environment(read_clocks(environment, world.device.torch_device))


def _refuse(spec: CommSpec, world: World) -> None:
    if spec.device == "cuda" and world.device.torch_device.type != "cuda":
        why = "not every process has a CUDA device"
        raise Unsupported(
            spec.transport, why, "start one process per GPU with --gpus, or use --backend gloo --device cpu"
        )
    if spec.world_size > world.size:
        raise Unsupported(spec.label, f"only {world.size} processes were started", f"start {spec.world_size}")


def _libraries(study: CommStudy) -> dict[str, str]:
    """Versions of what moves the bytes; gloo is a part of torch and has none of its own."""
    if all(cell.backend != "nccl" for cell in study.cells):
        return {}
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


@dataclass(slots=True)
class _Groups:
    """The ranks of the lowest numbers by backend and size, each group made once, by all ranks together."""

    world: World
    made: dict[tuple[str, int], tuple[dist.ProcessGroup | None, GroupCollectives | None]] = field(default_factory=dict)

    def of(self, spec: CommSpec) -> tuple[dist.ProcessGroup | None, GroupCollectives | None]:
        """The group, and what its members agree by; None for the latter: this rank is none."""
        key = (spec.transport, spec.world_size)
        if key not in self.made:
            self.made[key] = self._make(spec)
        return self.made[key]

    def _make(self, spec: CommSpec) -> tuple[dist.ProcessGroup | None, GroupCollectives | None]:
        # The processes' own group sends tensors of each device by the backend native to it.
        if spec.world_size == self.world.size and spec.transport in ("nccl", "gloo"):
            return None, GroupCollectives(None)
        # With gloo for what is on the CPU, as the ranks agree by it whoever moves the tensors.
        backend = "gloo" if spec.backend == "gloo" else "nccl"  # where copies find each other, too
        group = dist.new_group(list(range(spec.world_size)), backend=f"cpu:gloo,cuda:{backend}")
        return group, GroupCollectives(group) if self.world.rank < spec.world_size else None


class _Session:
    """The world, its groups, and the cell under way."""

    def __init__(self, study: CommStudy, world: World, observer: Observer, make: MakeCall) -> None:
        self.study, self.world, self.observer, self.make = study, world, observer, make
        self._groups = _Groups(world)
        self.cells: list[CommCell] = []
        """What has been measured."""

    def measure(self, index: int) -> None:
        """Measure one cell."""
        spec = self.study.cells[index]
        self.observer.on_under_way([index])
        self._begin(spec, "first call")
        group, collectives = self._groups.of(spec)
        found = None
        if collectives is not None:
            together = Together(device=self._device(spec), collectives=collectives)
            found = _Share(spec, self.world, group, together, self.make).measure(self.study, self._begin)
        everyone = self.world.collectives.host_gather(found)  # who has no part in the cell waits here
        self.cells.append(_cell(spec, everyone))
        if self.cells[-1].failure and self.world.device.torch_device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        self.observer.on_cell(index, self.cells[-1])

    def _device(self, spec: CommSpec) -> Device:
        """Where this cell's tensors are: the rank's own device, or the CPU beside its GPU."""
        device = self.world.device
        return device if device.torch_device.type == spec.device else HostClockDevice(torch.device("cpu"))

    def _begin(self, spec: CommSpec, stage: str) -> None:
        self.observer.on_stage(f"{spec.label}: {stage}", 0)


class _Share:
    """One rank's share of a cell: its buffers, its call, and what it finds; all of it goes with the cell."""

    def __init__(
        self, spec: CommSpec, world: World, group: dist.ProcessGroup | None, together: Together, make: MakeCall
    ) -> None:
        self._spec, self._world, self._group, self._together, self._make = spec, world, group, together, make
        self._found = _Found()

    def measure(self, study: CommStudy, begin: Callable[[CommSpec, str], None]) -> _Found:
        """Fill buffers, check the first call and time the others: each step only if the one before went well on all."""
        called = self._went_well("buffers", self._fill) and self._went_well("first call", self._check)
        if called and not any(self._together.collectives.host_gather(self._found.compared[1])):
            self._went_well("timing", lambda: self._time(study, begin))
        return self._found

    def _went_well(self, stage: str, work: Callable[[], None]) -> bool:
        """Do it, keep how it failed, and say whether it went well on all ranks."""
        try:
            work()
        except Exception as error:
            failure = refused_memory(error, stage, self._together.device) or failure_of(error, stage)
            message = f"rank {self._world.rank} on {self._world.host}: {failure.message}"
            self._found.failure = dataclasses.replace(failure, rank=self._world.rank, message=message)
        return not any(self._together.collectives.host_gather(self._found.failure is not None))

    def _fill(self) -> None:
        rank, device = self._together.collectives.rank, self._together.device.torch_device
        self._buffers = Buffers(self._spec, rank, device)

    def _check(self) -> None:
        self._call = self._make(self._buffers, self._group)
        self._call()
        self._together.device.synchronize()
        self._found.compared = self._buffers.compare()

    def _time(self, study: CommStudy, begin: Callable[[CommSpec, str], None]) -> None:
        self._found.times = time_calls(
            self._call, self._together, study, on_begin=lambda stage: begin(self._spec, stage)
        )


def _cell(spec: CommSpec, everyone: Sequence[_Found | None]) -> CommCell:
    """The cell's record from what its ranks found; the first failure speaks for all."""
    found = [one for one in everyone if one is not None]
    failure = next((one.failure for one in found if one.failure), None)
    compared = [one.compared for one in found]
    check = CommCheck(
        num_elements=sum(num for num, _, _ in compared),
        num_wrong=sum(wrong for _, wrong, _ in compared),
        first_wrong=next((first for _, _, first in compared if first), ""),
    )
    if failure is None and check.num_wrong:
        message = f"the result is wrong: {check.first_wrong} ({check.num_wrong:,} of {check.num_elements:,} elements)"
        failure = Failure(kind="error", message=message, phase="first call")
    times = tuple(one.times for one in found if one.times is not None)
    return CommCell(
        spec=spec,
        message_bytes=spec.message_bytes,
        ranks=times if failure is None else (),
        check=check if check.num_elements else None,
        failure=failure,
    )
