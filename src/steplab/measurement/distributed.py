"""What a step needs to know of a module that was spread over the processes of a world."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from steplab.parallel.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    """A module spread over processes."""

    module: nn.Module
    """Has the parameters that this rank's optimizer steps."""
    call: Callable[..., Any] | None
    """To be called with a rank's batch in place of the module; None: there is a pipeline."""
    data_index: int
    """Which of the step's batches this rank works on; ranks that share a batch have the same."""
    finish_gradients: Callable[[], None] | None = None
    """To be called after the backward pass: then every rank has the gradients that its optimizer needs. None: they are
    there when the backward pass ends."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """To be entered for the forward pass and for the backward pass."""
    pipeline: Pipeline | None = None
    """Runs both passes of a batch in turn; None: they are run one after the other."""
