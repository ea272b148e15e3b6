"""Measures cells of a benchmark of collectives on this rank.

Every rank measures the same cells in the same order; a cell with fewer ranks uses the lowest ones, and the others wait.
A result is checked before it is timed. If a step fails on one rank alone, such as an allocation, all ranks learn of it
before they wait for each other in a collective.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from steplab.errors import Unsupported
from steplab.measurement.comm.calls import MakeCall, make_call
from steplab.measurement.comm.data import Buffers
from steplab.measurement.comm.timing import Together, time_calls
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import Device, HostClockDevice
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.runner import Runner, attempt
from steplab.parallel.collectives import GroupCollectives
from steplab.records.comm import CommCell, CommCheck, CommFacts, CommRank, RankTimes
from steplab.records.failure import Failure
from steplab.specs.comm import CommSpec, CommStudy


@dataclass(kw_only=True, slots=True)
class _Found:
    times: RankTimes | None = None
    compared: tuple[int, int, str] = (0, 0, "")
    failure: Failure | None = None


def measure_comm(
    task: CellsTask[CommStudy], observer: Observer, world: World | None, make: MakeCall = make_call
) -> None:
    """The job; collective, and each rank's observer gets all cells. Raises Unsupported for an impossible request."""
    assert world is not None  # the study has at least two processes
    study = task.study
    for index in task.numbers:
        _refuse(study.cells[index], world)
    observer.on_stage("build", 0)
    runner = Runner(world.device, observer)
    name = runner.environment.device.name
    mine = CommRank(rank=world.rank, host=world.host, device=f"{world.device.torch_device} {name}")
    ranks = tuple(world.collectives.host_gather(mine))
    observer.on_facts(CommFacts(ranks=ranks, libraries=_libraries(study)))
    if runner.run([[index] for index in task.numbers], _Session(study, world, runner, make).measure):
        runner.tell_clocks()


def _refuse(spec: CommSpec, world: World) -> None:
    if spec.device == "cuda" and world.device.torch_device.type != "cuda":
        why = "not every process has a CUDA device"
        raise Unsupported(
            spec.transport, why, "start one process per GPU with --gpus, or use --backend gloo --device cpu"
        )
    if spec.world_size > world.size:
        raise Unsupported(spec.label, f"only {world.size} processes were started", f"start {spec.world_size}")


def _libraries(study: CommStudy) -> dict[str, str]:
    if all(cell.backend != "nccl" for cell in study.cells):
        return {}
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


@dataclass(slots=True)
class _Groups:
    world: World
    made: dict[tuple[str, int], tuple[dist.ProcessGroup | None, GroupCollectives | None]] = field(default_factory=dict)

    def of(self, spec: CommSpec) -> tuple[dist.ProcessGroup | None, GroupCollectives | None]:
        """The group, and its members' collectives for agreeing; None for these if this rank is not a member."""
        key = (spec.transport, spec.world_size)
        if key not in self.made:
            self.made[key] = self._make(spec)
        return self.made[key]

    def _make(self, spec: CommSpec) -> tuple[dist.ProcessGroup | None, GroupCollectives | None]:
        # The processes' own group sends tensors of each device by the backend native to it.
        if spec.world_size == self.world.size and spec.transport in ("nccl", "gloo"):
            return None, GroupCollectives(None)
        # With gloo for CPU tensors, through which the ranks agree, whatever moves the messages.
        backend = "gloo" if spec.backend == "gloo" else "nccl"  # where the ranks of peer copies find each other as well
        group = dist.new_group(list(range(spec.world_size)), backend=f"cpu:gloo,cuda:{backend}")
        return group, GroupCollectives(group) if self.world.rank < spec.world_size else None


class _Session:
    def __init__(self, study: CommStudy, world: World, runner: Runner, make: MakeCall) -> None:
        self.study, self.world, self.runner, self.make = study, world, runner, make
        self._groups = _Groups(world)

    def measure(self, numbers: Sequence[int]) -> None:
        (index,) = numbers
        spec = self.study.cells[index]
        self._begin(spec, "first call")
        group, collectives = self._groups.of(spec)
        found = None
        if collectives is not None:
            together = Together(device=self._device(spec), collectives=collectives)
            found = _Share(spec, self.world, group, together, self.make).measure(self.study, self._begin)
        everyone = self.world.collectives.host_gather(found)  # ranks outside of the cell wait here
        cell = _cell(spec, everyone)
        if cell.failure:
            self.runner.free()
        self.runner.tell(index, cell)

    def _device(self, spec: CommSpec) -> Device:
        device = self.world.device
        return device if device.torch_device.type == spec.device else HostClockDevice(torch.device("cpu"))

    def _begin(self, spec: CommSpec, stage: str) -> None:
        self.runner.begin(f"{spec.label}: {stage}")


class _Share:
    def __init__(
        self, spec: CommSpec, world: World, group: dist.ProcessGroup | None, together: Together, make: MakeCall
    ) -> None:
        self._spec, self._world, self._group, self._together, self._make = spec, world, group, together, make
        self._found = _Found()

    def measure(self, study: CommStudy, begin: Callable[[CommSpec, str], None]) -> _Found:
        """Each step runs only if the previous one succeeded on all ranks."""
        called = self._went_well("buffers", self._fill) and self._went_well("first call", self._check)
        if called and not any(self._together.collectives.host_gather(self._found.compared[1])):
            self._went_well("timing", lambda: self._time(study, begin))
        return self._found

    def _went_well(self, stage: str, work: Callable[[], None]) -> bool:
        _, failure = attempt(stage, work, self._together.device)
        if failure is not None:
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
