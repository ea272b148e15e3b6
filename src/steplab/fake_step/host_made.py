"""Finds tensors that a model makes without naming a device: the CPU makes them and copies them in each step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FACTORIES = frozenset(
    {
        *(torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.eye),
        *(torch.arange, torch.linspace, torch.tril_indices, torch.triu_indices),
        *(torch.rand, torch.randn, torch.randint, torch.randperm),
    }
)


class HostMade(TorchFunctionMode):
    """Reports each tensor of several elements that is made without naming a device, while it is entered.

    A single element is mostly a constant, which kernels take as an argument.
    """

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _FACTORIES and kwargs.get("device") is None:
            number = made.numel()
            if isinstance(number, int) and number > 1:
                self._tell(made)
        return made
