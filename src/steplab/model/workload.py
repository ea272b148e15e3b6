"""What the measuring loop needs to know of a model, whoever made it: a module and batches, or a whole step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model ready to be stepped: either `module` with `make_batch`, or `step` alone."""

    module: nn.Module | None = None
    """Called with a batch; gives a scalar loss, or an object whose `.loss` is one."""
    make_batch: Callable[[], Any] | None = None
    """Gives one batch on the device: a tensor, a tuple (positional) or a dict (by keyword)."""
    step: Callable[[], object] | None = None
    """A whole step of the user's own, which steplab times as a single phase."""
    num_layers: int | None = None
    """Attention layers, for the FLOP count; None: not known."""
    attention_width: int | None = None
    """Query heads x head dimension; None: not known."""
    notes: tuple[str, ...] = ()
    """What was chosen while it was built, in words for the record."""


def call(module: Callable[..., Any], batch: Any) -> Any:
    """module(batch), spreading tuples and dicts over its parameters."""
    if isinstance(batch, dict):
        return module(**batch)
    if isinstance(batch, (tuple, list)):
        return module(*batch)
    return module(batch)


def loss_of(output: Any) -> Tensor:
    """The scalar to differentiate; raises UserError where the module gives none."""
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(
            f"the model returned {shown}; a pass with gradients needs a scalar loss, or an object with .loss"
        )
    return loss


def num_parameters(module: nn.Module) -> int:
    """All parameters, each tied one once (as nn.Module.parameters gives them)."""
    return sum(parameter.numel() for parameter in module.parameters())


def num_lookup_parameters(module: nn.Module) -> int | None:
    """Parameters of embeddings that do no matmul: those not also used as a linear layer's weight."""
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    embeddings = {id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    return sum(weight.numel() for key, weight in embeddings.items() if key not in linear)


def random_tokens(vocab_size: int, batch: int, context: int, device: torch.device) -> Tensor:
    """Uniform token ids, [batch, context]: the values do not change the work, but zeros would flatter it."""
    return torch.randint(vocab_size, (batch, context), device=device)
