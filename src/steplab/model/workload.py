"""A model as the measuring loop sees it: a module and batches, or a whole step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Either `module` with `make_batch`, or `step` alone."""

    module: nn.Module | None = None
    """Called with a batch; `loss_of` finds the loss in its result."""
    make_batch: Callable[[], Any] | None = None
    """Returns one batch on the device: a tensor, a tuple (positional) or a dict (by keyword)."""
    step: Callable[[], object] | None = None
    """A user's whole step, which steplab times as a single phase."""
    num_layers: int | None = None
    attention_width: int | None = None
    """Query heads x head dimension; None: unknown."""
    key_width: int | None = None
    """Heads of keys x head dimension; None: unknown."""
    inner_width: int | None = None
    is_causal: bool = True
    num_active_parameters: int | None = None
    """Parameters that one token uses in a mixture of experts; None if it uses all."""
    experts: tuple[int, int] | None = None
    """Number of experts in a block, and number of them that a token uses; None without experts."""
    knows_tokens: bool = True
    """True if a step has the spec's batch times context tokens."""
    notes: tuple[str, ...] = ()


def call(module: Callable[..., Any], batch: Any) -> Any:
    """module(batch), spreading tuples and dicts over its parameters."""
    if isinstance(batch, dict):
        return module(**batch)
    if isinstance(batch, (tuple, list)):
        return module(*batch)
    return module(batch)


def loss_of(output: Any) -> Tensor:
    """The scalar to differentiate: the model's result, its `.loss` or ["loss"], or the single scalar of a tuple such as
    (logits, loss). Raises UserError without one.
    """
    loss = output.get("loss", output) if isinstance(output, dict) else getattr(output, "loss", output)
    if isinstance(loss, (tuple, list)):
        scalars = [each for each in loss if isinstance(each, Tensor) and each.numel() == 1]
        loss = scalars[0] if len(scalars) == 1 else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UserError(
            f"the model returned {_shown(loss)}; a pass with gradients needs a scalar loss, an object with .loss, a "
            'dict with a scalar "loss", or a tuple in which one tensor is a scalar'
        )
    return loss


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(map(_shown, value)) or 'nothing'}"
    return type(value).__name__


def num_parameters(module: nn.Module) -> int:
    """Count parameters, tied ones once, as in nn.Module.parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def num_lookup_parameters(module: nn.Module) -> int | None:
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    embeddings = {id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    return sum(weight.numel() for key, weight in embeddings.items() if key not in linear)


def random_tokens(vocab_size: int, batch: int, context: int, device: torch.device) -> Tensor:
    """Uniform token ids [batch, context]. The values do not change the work, but zeros would run faster."""
    return torch.randint(vocab_size, (batch, context), device=device)
