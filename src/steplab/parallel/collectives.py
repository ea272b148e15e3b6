"""The collectives of a process group, which tests replace. Peer copies and torch's DeviceMesh engines do not use this.

Calls on tensors return at once; waits happen on the device's stream. Host values go from CPU to CPU, so GPU queues need
not drain. All ranks make all calls in the same order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from .errors import UserError


class Pending(Protocol):
    def wait(self) -> None:
        """Wait for the result; on a GPU, only the current stream's later work waits."""


class Collectives(Protocol):
    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Pending:
        """Sum or average over ranks, in place."""

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        """Write every rank's `part` (n elements) to `output` (size · n elements), in the order of ranks."""

    def reduce_scatter(self, part: Tensor, tensor: Tensor, *, average: bool) -> Pending:
        """Write this rank's slice of the sum or average of `tensor` (size · n elements) to `part` (n elements)."""

    def reduce(self, tensor: Tensor, *, destination: int, average: bool) -> Pending:
        """Sum or average over ranks, in place on rank `destination`; elsewhere `tensor` becomes undefined."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        """Overwrite `tensor` with that of the group's rank `source`."""

    def host_maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum over ranks of int64 values on the CPU; waits for all ranks."""

    def host_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks; waits for all ranks. Values are pickled."""


class GroupCollectives:
    """Collectives of a torch process group. Without a CPU backend, all ranks create a gloo group for host values."""

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

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Pending:
        operation, divisor = self._operation(tensor, average)
        work = dist.all_reduce(tensor, op=operation, group=self._group, async_op=True)
        return _Work(work, tensor, divisor)

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
        """The reduce operation, and the divisor to apply afterwards: only NCCL averages."""
        if not average:
            return dist.ReduceOp.SUM, 1
        if self._backends.get(tensor.device.type) == "nccl":
            return dist.ReduceOp.AVG, 1
        return dist.ReduceOp.SUM, self.size


def collectives_of(group: dist.ProcessGroup | Collectives | None) -> Collectives:
    """Wrap a process group; None: the default group. Collectives are returned unchanged."""
    left_out: Any = dist.GroupMember.NON_GROUP_MEMBER  # new_group returns it on excluded ranks
    if group == left_out:
        raise UserError("this process is not in the group it was given")
    if group is None or isinstance(group, dist.ProcessGroup):
        return GroupCollectives(group)
    return group


def check_alike(
    collectives: Collectives, settings: Mapping[str, Any], tensors: Sequence[tuple[str, Tensor]], what: str = "module"
) -> None:
    """Raise UserError on all ranks if their settings or their named tensors' forms differ: they would wait for each
    other, or overwrite weights. `what` is the message's word for what has to be built alike.
    """
    everyone = collectives.host_gather((dict(settings), {name: _form(tensor) for name, tensor in tensors}))
    first_settings, first_tensors = everyone[0]
    for rank, (others_settings, others_tensors) in enumerate(everyone):
        for name, value in first_settings.items():
            if others_settings[name] != value:
                raise UserError(
                    f"{name} is {value!r} on rank 0 and {others_settings[name]!r} on rank {rank}: "
                    "give every rank the same"
                )
        for name in [*first_tensors, *others_tensors]:
            here, there = first_tensors.get(name, "absent"), others_tensors.get(name, "absent")
            if here != there:
                raise UserError(
                    f"{name} is {here} on rank 0 and {there} on rank {rank}: every rank has to build the same {what}"
                )
        if list(first_tensors) != list(others_tensors):
            raise UserError(
                f"rank 0 and rank {rank} have their parameters and buffers in another order: "
                f"every rank has to build the same {what} in the same way"
            )


def _form(tensor: Tensor) -> str:
    gradient = "trained" if tensor.requires_grad else "not trained"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} on {tensor.device.type} strides {tensor.stride()} {gradient}"


class _Work:
    def __init__(self, work: Any, tensor: Tensor, divisor: int = 1) -> None:
        self._work, self._tensor, self._divisor = work, tensor, divisor

    def wait(self) -> None:
        self._work.wait()
        if self._divisor != 1:
            self._tensor.div_(self._divisor)


# torch 2.13 has these names, and warns about the older ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
