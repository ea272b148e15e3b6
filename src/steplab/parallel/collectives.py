"""The one place that calls torch.distributed.

Everything in `parallel` speaks to the other ranks through `Collectives`, so that another transport, a recorder of calls
or a source of delays can take its place. Every call has to be made by all ranks of the group in the same order.
"""

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from steplab.errors import UserError


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

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        """`output` (size · n elements) becomes every rank's `part` (n elements), in the order of ranks."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        """`tensor` becomes what it is on the rank `source` of the group."""

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
        self._host_group = group
        config = str(dist.get_backend_config(group))  # for instance cpu:gloo,cuda:nccl
        if dict(entry.split(":") for entry in config.split(",")).get("cpu") != "gloo":
            ranks = dist.get_process_group_ranks(group)
            self._host_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        return _all_gather(output, part, group=self._group, async_op=True)

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        work: Any = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        return work

    def host_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host_group)
        return values


def collectives_of(group: dist.ProcessGroup | Collectives | None) -> Collectives:
    """The collectives of a group (None: of all processes); what already is one passes through."""
    left_out: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns on the ranks it leaves out
    if group == left_out:
        raise UserError("this process is not in the group it was given")
    if group is None or isinstance(group, dist.ProcessGroup):
        return GroupCollectives(group)
    return group


# torch 2.13 calls it so, and warns of the name before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
