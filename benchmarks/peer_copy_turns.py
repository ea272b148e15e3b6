"""Copies from every GPU to every other: in which order they are sent, and whether in turns. Then peer copies by size.

    export CUDA_SCALE_LAUNCH_QUEUES=4x          # as `steplab ddp` sets it for its ranks
    torchrun --nproc-per-node 4 -m benchmarks.peer_copy_turns [--buckets 100,200,400]

First copies alone: 60 rounds in which each GPU sends 20 MB to each other one, without waiting for any (from the next
rank on, the same with ranks that begin 30 microseconds apart, all to rank 0 first), in turns as of
parallel/peer_copies.py, and on two streams. Then the gradients of xl, averaged with nothing beside them, in buckets of
some sizes in MB: at once; by stages, in which a rank sends to all peers as soon as the next rank has ended the stage
before; and in turns. Milliseconds of the slowest rank, and of rank 0's host for the calls that launch all of it, while
its GPU is held for some 40; rates are of what one GPU sends. Half a minute on four H200s.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.parallel import peer_copies
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.peer_copies import PeerBucket, PeerCopies, peer_buckets
from steplab.parallel.peer_memory import SymmetricMemory
from steplab.parallel.sizes import grouped

PIECE_BYTES, ROUNDS, REPEATS = 20_000_000, 60, 6
HELD_CYCLES, APART_CYCLES = 80_000_000, 50_000
"""How long the GPU is held so that Python is ahead of it, some 40 ms, and how far apart ranks begin."""


class Copies:
    """Rounds of copies to all other GPUs."""

    def __init__(self, device: torch.device) -> None:
        self.memory = SymmetricMemory(GroupCollectives(), None, device)
        self.rank, self.size = self.memory.rank, self.memory.size
        _, self.bases = self.memory.allocate(PIECE_BYTES * (self.size + 1), 1)
        self.next_ranks = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.turn = 0

    def rounds(self, order: Sequence[int], *, in_turns: bool = False, num_lines: int = 1) -> None:
        """Give the lines all copies, and have the current stream wait for them."""
        for line in range(num_lines):
            self.memory.follow_current(line)
        for _ in range(ROUNDS):
            for place, peer in enumerate(order):
                if in_turns and self.turn:
                    self.memory.await_signals(0, (0,), self.turn)
                target = self.bases[peer] + PIECE_BYTES * (1 + self.rank)
                self.memory.copy(place % num_lines, [target], [self.bases[self.rank]], [PIECE_BYTES])
                if in_turns:
                    self.turn += 1
                    self.memory.signal(0, (((self.rank - 1) % self.size, 0),), self.turn)
        for stream in self.memory._streams:
            torch.cuda.current_stream().wait_stream(stream)


class Times(NamedTuple):
    slowest_ms: list[float]
    """Times of the slowest rank in each repeat, in ascending order."""
    host_ms: float
    """Median of this rank's calls."""

    def __str__(self) -> str:
        return f"{statistics.median(self.slowest_ms):.2f},{self.slowest_ms[0]:.2f},{self.slowest_ms[-1]:.2f}"


def timed(work: Callable[[], object], after: Callable[[], object], *, apart: bool = False) -> Times:
    """Repeats of work that all ranks begin together."""
    found, host = [], []
    for repeat in range(-2, REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(HELD_CYCLES + apart * APART_CYCLES * dist.get_rank())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter()
        work()
        called_ms = (time.perf_counter() - began) * 1e3
        end.record()
        torch.cuda.synchronize()
        after()
        if repeat >= 0:
            found.append(start.elapsed_time(end))
            host.append(called_ms)
    times = torch.tensor(found, device="cuda")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return Times(sorted(times.tolist()), statistics.median(host))


def compare_orders(copies: Copies) -> None:
    """Print a line for each order of copies."""
    if copies.rank == 0:
        print("copies,ms,ms_least,ms_most,GB_per_s", flush=True)
    ways: dict[str, Callable[[], None]] = {
        "from the next rank on": lambda: copies.rounds(copies.next_ranks),
        "the same, begun apart": lambda: copies.rounds(copies.next_ranks),
        "rank 0 first": lambda: copies.rounds(sorted(copies.next_ranks)),
        "in turns": lambda: copies.rounds(copies.next_ranks, in_turns=copies.size > 2),
        "two streams": lambda: copies.rounds(copies.next_ranks, num_lines=2),
    }
    for name, way in ways.items():
        times = timed(way, lambda: None, apart=name.endswith("apart"))
        rate = PIECE_BYTES * ROUNDS * (copies.size - 1) / statistics.median(times.slowest_ms) / 1e6
        if copies.rank == 0:
            print(f"{name},{times},{rate:.0f}", flush=True)


def xl_shapes() -> list[tuple[int, ...]]:
    """Shapes of the parameters of xl, in the order in which their gradients become ready."""
    width, inner, vocabulary = 1600, 6400, 10_000
    block = [*[(width, width)] * 4, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(vocabulary, width), (width,), *(block * 48), (vocabulary, width)]


def average(buckets: Sequence[PeerBucket], groups: Sequence[Sequence[int]], gradients: Sequence[Tensor]) -> None:
    """Average all gradients."""
    for bucket, group in zip(buckets, groups, strict=True):
        bucket.launch([gradients[index] for index in group])
    for bucket in buckets:
        bucket.wait()


def release(buckets: Sequence[PeerBucket]) -> None:
    for bucket in buckets:
        bucket.release()


def by_stages(copies: PeerCopies, items: Sequence[peer_copies.Copies]) -> None:
    """Copy to all peers when the next rank has ended its stage before: the waits and signals of turns, once for all."""
    if copies._num_turns:
        copies.memory.await_signals(peer_copies.COPIES, copies._turns_told, copies._num_turns)
    copies.copy_at_once(items)
    copies._num_turns += 1
    copies.memory.signal(peer_copies.COPIES, copies._tell_of_turns, copies._num_turns)


def compare_designs(size_mb: int, gradients: Sequence[Tensor]) -> None:
    """Print a line for buckets of this size by each design; raises AssertionError if an average is wrong."""
    size = dist.get_world_size()
    parameters = [nn.Parameter(torch.empty(gradient.shape, device="meta")) for gradient in gradients]
    groups = grouped([gradient.nbytes for gradient in gradients], size_mb * 1e6)
    memory = SymmetricMemory(GroupCollectives(), None, gradients[0].device)
    buckets = peer_buckets([[parameters[index] for index in group] for group in groups], memory)
    copies = buckets[0]._copies
    designs: dict[str, Callable[[Sequence[peer_copies.Copies]], None]] = {"at once": copies.copy_at_once}
    if size > 2:
        designs |= {"by stages": partial(by_stages, copies), "in turns": copies.copy_in_turns}
    for name, design in designs.items():
        copies.copy = design  # type: ignore[assignment,method-assign]
        times = timed(partial(average, buckets, groups, gradients), partial(release, buckets))
        for kept in (kept for bucket in buckets for kept in bucket.wait()):
            assert kept is not None
            assert bool((kept == (size + 1) / 2).all()), f"{name}, {size_mb} MB"
            kept.zero_()
        if dist.get_rank() == 0:
            print(f"{name},{size_mb},{len(buckets)},{times},{times.host_ms:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", default="100,200,400", help="sizes in MB of 1e6 bytes")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    compare_orders(Copies(device))
    gradients = [torch.full(shape, dist.get_rank() + 1.0, device=device) for shape in xl_shapes()]
    if dist.get_rank() == 0:
        print("\ngradients of xl,bucket_mb,num_buckets,ms,ms_least,ms_most,host_ms", flush=True)
    for size in options.buckets.split(","):
        compare_designs(int(size), gradients)
        torch.cuda.synchronize()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
