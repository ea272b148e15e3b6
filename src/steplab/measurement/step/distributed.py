"""A module that is ready to be stepped on this rank, alone or among others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steplab.parallel.layout import Pipeline

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""(parameters, class of the optimizer, **its options) -> the optimizer"""


def make_whole(
    parameters: Sequence[nn.Parameter], optimizer: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Make an optimizer whose state is whole on each rank, or divided as its parameters are."""
    return optimizer(parameters, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    """A module ready to be stepped on this rank."""

    module: nn.Module
    """The module with the parameters that this rank's optimizer updates."""
    call: Callable[..., Any] | None
    """The callable that runs a rank's batch; None if there is a pipeline."""
    data_index: int = 0
    """The number of the step's batch that this rank works on; ranks with equal numbers share a batch."""
    finish_gradients: Callable[[], None] | None = None
    """Called after the backward pass; then every rank has the gradients that its optimizer needs. None if they are
    complete when the backward pass ends."""
    finish_in_parts: Callable[[], Iterator[Sequence[Tensor]]] | None = None
    """The same, but gives some parameters at a time as soon as they have their gradients, to be updated; None if all
    are updated afterwards."""
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context for the forward and backward passes of every micro-step but the last, in which gradients accumulate
    on each rank and are not sent."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context for the forward pass and for the backward pass."""
    pipeline: Pipeline | None = None
    """Runs both passes of a batch in turn; None if they run one after the other."""
    make_optimizer: MakeOptimizer = make_whole
    """Makes the optimizer of the parameters."""
