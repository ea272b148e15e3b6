"""Tensors in nested dicts, lists and tuples, such as batches and a model's output."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tensors_in(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from tensors_in(value)
    elif isinstance(held, (list, tuple)):
        for value in held:
            yield from tensors_in(value)


def with_tensors(held: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy of nested containers with `change` applied to each tensor; lists become tuples."""
    if isinstance(held, Tensor):
        return change(held)
    if isinstance(held, dict):
        return {key: with_tensors(value, change) for key, value in held.items()}
    if isinstance(held, (tuple, list)):
        return tuple(with_tensors(value, change) for value in held)
    return held


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of these tensors' storages by address: each once and in full, also for views."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; else the tensor itself."""
    divided: Any = tensor
    return divided.to_local() if hasattr(divided, "to_local") else tensor


def not_finite(module: nn.Module) -> str | None:
    """Name of this rank's first trained parameter with an infinite or NaN value."""
    for name, parameter in module.named_parameters():
        part = local_part(parameter.detach())
        if parameter.requires_grad and part.numel() and not torch.linalg.vector_norm(part, torch.inf).isfinite():
            return name
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
