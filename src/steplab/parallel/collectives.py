"""The one place that calls torch.distributed's collectives.

`DataParallel` and `ShardedOptimizer` speak to the other ranks through `Collectives`, so that a recorder of calls or a
source of delays can take its place; gradients may go another way (peer_memory.py). Torch's own engine, by which modules
are laid out over a mesh, sends by itself.

Two kinds of traffic. *Tensors* stay on their device: each call returns at once with a `Pending`, and waiting for it
puts the wait on the device's timeline where the device has one. *Host values* are what the ranks agree on to decide
what to do next; they go from CPU to CPU, so that a GPU's queue need not drain before the host can read them.

Bytes are counted by the tensors handed over. Every call has to be made by all ranks of the group in the same order.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UserError


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """After this the result can be used, on a GPU by the work that the current stream is given from here on."""


class Collectives(Protocol):
    """What the ranks of one group can do together. Tensors are contiguous."""

    rank: int
    """This process's place in the group, from 0."""
    size: int
    """How many ranks the group has."""

    def all_reduce(self, tensor: Tensor, *, average: bool, into: Tensor | None = None) -> Pending:
        """Sum or average over ranks, in place; then copied `into` a tensor of that shape, maybe of another dtype."""

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        """`output` (size · n elements) becomes every rank's `part` (n elements), in the order of ranks."""

    def reduce_scatter(self, part: Tensor, tensor: Tensor, *, average: bool) -> Pending:
        """`part` (n elements) becomes this rank's slice of the sum or average of `tensor` (size · n elements)."""

    def reduce(self, tensor: Tensor, *, destination: int, average: bool) -> Pending:
        """`tensor` becomes the sum or average over ranks on that rank of the group; on others it is undefined."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        """`tensor` becomes what it is on the rank `source` of the group."""

    def host_maximum(self, values: Tensor) -> Tensor:
        """The largest over ranks of each of these int64 values on the CPU; waits for all ranks."""

    def host_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks; waits for all ranks. The values are pickled."""


class GroupCollectives:
    """The collectives of a process group of torch's.

    A group that has no CPU backend gets a companion for host values (gloo); making it is itself a collective call.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UserError(
                "there are no other processes to work with: call torch.distributed.init_process_group first, "
                "in processes started by torchrun"
            )
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise UserError("this process is not in the group it was given")
        self._group = group
        config = str(dist.get_backend_config(group))  # for instance cpu:gloo,cuda:nccl
        self._backends = dict(entry.split(":") for entry in config.split(","))
        self._host_group = group
        if self._backends.get("cpu") != "gloo":
            ranks = dist.get_process_group_ranks(group)
            self._host_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def all_reduce(self, tensor: Tensor, *, average: bool, into: Tensor | None = None) -> Pending:
        operation, divisor = self._operation(tensor, average)
        work = dist.all_reduce(tensor, op=operation, group=self._group, async_op=True)
        return _Work(work, tensor, divisor, into)

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        work = all_gather_single(output, part, group=self._group, async_op=True)
        return _Work(work, output)

    def reduce_scatter(self, part: Tensor, tensor: Tensor, *, average: bool) -> Pending:
        operation, divisor = self._operation(tensor, average)
        work = reduce_scatter_single(part, tensor, op=operation, group=self._group, async_op=True)
        return _Work(work, part, divisor)

    def reduce(self, tensor: Tensor, *, destination: int, average: bool) -> Pending:
        operation, divisor = self._operation(tensor, average)
        work = dist.reduce(tensor, group_dst=destination, op=operation, group=self._group, async_op=True)
        return _Work(work, tensor, divisor)

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        return _Work(work, tensor)

    def host_maximum(self, values: Tensor) -> Tensor:
        result = values.clone()
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._host_group)
        return result

    def host_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def _operation(self, tensor: Tensor, average: bool) -> tuple[Any, int]:
        """What the backend is asked for, and what is left to divide by: only NCCL averages by itself."""
        if not average:
            return dist.ReduceOp.SUM, 1
        if self._backends.get(tensor.device.type) == "nccl":
            return dist.ReduceOp.AVG, 1
        return dist.ReduceOp.SUM, self.size


def collectives_of(group: dist.ProcessGroup | Collectives | None) -> Collectives:
    """The collectives of a group (None: of all processes); what already is one passes through."""
    left_out: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns on the ranks it leaves out
    if group == left_out:
        raise UserError("this process is not in the group it was given")
    if group is None or isinstance(group, dist.ProcessGroup):
        return GroupCollectives(group)
    return group


class _Work:
    """A collective of torch's under way, with what is left to do to its result."""

    def __init__(self, work: Any, tensor: Tensor, divisor: int = 1, into: Tensor | None = None) -> None:
        self._work, self._tensor, self._divisor, self._into = work, tensor, divisor, into

    def wait(self) -> None:
        self._work.wait()
        if self._divisor != 1:
            torch.div(self._tensor, self._divisor, out=self._tensor if self._into is None else self._into)
        elif self._into is not None:
            self._into.copy_(self._tensor)


# torch 2.13 calls them so, and warns of the names before.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
