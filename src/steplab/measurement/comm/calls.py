"""One call of each collective, by torch.distributed or steplab.parallel's transport, and the data that check it.

Data are whole numbers so small that all sums are exact; a hash of rank and index makes them differ almost always at
another place or rank. They are compared in pieces: a whole message as int64 would take twice its memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.measurement.tensors import TORCH_DTYPES
from steplab.parallel.collectives import GroupCollectives, all_gather_single, reduce_scatter_single
from steplab.parallel.peer_memory import PeerMemory
from steplab.specs.comm import CommSpec

_PIECE = 2**24
_SENTINEL = 99.0
_EXACT = 256
"""Largest whole number up to which bf16 represents all exactly."""


class Buffers:
    """Data sent (`send`) and result (`receive`) of one rank; one tensor for in-place collectives. Averages are checked
    by their sum, which is exact.
    """

    def __init__(self, spec: CommSpec, rank: int, device: torch.device) -> None:
        self.spec, self.rank = spec, rank
        dtype = TORCH_DTYPES[spec.dtype]
        whole, part = spec.message_elements, spec.part_elements
        num_sent = part if spec.collective == "all_gather" else whole
        num_received = part if spec.collective == "reduce_scatter" else whole
        self.send = torch.empty(num_sent, dtype=dtype, device=device)
        for piece, index in _pieces(self.send):
            piece.copy_(self._drawn(rank, index))
        self.averaged = spec.backend == "peer_copy"
        in_place = spec.collective in ("all_reduce", "broadcast")
        self.receive = self.send if in_place else torch.full((num_received,), _SENTINEL, dtype=dtype, device=device)

    def compare(self) -> tuple[int, int, str]:
        """Numbers of received and of wrong elements, and a description of the first wrong one."""
        num_wrong, first = 0, ""
        for piece, index in _pieces(self.receive):
            expected = self._expected(index)
            received = (piece.double() * self.spec.world_size).round() if self.averaged else piece.double()
            wrong = (received != expected).nonzero().flatten()
            if wrong.numel() and not first:
                at = int(wrong[0])
                first = (
                    f"rank {self.rank}, element {int(index[at])} is {received[at].item():g} "
                    f"and should be {int(expected[at])}"
                )
            num_wrong += wrong.numel()
        return self.receive.numel(), num_wrong, first

    def _expected(self, index: Tensor) -> Tensor:
        n, part = self.spec.world_size, self.spec.part_elements
        mine = self.rank * part
        match self.spec.collective:
            case "all_reduce":
                return sum((self._drawn(rank, index) for rank in range(n)), torch.zeros_like(index))
            case "reduce_scatter":
                return sum((self._drawn(rank, index + mine) for rank in range(n)), torch.zeros_like(index))
            case "all_gather":
                return self._drawn(index // part, index % part)
            case "all_to_all":
                return self._drawn(index // part, index % part + mine)
            case "broadcast":
                return self._drawn(0, index)
            case "send_recv":
                return self._drawn((self.rank - 1) % n, index)

    def _drawn(self, rank: int | Tensor, index: Tensor) -> Tensor:
        largest = 3 if 3 * self.spec.world_size <= _EXACT else 1
        mixed = (index * 2654435761 + rank * 40503) & 0xFFFFFFFF
        return (mixed ^ (mixed >> 15)) % (2 * largest + 1) - largest


def _pieces(tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, tensor.numel(), _PIECE):
        piece = tensor[start : start + _PIECE]
        yield piece, torch.arange(start, start + piece.numel(), device=tensor.device)


Call = Callable[[], Any]
MakeCall = Callable[[Buffers, dist.ProcessGroup | None], Call]


def make_call(buffers: Buffers, group: dist.ProcessGroup | None) -> Call:
    send, receive = buffers.send, buffers.receive
    if buffers.spec.backend == "peer_copy":
        return peer_copy_call(buffers, PeerMemory(GroupCollectives(group), group, send.device))
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
    """Average the whole message as one gradient, in a bucket."""
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
