"""One call of each collective, through torch.distributed and nothing else, as a training loop makes it.

Calls are torch's synchronous ones: on a GPU they return as soon as the work is on the current stream.
"""

from collections.abc import Callable

import torch.distributed as dist

from steplab.measurement.comm_data import Buffers
from steplab.parallel.collectives import all_gather_single, reduce_scatter_single

Call = Callable[[], object]
MakeCall = Callable[[Buffers, dist.ProcessGroup | None], Call]


def make_call(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
    """What one repeat of the cell does; to be called by all ranks of the group."""
    send, receive = buffers.send, buffers.receive
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


def _ring(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
    """To the next rank, from the one before, both under way at once."""
    rank, size = buffers.rank, buffers.spec.world_size
    operations = [
        dist.P2POp(dist.isend, buffers.send, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, buffers.receive, group=group, group_peer=(rank - 1) % size),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call
