"""What a step needs to know of a module that was made ready on this rank, alone or among others."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steplab.parallel.pipeline import Pipeline

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""(parameters, class of the optimizer, **its options) -> the optimizer"""


def make_whole(
    parameters: Sequence[nn.Parameter], optimizer: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer whose state is whole on each rank, or as its parameters are spread."""
    return optimizer(parameters, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    """A module ready to be stepped on this rank."""

    module: nn.Module
    """Has the parameters that this rank's optimizer steps."""
    call: Callable[..., Any] | None
    """To be called with a rank's batch in place of the module; None: there is a pipeline."""
    data_index: int = 0
    """Which of the step's batches this rank works on; ranks that share a batch have the same."""
    finish_gradients: Callable[[], None] | None = None
    """To be called after the backward pass: then every rank has the gradients that its optimizer needs. None: they are
    there when the backward pass ends."""
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    """To be entered for the forward and backward passes of every micro-step but the last: gradients add up on each rank
    and are not sent."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """To be entered for the forward pass and for the backward pass."""
    pipeline: Pipeline | None = None
    """Runs both passes of a batch in turn; None: they are run one after the other."""
    make_optimizer: MakeOptimizer = make_whole
    """Makes the optimizer of the parameters."""
