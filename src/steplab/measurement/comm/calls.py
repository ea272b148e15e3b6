"""One call of each collective: torch.distributed's, as a training loop makes it, or steplab.parallel's own transport.

The calls of torch are synchronous: on a GPU they return as soon as the work is on the current stream.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from steplab.measurement.comm.data import Buffers
from steplab.parallel.collectives import GroupCollectives, all_gather_single, reduce_scatter_single
from steplab.parallel.peer_memory import PeerMemory, SymmetricMemory

Call = Callable[[], Any]
MakeCall = Callable[[Buffers, dist.ProcessGroup | None], Call]


def make_call(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
    send, receive = buffers.send, buffers.receive
    if buffers.spec.backend == "peer_copy":
        return peer_copy_call(buffers, SymmetricMemory(GroupCollectives(group), group, send.device))
    match buffers.spec.collective:
        case "all_reduce":
            return lambda: dist.all_reduce(send, group=group)
        case "broadcast":
            return lambda: dist.broadcast(send, group=group, group_src=0)
        case "all_gather":
            return lambda: all_gather_single(receive, send, group=group)
        case "reduce_scatter":
            return lambda: reduce_scatter_single(receive, send, group=group)
        case "all_to_all":
            return lambda: dist.all_to_all_single(receive, send, group=group)
        case "send_recv":
            return _ring(buffers, group)


def peer_copy_call(buffers: Buffers, memory: PeerMemory) -> Call:
    """Average the whole message as one gradient; the average is written to the bucket."""
    from steplab.parallel.peer_copies import peer_buckets  # it needs Triton

    (bucket,) = peer_buckets([[nn.Parameter(buffers.send)]], memory)
    (average,) = bucket.wait()
    assert average is not None  # without owners every rank has it
    buffers.receive = average

    def call() -> None:
        bucket.launch([buffers.send])
        bucket.wait()
        bucket.release()

    return call


def _ring(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
    rank, size = buffers.rank, buffers.spec.world_size
    operations = [
        dist.P2POp(dist.isend, buffers.send, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, buffers.receive, group=group, group_peer=(rank - 1) % size),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call
