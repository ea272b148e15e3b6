"""What a variant of a data-parallel study holds, by whose it is, and whether it is gone when it should be."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from steplab.measurement.machine.device import Device, allocated_bytes
from steplab.records.ddp import StateMemory
from steplab.units import MIB

TOLERATED_BYTES = 256 * MIB
"""So much more may be held once a variant is gone: what libraries take once, and keep."""


def state_memory(
    moment: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: Device,
    *,
    before_bytes: int | None,
    uncounted_bytes: int,
) -> StateMemory:
    """What is held now; `before_bytes` were allocated before the variant was built.

    It holds `uncounted_bytes` besides, which the allocator knows nothing of, and in which gradients may be.
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
    """Bytes of the memory these tensors are in, on this rank, each stretch of it once: of views, the whole buffer."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local: Any = tensor
        if hasattr(local, "to_local"):  # a part of a tensor that is divided over ranks
            local = local.to_local()
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def free(device: Device) -> int | None:
    """Let go of what nobody refers to any more; bytes still allocated, None where the allocator keeps no count."""
    gc.collect()
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize(device.torch_device)
        torch.cuda.empty_cache()
    return allocated_bytes(device)
