"""Measures cells of a benchmark of collectives on this rank.

Every rank measures the same cells, the largest groups first; a cell with fewer ranks takes the lowest ones. Results are
checked before they are timed. Ranks learn of a failure before they wait for each other.

On a GPU, calls go back to back in rows. A row begins with a barrier, also on the device, because a broadcast's root
waits for no rank. An uncounted call follows. An event takes microseconds, so there is one per millisecond of calls,
and a sample is their mean.

Then each call is timed alone by Python's clock, after a barrier, with the device idle at both ends. The slowest rank's
time decides the number of calls.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

from steplab.errors import Unsupported
from steplab.measurement.clock import HeadStart, Phase, Samples, repeats_within, run_synchronised, seconds_of
from steplab.measurement.comm.calls import Buffers, Call, MakeCall, make_call
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import Device
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.runner import Runner, attempt
from steplab.parallel.collectives import Collectives, GroupCollectives
from steplab.records.comm import CommCell, CommCheck, CommFacts, RankTimes
from steplab.records.failure import Failure
from steplab.records.record import RankPlace
from steplab.records.timing import find_phase
from steplab.specs.comm import CommSpec, CommStudy
from steplab.units import NS_PER_S

T = TypeVar("T")
_LEAST_WARMUP_CALLS = 5
_LONGEST_WARMUP = 10
"""Longest warm-up, as a multiple of the requested one; then even unstable calls are timed."""
_SETTLED = 1.5
_SAMPLE_S = 1e-3
_MOST_A_SAMPLE = 100
_IN_A_ROW = 200
"""Most calls in one row: the device's launch queue holds them."""
_TRIED = 5
_LONGEST_HOLD_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    device: Device
    collectives: Collectives

    def barrier(self) -> None:
        self.collectives.host_maximum(torch.zeros(1, dtype=torch.int64))

    def slowest_s(self, seconds: float) -> float:
        """Seconds of the slowest rank, equal on all ranks."""
        longest = self.collectives.host_maximum(torch.tensor([int(seconds * NS_PER_S)]))
        return max(int(longest), 1) / NS_PER_S


def time_calls(
    call: Call, together: Together, study: CommStudy, on_begin: Callable[[str], None] = lambda stage: None
) -> RankTimes:
    device = together.device
    on_begin("warm-up")
    call_s = _warmed_up(call, together, study.warmup_s)

    def samples_of(calls: int) -> int:
        return repeats_within(study.measured_s, calls * call_s, least=study.least_repeats, most=study.most_repeats)

    rows = None
    if device.asynchronous:
        on_begin("back to back")
        rows = back_to_back(call, together, samples_of)
    on_begin("one by one")
    phases = [Phase(name="barrier", run=together.barrier), Phase(name="call", run=call)]
    samples, _ = run_synchronised(phases, device, samples_of(1), lambda repeat: None)
    alone = find_phase(samples, "call")
    assert alone is not None
    assert alone.host_s is not None  # run_synchronised times each phase by Python's clock
    rank = together.collectives.rank
    return dataclasses.replace(rows or RankTimes(rank=rank), alone_s=alone.host_s)


def back_to_back(call: Call, together: Together, samples_of: Callable[[int], int]) -> RankTimes:
    """Time rows of calls without waits between them. `samples_of` maps calls per sample to a number of samples."""
    head_start = HeadStart(together.device, together.collectives, _LONGEST_HOLD_S)

    def row(num_samples: int, calls: int) -> tuple[list[float], int]:
        """Seconds per call, and the number of samples that may contain waits for Python even after the longest hold."""

        def sample() -> None:
            for _ in range(calls):
                call()

        phases = [Phase(name="step", run=sample)]
        samples = head_start.run(
            phases, num_samples, lambda found: _waits(found) > 0, meet=together.barrier, before=call
        )
        return [seconds / calls for seconds in samples[0].best_s], _waits(samples)

    single_s = together.slowest_s(median(row(_TRIED, 1)[0]))
    calls = min(math.ceil(_SAMPLE_S / single_s), _MOST_A_SAMPLE)
    wanted = samples_of(calls)
    samples: list[float] = []
    num_waits = 0
    while len(samples) < wanted:
        found_s, waits = row(min(_IN_A_ROW // calls, wanted - len(samples)), calls)
        samples += found_s
        num_waits += waits
    return RankTimes(
        rank=together.collectives.rank,
        device_s=tuple(samples),
        calls_per_sample=calls,
        num_waits=num_waits,
        held_s=head_start.seconds,
    )


def _waits(samples: Samples) -> int:
    (found,) = samples
    return sum(lead < seconds for lead, seconds in zip(found.lead_s or (), found.best_s, strict=True))


def _warmed_up(call: Call, together: Together, warmup_s: float) -> float:
    """Seconds of a call, once the warm-up is over and two batches in a row agree, or the longest time has passed: the
    first calls are among the slowest.
    """
    call_s, agree = _batch_s(call, together, _LEAST_WARMUP_CALLS), False
    spent_s = _LEAST_WARMUP_CALLS * call_s
    while spent_s < (warmup_s if agree else _LONGEST_WARMUP * warmup_s):
        before_s, count = call_s, math.ceil(warmup_s / 2 / call_s)
        call_s = _batch_s(call, together, count)
        spent_s += count * call_s
        agree = max(before_s, call_s) <= _SETTLED * min(before_s, call_s)
    return call_s


def _batch_s(call: Call, together: Together, count: int) -> float:
    def batch() -> None:
        for _ in range(count):
            call()

    together.barrier()
    return together.slowest_s(seconds_of(batch, together.device) / count)


@dataclass(kw_only=True, slots=True)
class _Found:
    times: RankTimes | None = None
    compared: tuple[int, int, str] = (0, 0, "")
    failure: Failure | None = None


def measure_comm(
    task: CellsTask[CommStudy], observer: Observer, world: World | None, make: MakeCall = make_call
) -> None:
    """Measure all cells; a collective call, and every rank's observer gets them. Raises Unsupported for an impossible
    request.
    """
    assert world is not None  # the study has at least two processes
    study = task.study
    for index in task.numbers:
        _refuse(study.cells[index], world)
    observer.on_stage("build", 0)
    runner = Runner(world.device, observer)
    name = runner.environment.device.name
    mine = RankPlace(rank=world.rank, host=world.host, device=f"{world.device.torch_device} {name}")
    ranks = tuple(world.collectives.host_gather(mine))
    observer.on_facts(CommFacts(ranks=ranks, libraries=_libraries(study)))
    # torch's symmetric memory numbers a process's exchanges: a group in which some ranks have had more of them than
    # others waits forever. A smaller group's ranks are all in the larger ones.
    largest_first = sorted(task.numbers, key=lambda index: -study.cells[index].world_size)
    if runner.run([[index] for index in largest_first], _Session(study, world, runner, make).measure):
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


Group = tuple[dist.ProcessGroup | None, GroupCollectives | None]
"""A cell's process group and its collectives; None on ranks outside it."""


def _group_of(world: World, transport: str, backend: str, size: int) -> Group:
    # The processes' own group sends tensors of each device by the backend native to it.
    if size == world.size and transport in ("nccl", "gloo"):
        return None, GroupCollectives(None)
    # With gloo for CPU tensors, through which the ranks agree, whatever moves the messages.
    moving = "gloo" if backend == "gloo" else "nccl"  # where the ranks of peer copies find each other as well
    group = dist.new_group(list(range(size)), backend=f"cpu:gloo,cuda:{moving}")
    return group, GroupCollectives(group) if world.rank < size else None


class _Session:
    def __init__(self, study: CommStudy, world: World, runner: Runner, make: MakeCall) -> None:
        self.study, self.world, self.runner, self.make = study, world, runner, make
        self._group_of = cache(partial(_group_of, world))

    def measure(self, numbers: Sequence[int]) -> None:
        (index,) = numbers
        spec = self.study.cells[index]
        self._begin(spec, "first call")
        group, collectives = self._group_of(spec.transport, spec.backend, spec.world_size)
        found = None
        if collectives is not None:
            found = self._share(spec, group, Together(device=self._device(spec), collectives=collectives))
        everyone = self.world.collectives.host_gather(found)  # ranks outside of the cell wait here
        cell = _cell(spec, everyone)
        if cell.failure:
            self.runner.free()
        self.runner.observer.on_cell(index, cell)

    def _share(self, spec: CommSpec, group: dist.ProcessGroup | None, together: Together) -> _Found:
        """Check and time one cell's calls on this rank, until the first failure of any rank."""
        found, device, collectives = _Found(), together.device, together.collectives

        def agreed(stage: str, work: Callable[[], T]) -> T | None:
            result, failure = attempt(stage, work, device)
            if failure is not None:
                message = f"rank {self.world.rank} on {self.world.host}: {failure.message}"
                found.failure = dataclasses.replace(failure, rank=self.world.rank, message=message)
            return None if any(collectives.host_gather(failure is not None)) else result

        def checked(buffers: Buffers) -> Call:
            call = self.make(buffers, group)
            call()
            device.synchronize()
            found.compared = buffers.compare()
            return call

        buffers = agreed("buffers", lambda: Buffers(spec, collectives.rank, device.torch_device))
        call = agreed("first call", lambda: checked(buffers)) if buffers else None
        if call and not any(collectives.host_gather(found.compared[1])):
            begin = partial(self._begin, spec)
            found.times = agreed("timing", lambda: time_calls(call, together, self.study, on_begin=begin))
        return found

    def _device(self, spec: CommSpec) -> Device:
        device = self.world.device
        return device if device.torch_device.type == spec.device else Device(torch.device("cpu"))

    def _begin(self, spec: CommSpec, stage: str) -> None:
        self.runner.begin(f"{spec.label}: {stage}")


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
