"""The memory of a variant of a data-parallel study by category."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from steplab.measurement.machine.device import Device, allocated_bytes
from steplab.measurement.tensors import local_part
from steplab.records.ddp import StateMemory


def state_memory(
    moment: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: Device,
    *,
    before_bytes: int | None,
    uncounted_bytes: int,
) -> StateMemory:
    """The memory held now; `before_bytes` were allocated before the variant was built.

    `uncounted_bytes` are held outside of torch's allocator, and gradients may be in them.
    """
    now_bytes = allocated_bytes(device)
    parameters = list(module.parameters())
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    return StateMemory(
        moment=moment,
        parameters_bytes=storage_bytes(parameters),
        gradients_bytes=storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer_bytes=storage_bytes(tensor for tensor in state if tensor.device.type == device.torch_device.type),
        allocated_bytes=None
        if now_bytes is None or before_bytes is None
        else max(now_bytes - before_bytes, 0) + uncounted_bytes,
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors on this rank, each counted once and in full, also for views."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
