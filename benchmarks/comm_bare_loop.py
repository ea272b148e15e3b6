"""The bus bandwidth that `steplab comm` finds beside that of a bare loop of torch.distributed's calls, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.comm_bare_loop [--size 1MB,10MB,100MB,1GB] [--collective all_reduce,...]
        [--turns 5]

The two take turns on every cell, and begin in turn. The bare loop: some calls to warm up, then rows of calls, so many
in all as steplab makes, a mark before a row and one after it, and nothing between; of the ranks, the slowest. A row
begins with a barrier, and on a GPU with the device held until Python has started the row and an all-reduce of one
number, so that the GPUs begin together: short calls take Python longer to start than a GPU to make, and the loop would
time Python. One more call is not counted. steplab's figure is the one
that its record shows. Medians over turns; on NCCL they should lie within 3 %. On a CPU they need not: the loop's mean
has every hiccup of the scheduler in it, and its ranks run out of step. Each row is printed when it is measured, which
takes some four seconds with two turns.
"""

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist

from steplab.costs.communication import wire_bytes
from steplab.measurement.comm.back_to_back import Together
from steplab.measurement.comm.calls import Call, make_call
from steplab.measurement.comm.data import Buffers
from steplab.measurement.comm.timing import time_calls
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.machine.world import World, join_world, meeting_place
from steplab.measurement.tensors import TORCH_DTYPES
from steplab.parallel.collectives import all_gather_single, reduce_scatter_single
from steplab.records.comm import CommCell
from steplab.specs.comm import CommSpec, CommStudy, comm_cells
from steplab.units import format_message

WITHIN = 0.03
WARMUP_CALLS = 10
ROW = 50
HELD = 4
"""How long a GPU is held before a row, as a multiple of what Python took to start one. On H200s it took up to 1.5 times
as long beside a GPU that was held, and 4 to 10 % of rows began before they were started when this was 1.5."""


def bare_call(spec: CommSpec, device: torch.device) -> Call:
    """The call as anybody would write it, on tensors of its own."""
    rank, size = dist.get_rank(), spec.world_size
    whole = torch.ones(spec.message_elements, dtype=TORCH_DTYPES[spec.dtype], device=device)
    part, other = whole[: spec.part_elements].clone(), torch.empty_like(whole)

    def ring() -> None:
        sends = dist.P2POp(dist.isend, whole, (rank + 1) % size), dist.P2POp(dist.irecv, other, (rank - 1) % size)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather_single(other, part),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send_recv": ring,
    }[spec.collective]


def bare_s(call: Call, together: Together, repeats: int) -> float:
    """Seconds a call on the slowest rank, over rows with nothing in them but the calls."""
    device, row, found = together.device, min(repeats, ROW), []
    token = torch.zeros(1, device=device.torch_device)
    for _ in range(WARMUP_CALLS):
        call()
    device.synchronize()
    started = time.perf_counter()
    for _ in range(row):
        call()
    start_s = time.perf_counter() - started
    for _ in range(max(round(repeats / row), 1)):
        device.synchronize()
        together.barrier()
        device.hold(HELD * start_s)
        dist.all_reduce(token)
        call()
        start = device.mark()
        for _ in range(row):
            call()
        end = device.mark()
        device.synchronize()
        found.append(device.seconds_between(start, end) / row)
    return together.slowest_s(median(found))


def steplab_s(spec: CommSpec, call: Call, together: Together, study: CommStudy) -> tuple[float, int]:
    """Seconds a call as the record has them, and how many calls that is of."""
    everyone = together.collectives.host_gather(time_calls(call, together, study))
    slowest = CommCell(spec=spec, message_bytes=spec.message_bytes, ranks=tuple(everyone)).slowest
    assert slowest is not None
    return slowest.median_s, len(slowest.best_s) * slowest.calls_per_sample


def compare(spec: CommSpec, world: World, study: CommStudy, turns: int) -> tuple[float, float]:
    """Bytes a second on the bus by steplab and by the bare loop."""
    together = Together(device=world.device, collectives=world.collectives)
    buffers = Buffers(spec, world.rank, world.device.torch_device)
    ours, bare = make_call(buffers, None), bare_call(spec, world.device.torch_device)
    _, repeats = steplab_s(spec, ours, together, study)
    times: dict[str, list[float]] = {"steplab": [], "bare": []}
    for turn in range(turns):
        for name in ("steplab", "bare") if turn % 2 else ("bare", "steplab"):
            found = steplab_s(spec, ours, together, study)[0] if name == "steplab" else bare_s(bare, together, repeats)
            times[name].append(found)
    return wire_bytes(spec) / median(times["steplab"]), wire_bytes(spec) / median(times["bare"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1MB,10MB,100MB,1GB")
    parser.add_argument("--collective", default="")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    place = torchrun_around()
    if place is None:
        parser.error("start it by torchrun, with --nproc-per-node at least 2")
    world = join_world(place, "auto", lambda: meeting_place(place))
    lists = {"size": options.size.split(","), "world_size": [world.size]}
    lists |= {"collective": options.collective.split(",")} if options.collective else {}
    cells = comm_cells(lists, num_processes=world.size, on_gpus=world.backend == "nccl")
    study = CommStudy(cells=cells, num_processes=world.size)
    if world.rank == 0:
        where = torch.cuda.get_device_name() if world.backend == "nccl" else "CPU"
        print(f"{world.size} ranks, {world.backend}, {where}, torch {torch.__version__}\n")
        print("| collective | size | steplab comm, busbw GB/s | bare loop, busbw GB/s | ratio |")
        print("|---|---|---|---|---|", flush=True)
    far = []
    for spec in cells:
        ours, bare = compare(spec, world, study, options.turns)
        if abs(ours / bare - 1) > WITHIN:
            far.append(f"{spec.collective} {format_message(spec.size_bytes)}")
        if world.rank == 0:
            figures = f"{ours / 1e9:.4g} | {bare / 1e9:.4g} | {ours / bare:.3f}"
            print(f"| {spec.collective} | {format_message(spec.size_bytes)} | {figures} |", flush=True)
    if world.rank == 0:
        others = f"; not: {', '.join(far)}" if far else ""
        print(f"\n{len(cells) - len(far)} of {len(cells)} within {WITHIN:.0%}{others}")
    world.leave()


if __name__ == "__main__":
    main()
