"""The update of some of an optimizer's parameters, while the gradients of others are still being made or averaged.

An optimizer that treats each parameter by itself, as AdamW and SGD do, changes it by the same numbers whenever that is
done after its gradient is final. Clipping by the norm of all gradients, a gradient scaler, and optimizers that look at
all parameters together (LBFGS) need all gradients first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from steplab.errors import Unsupported


class UpdateByParts:
    """Steps of an optimizer that update some of its parameters each."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Groups that are added to the optimizer later are not updated. Raises Unsupported for LBFGS."""
        if isinstance(optimizer, torch.optim.LBFGS):
            why = "it updates all parameters as one vector"
            raise Unsupported("updating some parameters by LBFGS", why, "use another optimizer")
        self._optimizer = optimizer
        self._group_of = {
            parameter: place for place, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }

    def of(self, parameters: Sequence[Tensor]) -> None:
        """Update these that have gradients; any that are not the optimizer's stay as they are."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        parts: list[list[Tensor]] = [[] for _ in groups]
        for parameter in parameters:
            if parameter in self._group_of:
                parts[self._group_of[parameter]].append(parameter)
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            self._optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
