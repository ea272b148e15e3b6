"""The benchmark of collectives within its ranks. gloo's collectives must pass the closed forms, and one changed element
must fail.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import Cases
from tests.distributed.shared_memory import SharedMemory

from steplab.errors import Unsupported
from steplab.measurement.comm.calls import Buffers, Call, MakeCall, make_call, peer_copy_call
from steplab.measurement.comm.session import measure_comm
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import Device
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.parallel.collectives import GroupCollectives
from steplab.records.comm import CommCell, CommFacts
from steplab.records.environment import Environment
from steplab.specs.comm import COLLECTIVES, CommStudy, comm_cells

cases = Cases()


def test_comm_session(subtests: pytest.Subtests) -> None:
    cases.run(3, subtests)


def world() -> World:
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        host=f"host{dist.get_rank()}",
        device=Device(torch.device("cpu")),
        backend="gloo",
        collectives=GroupCollectives(),
    )


def study(**lists: Sequence[object]) -> CommStudy:
    some: dict[str, Sequence[object]] = {"size": ["1000"], "world_size": [2, 3]}
    cells = comm_cells(some | lists, num_processes=3, on_gpus=False)
    return CommStudy(cells=cells, num_processes=3, warmup_s=0.0, measured_s=0.0, least_repeats=3, most_repeats=3)


def measured(asked: CommStudy, make: MakeCall = make_call, indices: Sequence[int] | None = None) -> list[CommCell]:
    cells: dict[int, CommCell] = {}
    under_way: list[int] = []
    facts: list[CommFacts] = []
    environments: list[Environment] = []
    observer = Observer(
        on_under_way=under_way.extend,
        on_cell=cells.__setitem__,
        on_environment=environments.append,
        on_facts=facts.append,
    )
    chosen = range(len(asked.cells)) if indices is None else indices
    measure_comm(CellsTask(study=asked, groups=[list(chosen)]), observer, world(), make)
    assert sorted(under_way) == sorted(chosen)
    sizes = [asked.cells[index].world_size for index in under_way]
    assert sizes == sorted(sizes, reverse=True)  # else symmetric memory of all ranks waits forever after some ranks'
    assert [rank.host for rank in facts[0].ranks] == ["host0", "host1", "host2"]
    assert facts[0].ranks[1].device.startswith("cpu ")
    assert {environment.device.name for environment in environments} == {environments[0].device.name}
    return [cells[index] for index in chosen]


def spoiled(ruin: Callable[[Buffers], None]) -> MakeCall:
    def make(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
        call = make_call(buffers, group)

        def spoil() -> None:
            call()
            if buffers.rank == 1:
                ruin(buffers)

        return spoil

    return make


@cases
def every_collective_is_right_and_every_rank_is_timed() -> None:
    asked = study(dtype=["fp32", "bf16", "fp16"])
    cells = measured(asked)
    assert [cell.spec for cell in cells] == list(asked.cells)
    assert len(cells) == 2 * 3 * len(COLLECTIVES)
    for cell in cells:
        n, spec = cell.spec.world_size, cell.spec
        assert cell.failure is None, cell.failure
        assert [times.rank for times in cell.ranks] == list(range(n))
        assert all(len(times.alone_s) == 3 and min(times.alone_s) > 0 for times in cell.ranks)
        assert all(times.device_s is None for times in cell.ranks)
        received = n * spec.message_elements // (n if spec.collective == "reduce_scatter" else 1)
        assert cell.check is not None
        assert (cell.check.num_elements, cell.check.num_wrong) == (received, 0)
        assert cell.message_bytes == spec.message_bytes


@cases
def one_wrong_element_is_found_wherever_it_is() -> None:
    def last(buffers: Buffers) -> None:
        buffers.receive[-1] += 1

    def swapped(buffers: Buffers) -> None:
        buffers.receive.copy_(buffers.receive.flip(0))

    for ruin, least in ((last, 1), (swapped, 20)):
        for cell in measured(study(world_size=[3]), spoiled(ruin)):
            assert cell.failure is not None
            assert cell.failure.message.startswith("the result is wrong: rank 1, element ")
            assert cell.check is not None
            assert cell.check.num_wrong >= least
            assert cell.ranks == ()


@cases
def a_collective_that_does_nothing_is_found_wrong() -> None:
    def make(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
        return lambda: None

    for cell in measured(study(), make):
        assert cell.failure is not None, cell.spec.label
        assert cell.check is not None
        assert cell.check.num_wrong > cell.check.num_elements / 8


@cases
def what_fails_on_one_rank_ends_that_cell_and_no_other() -> None:
    def make(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
        if buffers.rank == 1 and buffers.spec.collective == "broadcast":
            raise RuntimeError("no way through")
        if buffers.rank == 1 and buffers.spec.collective == "all_to_all":
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return (lambda: None) if buffers.spec.collective in ("broadcast", "all_to_all") else make_call(buffers, group)

    for cell in measured(study(), make):
        failed = {"broadcast": "error", "all_to_all": "out_of_memory"}.get(cell.spec.collective)
        assert cell.status == (failed or "ok"), cell
        assert bool(cell.ranks) == (failed is None)
        if cell.failure:
            assert cell.failure.rank == 1
            assert cell.failure.message.startswith("rank 1 on host1: ")


@cases
def copies_into_each_others_memory_give_the_average() -> None:
    for dtype in ("fp32", "bf16"):
        (spec,) = comm_cells(
            {"backend": ["peer_copy"], "size": ["5000"], "world_size": [3], "dtype": [dtype]},
            num_processes=3,
            on_gpus=True,
        )
        buffers = Buffers(spec, dist.get_rank(), torch.device("cpu"))
        call = peer_copy_call(buffers, SharedMemory())
        assert buffers.compare()[1] > 500
        for _ in range(3):
            call()
            assert buffers.compare()[:2] == (spec.message_elements, 0)


@cases
def only_the_cells_asked_for_are_measured() -> None:
    asked = study()
    assert [cell.spec for cell in measured(asked, indices=[7, 2])] == [asked.cells[7], asked.cells[2]]


@cases
def what_this_machine_cannot_serve_is_refused_on_all_ranks() -> None:
    cuda = CommStudy(cells=comm_cells({"backend": ["nccl"]}, num_processes=2, on_gpus=True), num_processes=2)
    with pytest.raises(Unsupported, match=r"nccl .*not every process has a CUDA device.*--gpus"):
        measure_comm(CellsTask(study=cuda, groups=[[0]]), Observer(), world())
